"""The prompts of training and evaluation: JSONL files of several known kinds become rows for `specbatch generate`.

A row's fields show its kind, in this order:

    {"messages": [...]}                    as it is; an answer at its end is dropped, the target writes its own
    {"turns": ["...", ...]}                MT-bench, Arena-Hard: the first turn (text, or {"content": text})
    {"question": "..."}                    GSM8K
    {"instruction": "...", "instances": [{"input": "..."}]} or {"instruction": "...", "input": "..."}    Self-Instruct
    {"prompt": "..."}                      anything else (HumanEval, Arena-Hard v0.1)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.errors import InputError
from specbatch.files.paths import partial_path

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptFile:
    """A file and the number of its rows to use (None: all)."""

    path: Path
    limit: int | None = None

    @staticmethod
    def parse(text: str) -> PromptFile:
        """Parse `FILE` or `FILE:ROWS`. It raises InputError for a number of rows below 1."""
        name, colon, rows = text.rpartition(":")
        if not colon or not rows.isdigit():
            return PromptFile(Path(text))
        if int(rows) < 1:
            raise InputError(f"{text}: the number of rows must be at least 1")
        return PromptFile(Path(name), int(rows))


def messages_of(row: Any) -> Messages:
    """Return the conversation that the target answers. It raises ValueError for a row of no known kind."""
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    if isinstance(row.get("messages"), list):
        messages = list(row["messages"])
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        if not messages:
            raise ValueError("its messages hold no question")
        return messages
    if row.get("turns"):
        first = row["turns"][0]
        return _user(first["content"] if isinstance(first, dict) else first)
    if row.get("question"):
        return _user(row["question"])
    if row.get("instruction"):
        instances = row.get("instances") or [row]
        given = instances[0].get("input") or ""
        return _user(f"{row['instruction']}\n\n{given}" if given else row["instruction"])
    if row.get("prompt"):
        return _user(row["prompt"])
    raise ValueError(f"it has none of messages, turns, question, instruction, prompt; its fields: {', '.join(row)}")


def read_prompts(files: Sequence[PromptFile]) -> list[Messages]:
    """Read the conversations of all files, each once, in order. It raises InputError with file and line."""
    return distinct(messages for file in files for messages in _read(file))


def distinct(prompts: Iterable[Messages]) -> list[Messages]:
    """Return `prompts`, each once, in order."""
    found: dict[str, Messages] = {}
    for messages in prompts:
        found.setdefault(json.dumps(messages, sort_keys=True), messages)
    return list(found.values())


def _read(file: PromptFile) -> Iterable[Messages]:
    try:
        # splitlines() is not used: it also ends lines at U+2028, which JSON strings may hold.
        lines = file.path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file.path}: {error}") from error
    taken = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.limit is not None and taken == file.limit:
            return
        try:
            yield messages_of(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file.path}, line {number}: this row is no prompt: {error}") from error
        taken += 1


def _user(content: Any) -> Messages:
    if not isinstance(content, str):
        raise ValueError(f"the prompt is {type(content).__name__}, not text")
    return [{"role": "user", "content": content}]


def rows_of(prompts: Sequence[Messages], temperatures: Sequence[float], as_text: bool) -> list[dict[str, Any]]:
    """Make one row for each prompt and temperature. The rows of one prompt follow each other, and have its number as
    metadata.

    `as_text`: the row is the last message's text as a prompt to continue, for a target without a chat template.
    """
    rows = []
    for number, messages in enumerate(prompts):
        prompt = {"prompt": messages[-1]["content"]} if as_text else {"messages": messages}
        for k, temperature in enumerate(temperatures):  # one may be there twice
            row = {"id": f"{number}-{k}@{temperature:g}", **prompt, "temperature": temperature}
            rows.append(row | {"metadata": {"prompt": number}})
    return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the rows that `write_lines` wrote, or the results of a finished job."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file. If it holds these rows already, it is not touched, because a finished or unfinished job
    belongs to it."""
    text = _lines(rows)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def write_job(path: Path, rows: Sequence[Mapping[str, Any]], results: Path, *, overwrite: bool) -> None:
    """Write the rows of a job, whose answers are or will be in `results`. It raises InputError if `results` exists,
    answers other rows, and must not be overwritten. The engine would find that out after the rows are overwritten."""
    kept = results.exists() or partial_path(results).exists()
    if kept and not overwrite and path.is_file() and path.read_text(encoding="utf-8") != _lines(rows):
        raise InputError(
            f"{results} answers other prompts than these",
            "the files of prompts, --invent or --temperatures are not what they were; -o DIR trains elsewhere, "
            "--overwrite starts again",
        )
    write_lines(path, rows)


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    # As ASCII: a prompt may hold half a surrogate pair, which is no UTF-8; that row fails, and no other.
    return "".join(json.dumps(row) + "\n" for row in rows)
