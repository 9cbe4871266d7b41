"""Result lines as the report reads them: native and OpenAI Batch, of finished and unfinished jobs."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbatch.errors import InputError
from specbatch.files.line_types import index_of
from specbatch.files.paths import is_partial, partial_path, read_stats, stats_path_of
from specbatch.files.result_files import open_results
from specbatch.results.partial import PartialLines, header_line, read_header

_MAX_NUMBER = 1 << 40  # tokens and rounds of a row


@dataclass(frozen=True, slots=True)
class Row:
    """One result. Of several completions the first one, with the sums of tokens and rounds."""

    index: int
    id: Any
    line: Mapping[str, Any]
    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    acceptance_length: float | None = None
    metadata: Any = None
    error: tuple[str, str] | None = None  # its type and message
    margin: float | None = None  # the certificate says it
    logprob: float | None = None  # the mean over its tokens


def read_row(line: Mapping[str, Any]) -> Row:
    """Raises LookupError, ValueError, TypeError or AttributeError for what is no result line."""
    index = index_of(dict(line))
    is_native = "index" in line
    row_id, metadata = (line["id"], line.get("metadata")) if is_native else (line["custom_id"], None)
    if error := line.get("error"):
        kind = str(error["type"] if "type" in error else error["code"])
        return Row(index, row_id, line, metadata=metadata, error=(kind, str(error["message"])))
    body = line if is_native else line["response"]["body"]
    choice = line if is_native else body["choices"][0]
    message = choice.get("message", choice)
    usage, counts = body["usage"], body["speculation"]
    numbers = usage["prompt_tokens"], usage["completion_tokens"], counts["rounds"]
    length = counts["acceptance_length"]
    _check_numbers(*numbers, counts["drafted"], counts["accepted"], *counts["accept_histogram"])
    if length is not None and not 0 <= length <= _MAX_NUMBER:  # nor NaN
        raise ValueError(length)
    return Row(
        index,
        row_id,
        line,
        _text(message.get("text") if "text" in message else message.get("content")),
        _text(message.get("reasoning_content")),
        _calls(message.get("tool_calls")),
        str(choice["finish_reason"]),
        *numbers,
        length,
        metadata,
        margin=_margin(body.get("certificate")),
        logprob=_mean_logprob(choice.get("logprobs")),
    )


def _margin(certificate: Any) -> float | None:
    return None if certificate is None else _real(certificate["margin"])


def _mean_logprob(given: Any) -> float | None:
    """Return the mean log-probability of an answer's tokens. They are a list of objects, or in OpenAI Batch lines an
    object with such a list (chats) or with a list of numbers (completions)."""
    if isinstance(given, dict):
        given = given["content"] if "content" in given else given["token_logprobs"]
    if not given:
        return None
    return sum(_real(token["logprob"] if isinstance(token, dict) else token) for token in given) / len(given)


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(value)
    return float(value)


def _check_numbers(*values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
            raise TypeError(value)


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise TypeError(value)
    return value or ""


def _calls(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list | None):
        raise TypeError(value)
    return value or ()


@dataclass
class Results:
    """A result file. `damaged`: lines that are no results, counted while `rows` runs."""

    path: Path
    is_finished: bool
    stats: Mapping[str, Any] | None  # stats.json; None: there is none
    job: Mapping[str, Any]  # what identifies the job, by name
    damaged: int = field(default=0, init=False)

    @classmethod
    def open(cls, named: Path) -> Results:
        """The results in `named`, or the unfinished ones that will be written there. Raises InputError."""
        path = named
        if not path.exists() and partial_path(path).exists():
            path = partial_path(path)
        if not path.is_file():
            raise InputError(f"there is no result file {named}", "name the output of `specbatch generate`")
        try:
            if not path.stat().st_size or not is_partial(path):  # an empty file is a job without rows
                stats = read_stats(stats_path_of(path))
                return cls(path, True, stats, stats["job"] if stats is not None else {})
            with path.open("rb") as file:
                return cls(path, False, None, read_header(file.readline(), str(path)) or {})
        except OSError as exc:
            raise InputError(f"cannot read {path}: {exc.strerror}") from exc

    def rows(self) -> Iterator[Row]:
        """Yield the rows in the order of the file. This is the order of the input, or, for an unfinished job, the order
        in which rows finished. It raises InputError if the file cannot be read to its end."""
        try:
            for line in self._lines():
                try:
                    row = read_row(json.loads(line))
                except (LookupError, ValueError, TypeError, AttributeError, RecursionError):
                    self.damaged += 1
                    continue
                yield row
        except (OSError, EOFError, ValueError, zlib.error) as exc:  # ValueError: a table of another program, or damage
            raise InputError(f"cannot read {self.path}: {exc}") from exc

    def _lines(self) -> Iterator[bytes]:
        if self.is_finished:
            with open_results(self.path) as lines:
                yield from lines
            return
        with self.path.open("rb") as file:
            header = file.readline()
            # Without its first line a file has no key: its rows cannot be read.
            lines_of = PartialLines(header if self.job else header_line({}))
            for line in file:
                if not line.endswith(b"\n"):  # the job is writing it, or was killed there
                    return
                if (opened := lines_of.open_row(line)) is not None:
                    yield opened.line
                elif lines_of.open_record(line) is None:
                    self.damaged += 1
