"""Structured output: what a row allows as its text, compiled to masks over token ids."""
