"""GEMMs of few tokens, in Triton."""
