"""JSON lines: read line by line from plain and compressed files, decoded, and encoded."""

from __future__ import annotations

import base64
import datetime
import decimal
import gzip
import io
import itertools
import json
import math
import re
import secrets
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from specbatch.errors import InputError, RowError

READ_ERRORS = (OSError, EOFError, zlib.error)  # gzip and Arrow raise these for a damaged file.
_CHUNK = 1 << 20
MAX_LINE_BYTES = 64 << 20  # bytes of an input line; in a compressed file of a few MB one line can fill the memory


def open_lines(path: Path) -> BinaryIO:
    """Open the bytes of a file, decompressed if its name ends in .gz or .zst."""
    return decompressed(path.open("rb", buffering=_CHUNK), path.name)


def decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """`file` as its name says; closing it closes `file`."""
    if name.lower().endswith(".gz"):
        return cast(BinaryIO, _GzipFile(fileobj=file))
    if name.lower().endswith(".zst"):
        # pyarrow comes with `datasets`, so zstd needs no other dependency.
        import pyarrow as pa

        return cast(BinaryIO, io.BufferedReader(pa.input_stream(file, compression="zstd"), _CHUNK))
    return file


class _GzipFile(gzip.GzipFile):
    """A gzip file that closes the file that it reads."""

    def close(self) -> None:
        file = cast(BinaryIO | None, self.fileobj)
        super().close()
        if file is not None:
            file.close()


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of an input that cannot be read: the error that becomes its result."""

    type: str  # see `RowError`
    message: str


def numbered_lines(readline: Callable[[int], bytes], name: str) -> Iterator[tuple[int, bytes | BadRow]]:
    """(0-based line, bytes without the newline). Blank lines are skipped but counted; a leading BOM is dropped.

    One line at a time is in memory. A line longer than MAX_LINE_BYTES is a BadRow. `readline` is that of a file; its
    argument is the maximum length. Raises InputError if the file cannot be read to its end (bad compression).
    """
    index = 0
    try:
        for index in itertools.count():
            line = readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = readline(_CHUNK)
                yield index, BadRow("invalid_json", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                continue
            if index == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.rstrip(b"\r\n")
            if not line.strip():
                continue
            yield index, line
    except READ_ERRORS as exc:
        raise InputError(f"{name} cannot be read past line {index}: {exc}") from exc


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


MAX_DEPTH = 100  # nested containers in a row: the encoder, which is recursive, must be able to write the row
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def decode_line(line: bytes) -> dict[str, Any]:
    """The JSON object in `line`. Raises RowError: invalid_text (not UTF-8) or invalid_json."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RowError("invalid_text", f"the line is not UTF-8: {exc.reason} at byte {exc.start}") from exc
    try:
        row = _DECODER.decode(text)
    except RecursionError as exc:
        raise RowError("invalid_json", "the JSON of the line is nested too deeply") from exc
    except ValueError as exc:  # JSONDecodeError, and numbers too long to convert
        raise RowError("invalid_json", f"the line is not valid JSON: {exc}") from exc
    # Only a line with that many brackets can be that deep: others are not searched.
    if text.count("{") + text.count("[") > MAX_DEPTH and _is_deeper(row, MAX_DEPTH):
        raise RowError("invalid_json", "the JSON of the line is nested too deeply")
    if not isinstance(row, dict):
        raise RowError("invalid_json", f"the line must be a JSON object, not {json_type(row)}")
    return row


def decode_value(text: str) -> Any:
    """The JSON value that a text of a row is. Raises ValueError."""
    try:
        value = _DECODER.decode(text)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if _is_deeper(value, MAX_DEPTH // 2):
        raise ValueError("it is nested too deeply")
    return value


def decode_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text of a row or of a model is; None if it is none."""
    found = begin_object(text, 0)
    return found[0] if found is not None and not text[found[1] :].strip() else None


def begin_object(text: str, position: int) -> tuple[dict[str, Any], int] | None:
    """The JSON object that begins at `position` or after white space, and where it ends; None if there is none."""
    start = len(text) - len(text[position:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # also numbers too long to convert
        return None
    if not isinstance(value, dict) or _is_deeper(value, MAX_DEPTH // 2):
        return None
    return value, end


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(_is_deeper(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))


def json_type(value: Any) -> str:
    """The JSON type of a value, for messages; the Python type of a table's value that JSON lacks."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value)) or ("a number" if type(value) in (int, float) else type(value).__name__)


_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")  # An address in the repr of an image differs from process to process.
_MAX_DIGITS = 1000  # digits of a decimal that is written as a number
_MISSING = ("NaTType", "NAType")  # types of missing values in pandas


def json_form(value: Any) -> Any:
    """A value that JSON lacks, as it is written: numbers and arrays of numpy as numbers and lists, a decimal without
    decimals as an integer and any other as text, dates and times as text in ISO 8601. Raises TypeError for others."""
    if isinstance(value, decimal.Decimal):
        exponent = value.as_tuple().exponent
        whole = isinstance(exponent, int) and exponent >= 0 and value.adjusted() < _MAX_DIGITS
        return int(value) if whole else str(value) if value.is_finite() else None
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "tolist"):
        if getattr(value, "dtype", None) is not None and value.dtype.kind in "mM":
            return value.astype(str).tolist() if value.ndim else None if value != value else str(value)
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | uuid.UUID):
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _foreign(value: Any) -> Any:
    """Return the JSON form of any value that tables and data sets have, such as bytes and images (see `json_form`).
    Bytes that are no text become a data URL, so that no two of them are written alike."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return f"data:;base64,{base64.b64encode(value).decode()}"
    try:
        return json_form(value)
    except TypeError:
        return _ADDRESS.sub("", str(value))


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value of a row that is written as JSON already, as `encode_line` would write it."""

    text: str


_PLACE = secrets.token_hex(16)  # the place of such a value in a text; drawn at random, so that no row has it
_NOT_ASCII = re.compile(r"[^\0-~]")


def encode_line(row: dict[str, Any]) -> bytes:
    """`row` as one UTF-8 line with its newline. Numbers that JSON lacks (NaN, infinity) become null."""
    try:
        text = _encode(row)
    except ValueError:
        text = _encode(finite(row))
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # lone surrogates have no UTF-8, but can be written as \\ud800, in a line that is ASCII
        return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text).encode("ascii") + b"\n"


def _encode(row: Any) -> str:
    encoded: list[str] = []

    def default(value: Any) -> Any:
        if not isinstance(value, Encoded):
            return _foreign(value)
        encoded.append(value.text)
        return _PLACE

    text = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=default).encode(row)
    if not encoded:
        return text
    between = text.split(f'"{_PLACE}"')
    return "".join(itertools.chain.from_iterable(zip(between, [*encoded, ""], strict=True)))


def valid_text(text: str) -> str:
    """Return the text as UTF-8 can have it: half of a surrogate pair becomes `\\\\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def finite(value: Any) -> Any:
    """`value` with NaN and infinities replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
