"""The margins of rows: how the partial file keeps each, and what the statistics say of all.

Another rounding could change the text of a greedy row with a small margin: see `types.Margin`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specbatch.types import Margin

_BYTES = struct.Struct(">fI")
MARGIN_DIGITS = 2 * _BYTES.size


def to_digits(margin: Margin) -> bytes:
    """MARGIN_DIGITS hexadecimal digits."""
    return _BYTES.pack(*margin).hex().encode()


def of_digits(digits: bytes) -> Margin:
    """The inverse of `to_digits`. Raises ValueError."""
    return Margin(*_BYTES.unpack(bytes.fromhex(digits.decode("ascii"))))


@dataclass(slots=True)
class MarginTotals:
    """Sums over the margins of the rows of a file."""

    rows: int = 0  # number of rows that have a margin
    smallest: Mapping[str, Any] | None = None  # the row with the smallest one; the first of several
    decades: dict[str, int] = field(default_factory=dict)  # rows by power of ten: "1e-3" is 0.001 up to 0.01; "0": ties

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> MarginTotals:
        """The inverse of `report`. Raises LookupError or TypeError for other files."""
        return cls(report["rows"], report["smallest"], dict(report["rows_by_decade"]))

    def report(self) -> dict[str, Any]:
        """Return the part of stats.json about margins."""
        decades = dict(sorted(self.decades.items(), key=lambda item: float(item[0])))
        return {"rows": self.rows, "smallest": self.smallest, "rows_by_decade": decades}

    def add(self, values: np.ndarray) -> None:
        """Count the margins of rows (float32)."""
        values = values[values < math.inf]
        self.rows += len(values)
        ties = int((values == 0).sum())
        powers = np.floor(np.log10(values[values > 0].astype(np.float64))).astype(int)
        counts = {"0": ties} if ties else {}
        counts |= {f"1e{power}": int(rows) for power, rows in zip(*np.unique(powers, return_counts=True), strict=True)}
        self._count(counts)

    def merge(self, other: MarginTotals) -> None:
        """Add those of other rows."""
        self.rows += other.rows
        self._count(other.decades)
        found: Sequence[Mapping[str, Any]] = [one for one in (self.smallest, other.smallest) if one is not None]
        self.smallest = min(found, key=lambda one: (one["margin"], one["index"]), default=None)

    def _count(self, decades: Mapping[str, int]) -> None:
        for decade, rows in decades.items():
            self.decades[decade] = self.decades.get(decade, 0) + rows
