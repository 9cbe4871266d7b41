"""`specbatch train-draft`: prompts and answers of the target become an EAGLE-3 head or a block drafter."""
