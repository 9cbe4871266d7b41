"""Attention backends behind one `plan` / `attend` interface."""
