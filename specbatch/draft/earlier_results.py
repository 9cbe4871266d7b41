"""The texts of an earlier result file, which `speculation.corpus` names."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbatch.errors import ConfigError

_OPTION = "speculation.corpus"
_MAX_CHARS_PER_TOKEN = 8  # more than texts have on average; tokens that are too many are left out later


def read_texts(path: Path, max_tokens: int) -> list[tuple[str, bool]]:
    """Read the completions of a result file, native or OpenAI, in order. Each is its text, and whether it ends by
    itself. Of a file with far more than `max_tokens` tokens the last ones are returned. Raises ConfigError for a file
    that is missing, damaged or no result file."""
    texts: deque[tuple[str, bool]] = deque()
    num_chars = 0
    for text, is_whole in _completions(path):
        texts.append((text, is_whole))
        num_chars += len(text)
        while num_chars > max_tokens * _MAX_CHARS_PER_TOKEN and len(texts) > 1:
            num_chars -= len(texts.popleft()[0])
    return list(texts)


def _completions(path: Path) -> Iterator[tuple[str, bool]]:
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    found = list(_of_line(json.loads(line))) if line.strip() else []
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
                    raise ConfigError(
                        f"{_OPTION}: line {number} of {path} is not a result line",
                        hint="name the finished result file of a job, with JSON lines (.jsonl or .jsonl.gz)",
                    ) from exc
                yield from found
    except (OSError, EOFError, zlib.error) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise ConfigError(f"{_OPTION}: {path} cannot be read: {reason}", hint="name the result file of a job") from exc


def _of_line(line: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the completions of a result line. It raises LookupError, TypeError, ValueError or AttributeError for other
    lines."""
    if line.get("error") and line.get("response") is None and "choices" not in line:
        return  # a row that failed has no text
    body = line["response"]["body"] if "response" in line else line
    for choice in body.get("choices") or [body]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        reasoning = choice.get("message", choice).get("reasoning_content")
        if reasoning is not None:
            yield _checked(reasoning), False
        if text is not None:  # None: an answer of tool calls, or a completion that failed
            yield _checked(text), choice["finish_reason"] == "stop"


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError("a completion's text is a string")
    return text
