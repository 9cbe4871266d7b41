"""A task with its rows and prompts, checked before any model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.config import Config, DataSection
from specbatch.errors import ConfigError, InputError
from specbatch.evals.data import example_rows, task_rows
from specbatch.evals.prompts import Messages, prompts
from specbatch.evals.schema import Task
from specbatch.evals.templates import Renderer
from specbatch.job.jsonl import encode_line
from specbatch.types import SamplingParams


@dataclass(frozen=True)
class Plan:
    """One task with its rows and prompts."""

    task: Task
    num_examples: int
    source: str  # of the rows, by name
    identity: dict[str, Any]  # of the rows
    rows: list[dict[str, Any]]
    ids: list[Any]
    prompts: list[str | Messages]
    answers: list[str] | None  # what the metric compares with; None where it compares with nothing
    sampling: SamplingParams
    folder: Path  # of this task's files


def make_plan(
    task: Task,
    *,
    num_examples: int | None,
    data: Path | None,
    limit: int | None,
    config: Config,
    overrides: Sequence[str],
    folder: Path,
) -> Plan:
    """Read the rows and make the prompts of `task`. `num_examples`: None: the task's own number. `overrides`: sampling
    options from the command line, which override the task's.

    Raises ConfigError or InputError.
    """
    count = task.few_shot.count if task.few_shot is not None else 0
    if num_examples is not None:
        if task.few_shot is None and num_examples > 0:
            raise ConfigError(f"the task {task.name} has no examples, and --num-fewshot is {num_examples}")
        count = num_examples
    found = task_rows(task, data, limit)
    pool = example_rows(task) if count else []
    written = list(prompts(task, found.rows, pool, count))
    answers = None
    if task.metric.needs_answer:
        answer = Renderer("prompt.answer", task.prompt.answer)
        answers = [answer(row, f"row {i + 1}") for i, row in enumerate(found.rows)]
    task.metric.check_rows(found.rows)
    sampling = dataclasses.replace(task.sampling, **{name: getattr(config.sampling, name) for name in overrides})
    return Plan(
        task,
        count,
        found.name,
        found.identity,
        found.rows,
        [_id(task, row, i) for i, row in enumerate(found.rows)],
        written,
        answers,
        sampling,
        folder / task.name,
    )


def plan_config(config: Config, plan: Plan, stop_token_ids: Sequence[int]) -> Config:
    """`config` for the rows of `plan`: the task samples, and its prompts run as they are.
    `stop_token_ids`: further ones."""
    ids = (*plan.sampling.stop_token_ids, *stop_token_ids)
    given = config.data
    kwargs = {**(plan.task.prompt.chat_template_kwargs or {}), **(given.chat_template_kwargs or {})}
    data = DataSection(
        chat_template=given.chat_template,
        chat_template_kwargs=kwargs or None,
        separate_reasoning=given.separate_reasoning,
        system_prompt=given.system_prompt,
        prompts_as_chat=False,
    )
    return dataclasses.replace(config, sampling=dataclasses.replace(plan.sampling, stop_token_ids=ids), data=data)


def stop_tokens(tokenizer: Any, stop: Sequence[str]) -> list[int]:
    """Ids of the special tokens among stop strings: decoded text does not have them. `</s>` stops a model that has it
    as a token, as in lm-evaluation-harness."""
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    return sorted({tokenizer.convert_tokens_to_ids(text) for text in stop if text in special})


def prompt_lines(ids: Sequence[Any], prompts: Sequence[str | Messages]) -> bytes:
    """The rows that the file job reads, as JSON lines."""
    lines = []
    for row_id, prompt in zip(ids, prompts, strict=True):
        lines.append(encode_line({"id": row_id, "prompt" if isinstance(prompt, str) else "messages": prompt}))
    return b"".join(lines)


def _id(task: Task, row: dict[str, Any], index: int) -> Any:
    if task.id_field is None:
        return f"{task.name}/{index}"
    value = row.get(task.id_field)
    if not isinstance(value, str | int):
        raise InputError(f"row {index + 1} has no {task.id_field!r} that could be its id (id_field of {task.name})")
    return value
