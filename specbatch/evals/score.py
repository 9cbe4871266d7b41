"""Result lines -> samples: what each filter made of an answer, and whether it is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.evals.filters import apply_filter
from specbatch.evals.metrics import exact_match
from specbatch.evals.plan import Plan
from specbatch.evals.prompts import Renderer
from specbatch.evals.sandbox import run_programs
from specbatch.evals.schema import ExactMatch, Execution, NoMetric


@dataclass(frozen=True)
class Score:
    """Of one row under one filter. `correct` is the mean over the values: 0 or 1, where there is one."""

    values: list[str]
    correct: float
    details: list[str]  # why a program did not pass; empty elsewhere


@dataclass(frozen=True)
class Scores:
    """Of a task. [row] = its scores by filter; None for a row that failed."""

    rows: list[dict[str, Score] | None]
    isolation: Mapping[str, str] | None  # of programs: what they were kept from

    def of(self, name: str) -> list[float]:
        """The scores of one filter, rows in order, failed ones left out."""
        return [row[name].correct for row in self.rows if row is not None]


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a finished result file, in input order."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def score(plan: Plan, results: Sequence[Mapping[str, Any]], shown: Callable[[int, int], None]) -> Scores:
    """Score a task's results. `shown` is told how many programs of how many have run."""
    metric = plan.task.metric
    if isinstance(metric, NoMetric):
        return Scores([None if _failed(result) else {} for result in results], None)
    values = [
        None if _failed(result) else {f.name: apply_filter(f, _texts(result)) for f in plan.task.filters}
        for result in results
    ]
    if isinstance(metric, Execution):
        return _run(plan, metric, values, shown)
    assert isinstance(metric, ExactMatch), metric
    assert plan.answers is not None, plan.task.name
    rows: list[dict[str, Score] | None] = []
    for row, answer in zip(values, plan.answers, strict=True):
        rows.append(None if row is None else {name: _compare(metric, found, answer) for name, found in row.items()})
    return Scores(rows, None)


def _compare(metric: ExactMatch, values: list[str], answer: str) -> Score:
    right = sum(exact_match(metric, value, answer) for value in values)
    return Score(values, right / len(values), [])


def _run(
    plan: Plan, metric: Execution, values: Sequence[dict[str, list[str]] | None], shown: Callable[[int, int], None]
) -> Scores:
    render = Renderer("metric.program", metric.program)
    programs: dict[str, None] = {}  # in order; equal ones are run once
    places: list[dict[str, list[str]] | None] = []
    for i, (row, found) in enumerate(zip(plan.rows, values, strict=True)):
        written = None
        if found is not None:
            where = f"row {i + 1}"
            written = {name: [render(row, where, response=v) for v in each] for name, each in found.items()}
            programs.update(dict.fromkeys(program for each in written.values() for program in each))
        places.append(written)
    total = len(programs)
    verdicts = run_programs(list(programs), metric.timeout_seconds, metric.memory_mb, lambda done: shown(done, total))
    ended = dict(zip(programs, verdicts, strict=True))
    rows: list[dict[str, Score] | None] = []
    for found, written in zip(values, places, strict=True):
        if found is None or written is None:
            rows.append(None)
            continue
        scores = {}
        for name, each in written.items():
            own = [ended[program] for program in each]
            passed = sum(verdict.passed for verdict in own)
            scores[name] = Score(found[name], passed / len(own), [verdict.detail for verdict in own])
        rows.append(scores)
    return Scores(rows, verdicts[0].isolation if verdicts else None)


def sample_line(plan: Plan, index: int, result: Mapping[str, Any], scores: dict[str, Score] | None) -> dict[str, Any]:
    """One line of samples.jsonl."""
    line: dict[str, Any] = {
        "task": plan.task.name,
        "index": index,
        "id": plan.ids[index],
        "prompt": plan.prompts[index],
        "text": result["text"],
    }
    if plan.answers is not None:
        line["answer"] = plan.answers[index]
    if scores is not None:
        line["filters"] = {name: _score_dict(s) for name, s in scores.items()}
    line["finish_reason"] = result["finish_reason"]
    for name in ("usage", "speculation", "error"):
        if name in result:
            line[name] = result[name]
    return line


def _score_dict(score: Score) -> dict[str, Any]:
    one = len(score.values) == 1
    line: dict[str, Any] = {
        "value": score.values[0] if one else score.values,
        "correct": score.correct == 1 if one else round(score.correct, 4),
    }
    if any(score.details):
        line["detail"] = score.details[0] if one else score.details
    return line


def _failed(result: Mapping[str, Any]) -> bool:
    return "error" in result


def _texts(result: Mapping[str, Any]) -> list[str]:
    return [choice["text"] for choice in result["choices"]] if "choices" in result else [result["text"]]
