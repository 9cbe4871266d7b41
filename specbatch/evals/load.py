"""Finds and reads tasks: YAML -> `schema.Task`. Every mistake is a ConfigError that names the full path."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Iterable
from pathlib import Path

from specbatch.config_load import packaged_tasks
from specbatch.errors import ConfigError
from specbatch.evals.filters import Filter
from specbatch.evals.metrics import metric_name
from specbatch.evals.schema import DataSource, Task
from specbatch.strict.reader import Reader, read_mapping, read_text
from specbatch.text.template_variables import variables_of


def find_tasks(names: Iterable[str], files: Iterable[Path]) -> list[Task]:
    """The packaged tasks `names`, then those of the YAML `files`. Raises ConfigError."""
    known = packaged_tasks()
    tasks = []
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown task {name}; known: {', '.join(known)}", _near_task(name, known))
        tasks.append(load_task(known[name]))
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
    tree = read_mapping(read_text(path, "task"), str(path))
    try:
        task: Task = Reader(Task).read(Task, tree, "")
        _check_relations(task)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc.message}", exc.hint) from exc
    return dataclasses.replace(task, path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def _check_relations(task: Task) -> None:
    """Check the options that depend on each other. Raises ConfigError."""
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
    if task.prompt.chat_template_kwargs is not None and task.prompt.kind != "chat":
        raise ConfigError("prompt.chat_template_kwargs is for prompt.kind: chat")
    if task.prompt.system is not None and task.prompt.kind != "chat":
        raise ConfigError("prompt.system is for chat prompts", "put the text into prompt.question")
    if (task.prompt.choices is not None) != task.metric.scores_choices:
        raise ConfigError("prompt.choices and metric multiple_choice belong together")
    if task.metric.scores_choices and task.filters != (Filter("none"),):
        raise ConfigError("filters are for answers that are generated, and multiple_choice generates none")
    if task.prompt.description and task.prompt.kind == "chat":
        raise ConfigError("prompt.description is for completion prompts", "chat: prompt.system")
    if not task.filters:
        raise ConfigError("filters must name one at least", "filters: [{name: none}], or leave the option out")
    names = [f.name for f in task.filters]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"filters: two are named {name}")
    if task.metric.needs_answer and not task.prompt.answer:
        raise ConfigError(f"prompt.answer is missing: metric {metric_name(task.metric)} compares with it")
    if not variables_of(task.prompt.question):
        raise ConfigError(
            "prompt.question names no field, so all rows would have the same prompt", "a field is written {{ name }}"
        )


def _check_source(source: DataSource, path: str) -> None:
    given = [name for name in ("packaged", "file", "hub") if getattr(source, name) is not None]
    if len(given) != 1:
        what = " and ".join(given) or "none"
        raise ConfigError(f"{path} must have exactly one of packaged, file and hub; it has {what}")
    if source.hub is None and (source.subset, source.split) != (None, DataSource.split):
        raise ConfigError(f"{path}: subset and split are for data of the hub")


def _near_task(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if name.endswith((".yaml", ".yml")):
        return f"--task {name} runs your own task"
    return f"did you mean {near[0]}?" if near else "--task FILE.yaml runs your own task"
