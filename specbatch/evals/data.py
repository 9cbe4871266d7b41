"""Sources of a task's rows: a packaged file, a file next to the task, the hub, or the user's --data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.config import DataSection
from specbatch.errors import ConfigError, InputError, RowError
from specbatch.evals.schema import DataSource, Task
from specbatch.rows.sources import open_source
from specbatch.strict.reader import nearest

DATA_FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Rows:
    """All rows of a source: tasks are small, and few-shot examples come from anywhere in them."""

    name: str
    identity: dict[str, Any]  # identifies them: a digest, or the version of a data set
    rows: list[dict[str, Any]]


def task_rows(task: Task, replacement: Path | None, limit: int | None) -> Rows:
    """The rows to be answered: the first `limit` of the task's, or of `replacement`. Raises InputError, ConfigError."""
    source = DataSource(file=str(replacement.absolute())) if replacement is not None else task.data
    return read_rows(source, task, limit)


def example_rows(task: Task) -> list[dict[str, Any]]:
    """The rows that few-shot examples are taken from. Raises InputError, ConfigError."""
    if task.few_shot is None:
        return []
    if task.few_shot.data is None:
        return [dict(example) for example in task.few_shot.examples]
    return read_rows(task.few_shot.data, task, None).rows


def read_rows(source: DataSource, task: Task, limit: int | None) -> Rows:
    """Rows of a source of `task`. Raises InputError where it cannot be read or a line is no JSON object."""
    opened = open_source(_reference(source, task), DataSection(split=source.split, subset=source.subset))
    rows: list[dict[str, Any]] = []
    for raw in opened.rows():
        if limit is not None and len(rows) == limit:
            break
        try:
            rows.append(dict(raw.fields()))
        except RowError as exc:
            raise InputError(f"{opened.name}, line {raw.index + 1}: {exc.message}") from exc
    if not rows:
        raise InputError(f"{opened.name} has no rows")
    name = source.packaged if source.packaged is not None else opened.name
    return Rows(name, opened.identity, rows)


def _reference(source: DataSource, task: Task) -> str:
    if source.hub is not None:
        return source.hub
    if source.file is not None:
        path = Path(task.path).parent / source.file  # an absolute one stays itself
        if not path.is_file():
            raise InputError(f"the data file {path} does not exist")
        return str(path)
    assert source.packaged is not None, source
    path = DATA_FOLDER / source.packaged
    if path.parent != DATA_FOLDER or not path.is_file():
        known = sorted(p.name for p in DATA_FOLDER.glob("*.jsonl.gz"))
        near = nearest(source.packaged, known)
        hint = f"did you mean {near}?" if near else f"packaged: {', '.join(known)}"
        raise ConfigError(f"{task.path}: no packaged data is named {source.packaged}", hint)
    return str(path)
