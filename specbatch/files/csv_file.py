"""CSV and TSV files: all fields are text, and each row has a field for each column of the header."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import BinaryIO

from specbatch.errors import InputError
from specbatch.files.jsonl import BadRow

MAX_FIELD_CHARS = 64 << 20  # a quote that is never closed would fill the memory
_OTHER_DELIMITERS = ";\t|,"


class Cells(dict[str, str]):
    """A row of a CSV or TSV file: the text of each column. A cell without content is an empty text."""

    __slots__ = ()


def csv_rows(file: BinaryIO, name: str, delimiter: str) -> Iterator[Cells | BadRow]:
    """The rows after the header. Blank lines are skipped.

    A row with another number of fields than the header, with wrong quotes, or that is not UTF-8 is a BadRow. Raises
    InputError for a header that cannot be used, and where a quote is not closed: what comes after it cannot be known.
    """
    csv.field_size_limit(MAX_FIELD_CHARS)  # the default is 128 KiB
    # Bytes that are not UTF-8 become surrogates, which UTF-8 itself does not have.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(_lines(text, name), delimiter=delimiter, strict=True)
    names = _header(reader, name, delimiter)
    width = len(names)
    line = reader.line_num  # the last one of the row before
    while True:
        try:
            for fields in reader:
                if len(fields) != width:
                    if not fields or (len(fields) == 1 and not fields[0].strip()):
                        line = reader.line_num
                        continue
                    found = f"{len(fields)} field{'s' * (len(fields) != 1)}"
                    yield BadRow("invalid_csv", f"line {line + 1} has {found}, but the header has {width}")
                elif _is_utf8(fields):
                    yield Cells(zip(names, fields, strict=True))
                else:
                    yield BadRow("invalid_text", f"line {line + 1} is not UTF-8")
                line = reader.line_num
            return
        except csv.Error as exc:
            if "expected after" not in str(exc):
                raise _not_closed(name, line + 1) from exc
            # The reader goes on with the next line.
            problem = "has text after the closing quote of a field; a quote in a quoted field is written twice"
            yield BadRow("invalid_csv", f"line {line + 1} {problem}")
            line = reader.line_num


def _lines(text: io.TextIOWrapper, name: str) -> Iterator[str]:
    number = 0
    while line := text.readline(MAX_FIELD_CHARS + 1):
        number += 1
        if len(line) > MAX_FIELD_CHARS:
            raise InputError(f"line {number} of {name} is longer than {MAX_FIELD_CHARS >> 20} MiB")
        yield line


def _header(reader: Iterator[list[str]], name: str, delimiter: str) -> list[str]:
    """The names of the columns, as pandas has them: `Unnamed: 0` for a column without a name."""
    try:
        header = next((fields for fields in reader if any(field.strip() for field in fields)), None)
    except csv.Error as exc:
        raise InputError(f"the header of {name} is not valid: {exc}") from exc
    if header is None:
        raise InputError(f"{name} is empty", "the first line of a CSV file has the names of its columns")
    if not _is_utf8(header):
        raise InputError(f"the header of {name} is not UTF-8", "save the file as UTF-8")
    other = next((char for char in _OTHER_DELIMITERS if len(header) == 1 and char in header[0]), None)
    if other is not None:
        wanted = "tabs, as .tsv says" if delimiter == "\t" else "commas, as .csv says"
        raise InputError(
            f"the columns of {name} are not separated by {wanted}: its header is {header[0][:60]!r}",
            "name a file with tabs .tsv, and one with commas .csv; export others with commas",
        )
    names = [field if field.strip() else f"Unnamed: {i}" for i, field in enumerate(header)]
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise InputError(f"the header of {name} has two columns {twice[:60]!r}", "give each column its own name")
    return names


def _is_utf8(fields: list[str]) -> bool:
    text = "".join(fields)
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _not_closed(name: str, line: int) -> InputError:
    return InputError(
        f"{name} cannot be read past line {line - 1}: a quote that opens in the row at line {line} is not closed",
        'a field with quotes is written in quotes, and each of its quotes twice: "say ""hi"""',
    )
