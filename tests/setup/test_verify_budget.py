"""`speculation.verify_budget` in jobs, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.config import SpeculationSection
from specbatch.config_load import load_config
from specbatch.engine.round import GREEDY
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.errors import ConfigError
from specbatch.setup.build import build_engine, measure_budget
from specbatch.setup.resolve import resolve
from specbatch.setup.speculation import resolve_budget, resolve_speculation
from tests.setup.test_suffix import TINY, answers, generate

HEAD = ["speculation.method=eagle3", "speculation.draft=random:eagle3"]


@pytest.mark.parametrize("method", [["speculation.method=ngram"], HEAD], ids=["ngram", "eagle3"])
def test_jobs_have_the_answers_of_plain_decoding(tmp_path: Path, tiny_model: Path, method: list[str]) -> None:
    """Rows with grammars, stop strings and several completions; greedy ones with the head."""
    greedy = [] if method != HEAD else ["sampling.temperature=0"]
    method = method if greedy else [*method, f"model.target={tiny_model}"]
    rows = [{"prompt": f"question {i % 3}: abcabc", "logprobs": 1} for i in range(6)]
    rows += [{"prompt": "stop", "stop": ["a", "e"]}, {"prompt": "bias", "frequency_penalty": 0.5}]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    rows += [{"prompt": "j", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}] * 2
    rows += [] if greedy else [{"prompt": "three", "n": 3, "temperature": 0.8}]
    for name, options in {
        "plain": [*method, "speculation.method=none"],
        "whole": method,
        "budget": [*method, "speculation.verify_budget=1.5"],
    }.items():
        result = generate(tmp_path, f"{name}.jsonl", *options, *greedy, rows=rows)
        assert result.exit_code == 0, result.output
    plain, whole, budget = (tmp_path / f"{name}.jsonl" for name in ("plain", "whole", "budget"))
    assert answers(budget) == answers(plain)
    drafted = [
        sum(json.loads(line)["speculation"]["drafted"] for line in path.read_text().splitlines()[:6])
        for path in (whole, budget)
    ]
    assert 0 < drafted[1] < drafted[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["speculation.method=none", "speculation.verify_budget=2"], "speculation.method is none"),
        ([*HEAD, "speculation.topk=2", "speculation.verify_budget=auto"], "is a tree"),
        (["engine.deterministic=true", "speculation.verify_budget=2"], "engine.deterministic is on"),
        (["speculation.verify_budget=0.5"], "must be auto, none, a number >= 1 or null"),
        (["speculation.verify_budget=many"], "must be auto, none, a number >= 1 or null"),
    ],
)
def test_what_is_refused(options: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(load_config(None, [*TINY, *options]))


@pytest.mark.parametrize("has_group", [False, True], ids=["one GPU", "two ranks"])
def test_the_start_measures_rounds(has_group: bool) -> None:
    """All ranks have the times that rank 0 has measured. This rank has measured half of each."""
    budget, captured = VerifyBudget(None), []
    executor: Any = SimpleNamespace(
        measure=lambda wanted: [(8, 48, 3.0), (64, 384, 9.0)],
        measure_sharing=lambda wanted: [(8, 8, 3.25), (64, 64, 3.5), (64, 128, 4.0)],
        capture_for_budget=lambda wanted: captured.append((wanted, budget.times)),
        runner=SimpleNamespace(seconds=0.0),
        num_graphs=0,
    )
    group: Any = SimpleNamespace(of_first=lambda values: [2 * value for value in values]) if has_group else None
    note, factor = measure_budget(executor, budget, GREEDY, 1000, group), 2 if has_group else 1
    assert executor.budget is budget
    assert budget.times is not None
    assert captured == [(GREEDY, budget.times)], "graphs are chosen by the times"
    assert budget.times.whole == ([48, 384], [3.0 * factor, 9.0 * factor])
    assert budget.times.shared.sizes == [8, 64]
    assert budget.times.shared.curves[1].of(128) == 4.0 * factor
    assert budget.times.ms_per_cached_token == pytest.approx(4e-7)
    assert f"64 rows by nodes for each: {3.5 * factor:.2f} with 1, " in note


def test_auto_verifies_all_nodes_on_a_cpu() -> None:
    run = resolve(load_config(None, [*TINY, "speculation.method=ngram", "speculation.verify_budget=auto"]))
    assert run.verify_budget is None
    assert any("speculation.verify_budget: auto, all nodes" in note for note in run.notes)


@pytest.mark.parametrize(
    ("options", "traits", "is_shared"),
    [
        ({"method": "suffix"}, {}, True),
        ({"method": "hybrid", "draft": "random:eagle3"}, {}, True),
        ({"method": "suffix", "verify_budget": "none"}, {}, False),
        ({"method": "suffix"}, {"can_measure": False}, False),
        ({"method": "suffix"}, {"deterministic": True}, False),
        ({"method": "suffix"}, {"attention": "flashinfer"}, False),
        ({"method": "ngram"}, {}, False),
    ],
)
def test_rounds_of_suffix_and_hybrid_share_a_budget_where_they_can(
    options: dict[str, Any], traits: dict[str, Any], is_shared: bool
) -> None:
    notes: list[str] = []
    speculation = resolve_speculation(SpeculationSection(**options), "random:tiny", notes)
    given = {"attention": "triton", "deterministic": False, "can_measure": True, **traits}
    budget = resolve_budget(speculation, given.pop("attention"), notes, **given)
    assert (budget is not None and budget.changes) == is_shared
    assert any("verify_budget: auto (the default" in note for note in notes) == is_shared


def test_a_note_on_sampled_rows_is_for_rounds_with_a_budget() -> None:
    """On a CPU `auto` has none: texts do not depend on other requests."""
    run = resolve(load_config(None, [*TINY, *HEAD, "speculation.verify_budget=auto"]))
    [note] = [note for note in run.notes if "verify_budget" in note]
    assert "auto, all nodes" in note


def test_sampled_rows_of_a_head_have_a_note() -> None:
    run = resolve(load_config(None, [*TINY, *HEAD, "speculation.verify_budget=2"]))
    assert any("their texts depend on the requests that run at the same time" in note for note in run.notes)
    assert run.config.speculation.verify_budget == 2.0
    build_engine(run)
