"""Counts over result lines, taken from the lines themselves: they cover the whole file whoever wrote its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class RowTotals:
    """Sums over finished rows."""

    ok: int = 0
    failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # error type -> rows
    finish_reasons: dict[str, int] = field(default_factory=dict)  # of each row's first completion
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    histogram: list[int] = field(default_factory=list)  # [a] = rounds that kept `a` draft tokens
    # (tokens of a completion, of several their mean; whether it ended before its limit) -> rows
    lengths: dict[tuple[int, bool], int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.ok + self.failed

    def add(self, row: dict[str, Any], times: int = 1) -> None:
        """Count one result line, native or OpenAI; `times=-1` takes one back. Raises KeyError or TypeError for what is
        neither."""
        # Everything is looked up before anything is counted: a damaged line must leave no half of itself behind.
        if row.get("error"):
            error = row["error"]
            kind = str(error["type"] if "type" in error else error["code"])
            self.failed += times
            _count(self.errors, kind, times)
            return
        body = row if "usage" in row else row["response"]["body"]
        reason = row["finish_reason"] if body is row else body["choices"][0]["finish_reason"]
        usage, counts = body["usage"], body["speculation"]
        completions = len(body.get("choices") or "1")
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        rounds, drafted, accepted = counts["rounds"], counts["drafted"], counts["accepted"]
        # Lines hold the quotient to 4 digits: exact below 10,000 rounds, and within 0.01% above.
        committed = round((counts["acceptance_length"] or 0) * rounds)
        histogram = counts["accept_histogram"]
        self.ok += times
        _count(self.finish_reasons, str(reason), times)
        _count(self.lengths, (completion // completions, reason == "stop"), times)
        self.prompt_tokens += times * prompt
        self.completion_tokens += times * completion
        self.rounds += times * rounds
        self.drafted += times * drafted
        self.accepted += times * accepted
        self.committed += times * committed
        self.histogram.extend([0] * (len(histogram) - len(self.histogram)))
        for kept, count in enumerate(histogram):
            self.histogram[kept] += times * count
        while times < 0 and self.histogram and not self.histogram[-1]:
            self.histogram.pop()


def _count(counts: dict[K, int], kind: K, times: int) -> None:
    """A kind that all its rows were taken back from is as if it had never been."""
    counts[kind] = counts.get(kind, 0) + times
    if not counts[kind]:
        del counts[kind]
