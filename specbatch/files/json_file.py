"""JSON files: an array of rows, one row, or rows one after the other."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from specbatch.errors import InputError, RowError
from specbatch.files import jsonl
from specbatch.files.jsonl import BadRow, decode_line

_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
# It only finds where a value ends, so that one bad row of an array is an error row: the rows are decoded as lines are.
_ENDS = json.JSONDecoder(strict=False, parse_int=len, parse_float=len)


def has_lines(file: BinaryIO) -> bool:
    """Return whether the first line that is not blank is a row. The file has JSON lines then."""
    while line := file.readline(jsonl.MAX_LINE_BYTES):
        if line.strip(b"\xef\xbb\xbf \t\r\n"):
            break
    try:
        decode_line(line.removeprefix(b"\xef\xbb\xbf"))
    except RowError:
        return False
    return True


def json_rows(file: BinaryIO, name: str) -> Iterator[bytes | BadRow]:
    """The text of each row: the elements of an array, or else the values of the file. A part of the file is in memory.

    A row longer than MAX_LINE_BYTES is an error, as is wrong syntax: what comes after it cannot be known. Raises
    InputError.
    """
    text = _Text(file, name)
    if not text.peek():
        raise InputError(f"{name} is empty", "a .json file has an array of rows, or one row")
    is_array = text.skip("[")
    if not (is_array and text.skip("]")):
        while True:
            yield text.value()
            if not is_array:
                if not text.peek():
                    return
            elif text.skip("]"):
                break
            elif not text.skip(","):
                raise text.error("a comma or the end of the array is missing")
    if text.peek():
        raise text.error("there is text after the end of the array")


class _Text:
    """The text of a file, of which the part that is needed is in memory."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        # Bytes that are not UTF-8 come back as the same bytes; then they are an error of their row.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text, self._at = "", 0
        self._is_all = False  # the text in memory reaches the end of the file
        self._num_values = self._num_lines = 0  # values and lines before the text in memory

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._is_all:
                return self._text[self._at : self._at + 1]
            self._read()

    def skip(self, char: str) -> bool:
        """Go past `char` if it is the next one."""
        found = self.peek() == char
        self._at += found
        return found

    def value(self) -> bytes:
        """The text of the next value."""
        self.peek()
        while True:
            try:
                end = _ENDS.raw_decode(self._text, self._at)[1]
                if end < len(self._text) or self._is_all:  # else a number could go on
                    break
            except (ValueError, RecursionError) as exc:
                if self._is_all or len(self._text) - self._at > jsonl.MAX_LINE_BYTES:
                    raise self.error(str(exc).partition(":")[0]) from exc
            self._read()
        text = self._text[self._at : end]
        self._at = end
        self._num_values += 1
        return text.encode("utf-8", "surrogateescape")

    def error(self, problem: str) -> InputError:
        line = self._num_lines + self._text.count("\n", 0, self._at) + 1
        return InputError(
            f"{self._name} is not valid JSON in row {self._num_values}, which begins at line {line}: {problem}"
        )

    def _read(self) -> None:
        """Read on. Each time at least as much as is in memory: so a long row is not decoded too often."""
        rest = self._text[self._at :]
        self._num_lines += self._text.count("\n", 0, self._at)
        part = self._file.read(max(_CHUNK, len(rest)))
        self._is_all = not part
        self._text, self._at = rest + self._decoder.decode(part, final=self._is_all), 0
