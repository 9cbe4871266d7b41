"""The prompts of the rows that the page shows, from the input file of the job."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from specbatch.errors import InputError, RowError
from specbatch.files.jsonl import decode_line, numbered_lines, open_lines
from specbatch.files.local import identify_input
from specbatch.report.rows import Results
from specbatch.results.fingerprint import INPUT_FACTS

_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def find_prompts(results: Results, named: Path | None, indices: Collection[int]) -> dict[int, str] | None:
    """[index] = the prompt, for JSON lines that have not changed since the job. None: they were not found. Raises
    InputError for an input that the user has `named`, if it is not that of the job."""
    if named is not None and not named.is_file():
        raise InputError(f"there is no input file {named}")
    for path in [named] if named is not None else _likely(results):
        if path.name.endswith(_LINES) and path.is_file() and _is_input(path, results.job):
            return _read(path, indices)
    if named is not None:
        raise InputError(f"{named} is not the input of this job, or has changed", "prompts are of unchanged JSON lines")
    return None


def _likely(results: Results) -> list[Path]:
    folder, name = results.path.parent, (results.stats or {}).get("input")
    stem = results.path.name.partition(".results.")[0]
    return [folder / str(name), Path(str(name)), folder / f"{stem}.jsonl"]


def _is_input(path: Path, job: Mapping[str, Any]) -> bool:
    wanted = {name.removeprefix(INPUT_FACTS): fact for name, fact in job.items() if name.startswith(INPUT_FACTS)}
    if wanted.get("size") != path.stat().st_size:
        return False
    return {"kind": "file", **identify_input(path)[0]} == wanted


def _read(path: Path, indices: Collection[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    last = max(indices, default=-1)
    with open_lines(path) as file:
        for index, line in numbered_lines(file.readline, path.name):
            if index > last:
                break
            if index in indices and isinstance(line, bytes):
                try:
                    found[index] = _prompt(decode_line(line))
                except RowError:
                    found[index] = line.decode("utf-8", "replace")
    return found


def _prompt(row: Mapping[str, Any]) -> str:
    asked = row["body"] if isinstance(row.get("body"), dict) else row
    messages = asked.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return "\n\n".join(f"{message.get('role')}: {_content(message)}" for message in messages)
    prompt = asked.get("prompt")
    return prompt if isinstance(prompt, str) else json.dumps(asked, ensure_ascii=False)


def _content(message: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in message.items() if name != "role" and value is not None}
    content = rest.pop("content", "")
    shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return " ".join(filter(None, [shown, json.dumps(rest, ensure_ascii=False) if rest else ""]))
