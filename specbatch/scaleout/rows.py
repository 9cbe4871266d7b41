"""The rows of a pool: which ones wait, which worker has which, and what the death of a worker means for its rows.

Handing out and finishing cost O(1) a row. What costs more happens at the end of a job and at deaths only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice

from specbatch.job.crash_retry import ALONE_DEATHS, MAX_DEATHS
from specbatch.results.finished import FinishedRow
from specbatch.rows.sources import RawRow

_PORTIONS = 3  # portions in which a worker gets the rows that it may have
_BLOCK = 8  # rows that stay together at the end of a file: they can begin alike


@dataclass(slots=True, eq=False)
class Holding:
    """The rows of one worker."""

    credit: int  # maximum number of rows
    own: dict[int, RawRow] = field(default_factory=dict)  # rows by index, the youngest last: no other worker has them
    copies: dict[int, RawRow] = field(default_factory=dict)  # another worker has or had them, too
    started: Sequence[int] = ()  # indices of the rows that it could no longer drop at its last answer
    is_slow: bool = False  # slower than others, or without an answer for a while
    drop: list[int] = field(default_factory=list)  # indices of rows that it need not begin
    alone: bool = False  # it has one row, which may be the cause of deaths

    @property
    def num_rows(self) -> int:
        return len(self.own) + len(self.copies)

    def rows(self) -> Iterator[RawRow]:
        return chain(self.own.values(), self.copies.values())

    def take_drop(self) -> list[int]:
        taken, self.drop = self.drop, []
        return taken


class PoolRows:
    """All rows that were submitted and have not finished."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._credit = 0  # sum over all workers
        self._holdings: list[Holding] = []
        self._waiting: deque[RawRow] = deque()
        self._suspects: deque[RawRow] = deque()
        self._deaths: dict[int, int] = {}  # deaths of workers that had a row, by row
        self._copied: dict[int, RawRow] = {}  # rows that more than one worker can return
        self._was_taken_over = False  # some row was: a worker can return it late

    @property
    def has_room(self) -> bool:
        # Suspects wait for the end of the input. They must not keep the pool from reading it.
        return self.num_rows - len(self._suspects) < self._credit

    def submit(self, row: RawRow, deaths: int = 0) -> None:
        if deaths:
            self._deaths[row.index] = deaths
        (self._suspects if deaths >= ALONE_DEATHS else self._waiting).append(row)
        self.num_rows += 1

    def open(self, credit: int) -> Holding:
        """The rows of a new worker."""
        holding = Holding(credit)
        self._holdings.append(holding)
        self._credit += credit
        return holding

    def widen(self, holding: Holding, credit: int) -> None:
        """Let a worker have at least `credit` rows."""
        self._credit += max(0, credit - holding.credit)
        holding.credit = max(credit, holding.credit)

    def hand_out(self, holding: Holding, last: bool) -> list[RawRow]:
        """New rows for a worker. `last`: no more rows will be submitted.

        Rows that begin alike follow each other. So a worker gets many at once, and not one for each that it finishes.
        """
        if holding.alone or (not last and holding.credit - holding.num_rows < holding.credit // _PORTIONS):
            return []
        if self._waiting:
            free = holding.credit - holding.num_rows
            rows = [self._waiting.popleft() for _ in range(free)] if self._has_enough else self._deal(holding)
            holding.own.update((row.index, row) for row in rows)
            return rows
        if not last or holding.num_rows:
            return []
        if self._suspects:
            row = self._suspects.popleft()
            holding.own[row.index] = row
            holding.alone = True
            return [row]
        return self._take_over(holding)

    def finish(self, holding: Holding, rows: list[FinishedRow]) -> tuple[list[FinishedRow], list[FinishedRow]]:
        """Return the rows that finish now, and the rows that another worker has finished before."""
        own = holding.own
        first, again = [], []
        for row in rows:
            if self._was_taken_over and not self._is_current(holding, row):
                again.append(row)
            elif own.pop(row.index, None) is not None or self._finish_copy(holding, row.index):
                first.append(row)
            else:
                again.append(row)
        self.num_rows -= len(first)
        if self._deaths:
            for row in first:
                self._deaths.pop(row.index, None)
        holding.alone = holding.alone and bool(holding.num_rows)
        return first, again

    def blame(self, holding: Holding) -> list[RawRow]:
        """A worker has died with rows that can be the cause: count it for each, and return them. A row is the cause
        after `MAX_DEATHS`, so the last one counts only if it ran alone."""
        blamed = [row for row in holding.rows() if holding.alone or self._deaths.get(row.index, 0) < MAX_DEATHS - 1]
        for row in blamed:
            self._deaths[row.index] = self._deaths.get(row.index, 0) + 1
        return blamed

    def close(self, holding: Holding) -> tuple[RawRow, int] | None:
        """Give back the rows of a worker that is gone. Returns a row that is the cause of deaths, and their number; it
        no longer belongs to the pool."""
        self._holdings.remove(holding)
        self._credit -= holding.credit
        if holding.alone:
            (row,) = holding.own.values()
            if self._deaths[row.index] >= MAX_DEATHS:
                self.num_rows -= 1
                return row, self._deaths.pop(row.index)
        back = list(holding.own.values())
        for index, row in holding.copies.items():
            if not any(index in other.copies for other in self._holdings):
                del self._copied[index]
                back.append(row)
        for row in sorted(back, key=lambda row: row.index, reverse=True):
            if self._deaths.get(row.index, 0) >= ALONE_DEATHS:
                self._suspects.appendleft(row)
            else:
                self._waiting.appendleft(row)
        return None

    @property
    def _has_enough(self) -> bool:
        """Return whether the waiting rows fill all workers."""
        num_handed_out = self.num_rows - len(self._waiting) - len(self._suspects)
        return len(self._waiting) >= self._credit - num_handed_out

    def _share(self, holding: Holding) -> int:
        """Return the number of waiting rows that a worker gets if there are too few for all, and each goes to the
        worker with the fewest."""
        free, waiting = holding.credit - holding.num_rows, len(self._waiting)
        counts = sorted(h.num_rows for h in self._holdings if not h.alone and h.num_rows < h.credit)
        level = total = 0
        for workers, count in enumerate(counts, 1):
            if workers > 1 and level <= count:  # this worker has more than the fewest will have
                break
            total += count
            level = -(-(waiting + total) // workers)
        return max(0, min(free, level - holding.num_rows, waiting))

    def _deal(self, holding: Holding) -> list[RawRow]:
        """A worker's share, from all places of the queue, in its order. The last rows of a file are the longest first:
        without this, one worker would get the long ones, and the others would have nothing to do at the end."""
        if not (count := self._share(holding)):
            return []
        waiting, num_taken = list(self._waiting), 0
        is_taken = [False] * len(waiting)
        size = min(_BLOCK, max(1, count // _BLOCK))
        for start in range(0, len(waiting), size):
            end = min(start + size, len(waiting))
            if count * end // len(waiting) - num_taken >= end - start:
                is_taken[start:end] = [True] * (end - start)
                num_taken += end - start
        left = (i for i in reversed(range(len(waiting))) if not is_taken[i])
        for i in islice(left, count - num_taken):  # less than two blocks
            is_taken[i] = True
        self._waiting = deque(row for row, taken in zip(waiting, is_taken, strict=True) if not taken)
        return list(compress(waiting, is_taken))

    def _take_over(self, holding: Holding) -> list[RawRow]:
        """Rows of another worker for an idle one: half, but none that the worker has begun, because it goes on with
        these. If it is slow, half of these are copied. The first result of a row counts."""
        self._was_taken_over = True
        others = [other for other in self._holdings if other is not holding and not other.alone]
        unstarted = [(_without(other.own, other.started), other) for other in others]
        rows, victim = max(unstarted, key=lambda pair: (len(pair[0]), len(pair[1].own)), default=([], holding))
        count = min(len(victim.own) // 2, holding.credit)
        if rows and count:
            for index in _youngest(rows, count):
                holding.copies[index] = self._copied[index] = victim.own.pop(index)
                victim.drop.append(index)
            return list(holding.copies.values())
        victim = max((other for other in others if other.is_slow), key=lambda other: len(other.own), default=holding)
        for index in _youngest(list(victim.own), min(-(-len(victim.own) // 2), holding.credit)):
            victim.copies[index] = holding.copies[index] = self._copied[index] = victim.own.pop(index)
        return list(holding.copies.values())

    def _is_current(self, holding: Holding, row: FinishedRow) -> bool:
        """Return whether this is not an earlier row of the same index. The Python interface counts each call's rows
        from 0."""
        given = holding.own.get(row.index) or self._copied.get(row.index)
        return given is not None and given.digest() == row.digest

    def _finish_copy(self, holding: Holding, index: int) -> bool:
        """Return whether this is the first result of a row that another worker has or had, too."""
        if self._copied.pop(index, None) is None:
            return False
        for other in self._holdings:
            if other.copies.pop(index, None) is not None and other is not holding:
                other.drop.append(index)
        return True


def _without(rows: Iterable[int], others: Iterable[int]) -> list[int]:
    left_out = set(others)
    return [row for row in rows if row not in left_out]


def _youngest(rows: Sequence[int], count: int) -> Sequence[int]:
    """Return the youngest `count` rows, the youngest first. `rows` are in order of age, the oldest first."""
    return rows[::-1][:count]
