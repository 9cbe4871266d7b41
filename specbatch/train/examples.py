"""The examples of a training run: token sequences from answers, the draft vocabulary, and which form a batch.

Shape suffix: W draft vocabulary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specbatch.config import DataSection
from specbatch.errors import InputError, RowError
from specbatch.rows.row import Row
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import EngineLimits

LENGTH_STEP = 64  # padded lengths are multiples of it, so that shapes are few and masks aligned
_POOL = 32  # the number of batches that are sorted by length together: padding is small, and the order still random


@dataclass(frozen=True)
class Example:
    """A prompt with one of the target's answers. Tokens [prompt_length, len(tokens)) are the answer, its
    end-of-sequence token included where the answer ended."""

    tokens: list[int]
    prompt_length: int
    prompt: int  # the number of the prompt: all its answers are on one side of the validation split
    greedy: bool

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def num_chains(self) -> int:
        """The number of rows that learn at step 0: roots in the answer whose next token is also in it."""
        return max(len(self.tokens) - self.prompt_length - 1, 0)


def make_examples(
    prompts: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataSection,
    vocab_size: int,
    max_length: int,
) -> list[Example]:
    """Make token sequences of the rows of stage 1 and their results. Sequences are cut at `max_length`. Rows that
    failed are left out.

    The prompt is encoded as the engine encodes it. The answer is its text encoded again, which sometimes gives other
    tokens than the target drew, but a text that the target could have written. It raises InputError if no example is
    left.
    """
    texts = TextProcessor(tokenizer, data)
    limits = EngineLimits(max_prompt_tokens=max_length - 2, vocab_size=vocab_size)
    end = tokenizer.eos_token_id
    answered = [(row, result) for row, result in zip(prompts, results, strict=True) if result.get("text") is not None]
    # All at once: the tokenizer encodes a list on all cores.
    answers = tokenizer([result["text"] for _, result in answered], add_special_tokens=False)["input_ids"]
    encoded: dict[
        int, list[int] | None
    ] = {}  # the key is the number of the prompt; None: the prompt is longer than the sequences of the training
    examples = []
    for (row, result), answer in zip(answered, answers, strict=True):
        assert row["id"] == result["id"], (row["id"], result["id"])
        number = row["metadata"]["prompt"]
        if number not in encoded:
            encoded[number] = _encode_prompt(row, texts, limits)
        prompt = encoded[number]
        if prompt is None:
            continue
        if result["finish_reason"] == "stop" and isinstance(end, int):
            answer = [*answer, end]
        example = Example((prompt + answer)[:max_length], len(prompt), number, row["temperature"] == 0)
        if example.num_chains > 0:
            examples.append(example)
    if not examples:
        raise InputError("no answer is long enough to learn from", "raise --max-length or --max-tokens")
    return examples


def _encode_prompt(row: Mapping[str, Any], texts: TextProcessor, limits: EngineLimits) -> list[int] | None:
    kind: Literal["messages", "prompt"] = "messages" if "messages" in row else "prompt"
    try:
        return texts.encode(Row(0, kind=kind, content=row[kind]), limits)
    except RowError:
        return None


def split(examples: Sequence[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split into training and validation examples. No prompt is on both sides, and each side has at least one. It
    raises InputError if there is only one prompt."""
    numbers = sorted({e.prompt for e in examples})
    if len(numbers) < 2:
        raise InputError("a validation split needs answers to two prompts at least", "give more prompts")
    random.Random(seed).shuffle(numbers)
    count = min(max(round(len(numbers) * fraction), 1), len(numbers) - 1)
    held_out = set(numbers[:count])
    return [e for e in examples if e.prompt not in held_out], [e for e in examples if e.prompt in held_out]


def draft_vocabulary(
    examples: Sequence[Example], size: int, vocab_size: int, always: Sequence[int] = ()
) -> tuple[Tensor, float]:
    """Return the `size` most frequent tokens of the answers, as sorted target ids (W,) int64, and their share of the
    answers' tokens. `always`: tokens that are always in it, such as those that end a text. Among equally frequent
    tokens (such as those that never occur) the lower id comes first, because it is an earlier merge."""
    size = min(size, vocab_size)
    counts = Counter(token for e in examples for token in e.answer)
    forced = set(always)
    order = sorted(range(vocab_size), key=lambda t: (t not in forced, -counts[t], t))
    ids = sorted(order[:size])
    covered = sum(counts[t] for t in ids) / max(sum(counts.values()), 1)
    return torch.tensor(ids, dtype=torch.int64), covered


def padded_length(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the indices of the examples of each batch of an epoch. A batch has at most `batch_tokens` tokens with
    padding (but at least one sequence), and similar lengths. Seed and epoch decide the order."""
    shuffler = random.Random(f"{seed} {epoch}")
    order = list(range(len(lengths)))
    shuffler.shuffle(order)
    average = max(sum(map(padded_length, lengths)) // len(lengths), 1)
    pool = _POOL * max(batch_tokens // average, 1)
    found: list[list[int]] = []
    for first in range(0, len(order), pool):
        batch: list[int] = []
        for i in sorted(order[first : first + pool], key=lambda i: -lengths[i]):
            # The first of a batch is its longest.
            if batch and (len(batch) + 1) * padded_length(lengths[batch[0]]) > batch_tokens:
                found.append(batch)
                batch = []
            batch.append(i)
        if batch:
            found.append(batch)
    shuffler.shuffle(found)
    return found
