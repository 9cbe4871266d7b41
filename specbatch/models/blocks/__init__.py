"""Block drafters: a small backbone that reads the target's hidden states and drafts a block in one pass."""
