"""The engine: rounds over a continuous batch, and the composition root that builds it from a config."""
