"""What bench.py runs: rows of random token ids, the same ones for every engine (seeded; peers draw them alike)."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID, LAST_ID = 1000, 120000  # the range that ids are drawn from


@dataclass(frozen=True)
class Rows:
    """Prompts, and how many tokens each is to generate."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        return sum(self.lengths)

    def prefill_only(self) -> Rows:
        """The same prompts with one token each."""
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
    """The two file jobs by name."""
    return {
        "mixed-1k-512": FileJob(512, 200, 1800, 128, 896),
        "short-in-long-out": FileJob(512, 64, 192, 512, 1024),
    }


def file_rows(name: str, vocab_size: int) -> Rows:
    """The rows of a file job. The order of the draws is part of it: all prompts, each length before its ids, then all
    output lengths, from a generator seeded with the job's name."""
    job = file_jobs()[name]
    rng = random.Random(name)
    prompts = [_ids(rng, rng.randint(job.shortest_in, job.longest_in), vocab_size) for _ in range(job.rows)]
    return Rows(prompts, [rng.randint(job.shortest_out, job.longest_out) for _ in range(job.rows)])


class UniformRows:
    """Rows of one length in and one out, new ones at every call, from one generator with seed 0."""

    def __init__(self, tokens_in: int, tokens_out: int, vocab_size: int) -> None:
        self._rng = random.Random(0)
        self._in, self._out, self._vocab_size = tokens_in, tokens_out, vocab_size

    def draw(self, count: int, tokens_out: int | None = None) -> Rows:
        prompts = [_ids(self._rng, self._in, self._vocab_size) for _ in range(count)]
        return Rows(prompts, [tokens_out or self._out] * count)


def warm_up_rows(vocab_size: int) -> Rows:
    """Eight short rows to run before a file job."""
    return Rows([[i % vocab_size for i in range(1000, 1100)]] * 8, [32] * 8)


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """The ids that every engine draws; those past a smaller vocabulary are folded back into it."""
    return [rng.randrange(FIRST_ID, LAST_ID) % vocab_size for _ in range(count)]
