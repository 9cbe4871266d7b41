"""The rows that bench.py runs: random token ids from a seed, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID, LAST_ID = 1000, 120000  # the range from which ids are drawn


@dataclass(frozen=True)
class Rows:
    """Prompts, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        return sum(self.lengths)

    def prefill_only(self) -> Rows:
        """Return the same prompts with one output token each."""
        return Rows(self.prompts, [1] * len(self.prompts))

    def first(self, count: int | None) -> Rows:
        return Rows(self.prompts[:count], self.lengths[:count])


@dataclass(frozen=True)
class FileJob:
    """A file of rows of mixed lengths; ranges are inclusive, in tokens."""

    rows: int
    shortest_in: int
    longest_in: int
    shortest_out: int
    longest_out: int


def file_jobs() -> dict[str, FileJob]:
    """Return the two file jobs by name."""
    return {
        "mixed-1k-512": FileJob(512, 200, 1800, 128, 896),
        "short-in-long-out": FileJob(512, 64, 192, 512, 1024),
    }


def file_rows(name: str, vocab_size: int) -> Rows:
    """Draw the rows of a file job. The order of the draws must not change: all prompts, each length before its ids,
    then all output lengths, from a generator seeded with the job's name."""
    job = file_jobs()[name]
    rng = random.Random(name)
    prompts = [_ids(rng, rng.randint(job.shortest_in, job.longest_in), vocab_size) for _ in range(job.rows)]
    return Rows(prompts, [rng.randint(job.shortest_out, job.longest_out) for _ in range(job.rows)])


class UniformRows:
    """Rows of one prompt length and one output length. Each call makes new rows, from one generator with seed 0."""

    def __init__(self, tokens_in: int, tokens_out: int, vocab_size: int) -> None:
        self._rng = random.Random(0)
        self._in, self._out, self._vocab_size = tokens_in, tokens_out, vocab_size

    def draw(self, count: int, tokens_out: int | None = None) -> Rows:
        prompts = [_ids(self._rng, self._in, self._vocab_size) for _ in range(count)]
        return Rows(prompts, [tokens_out or self._out] * count)


def warm_up_rows(vocab_size: int) -> Rows:
    """Make eight short rows to run before a file job."""
    return Rows([[i % vocab_size for i in range(1000, 1100)]] * 8, [32] * 8)


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Draw the ids that every engine draws. Those past a smaller vocabulary are folded back into it."""
    return [rng.randrange(FIRST_ID, LAST_ID) % vocab_size for _ in range(count)]
