"""The prompts of the measurements: the questions of a GSM8K file, written by the model's chat template."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase


def question_prompts(data: Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> list[list[int]]:
    """Return the token ids of prompts with one user message each: the `question` of the first `limit` rows (None: all)
    of a JSONL file."""
    with data.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in islice(lines, limit)]
    prompts = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts
