"""A job of a model with experts: what its statistics, its report and its estimate say about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.models.pass_weights import distinct_experts

MODEL = ["engine.device=cpu", "speculation.method=ngram", "engine.kv_cache_tokens=4096", "sampling.max_tokens=12"]


def invoke(*arguments: str | Path, target: str = "random:tiny-experts") -> str:
    options = [part for setting in [f"model.target={target}", *MODEL] for part in ("--set", setting)]
    made = CliRunner().invoke(app, [*map(str, arguments), *(options if arguments[0] != "report" else ())])
    assert made.exit_code == 0, made.output
    return made.stdout


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} and {i * 7919}"}) + "\n" for i in range(12)))
    return path


@pytest.mark.parametrize("skew", [None, 2])
def test_a_job_counts_its_experts(rows: Path, skew: int | None) -> None:
    output = rows.with_name("out.jsonl")
    target = "random:tiny-experts" + ("" if skew is None else f"?skew={skew}")
    invoke("generate", rows, "-o", output, target=target)
    found = json.loads(output.with_suffix(".stats.json").read_text())["session"]
    experts = found["experts"]
    assert (experts["number"], len(experts["peak_load_by_layer"])) == (8, 8)
    assert sum(one["rounds"] for one in experts["distinct"]) == found["engine_rounds"]
    for one in experts["distinct"]:
        assert 2 <= one["experts"] <= 1.2 * distinct_experts(8, 2, one["tokens"])
    uneven = experts["effective_number"] < 4
    assert uneven == (skew is not None), "a skew leaves few experts with much to do"
    assert (experts["peak_load"] > 3) == uneven
    invoke("report", output)
    page = output.with_name("out.report.html").read_text()
    assert "Distinct experts of a round" in page
    assert f"{experts['peak_load']:.2f} times the mean load" in page


def test_a_dense_model_has_no_experts_to_count(rows: Path) -> None:
    output = rows.with_name("out.jsonl")
    invoke("generate", rows, "-o", output, target="random:tiny")
    assert json.loads(output.with_suffix(".stats.json").read_text())["session"]["experts"] is None
    invoke("report", output)
    assert "experts" not in output.with_name("out.report.html").read_text()


def test_an_estimate_has_all_and_active_parameters(rows: Path) -> None:
    found = json.loads(invoke("estimate", rows, "--json", "--trial-rows", "4"))["memory"]
    assert found["parameters"] - found["active_parameters"] == 8 * 6 * 3 * 64 * 32
    assert (
        "parameters"
        not in json.loads(invoke("estimate", rows, "--json", "--trial-rows", "4", target="random:tiny"))["memory"]
    )
