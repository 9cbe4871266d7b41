"""Where the result of each row lies in the partial file: 21 bytes a row, in blocks that are made when a row of theirs
comes, so that a line with an absurd row number costs one block and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_BLOCK = 1024
_ENTRY = np.dtype([("offset", np.int64), ("length", np.uint32), ("digest", np.uint64), ("state", np.uint8)])
_FOUND, _CONFIRMED = 1, 2  # 0: not there


class Entry(NamedTuple):
    """A result line, and the digest of the input row that it answers."""

    offset: int
    length: int
    digest: int


class RowIndex:
    """Entries by row number. Those that an earlier session wrote count as the row's answer once they are confirmed."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}

    def get(self, row: int) -> Entry | None:
        block = self._blocks.get(row // _BLOCK)
        if block is None or not block[row % _BLOCK]["state"]:
            return None
        offset, length, digest, _ = block[row % _BLOCK].item()
        return Entry(offset, length, digest)

    def put(self, row: int, entry: Entry, *, confirmed: bool) -> None:
        block = self._blocks.get(row // _BLOCK)
        if block is None:
            block = self._blocks[row // _BLOCK] = np.zeros(_BLOCK, dtype=_ENTRY)
        block[row % _BLOCK] = (*entry, _CONFIRMED if confirmed else _FOUND)

    def confirm(self, row: int) -> None:
        self._blocks[row // _BLOCK][row % _BLOCK]["state"] = _CONFIRMED

    def remove(self, row: int) -> None:
        self._blocks[row // _BLOCK][row % _BLOCK]["state"] = 0

    def unconfirmed(self) -> list[int]:
        """Rows that no one asked for."""
        return [
            number * _BLOCK + int(at)
            for number, block in self._blocks.items()
            for at in np.flatnonzero(block["state"] == _FOUND)
        ]

    def in_order(self) -> Iterator[Entry]:
        """The confirmed entries by row number."""
        for number in sorted(self._blocks):
            block = self._blocks[number]
            for offset, length, digest, _ in block[block["state"] == _CONFIRMED].tolist():
                yield Entry(offset, length, digest)
