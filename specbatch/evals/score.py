"""Result lines -> samples: what each filter made of an answer, and whether it is right; and the accuracy of a task."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.evals.metrics import Score, Value
from specbatch.evals.plan import Plan

_Z = 1.959964  # the quantile of the normal distribution for 97.5%


@dataclass(frozen=True)
class RowScore:
    """The values and scores of one row under one filter."""

    values: list[str]
    scores: list[Score]  # score of each value

    @property
    def correct(self) -> float:
        """The mean over the values: 0 or 1, where there is one."""
        return sum(score.correct for score in self.scores) / len(self.scores)


@dataclass(frozen=True)
class Scores:
    """The scores of a task. [row] = its scores by filter; None for a row that failed."""

    rows: list[dict[str, RowScore] | None]
    isolation: Mapping[str, str] | None  # isolation of the programs: what they could not reach

    def of(self, name: str) -> list[float]:
        """The scores of one filter, rows in order, failed ones left out."""
        return [row[name].correct for row in self.rows if row is not None]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The mean of `scored` rows' scores in 0 .. 1, its standard error, and its interval of 95%; None where there are
    too few rows."""

    value: float | None
    standard_error: float | None
    interval: tuple[float, float] | None
    correct: float  # the sum of the scores: a count, where each row has one answer
    scored: int


def accuracy(scores: Sequence[float]) -> Accuracy:
    """Mean, and the sample's standard deviation over the root of its size, as lm-evaluation-harness' mean_stderr."""
    if not scores:
        return Accuracy(None, None, None, 0.0, 0)
    total, number = sum(scores), len(scores)
    return Accuracy(total / number, standard_error(scores), wilson_interval(total, number), total, number)


def wilson_interval(correct: float, number: int) -> tuple[float, float]:
    """Return the 95% interval of the share `correct / number` (Wilson, 1927). With 0 of 8 right, the standard error is
    0, but the interval goes to 32%. For scores between 0 and 1 it is too wide rather than too narrow."""
    share, spread = correct / number, _Z * _Z / number
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of `values`. Returns None for fewer than two."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a finished result file, in input order."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def score(plan: Plan, results: Sequence[Mapping[str, Any]], on_progress: Callable[[int, int], None]) -> Scores:
    """Score a task's results. `on_progress(done, total)`: programs that have run."""
    found: list[dict[str, list[str]] | None] = []
    values: list[Value] = []  # the values of all rows and filters
    for i, result in enumerate(results):
        answer = plan.answers[i] if plan.answers is not None else None
        by_filter = None
        if "error" not in result:
            by_filter = _values(plan, i, result)
            texts = (text for each in by_filter.values() for text in each)
            values += [Value(text, plan.rows[i], f"row {i + 1}", answer) for text in texts]
        found.append(by_filter)
    scored = plan.task.metric.score(values, on_progress)
    following = iter(scored)
    rows = [
        None
        if by_filter is None
        else {name: RowScore(each, [next(following) for _ in each]) for name, each in by_filter.items()}
        for by_filter in found
    ]
    return Scores(rows, scored[0].isolation if scored else None)


def _values(plan: Plan, index: int, result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the values that are scored for a row's answers, by filter."""
    if plan.choices is None:
        return {f.name: f.apply(_texts(result)) for f in plan.task.scored_filters}
    logprobs = [score["logprob"] for score in result["choice_scores"]]
    # Without the delimiter, and in characters: so does lm-evaluation-harness.
    normalised = [logprob / len(choice) for logprob, choice in zip(logprobs, plan.choices[index], strict=True)]
    return {"acc": [str(logprobs.index(max(logprobs)))], "acc_norm": [str(normalised.index(max(normalised)))]}


def sample_line(
    plan: Plan, index: int, result: Mapping[str, Any], scores: Mapping[str, RowScore] | None
) -> dict[str, Any]:
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
    for name in ("choice_scores", "usage", "speculation", "error"):
        if name in result:
            line[name] = result[name]
    return line


def _score_dict(score: RowScore) -> dict[str, Any]:
    one = len(score.values) == 1
    details = [each.detail for each in score.scores]
    line: dict[str, Any] = {
        "value": score.values[0] if one else score.values,
        "correct": score.correct == 1 if one and score.correct in (0, 1) else round(score.correct, 4),
    }
    if any(details):
        line["detail"] = details[0] if one else details
    return line


def _texts(result: Mapping[str, Any]) -> list[str]:
    return [choice["text"] for choice in result["choices"]] if "choices" in result else [result["text"]]
