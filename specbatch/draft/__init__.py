"""Drafting and verification: proposers, trees, acceptance, and the noise that sampling draws from."""
