"""`OUTPUT.partial`: its lines, and the index of its results by row.

JSON lines, each with a checksum of its rest:

    {"check":"<16 hex digits>","specbatch_job":{...},"format":3}            the first line
    {"check":"<16 hex digits>","input":"<16 hex digits>","margin":"<16 hex digits>","row":{...}}      a result
    {"check":"<16 hex digits>","specbatch_longest_row":N}                   maximum tokens of a row, in all sessions
    {"check":"<16 hex digits>","specbatch_input":{...}}                     the job's input from here on; null: any
    {"check":"<16 hex digits>","specbatch_weights":{...}}                   long files of models, see `fingerprint`
    {"check":"<16 hex digits>","specbatch_margins":{...}}                   margins that lines lack, see `retry`
    {"check":"<16 hex digits>","specbatch_templates":[...]}                 templates of rows that are kept, see `retry`
    {"check":"<16 hex digits>","specbatch_deaths":{"<row>":[...],...}}      `RowDeaths` that have changed

Of a result, `input` is RawRow.digest and `margin` a `types.Margin`. The checksums of all lines but the first are keyed
by the first, so that lines of another job's file are found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from specbatch.errors import InputError
from specbatch.files.jsonl import encode_line
from specbatch.results.margins import MARGIN_DIGITS, of_digits, to_digits
from specbatch.types import NO_MARGIN, Margin

FORMAT = 3  # 1 had no checksums, 2 no margins
_JOB = "specbatch_job"
_HEADER = b'"specbatch_job":'
_START, _END = b'{"check":"', b'",'
_CHECK_AT = len(_START)
_FIELDS_AT = _CHECK_AT + 16 + len(_END)
_INPUT, _MARGIN, _ROW = b'"input":"', b'","margin":"', b'","row":'
_INPUT_AT = len(_INPUT)
_MARGIN_AT = _INPUT_AT + 16 + len(_MARGIN)
_ROW_AT = _MARGIN_AT + MARGIN_DIGITS + len(_ROW)


class OpenedRow(NamedTuple):
    """A result in a partial file."""

    digest: int  # digest of the input row
    margin: Margin
    line: bytes  # the result line


class PartialLines:
    """Writes and reads the lines after the header."""

    def __init__(self, header: bytes) -> None:
        self._key = blake2b(header, digest_size=32).digest()
        self.job_id = self._key.hex()[:16]

    def row(self, digest: int, result: bytes, margin: Margin = NO_MARGIN) -> bytes:
        """The line with a result line; `digest`: of the input row."""
        fields = (_INPUT, digest, _MARGIN, to_digits(margin), _ROW, result[:-1])
        return _seal(b"%s%016x%s%s%s%s}\n" % fields, self._key)

    def record(self, record: Mapping[str, Any]) -> bytes:
        """The line with anything but a result."""
        return _seal(encode_line(dict(record))[1:], self._key)

    def open_record(self, line: bytes) -> dict[str, Any] | None:
        """The argument of `record`; None if the line is damaged or a result."""
        fields = _unseal(line, self._key)
        if fields is None or fields.startswith(_INPUT):
            return None
        try:
            return dict(json.loads(b"{" + fields))
        except (ValueError, RecursionError):
            return None

    def open_row(self, line: bytes) -> OpenedRow | None:
        """The arguments of `row`; None if the line is damaged or not a result."""
        fields = _unseal(line, self._key)
        if fields is None or not fields.startswith(_INPUT):
            return None
        margin = of_digits(fields[_MARGIN_AT : _MARGIN_AT + MARGIN_DIGITS])
        return OpenedRow(int(fields[_INPUT_AT : _INPUT_AT + 16], 16), margin, fields[_ROW_AT:-2] + b"\n")


def header_line(job: Mapping[str, Any]) -> bytes:
    return _seal(encode_line({_JOB: dict(job), "format": FORMAT})[1:], b"")


def read_header(line: bytes, name: str) -> dict[str, Any] | None:
    """The job of the file `name`; None if the line is damaged. Raises InputError if specbatch did not write the
    file, or wrote it in another format."""
    if _unseal(line, b"") is None and (line.startswith(_START) or line[_FIELDS_AT:].startswith(_HEADER)):
        return None
    try:
        header = json.loads(line)
        job, number = dict(header[_JOB]), header.get("format", 1)
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise InputError(
            f"{name} is not a partial result of specbatch", "move it away, or write elsewhere with -o PATH"
        ) from exc
    if number != FORMAT:
        raise InputError(
            f"{name} was written by another version of specbatch (format {number}; this version has format {FORMAT})",
            "finish it with that version; --overwrite drops it and starts again; -o PATH writes elsewhere",
        )
    return job


def _seal(fields: bytes, key: bytes) -> bytes:
    return b"%s%s%s%s" % (_START, _checksum(fields, key), _END, fields)


def _unseal(line: bytes, key: bytes) -> bytes | None:
    """Return the fields that follow the checksum. Returns None if the checksum is wrong."""
    check, fields = line[_CHECK_AT : _FIELDS_AT - len(_END)], line[_FIELDS_AT:]
    whole = line.startswith(_START) and line[_FIELDS_AT - len(_END) : _FIELDS_AT] == _END
    return fields if whole and check == _checksum(fields, key) else None


def _checksum(fields: bytes, key: bytes) -> bytes:
    return blake2b(fields, digest_size=8, key=key).hexdigest().encode()


_BLOCK = 1024
_ENTRY = np.dtype(
    [("offset", np.int64), ("length", np.uint32), ("digest", np.uint64), ("margin", np.float32), ("state", np.uint8)]
)
_FOUND, _CONFIRMED = 1, 2  # 0: none


class Entry(NamedTuple):
    """The position of a result line, the digest of its input row, and its margin (`Margin.value`)."""

    offset: int
    length: int
    digest: int
    margin: float


class RowDeaths(NamedTuple):
    """Number of deaths of processes that ran a row, the digest of the input row, and the cause of the last death."""

    times: int
    digest: int
    cause: str


class RowIndex:
    """Index of the partial file: the position of each row's result, in 25 bytes a row. Entries of an earlier session
    count after they are confirmed. Entries are kept in blocks, so that a line with an absurd row number costs one
    block."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}

    def get(self, row: int) -> Entry | None:
        block = self._blocks.get(row // _BLOCK)
        if block is None or not block[row % _BLOCK]["state"]:
            return None
        return Entry(*block[row % _BLOCK].item()[:-1])

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
        """Rows of earlier sessions that were not confirmed."""
        return [
            number * _BLOCK + int(at)
            for number, block in self._blocks.items()
            for at in np.flatnonzero(block["state"] == _FOUND)
        ]

    def in_order(self) -> Iterator[Entry]:
        """The confirmed entries by row number."""
        for number in sorted(self._blocks):
            block = self._blocks[number]
            for entry in block[block["state"] == _CONFIRMED].tolist():
                yield Entry(*entry[:-1])

    def margins(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of the first row, margins of the rows from there on), float32, by row number. An infinite
        margin says that the row has none, or is not confirmed."""
        for number in sorted(self._blocks):
            block = self._blocks[number]
            yield number * _BLOCK, np.where(block["state"] == _CONFIRMED, block["margin"], np.float32(np.inf))
