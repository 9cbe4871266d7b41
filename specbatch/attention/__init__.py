"""Attention backends with one interface: `plan` and `attend`."""
