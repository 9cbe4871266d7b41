"""One pass over the results, in memory that does not grow with their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from specbatch.report.answers import Answers
from specbatch.report.job_input import Formats
from specbatch.report.rows import Row
from specbatch.report.sampling import Highest, Sample
from specbatch.results.stats import RowTotals

_NUM_WINDOWS = 240  # at most; then pairs of them become one
_NUM_POINTS = 1500  # points of the scatter plot
_NUM_SAMPLES, _NUM_FAILED = 12, 6
_NUM_SLOWEST = 15
_NUM_LONGEST = _NUM_UNSURE = 4
_NUM_MESSAGES, _NUM_INDICES = 3, 5  # examples that are kept for each type of error
_MAX_SEEN = 1 << 27  # rows whose indices are remembered: 16 MiB


@dataclass(slots=True)
class Window:
    """Sums over rows that follow each other in the file."""

    rows: int = 0
    failed: int = 0
    rounds: int = 0
    committed: float = 0.0

    def add(self, other: Window) -> None:
        self.rows += other.rows
        self.failed += other.failed
        self.rounds += other.rounds
        self.committed += other.committed


class Windows:
    """Equal parts of the file, although its length is not known before its end."""

    def __init__(self) -> None:
        self._size = 1  # rows of a window
        self.windows: list[Window] = []

    def add(self, row: Window) -> None:
        if not self.windows or self.windows[-1].rows >= self._size:
            if len(self.windows) == _NUM_WINDOWS:
                for one, other in zip(self.windows[::2], self.windows[1::2], strict=True):
                    one.add(other)
                del self.windows[1::2]
                self._size *= 2
            self.windows.append(Window())
        self.windows[-1].add(row)


@dataclass(slots=True)
class ErrorGroup:
    """Rows that failed with the same type of error."""

    rows: int = 0
    messages: list[str] = field(default_factory=list)  # the first ones that differ
    indices: list[int] = field(default_factory=list)  # indices of the first rows


@dataclass
class Summary:
    """The facts about the rows that the page shows."""

    totals: RowTotals = field(default_factory=RowTotals)
    windows: Windows = field(default_factory=Windows)
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    completion_lengths: Counter[int] = field(default_factory=Counter)
    points: Sample[tuple[int, float, int]] = field(default_factory=lambda: Sample(_NUM_POINTS))  # tokens, length, index
    errors: dict[str, ErrorGroup] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)
    slowest: Highest[Row] = field(default_factory=lambda: Highest(_NUM_SLOWEST))  # rows with the most rounds
    samples: Sample[Row] = field(default_factory=lambda: Sample(_NUM_SAMPLES))
    failed: Sample[Row] = field(default_factory=lambda: Sample(_NUM_FAILED))
    longest: Highest[Row] = field(default_factory=lambda: Highest(_NUM_LONGEST))
    lowest_margins: Highest[Row] = field(default_factory=lambda: Highest(_NUM_UNSURE))
    lowest_logprobs: Highest[Row] = field(default_factory=lambda: Highest(_NUM_UNSURE))
    repeated: int = 0  # rows that are there more than once: the first one counts

    @property
    def shown_indices(self) -> frozenset[int]:
        """Return the indices of the rows whose texts the page shows."""
        chosen = (self.samples, self.failed, self.longest, self.lowest_margins, self.lowest_logprobs)
        shown = [*(row for one in chosen for row in one.items), *(row for row, _ in self.answers.invalid.items)]
        return frozenset(row.index for row in shown)


def summarize(rows: Iterable[Row], formats: Formats | None = None) -> Summary:
    """Read the rows once. `formats`: what they were asked for."""
    summary = Summary(answers=Answers(formats or Formats()))
    seen = bytearray()
    for row in rows:
        if _is_repeated(row.index, seen):
            summary.repeated += 1
            continue
        summary.totals.add(dict(row.line))
        if row.error is not None:
            summary.windows.add(Window(1, 1))
            _add_error(summary.errors.setdefault(row.error[0], ErrorGroup()), row)
            summary.failed.add(row)
            continue
        summary.windows.add(Window(1, 0, row.rounds, row.rounds * (row.acceptance_length or 0)))
        summary.prompt_lengths[row.prompt_tokens] += 1
        summary.completion_lengths[row.completion_tokens] += 1
        if row.acceptance_length is not None:
            summary.points.add((row.completion_tokens, row.acceptance_length, row.index))
        summary.answers.add(row)
        summary.samples.add(row)
        summary.slowest.add((row.rounds, row.completion_tokens), row)
        summary.longest.add((row.completion_tokens,), row)
        if row.margin is not None:
            summary.lowest_margins.add((-row.margin,), row)
        if row.logprob is not None:
            summary.lowest_logprobs.add((-row.logprob,), row)
    return summary


def _is_repeated(index: int, seen: bytearray) -> bool:
    """Return whether this index was seen before, and record it as seen."""
    if index >= _MAX_SEEN:
        return False
    place, bit = index >> 3, 1 << (index & 7)
    if place >= len(seen):
        seen.extend(bytes(place + 1 - len(seen)))
    was_seen = bool(seen[place] & bit)
    seen[place] |= bit
    return was_seen


def _add_error(group: ErrorGroup, row: Row) -> None:
    assert row.error is not None
    group.rows += 1
    if len(group.messages) < _NUM_MESSAGES and row.error[1] not in group.messages:
        group.messages.append(row.error[1])
    if len(group.indices) < _NUM_INDICES:
        group.indices.append(row.index)
