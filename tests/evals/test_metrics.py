"""Metrics: each is one class and one entry of METRICS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from specbatch.errors import ConfigError, InputError
from specbatch.evals import metrics
from specbatch.evals.load import load_task
from specbatch.evals.metrics import METRICS, ExactMatch, Execution, Metric, NoMetric, Score, Value, metric_name
from specbatch.evals.sandbox import Verdict
from specbatch.strict.option import AT_LEAST_1, option
from tests.evals.test_command import EXACT, Eval
from tests.evals.test_evals import write_task


@dataclass(frozen=True)
class StartsWith(Metric):
    """The share of the first letters that are right."""

    needs_answer: ClassVar[bool] = True
    letters: int = option(2, "Letters to compare.", AT_LEAST_1)

    def score(self, values: Sequence[Value], on_progress: Callable[[int, int], None]) -> list[Score]:
        on_progress(len(values), len(values))
        return [Score(self._share(value.text, value.answer or "")) for value in values]

    def _share(self, text: str, answer: str) -> float:
        right = [a == b for a, b in zip(text, answer, strict=False)]
        return sum(right[: self.letters]) / self.letters


@pytest.fixture
def run(tmp_path: Path) -> Eval:
    return Eval(tmp_path)


@pytest.fixture
def starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "starts_with", StartsWith)  # type: ignore[arg-type]


@pytest.mark.usefixtures("starts_with")
def test_a_new_metric_is_a_class_and_an_entry(run: Eval) -> None:
    """Its options are read strictly, and its scores reach results, samples and the comparison."""
    task = write_task(run.folder, {**EXACT, "metric": {"name": "starts_with", "letters": 1}})
    assert run(task_files=(task,), compare="none") == 0
    found = run.results()["tasks"]["mine"]
    assert found["metric"] == "starts_with"
    assert found["accuracy"]["strict"]["value"] == 0.5  # 1, 2 and 3; of the others one letter too is wrong
    assert found["compare"]["accuracy_difference"]["strict"]["value"] == 0.0
    assert [sample["filters"]["loose"]["correct"] for sample in run.samples()] == [True, True, True, False, True, False]


@pytest.mark.usefixtures("starts_with")
def test_options_of_a_metric_are_strict(tmp_path: Path) -> None:
    for options, message in (
        ({"letters": 0}, "metric.letters must be >= 1, not 0"),
        ({"leters": 1}, "unknown option metric.leters"),
        ({"letters": "x"}, "metric.letters must be an integer >= 1, not 'x'"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_task(write_task(tmp_path, {"metric": {"name": "starts_with", **options}}))
        assert caught.value.message.endswith(message)
    with pytest.raises(ConfigError, match="metric starts_with compares with it"):
        load_task(write_task(tmp_path, {"metric": {"name": "starts_with"}, "prompt": {"question": "{{q}}"}}))
    task = load_task(write_task(tmp_path, {"metric": {"name": "starts_with"}}))
    assert metric_name(task.metric) == "starts_with"


def test_every_metric_has_a_name_and_no_metric_scores_nothing() -> None:
    for metric in (ExactMatch(), Execution("x"), NoMetric()):
        assert METRICS[metric_name(metric)] is type(metric)
    assert NoMetric().score([], lambda done, total: None) == []


def test_equal_programs_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_programs(
        programs: Sequence[str], seconds: float, mb: int, on_progress: Callable[[int], None]
    ) -> list[Verdict]:
        ran.extend(programs)
        on_progress(len(programs))
        return [Verdict(p.endswith("1"), "" if p.endswith("1") else "wrong", {"network": "x"}) for p in programs]

    monkeypatch.setattr(metrics, "run_programs", run_programs)
    progress: list[tuple[int, int]] = []
    values = [Value(text, {"a": 3}, "row 1", None) for text in ("1", "2", "1")]
    scores = Execution("{{a}} {{response}}").score(values, lambda done, total: progress.append((done, total)))
    assert ran == ["3 1", "3 2"]
    assert [(score.correct, score.detail) for score in scores] == [(1.0, ""), (0.0, "wrong"), (1.0, "")]
    assert scores[0].isolation == {"network": "x"}
    assert progress == [(2, 2)]


def test_rows_that_a_program_does_not_fit_are_found_before_any_model_is_loaded() -> None:
    with pytest.raises(InputError, match=r"metric\.program does not fit row 2"):
        Execution("{{a}}{{response}}").check_rows([{"a": 1}, {"b": 1}])
