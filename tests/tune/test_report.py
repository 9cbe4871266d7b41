"""What tuning writes can be read: the configuration by the loader, the report as JSON, the tables by people."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from specbatch.config import Config
from specbatch.config_load import config_to_dict, load_config
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.tune.costs import CostModel, Measurement
from specbatch.tune.plots import plot_acceptance, plot_comparisons, plot_throughput
from specbatch.tune.replay import Replayer
from specbatch.tune.report import (
    Comparison,
    comparisons_table,
    costs_table,
    evidence,
    json_report,
    jsonable,
    plans_table,
    rankings_table,
    tuned_yaml,
    with_schedule,
)
from specbatch.tune.search import search
from tests.tune.test_replay import made
from tests.tune.test_search import LADDER, LIMITS, SPACE, costs, found, profile_of, replays

NEURAL = ByBatch((4, 32, 64), (DraftShape(5, 2, 9), DraftShape(2, 1, 3), None))
NGRAM = ByBatch((8, 64), (DraftShape.ngram(9, 1, 4), None))
CAPTION = "a model, its draft, on a device"
LIVE = [Comparison("3/1/4", 100.0, 98.0, 95.0, 101.0), Comparison("plain", 20.0, 21.0, 21.0, 21.0)]


def config() -> dict:
    tree = config_to_dict(Config())
    tree["speculation"] |= {"method": "eagle3", "draft": "some/head", "num_steps": 3, "topk": 4, "num_draft_tokens": 9}
    return tree


def written(schedule: Schedule, path: Path, **comments: list[str]) -> Config:
    path.write_text(tuned_yaml(config(), schedule, **comments), encoding="utf-8")  # type: ignore[arg-type]
    return load_config(path, [])


def test_the_tuned_configuration_loads(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    back = written(NEURAL, path, header=["two", "lines: of comment"], comments=["first", "", "a: b # c"])
    assert back.speculation.schedule is not None
    assert [asdict(entry) for entry in back.speculation.schedule] == [
        {"max_batch": 4, "num_steps": 5, "topk": 2, "num_draft_tokens": 9},
        {"max_batch": 32, "num_steps": 2, "topk": 1, "num_draft_tokens": 3},
        {"max_batch": 64, "num_steps": 0, "topk": 1, "num_draft_tokens": None},
    ]
    assert (back.speculation.method, back.speculation.draft) == ("eagle3", "some/head")
    assert (back.speculation.num_steps, back.speculation.topk, back.speculation.num_draft_tokens) == (None, 1, None)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# two\n# lines: of comment\n")
    assert "{max_batch: 4, num_steps: 5, topk: 2, num_draft_tokens: 9}  # first\n" in text
    assert yaml.safe_load(text) == with_schedule(config(), NEURAL), "comments apart, nothing else is in it"


def test_everything_else_is_kept(tmp_path: Path) -> None:
    back, before = written(NEURAL, tmp_path / "tuned.yaml"), config()
    assert config_to_dict(back) | {"speculation": None} == before | {"speculation": None}
    assert before == config(), "the mapping that was given is not changed"


def test_ngrams_and_plain_decoding(tmp_path: Path) -> None:
    back = written(NGRAM, tmp_path / "tuned.yaml").speculation
    assert back.schedule is not None
    assert [(e.max_batch, e.num_steps, e.num_draft_tokens) for e in back.schedule] == [(8, None, 9), (64, 0, None)]
    assert (back.ngram.min_match, back.ngram.max_match) == (1, 4)
    plain = written(ByBatch.always(None, 64), tmp_path / "tuned.yaml").speculation
    assert (plain.method, plain.draft, plain.schedule) == ("none", None, None)


def test_evidence_for_the_configuration(tmp_path: Path) -> None:
    result = found()
    header, comments = evidence(result)
    assert len(comments) == len(result.best.schedule.entries)
    assert all("tok/s" in comment for comment in comments)
    assert any("Plain decoding" in line for line in header)
    assert not any("does not pay" in line for line in header)
    worthless = search(replays(rates=(1.0,) * len(SPACE)), costs(), profile_of(), LIMITS)
    assert any("does not pay" in line for line in evidence(worthless)[0])
    assert "does not pay" in tuned_yaml(config(), worthless.best.schedule, header=evidence(worthless)[0])


def test_the_report_is_json() -> None:
    result, model = found(), costs()
    report = json_report(result, model, replays(), LIVE)
    back = json.loads(json.dumps(report, allow_nan=False))
    assert back == report, "nothing in it changes on the way"
    assert back["pays"] is True
    assert [c["batch"] for c in back["by_batch"]] == list(LADDER)
    assert back["best"]["seconds"] == result.best.prediction.seconds
    assert {r["candidate"]["label"] for r in back["replays"]} == {str(c) for c in SPACE}
    assert len(back["costs"]) == len(model.residuals)
    assert back["live"][0]["percent"] == pytest.approx(100 * (100 / 98 - 1))
    assert jsonable({1: (float("inf"), np.float32(0.5), np.array([1, 2]))}) == {"1": [None, 0.5, [1, 2]]}


def test_tables_show_what_they_should() -> None:
    result, out = found(), io.StringIO()
    console = Console(file=out, width=140)
    for table in (costs_table(costs()), rankings_table(result), plans_table(result), comparisons_table(LIVE)):
        console.print(table)
    text = out.getvalue()
    for wanted in ("draft_step", "plain tok/s", "best: ", "single: ", "+2.0%", "95.0-101.0", str(SPACE[0])):
        assert wanted in text


def test_costs_by_part_and_batch_size() -> None:
    """One line each, the widths in order, and where the fit differs by how much; of what took no time, too."""
    times = {(1, 2): 1.0, (1, 4): 3.0, (1, 3): 1.5, (2, 2): 2.0, (2, 4): 1.0}
    found = [Measurement("verify", *place, ms) for place, ms in times.items()]
    found += [Measurement("draft_step", 1, 1, 1.0), Measurement("draft_step", 1, 2, 0.0)]
    out = io.StringIO()
    Console(file=out, width=140).print(costs_table(CostModel.fit(found)))
    lines = [line.split() for line in out.getvalue().splitlines()[2:]]
    verify, draft = [line for line in lines if line[0] == "verify"], [line for line in lines if line[0] == "draft_step"]
    assert [line[:2] for line in verify] == [["verify", "1"], ["verify", "2"]]
    assert verify[0][2:] == ["2:1.000", "3:1.500(-16.7%)", "4:3.000(-33.3%)"]
    assert verify[1][2:] == ["2:2.000(-25.0%)", "4:1.000(+100.0%)"]
    assert draft == [["draft_step", "1", "1:1.000(-50.0%)", "2:0.000(fitted:0.500)"]]


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, replayer = made(0, None)
    several = replayer.replay_all([DraftShape(s, k, s + 1) for s in (1, 2, 3) for k in (1, 2)])
    plot_acceptance(several, replayer.rank_shares(), CAPTION, tmp_path / "acceptance.png")
    plot_acceptance(
        Replayer(trace).replay_all([DraftShape.ngram(n, 1, 3) for n in (2, 4)]), None, CAPTION, tmp_path / "ngram.png"
    )
    plot_throughput(replays(), costs(), LADDER, SPACE[:2], CAPTION, tmp_path / "throughput.png")
    plot_comparisons(LIVE, CAPTION, tmp_path / "comparisons.png")
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(b"\x89PNG"), file.name


def test_rank_shares_count_true_tokens() -> None:
    trace, replayer = made(0, None)
    shares = replayer.rank_shares()
    assert shares is not None
    assert shares.shape == (trace.depth, trace.topk + 1)
    assert shares.sum(axis=1) == pytest.approx(np.ones(trace.depth))
    first = [
        row.tokens_PC[p, : trace.topk].tolist().index(row.tokens[row.num_prompt + p + 1])
        if row.tokens[row.num_prompt + p + 1] in row.tokens_PC[p, : trace.topk]
        else trace.topk
        for row in trace.rows
        if row.tokens_PC is not None
        for p in range(row.num_output - 1)
    ]
    assert shares[0] == pytest.approx(np.bincount(first, minlength=trace.topk + 1) / len(first))


def test_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TuningError, match="matplotlib") as caught:
        plot_comparisons(LIVE, CAPTION, tmp_path / "plot.png")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("pip install")
    assert not list(tmp_path.iterdir())
