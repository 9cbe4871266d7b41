"""Reads a task: YAML -> `schema.Task`, strictly. Every mistake is a ConfigError that names the full path."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from specbatch.config import sampling_value
from specbatch.errors import ConfigError, cut, shown
from specbatch.evals.prompts import compile_template
from specbatch.evals.schema import METRICS, STEPS, DataSource, ExactMatch, Filter, Metric, Regex, Step, Task
from specbatch.strict_yaml import YamlProblem, load_yaml
from specbatch.types import SamplingParams

TASKS_FOLDER = Path(__file__).parent / "tasks"
_COUNTS = ("few_shot.count", "few_shot.seed")  # integers >= 0; other numbers are > 0
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # names files


def task_names() -> list[str]:
    """The packaged tasks."""
    return sorted(path.stem for path in TASKS_FOLDER.glob("*.yaml"))


def find_tasks(names: Iterable[str], files: Iterable[Path]) -> list[Task]:
    """The packaged tasks `names`, then those of the YAML `files`. Raises ConfigError."""
    known = task_names()
    tasks = []
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown task {name}; known: {', '.join(known)}", _near_task(name, known))
        tasks.append(load_task(TASKS_FOLDER / f"{name}.yaml"))
    tasks += [load_task(path) for path in files]
    if not tasks:
        raise ConfigError(
            f"no task is given; known: {', '.join(known)}", "specbatch eval gsm8k, or --task FILE for your own"
        )
    seen: set[str] = set()
    for task in tasks:
        if task.name in seen:
            raise ConfigError(f"the task {task.name} is given twice")
        seen.add(task.name)
    return tasks


def load_task(path: Path) -> Task:
    """The task in a YAML file. Raises ConfigError."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        names = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        hint = f"did you mean {path.parent / near[0]}?" if near else None
        raise ConfigError(f"cannot read the task {path}: {reason}", hint) from exc
    try:
        tree = load_yaml(text)
    except YamlProblem as exc:
        raise ConfigError(f"{path} is not valid YAML: {exc}") from exc
    try:
        task = _read(Task, tree, "")
        _check(task)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc.message}", exc.hint) from exc
    return dataclasses.replace(task, path=str(path), sha256=hashlib.sha256(data).hexdigest())


def _read(annotation: Any, value: Any, path: str) -> Any:
    """`value` as `annotation` wants it."""
    if annotation is SamplingParams:
        return _sampling(value, path)
    if annotation == Metric:
        return _metric(value, path)
    if annotation == Step:
        return _step(value, path)
    if dataclasses.is_dataclass(annotation):
        return _dataclass(annotation, value, path)
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(k for k in kinds if k is not type(None))
    assert len(kinds) == 1, annotation
    kind = kinds[0]
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, path)
    origin = typing.get_origin(kind)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, str) and item is str:
            value = [value]
        if not isinstance(value, list):
            raise ConfigError(f"{path} must be a list, not {shown(value)}")
        return tuple(_read(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise ConfigError(f"{path} must be a mapping with names as keys, not {shown(value)}")
        return value
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            near = difflib.get_close_matches(cut(str(value)), choices, n=1)
            hint = f"did you mean {near[0]}?" if near else None
            raise ConfigError(f"{path} must be one of {', '.join(choices)}, not {shown(value)}", hint)
        return value
    return _scalar(kind, value, path)


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if path == "version" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
        raise ConfigError(f"{path} must be {names[kind]}, not {shown(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not path.endswith("group_select"):
        least = 0 if path in _COUNTS else 1 if kind is int else 0.001
        if not least <= value <= 2**31:
            raise ConfigError(f"{path} must be >= {least}, not {shown(value)}")
    return value


def _dataclass(cls: Any, tree: Any, path: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'a task'} must be a mapping of options, not {shown(tree)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.metadata.get("in_file", True)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        full = _join(path, cut(str(key)))
        if key not in fields:
            near = difflib.get_close_matches(cut(str(key)), fields, n=1)
            known = f"known here: {', '.join(fields) or 'none'}"
            raise ConfigError(f"unknown option {full}", f"did you mean {_join(path, near[0])}?" if near else known)
        values[key] = _read(hints[key], value, full)
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(path, name)} is missing")
    return cls(**values)


def _sampling(tree: Any, path: str) -> SamplingParams:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} must be a mapping of options, not {shown(tree)}")
    known = [f.name for f in dataclasses.fields(SamplingParams)]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(cut(str(key)), known, n=1)
            hint = f"did you mean {path}.{near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ConfigError(f"unknown option {path}.{cut(str(key))}", hint)
        values[key] = sampling_value(str(key), value, f"{path}.{key}")
    return SamplingParams(**values)


def _metric(tree: Any, path: str) -> Metric:
    if not isinstance(tree, Mapping) or "name" not in tree:
        raise ConfigError(f"{path} must be a mapping with a name, not {shown(tree)}", f"known: {', '.join(METRICS)}")
    cls = METRICS.get(str(tree["name"]))
    if cls is None:
        near = difflib.get_close_matches(cut(str(tree["name"])), METRICS, n=1)
        raise ConfigError(
            f"{path}.name must be one of {', '.join(METRICS)}, not {shown(tree['name'])}",
            f"did you mean {near[0]}?" if near else None,
        )
    return typing.cast(Metric, _dataclass(cls, {k: v for k, v in tree.items() if k != "name"}, path))


def _step(value: Any, path: str) -> Step:
    name: Any = value
    options: Any = {}
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, options),) = value.items()
    cls = STEPS.get(name) if isinstance(name, str) else None
    if cls is None:
        near = difflib.get_close_matches(cut(str(name)), STEPS, n=1)
        raise ConfigError(
            f"{path} must be one step, such as take_first or regex: {{pattern: ...}}, not {shown(value)}",
            f"did you mean {near[0]}?" if near else f"known: {', '.join(STEPS)}",
        )
    return typing.cast(Step, _dataclass(cls, options or {}, f"{path}.{name}"))


def _check(task: Task) -> None:
    """What no single option can tell."""
    if not _NAME.fullmatch(task.name):
        raise ConfigError(f"name: {task.name!r} cannot name files", "letters, digits, _, - and .")
    _check_source(task.data, "data")
    few = task.few_shot
    if few is not None:
        if (few.data is None) == (not few.examples):
            raise ConfigError("few_shot must have either data or examples")
        if few.data is not None:
            _check_source(few.data, "few_shot.data")
        if few.examples and few.count > len(few.examples):
            raise ConfigError(f"few_shot.count is {few.count}, and there are {len(few.examples)} examples")
        if not task.prompt.answer and not task.prompt.example_answer:
            raise ConfigError("prompt.answer is missing: few_shot shows questions with their answers")
    if task.prompt.system is not None and task.prompt.kind != "chat":
        raise ConfigError("prompt.system is for chat prompts", "put the text into prompt.question")
    if not task.filters:
        raise ConfigError("filters must name one at least", "filters: [{name: none}], or leave the option out")
    names = [f.name for f in task.filters]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"filters: two are named {name}")
    templates = {
        "prompt.question": task.prompt.question,
        "prompt.answer": task.prompt.answer,
        "prompt.example_answer": task.prompt.example_answer or "",
        "metric.program": getattr(task.metric, "program", ""),
    }
    for path, template in templates.items():
        compile_template(path, template)  # not only parsed: that finds unknown filters
    for f in task.filters:
        _check_patterns(f)
    for pattern in getattr(task.metric, "regexes_to_ignore", ()):
        _check_regex("metric.regexes_to_ignore", pattern)
    if isinstance(task.metric, ExactMatch) and not task.prompt.answer:
        raise ConfigError("prompt.answer is missing: metric exact_match compares with it")


def _check_source(source: DataSource, path: str) -> None:
    given = [name for name in ("packaged", "file", "hub") if getattr(source, name) is not None]
    if len(given) != 1:
        what = " and ".join(given) or "none"
        raise ConfigError(f"{path} must have exactly one of packaged, file and hub; it has {what}")
    if source.hub is None and (source.subset, source.split) != (None, DataSource.split):
        raise ConfigError(f"{path}: subset and split are for data of the hub")


def _check_patterns(f: Filter) -> None:
    for step in f.steps:
        if isinstance(step, Regex):
            _check_regex(f"filters.{f.name}", step.pattern)


def _check_regex(path: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as exc:
        raise ConfigError(f"{path}: {pattern!r} is not a regular expression: {exc}") from exc


def _near_task(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if name.endswith((".yaml", ".yml")):
        return f"--task {name} runs a task of your own"
    return f"did you mean {near[0]}?" if near else "--task FILE.yaml runs a task of your own"


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
