"""Mixtures of experts, in Triton."""
