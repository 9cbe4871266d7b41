"""Files of finished results: JSON lines (plain, .gz, .zst), parquet, CSV and TSV, written from JSON lines and read back
as such.

While a job runs, its partial file has plain JSON lines. The finished file is written once, in a stream. The same lines
give the same bytes: gzip has no time and no name in its header, and the settings of each writer are fixed.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.files.flat_table import DELIMITERS, FlatTable, is_delimited, read_delimited, write_delimited
from specbatch.files.local import FileFacts, create_like, file_facts

RESULT_SUFFIXES = (
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".parquet",
    *DELIMITERS,
)  # A file with any other name has plain JSON lines.
_BUFFER = 1 << 20
_GZIP_LEVEL = 6
_ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 10_000, 32 << 20  # size of a row group of parquet, which is held in memory
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"  # first bytes
_MAX_LINE_BYTES = 64 << 20


def result_suffix(path: Path) -> str:
    """The ending of a name that says the format, such as ".jsonl.gz"; "": none."""
    return next((suffix for suffix in RESULT_SUFFIXES if path.name.endswith(suffix)), "")


def write_lines(
    path: Path, lines: Iterable[bytes], suffix: str, *models: Path, table: FlatTable | None = None
) -> dict[str, Any]:
    """Write a new file, flushed to the operating system, in the format of `suffix` (see `result_suffix`); returns what
    identifies the file: bytes, rows and sha256. The memory that this takes does not grow with the lines. `models`: see
    `create_like`. `table`: the columns of a table with flat results, which CSV and TSV files have."""
    facts = FileFacts()
    with create_like(path, *models) as file:
        if suffix == ".parquet":
            from specbatch.files.parquet import write_parquet

            write_parquet(file, _counted(lines, facts), _ROW_GROUP_ROWS, _ROW_GROUP_BYTES, table)
        elif suffix in DELIMITERS:
            assert table is not None, "the job has flat columns"
            write_delimited(file, table, _counted(lines, facts), DELIMITERS[suffix])
        else:
            with _packed(file, suffix) as out:
                for line in _counted(lines, facts):
                    out.write(line)
    return identity(path, facts)


def identity(path: Path, lines: FileFacts) -> dict[str, Any]:
    """Return the bytes, rows and sha256 of a result file whose lines were counted."""
    if lines.num_bytes == path.stat().st_size and not is_packed(path):
        return lines.of_results()
    return {**file_facts(path).of_results(), "rows": lines.num_newlines}


@contextlib.contextmanager
def open_results(path: Path) -> Iterator[Iterator[bytes]]:
    """The result lines of a file, whatever its name. A damaged one raises OSError, EOFError, ValueError or
    zlib.error."""
    begin = _first_bytes(path)
    if begin == _PARQUET:
        from specbatch.files.parquet import read_parquet

        yield read_parquet(path)
    elif begin.startswith(_GZIP):
        with gzip.open(path, "rb") as file:
            yield iter(file)
    elif begin == _ZSTD:
        import io

        import pyarrow as pa

        with pa.input_stream(str(path), compression="zstd") as stream:
            yield iter(io.BufferedReader(stream, _BUFFER))
    elif _is_text_table(path, begin):
        yield read_delimited(path)
    else:
        with path.open("rb", _BUFFER) as file:
            yield iter(file)


def result_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The results of a finished job, in the order of the input."""
    with open_results(path) as lines:
        for line in lines:
            yield json.loads(line)


def first_line(path: Path) -> bytes | None:
    """The first result line; b"": there is none. None: the file is packed and cannot be read."""
    if not is_packed(path):
        with path.open("rb") as file:
            return file.readline(_MAX_LINE_BYTES)
    try:
        with open_results(path) as lines:
            return next(lines, b"")
    except (OSError, EOFError, ValueError, zlib.error):  # Arrow's errors are ValueErrors and OSErrors
        # The header of a text shows that specbatch wrote it, also if its first row is torn.
        return b"" if _is_text_table(path, _first_bytes(path)) else None


def is_table(path: Path) -> bool:
    return _first_bytes(path) == _PARQUET


def is_packed(path: Path) -> bool:
    """Return whether the content is not the result lines themselves: it is compressed, or a table."""
    begin = _first_bytes(path)
    return begin.startswith((_GZIP, _ZSTD, _PARQUET)) or _is_text_table(path, begin)


def _is_text_table(path: Path, begin: bytes) -> bool:
    """Return whether the file is CSV or TSV with flat results. `begin`: its first bytes."""
    return not begin.startswith((b"{", _GZIP, _ZSTD, _PARQUET)) and is_delimited(path)


def is_torn_pack(path: Path) -> bool:
    """Return whether the file is the beginning of a compressed file or a table, too short to show which."""
    begin = _first_bytes(path)
    return len(begin) < 4 and any(mark.startswith(begin) for mark in (_GZIP, _ZSTD, _PARQUET))


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def _counted(lines: Iterable[bytes], facts: FileFacts) -> Iterator[bytes]:
    for line in lines:
        facts.add(line)
        yield line


@contextlib.contextmanager
def _packed(file: BinaryIO, suffix: str) -> Iterator[Any]:
    if suffix.endswith(".gz"):
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
            yield packed
    elif suffix.endswith(".zst"):
        import pyarrow as pa

        # Arrow closes what it writes to; the caller closes `file` itself.
        with pa.CompressedOutputStream(pa.PythonFile(_Unclosed(file), "w"), "zstd") as packed:
            yield packed
    else:
        yield file


class _Unclosed:
    """A file that stays open when Arrow closes it."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
