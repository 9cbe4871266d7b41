"""What is drafted by how many rows are running."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from specbatch.tune.candidates import Candidate, label


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    max_batch: int  # for so many running rows at most
    candidate: Candidate | None  # None: plain decoding


@dataclass(frozen=True, slots=True)
class Schedule:
    """Entries by rising max_batch; the last one is for more rows too."""

    entries: tuple[ScheduleEntry, ...]

    def __post_init__(self) -> None:
        bounds = [entry.max_batch for entry in self.entries]
        assert bounds, "a schedule has an entry"
        assert bounds[0] >= 1, bounds
        assert all(low < high for low, high in itertools.pairwise(bounds)), bounds

    def __str__(self) -> str:
        return ", ".join(f"<={entry.max_batch}: {label(entry.candidate)}" for entry in self.entries)

    @property
    def name(self) -> str:
        """As tables show it: a single candidate by its own label."""
        return label(self.entries[0].candidate) if len(self.entries) == 1 else str(self)

    @staticmethod
    def always(candidate: Candidate | None, max_batch: int = 1) -> Schedule:
        return Schedule((ScheduleEntry(max_batch, candidate),))

    def at(self, batch: int) -> Candidate | None:
        return next((e.candidate for e in self.entries if batch <= e.max_batch), self.entries[-1].candidate)

    @property
    def candidates(self) -> tuple[Candidate | None, ...]:
        """Without repetitions, in order."""
        return tuple(dict.fromkeys(entry.candidate for entry in self.entries))

    @property
    def is_plain(self) -> bool:
        return self.candidates == (None,)

    def merged(self) -> Schedule:
        """Neighbours that say the same as one entry."""
        entries: list[ScheduleEntry] = []
        for entry in self.entries:
            if entries and entries[-1].candidate == entry.candidate:
                entries.pop()
            entries.append(entry)
        return Schedule(tuple(entries))
