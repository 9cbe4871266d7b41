"""Training of EAGLE-3 draft heads, the parts of `scripts/train_draft.py`: prompts and answers -> examples -> head."""
