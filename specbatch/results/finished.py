"""Rows that finished: their result lines, and what is counted of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specbatch.files.jsonl import encode_line
from specbatch.results.partial import RowDeaths
from specbatch.results.stats import RowTotals
from specbatch.rows.parameters import MAX_NAME_CHARS
from specbatch.rows.row import Doubt, Row
from specbatch.rows.sources import RawRow
from specbatch.types import NO_MARGIN, Margin


class Remark(NamedTuple):
    """The facts about one row that are counted."""

    unread_fields: tuple[str, ...] = ()
    model: str | None = None  # the model that the row names
    id_hash: int = 0  # the same in every process; 0: the row has no id
    doubts: tuple[Doubt, ...] = ()
    own_max_tokens: bool | None = None  # None: the row cannot run
    closes_objects: bool = False


def remark_on(row: Row) -> Remark:
    names = tuple(name[:MAX_NAME_CHARS] for name in row.unread_fields)
    id_hash = 0
    if row.id is not None:
        digest = hashlib.blake2b(encode_line({"id": row.id}), digest_size=8).digest()
        id_hash = int.from_bytes(digest, "big", signed=True) or 1
    model = None if row.model is None else str(row.model)
    return Remark(names, model, id_hash, tuple(row.doubts), row.own_max_tokens, row.closes_objects)


@dataclass(frozen=True, slots=True)
class FinishedRow:
    index: int
    digest: int  # RawRow.digest
    line: bytes  # the result, with a newline
    remark: Remark
    margin: Margin = NO_MARGIN

    def __reduce__(self) -> tuple[type[FinishedRow], tuple[Any, ...]]:
        return FinishedRow, (self.index, self.digest, self.line, self.remark, self.margin)  # see `RawRow`


@dataclass(slots=True)
class Finished:
    """Rows that finished, and sums over their lines."""

    rows: list[FinishedRow] = field(default_factory=list)
    totals: RowTotals = field(default_factory=RowTotals)
    left_out: list[tuple[RawRow, RowDeaths]] = field(default_factory=list)  # without a line: they end each process

    def add(
        self,
        index: int,
        digest: int,
        line: dict[str, Any],
        remark: Remark | None = None,
        margin: Margin = NO_MARGIN,
    ) -> None:
        self.rows.append(FinishedRow(index, digest, encode_line(line), remark or Remark(), margin))
        self.totals.add(line)
