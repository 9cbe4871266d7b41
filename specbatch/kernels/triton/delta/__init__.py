"""The gated delta rule (Triton)."""
