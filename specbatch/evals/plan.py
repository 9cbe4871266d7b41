"""A task with its rows and prompts, checked before any model is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.config import Config, DataSection
from specbatch.errors import ConfigError, InputError, cut
from specbatch.evals.data import example_rows, task_rows
from specbatch.evals.prompts import Messages, prompts
from specbatch.evals.schema import Task
from specbatch.evals.templates import Renderer
from specbatch.files.jsonl import encode_line
from specbatch.types import SamplingParams


@dataclass(frozen=True)
class Plan:
    """One task with its rows and prompts."""

    task: Task
    num_examples: int
    source: str  # name of the source of the rows
    identity: dict[str, Any]  # identity of the rows
    rows: list[dict[str, Any]]
    ids: list[Any]
    prompts: list[str | Messages]
    answers: list[str] | None  # what the metric compares with; None where it compares with nothing
    choices: list[list[str]] | None  # choices of each row; None: its answer is generated
    sampling: SamplingParams
    folder: Path  # folder of this task's files

    def lines(self, indices: Iterable[int] | None = None) -> bytes:
        """The rows that the file job reads, as JSON lines. `indices`: of these; None: all."""
        lines = []
        for i in range(len(self.rows)) if indices is None else indices:
            prompt = self.prompts[i]
            line: dict[str, Any] = {"id": self.ids[i], "prompt" if isinstance(prompt, str) else "messages": prompt}
            if self.choices is not None:
                line["score_choices"] = [self.choice_start + choice for choice in self.choices[i]]
            lines.append(encode_line(line))
        return b"".join(lines)

    @property
    def choice_start(self) -> str:
        """Return the text before each choice."""
        return "" if self.task.prompt.kind == "chat" else self.task.prompt.answer_delimiter


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
    choices = _choices(task, found.rows, answers or []) if task.metric.scores_choices else None
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
        choices,
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
        plan_rows=given.plan_rows,
    )
    sampling = dataclasses.replace(plan.sampling, stop_token_ids=ids)
    output = dataclasses.replace(config.output, columns="results")  # answers are JSON lines
    return dataclasses.replace(config, sampling=sampling, data=data, output=output)


def stop_tokens(tokenizer: Any, stop: Sequence[str]) -> list[int]:
    """Ids of the special tokens among stop strings: decoded text does not have them. `</s>` stops a model that has it
    as a token, as in lm-evaluation-harness."""
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    return sorted({tokenizer.convert_tokens_to_ids(text) for text in stop if text in special})


def _choices(task: Task, rows: Sequence[dict[str, Any]], answers: Sequence[str]) -> list[list[str]]:
    """Raises InputError for a row whose choices are not two or more texts, or that has no right one."""
    assert task.prompt.choices is not None, "load_task checks it"
    render, found = Renderer("prompt.choices", task.prompt.choices), []
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True), start=1):
        written = render(row, f"row {i}")
        try:
            choices = json.loads(written)
        except ValueError:
            choices = None
        is_list = isinstance(choices, list) and len(choices) > 1
        if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
            raise InputError(
                f"prompt.choices must be a JSON list of two texts or more, and row {i} gives {cut(written)}"
            )
        if answer not in map(str, range(len(choices))):
            last = len(choices) - 1
            raise InputError(f"prompt.answer must be an index, 0 to {last}, and row {i} gives {cut(answer)!r}")
        found.append(choices)
    return found


def _id(task: Task, row: dict[str, Any], index: int) -> Any:
    if task.id_field is None:
        return f"{task.name}/{index}"
    value = row.get(task.id_field)
    if not isinstance(value, str | int):
        raise InputError(f"row {index + 1} has no {task.id_field!r} that could be its id (id_field of {task.name})")
    return value
