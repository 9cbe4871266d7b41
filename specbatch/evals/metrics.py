"""Metrics that score values: one class and one entry of METRICS for each."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specbatch.errors import ConfigError
from specbatch.evals.filters import check_regex
from specbatch.evals.sandbox import run_programs
from specbatch.evals.templates import Renderer, Row, check_template
from specbatch.strict.option import AT_LEAST_1, Range, option, required
from specbatch.strict.reader import Reader, choose, described

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Value:
    """The text that a filter made of one answer to a row."""

    text: str
    row: Row
    where: str  # names the row in errors
    answer: str | None  # the right one, for metrics that compare with it


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one value."""

    correct: float  # 0 .. 1
    detail: str = ""  # why a program did not pass
    isolation: Mapping[str, str] | None = None  # isolation of a program: what it could not reach, and how


class Metric:
    """A frozen dataclass: its fields are the metric's options in a task's file."""

    has_scores: ClassVar[bool] = True  # False: the task is for speed and acceptance only
    needs_answer: ClassVar[bool] = False  # compares with prompt.answer
    runs_programs: ClassVar[bool] = False  # only with --allow-code-execution
    scores_choices: ClassVar[bool] = False  # nothing is generated: the likeliest of prompt.choices is the answer

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Check rows before any model is loaded. It raises InputError for a row that cannot be scored."""

    def score(self, values: Sequence[Value], on_progress: Callable[[int, int], None]) -> list[Score]:
        """The score of each value. `on_progress(done, total)` may be called meanwhile."""
        raise NotImplementedError


@dataclass(frozen=True)
class ExactMatch(Metric):
    """Score whether value and answer are equal after the ignored parts of both are removed. It is exact_match of
    lm-evaluation-harness (and before it of Hugging Face evaluate)."""

    needs_answer: ClassVar[bool] = True
    ignore_case: bool = option(False, "Compare in lower case.")
    ignore_punctuation: bool = option(False, "Compare without punctuation.")
    regexes_to_ignore: tuple[str, ...] = option((), "Every match of each is removed first.", check_regex)

    def score(self, values: Sequence[Value], on_progress: Callable[[int, int], None]) -> list[Score]:
        return [Score(float(self._plain(value.text) == self._plain(value.answer or ""))) for value in values]

    def _plain(self, text: str) -> str:
        for pattern in self.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = text.lower()
        return text.translate(_NO_PUNCTUATION) if self.ignore_punctuation else text


@dataclass(frozen=True)
class Execution(Metric):
    """Score whether a program runs to its end."""

    runs_programs: ClassVar[bool] = True
    program: str = required("A template over the row's fields and `response`, the value.", check_template)
    timeout_seconds: float = option(10.0, "Wall time of a program.", Range(">= 0.001", lambda v: 0.001 <= v <= 2**31))
    memory_mb: int = option(1024, "Address space of a program, in MiB.", AT_LEAST_1)

    def check_rows(self, rows: Sequence[Row]) -> None:
        render = Renderer("metric.program", self.program)
        for i, row in enumerate(rows):
            render(row, f"row {i + 1}", response="")

    def score(self, values: Sequence[Value], on_progress: Callable[[int, int], None]) -> list[Score]:
        render = Renderer("metric.program", self.program)
        programs = [render(value.row, value.where, response=value.text) for value in values]
        once = list(dict.fromkeys(programs))  # equal ones are run once
        verdicts = run_programs(once, self.timeout_seconds, self.memory_mb, lambda done: on_progress(done, len(once)))
        scores = {p: Score(float(v.passed), v.detail, v.isolation) for p, v in zip(once, verdicts, strict=True)}
        return [scores[program] for program in programs]


@dataclass(frozen=True)
class MultipleChoice(Metric):
    """Score whether the likeliest choice is the right one. Values and answers are indices. It is acc and acc_norm of
    lm-evaluation-harness' multiple_choice tasks."""

    needs_answer: ClassVar[bool] = True
    scores_choices: ClassVar[bool] = True

    def score(self, values: Sequence[Value], on_progress: Callable[[int, int], None]) -> list[Score]:
        return [Score(float(value.text == value.answer)) for value in values]


@dataclass(frozen=True)
class NoMetric(Metric):
    """Nothing is scored."""

    has_scores: ClassVar[bool] = False

    def score(self, values: Sequence[Value], on_progress: Callable[[int, int], None]) -> list[Score]:
        return []


METRICS: Mapping[str, type[Metric]] = {
    "exact_match": ExactMatch,
    "multiple_choice": MultipleChoice,
    "pass@1": Execution,
    "none": NoMetric,
}


def read_metric(reader: Reader, value: Any, path: str) -> Metric:
    """A metric from a task's file: a mapping with its name and options. Raises ConfigError."""
    if not isinstance(value, Mapping) or "name" not in value:
        raise ConfigError(
            f"{path} must be a mapping with a name, not {described(value)}", f"known: {', '.join(METRICS)}"
        )
    cls = METRICS[choose(METRICS, value["name"], f"{path}.name")]
    metric: Metric = reader.read(cls, {k: v for k, v in value.items() if k != "name"}, path)
    return metric


def metric_name(metric: Metric) -> str:
    """Return the metric's name in METRICS."""
    return next(name for name, cls in METRICS.items() if type(metric) is cls)
