"""When failed rows end a job early: too many have failed (`--max-failed`), or all of the first ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field

from specbatch.errors import InputError, TooManyFailed
from specbatch.results.finished import Finished
from specbatch.results.stats import RowTotals

FIRST_ROWS = 100  # if all of these fail, so will most others
_MIN_ROWS = 1000  # finished rows that a share is taken of, if the length of the input is not known
_MAX_KINDS, _MAX_MESSAGE = 1000, 200  # kinds of messages that are counted; characters of a message that are kept
_TEXT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(%?)", re.ASCII)
_KEPT = "finished rows are kept"


@dataclass(frozen=True, slots=True)
class MaxFailed:
    """The most rows that may fail: a number, or a share of all rows."""

    text: str
    amount: float
    is_share: bool

    @classmethod
    def parse(cls, text: str) -> MaxFailed:
        """Parse `50` or `0.1%`. Raises InputError."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or (not found[2] and "." in found[1]) or (found[2] and float(found[1]) > 100):
            raise InputError(f"--max-failed {text[:40]!r} is neither a number of rows nor a share", "50, or 0.1%")
        return cls(text.strip(), float(found[1]), bool(found[2]))

    def is_exceeded(self, totals: RowTotals, num_rows: int | None, *, ended: bool) -> bool:
        """Return whether more rows have failed than allowed. `num_rows`: the rows of the input; None: not known.
        `ended`: all rows have finished."""
        if not self.is_share:
            return totals.failed > self.amount
        if num_rows is None and not ended and totals.rows < _MIN_ROWS:
            return False
        rows = totals.rows if num_rows is None or ended else num_rows
        return totals.failed > rows * self.amount / 100


@dataclass
class FailureWatch:
    """Looks at the rows that finish in this session. Without arguments it never ends a job."""

    max_failed: MaxFailed | None = None
    all_of_first: bool = False  # end the job if each of the first rows failed
    _num_started: int = field(default=0, init=False)  # number of the first rows that have started
    _unfinished: set[int] = field(default_factory=set, init=False)  # indices of these
    _rows: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False)  # number of rows for each kind of message
    _examples: dict[str, str] = field(default_factory=dict, init=False)  # the first message of each kind

    def start(self, index: int) -> None:
        """A row starts. A healthy one takes longer than an error: the first rows have failed when all have finished."""
        if self._num_started < FIRST_ROWS:
            self._num_started += 1
            self._unfinished.add(index)

    def add(self, finished: Finished) -> None:
        if self._unfinished:
            self._unfinished.difference_update(row.index for row in finished.rows)
        self._rows += len(finished.rows)
        self._failed += finished.totals.failed
        if not finished.totals.failed:
            return
        for row in finished.rows:
            if b'"error": {' in row.line and (error := json.loads(row.line).get("error")):
                text = f"{error.get('type', error.get('code'))}: {error['message'][:_MAX_MESSAGE]}"
                kind = re.sub(r"[0-9]+", "N", text)  # numbers differ from row to row
                if kind in self._examples or len(self._examples) < _MAX_KINDS:
                    self._examples.setdefault(kind, text)
                    self._counts[kind] += 1

    def verdict(self, totals: RowTotals, num_rows: int | None, *, ended: bool) -> TooManyFailed | None:
        """Return the error with which the job must end now, or None. `totals`: those of all sessions. For the other
        arguments see `MaxFailed`."""
        if self.max_failed is not None and self._rows and self.max_failed.is_exceeded(totals, num_rows, ended=ended):
            return TooManyFailed(
                f"{totals.failed:,} of {totals.rows:,} finished rows failed, more than --max-failed "
                f"{self.max_failed.text} allows{self._common()}",
                f"{_KEPT}; repair the rows, or run the same command with a higher --max-failed",
            )
        first_ended = self._rows >= FIRST_ROWS and not self._unfinished
        if self.all_of_first and not ended and first_ended and self._failed == self._rows:
            return TooManyFailed(
                f"each of the first {self._rows:,} rows that ran failed{self._common()}",
                f"{_KEPT}; repair the rows or the options, or run the same command with --keep-going",
            )
        return None

    def _common(self) -> str:
        if not self._counts:
            return ""
        (kind, count), *_ = self._counts.most_common(1)
        return f"; the most common error ({count:,} of these rows): {self._examples[kind]}"
