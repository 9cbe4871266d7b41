"""The parts of `train_draft.py`, which trains EAGLE-3 draft heads: prompts and answers -> examples -> head."""
