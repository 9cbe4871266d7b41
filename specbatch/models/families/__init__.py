"""Model families: a file has what reads a family's config.json, and the class of its layers."""
