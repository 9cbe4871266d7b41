"""GEMMs in FP8 with scales of tokens and outputs."""
