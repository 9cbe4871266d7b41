"""The files of a data set that are read here and not by `datasets`, which would guess the types of CSV and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import RowError
from specbatch.files.input_file import DELIMITERS, RowData, is_text, open_file, rows_of_stream, suffix_of
from specbatch.files.jsonl import BadRow, decode_line

# Options of a builder that do not change how a file is read; `_reads_as_here` checks the delimiter.
_HARMLESS = ("name", "version", "data_dir", "data_files", "description", "sep", "delimiter")


@dataclasses.dataclass(frozen=True)
class DataSetFiles:
    """The files of one split."""

    rows: Callable[[], Iterator[RowData]]
    total: int | None  # rows, if that is known


def files_of(builder: Any, split: str, *, local: bool) -> DataSetFiles | None:
    """Return the files of a split. `builder`: an object of `datasets` that knows them. Return None if `datasets` has to
    read them, because the builder declares types or options, or has files of other kinds. It raises InputError for a
    file here that cannot be read."""
    names = [str(file) for file in (getattr(builder.config, "data_files", None) or {}).get(split, ())]
    if not names or builder.info.features is not None or not _reads_as_here(builder.config, names):
        return None
    if not local:
        if not all(name.startswith("hf://") and is_text(name) for name in names):  # parquet has types of its own
            return None
        return DataSetFiles(partial(_columns, [partial(rows_of_stream, partial(_open, n), n) for n in names]), None)
    if not all(suffix_of(name) for name in names):  # such as images with their labels
        return None
    opened = [open_file(Path(name), name, None) for name in names]
    totals = [file.total for file in opened]
    total = None if None in totals else sum(filter(None, totals))
    return DataSetFiles(partial(_columns, [file.rows for file in opened]), total)


def _reads_as_here(config: Any, names: list[str]) -> bool:
    """Return whether `datasets` would read the files with the options that their names say."""
    for field in dataclasses.fields(config):
        if field.name not in _HARMLESS and getattr(config, field.name) != field.default:
            return False
    delimiter = getattr(config, "sep", None)
    wanted = {DELIMITERS.get((suffix_of(name) or "")[:4], delimiter) for name in names}
    return delimiter is None or wanted == {delimiter}


def _columns(files: list[Callable[[], Iterator[tuple[int, RowData]]]]) -> Iterator[RowData]:
    """The rows of all files. Those of a data set are columns, also where its files have JSON."""
    for rows in files:
        for _, row in rows():
            if not isinstance(row, bytes):
                yield row
                continue
            try:
                yield decode_line(row)
            except RowError as exc:
                yield BadRow(exc.type, exc.message)


def _open(url: str) -> BinaryIO:
    import fsspec

    opened: BinaryIO = fsspec.open(url, "rb").open()
    return opened
