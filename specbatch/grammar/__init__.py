"""Structured output: the texts that a row allows, compiled to masks over token ids."""
