"""scripts/check/check_tune.py and check_vllm.py: what they make of runs, and a whole check on the CPU."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.tune import live
from specbatch.tune.command import Tuned, tune_file
from specbatch.tune.predict import predict
from specbatch.tune.profile import Limits
from specbatch.tune.search import neural_space, ngram_space
from specbatch.types import Request, RngKey, SamplingParams
from tests.tiny_models import tiny_device_engine, tiny_engine

pytestmark = pytest.mark.usefixtures("scripts")


def test_what_was_picked_against_the_fastest() -> None:
    """By the mean of a candidate's runs: b was lucky once."""
    from check_tune import against_fastest

    runs = [
        ("a", 8, 100.0, 90.0),
        ("b", 8, 120.0, 80.0),
        ("c", 8, 90.0, 95.0),
        ("b", 8, 60.0, 80.0),
        ("c", 1, 5.0, 1.0),
    ]
    cells: list[dict[str, Any]] = [
        {"what": what, "batch": batch, "live_tok_s": live, "predicted_tok_s": said} for what, batch, live, said in runs
    ]
    assert against_fastest(cells) == [
        {"batch": 8, "picked": "c", "fastest": "a", "loss": 0.1},
        {"batch": 1, "picked": "c", "fastest": "c", "loss": 0.0},
    ]
    assert against_fastest([]) == []


def test_a_grid_of_shapes() -> None:
    """As SGLang's bench_speculative.py has by default, but for what other shapes do in fewer steps."""
    from check_tune import grid, grid_of

    known = [*neural_space(8, 8), *ngram_space()]
    names = [str(shape) for shape in grid(grid_of("1,3,5,7/1,2,4,8/2,4,8,16,32"), known)]
    assert names[:4] == ["1/1/2", "3/1/4", "5/1/6", "7/1/8"]
    assert names[4:10] == ["3/2/4", "3/2/8", "5/2/8", "5/2/16", "7/2/8", "7/2/16"]
    assert len(names) == len(set(names)) == 4 + 6 + 10 + 10
    assert not grid(([9], [1], [10]), known)


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two live runs of each schedule, and not as many as the budget allows."""
    monkeypatch.setattr(live, "MAX_TRIALS", 2)


@pytest.mark.wide
@pytest.mark.usefixtures("few_trials")
def test_a_whole_check(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import check_tune

    tuned: list[Tuned] = []

    def tune_once(*args: Any) -> Tuned:
        return tuned[0] if tuned else tuned.append(tune_file(*args)) or tuned[0]

    monkeypatch.setattr(check_tune, "tune_file", tune_once)
    said = Mock(side_effect=predict)
    monkeypatch.setattr(check_tune, "predict", said)

    rows = [{"prompt": f"Row {i}: " + "ab " * i, "max_tokens": 4 + i, "temperature": 0.8 * (i % 2)} for i in range(5)]
    rows = [{**row, "prompt": "What all rows begin with, longer than a page. " + row["prompt"]} for row in rows]
    data, output = tmp_path / "rows.jsonl", tmp_path / "check.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        f"model.target={tiny_model}",
        "engine.device=cpu",
        "engine.max_batch_size=4",
        "engine.prefill_chunk_tokens=64",
    ]
    args = [str(data), "-o", str(output), *(part for each in sets for part in ("--set", each)), "--rows", "5"]
    args += ["--budget", "60s", "--batches", "1,4", "--candidates", "2", "--cell-rows", "3,8", "--commit", "none"]

    def check(*more: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["check_tune.py", *args, *more])
        check_tune.main()
        report: dict[str, Any] = json.loads(output.read_text())
        return report

    report = check("--finals", "1", "--whole-file", "1", "--turns", "2")
    assert "cut_short" not in report
    assert len(report["cells"]) == 6
    for cell in report["cells"]:
        assert cell["live"]["tokens"] == cell["predicted"]["tokens"], "in float32 texts are the traced ones"
        for part in (cell["live"], cell["predicted"]):
            assert 0 < part["steady_tokens"] < part["tokens"], "the last row's end is not in it"
            assert 0 < part["steady_seconds"] < part["seconds"]
        assert cell["live"]["steady_tokens"] == pytest.approx(cell["predicted"]["steady_tokens"], rel=0.2)
        speeds = [cell[of]["steady_tokens"] / cell[of]["steady_seconds"] for of in ("predicted", "live")]
        assert [cell["predicted_tok_s"], cell["live_tok_s"]] == pytest.approx(speeds, rel=0.01)
        assert 1 + cell["error"] == pytest.approx(speeds[0] / speeds[1], rel=0.02)
        # The tokens are the same.
        to_the_end = cell["live"]["seconds"] / cell["predicted"]["seconds"]
        assert 1 + cell["error_to_the_end"] == pytest.approx(to_the_end, rel=0.02)
        assert cell["rows"] == {1: 3, 4: 8}[cell["batch"]]
        if cell["what"] == "plain":
            assert cell["live"]["rounds_of_rows"] == cell["predicted"]["rounds_of_rows"] > 0
            assert cell["live"]["rounds"] == pytest.approx(cell["predicted"]["rounds"], abs=1)
    assert [one["picked"] for one in report["picked_finals"]] == [one["picked"] for one in report["picked"]]
    assert [run["turn"] for run in report["whole_file"]] == [0] * 5 + [1] * 5
    # Tuned, plain, another, plain, tuned: each with its own prediction, of a session that caches no prefixes.
    schedules = [call.args[4] for call in said.call_args_list]
    assert [schedule.name for schedule in schedules[1:4]] == [run["what"] for run in report["whole_file"][1:4]]
    assert schedules[0] == schedules[4]
    assert report["winner"] in (None, str(schedules[0])), "undecided: what was predicted to be the fastest"
    assert not any(call.args[0].shared_prefix for call in said.call_args_list)
    assert all(run["predicted_seconds"] > 0 for run in report["whole_file"])
    short = check("--time-limit", "0")
    assert short["cut_short"]
    assert [(cell["what"], cell["batch"]) for cell in short["cells"]] == [("plain", 1), ("plain", 4)]


@pytest.mark.slow
@pytest.mark.usefixtures("few_trials")
def test_a_check_of_a_grid(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from check_tune import main

    data, output = tmp_path / "rows.jsonl", tmp_path / "check.json"
    data.write_text("".join(json.dumps({"prompt": f"Row {i}", "max_tokens": 4}) + "\n" for i in range(4)))
    sets = [f"model.target={tiny_model}", "speculation.method=draft_model", f"speculation.draft={tiny_model}"]
    sets += ["engine.device=cpu", "engine.max_batch_size=1"]
    args = [str(data), "-o", str(output), *(part for each in sets for part in ("--set", each)), "--budget", "60s"]
    args += ["--batches", "1", "--candidates", "0", "--grid", "1,2/1,2/3", "--commit", "none"]
    args += ["--whole-file", "1", "--without-plain"]
    monkeypatch.setattr(sys, "argv", ["check_tune.py", *args])
    main()
    report = json.loads(output.read_text())
    cells, runs = report["cells"], report["whole_file"]
    tuned = runs[0]["what"]
    assert tuned.startswith("tuned: ")
    assert report["winner"] in (None, tuned.removeprefix("tuned: "))
    assert [run["what"] for run in runs] == [tuned, cells[1]["what"], tuned], "and not plain decoding"
    assert {"plain", "1/1/2", "2/1/3", "1/2/3", "2/2/3"} <= {cell["what"] for cell in cells}
    assert {(cell["batch"], cell["rows"]) for cell in cells} == {(1, 8)}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cell-rows", "8"], "--cell-rows: a number for each of --batches"),
        (["--cell-rows", "2,15"], "twice as many at least"),
        (["--cell-rows", "many"], "'many': numbers from 1 on"),
        (["--batches", "1;8"], "'1;8': numbers from 1 on"),
        (["--batches", "0,8"], "'0,8': numbers from 1 on"),
        (["--grid", "1,3/1"], "three lists, STEPS/TOPKS/TOKENS"),
        (["--grid", "1/a/3"], "'a': numbers from 1 on"),
        (["-o", "missing/check.json"], "does not exist"),
        (["-o", "."], "a folder"),
        (["--budget", "soon"], "not a time"),
    ],
)
def test_mistakes_are_told_before_anything_is_timed(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import check_tune

    tuning = Mock()
    monkeypatch.setattr(check_tune, "tune_file", tuning)
    monkeypatch.setattr(sys, "argv", ["check_tune.py", "rows.jsonl", "-o", "check.json", "--batches", "1,8", *args])
    with pytest.raises(SystemExit):
        check_tune.main()
    assert message in capsys.readouterr().err
    assert not tuning.called


@pytest.mark.parametrize("told", [True, False], ids=["the configuration says", "the device decides"])
def test_more_rows_at_once_than_there_are_places_for(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import check_tune

    tuned = Mock(name="tuned")
    tuned.run.engine.max_batch_size = 4
    tuning = Mock(return_value=tuned)
    monkeypatch.setattr(check_tune, "tune_file", tuning)
    sets = ["--set", "engine.max_batch_size=4"] if told else []
    monkeypatch.setattr(sys, "argv", ["check_tune.py", "rows.jsonl", "-o", "check.json", "--batches", "1,8", *sets])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 4)
    with pytest.raises(SystemExit):
        check_tune.main()
    assert "4 rows at most" in capsys.readouterr().err
    assert tuning.called != told, "not before all that time was spent"


@pytest.mark.parametrize(
    ("most", "gathered", "tokens", "chunks"), [(1, 1, 99, 6), (3, 1, 99, 4), (4, 3, 99, 2), (4, 3, 12, 2), (4, 3, 8, 3)]
)
@pytest.mark.parametrize("behind", [0, 1])
def test_an_engine_is_given_so_many_rows_at_a_time(
    most: int, gathered: int, tokens: int, chunks: int, behind: int
) -> None:
    """Rows of 4, 5 .. 9 prompt tokens, each longer than the one in front, one of which ends in each step. In the step
    that they are given to the engine they wait there, in the next one their prompts are computed."""
    from tune_cells import Gathered, run_at_once

    engine = Mock(num_waiting=0, is_prefilled=True, stats=SimpleNamespace(generated_tokens=7))
    inside: list[Request] = []
    given: list[int] = []
    engine.submit.side_effect = inside.append

    def step() -> list[Request]:
        new = len(inside) > (given[-1] - 1 if given else 0)
        engine.num_waiting, engine.is_prefilled = int(new), not new and engine.num_waiting == 0
        given.append(len(inside))
        engine.stats.generated_tokens += 1
        return [inside.pop(0)]

    engine.step.side_effect = step
    rows = [Request(i, [0] * (4 + i), SamplingParams(max_tokens=4), RngKey(0, i, 0)) for i in range(6)]
    steady, seconds, done = run_at_once(Mock(engine=engine), rows, most, Gathered(gathered, tokens), behind)
    assert 0 < steady.seconds <= seconds
    # A token in each step: up to two behind that which found the last of them inside, or to the end.
    last = next(i for i, count in enumerate(given) if i + count == len(rows))
    assert steady.tokens == min(len(rows), 1 + last + 2 + behind)
    assert done == rows
    assert max(given) == most
    assert sum(later >= before for before, later in itertools.pairwise([0, *given])) == chunks, given


@pytest.mark.parametrize("most", [1, 4])
def test_a_device_tells_late_what_it_did(most: int) -> None:
    """Up to the last row's admission both engines write the same, but for who leaves a round late. The last prompt
    takes two chunks."""
    from tune_cells import Gathered, run_at_once

    lengths = [3 + i * 7 % 20 + 30 * (i == 11) for i in range(12)]
    params = [SamplingParams(max_tokens=8 + i % 3, ignore_eos=True) for i in range(12)]
    rows = [Request(i, [1] * lengths[i], params[i], RngKey(0, i, 0)) for i in range(12)]
    found = []
    for engine, behind in ((tiny_engine(num_pages=200), 0), (tiny_device_engine(num_pages=200), 1)):
        steady, _, done = run_at_once(Mock(engine=engine), rows, most, Gathered(1, 1), behind)
        assert sum(len(c.token_ids) for c in done) == 108
        found.append(steady.tokens)
    assert found[1] == pytest.approx(found[0], abs=1)
    assert 108 - most * 10 <= found[0] < 108


def test_what_rows_wait_for() -> None:
    """As an engine of so many places would have it, whatever the one that runs them has."""
    from tune_cells import Gathered

    limits = Limits(32, 4096, 64)
    assert Gathered.of(limits, 50.0) == Gathered(1, 1), "on a CPU no prompt is held"
    assert Gathered.of(replace(limits, chunk_cost=ChunkCost(1.0, 500)), 50.0) == Gathered(6, 500)


def test_speed_of_so_many_rows_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import check_vllm

    ids, output, most = tmp_path / "ids.json", tmp_path / "speed.json", list[int]()
    rows = [{"file": name, "prompt": [1]} for name in ["gsm8k_test"] * 20 + ["mt_bench"] * 300]
    ids.write_text(json.dumps({"rows": rows, "stop": [2]}))

    def runs(args: Any) -> Any:
        most.append(args.max_batch_size)
        return len

    monkeypatch.setattr(check_vllm, "_runs_in_ours", runs)
    argv = ["check_vllm.py", "speed", str(ids), "--engine", "ours", "--model", "m", "-o", str(output), "--batches"]
    monkeypatch.setattr(sys, "argv", [*argv, "1,20"])
    check_vllm.main()
    found = json.loads(output.read_text())
    assert {name: found[name] for name in found if name != "tok_s"} == {"engine": "ours", "head": None}
    assert {batch: len(speeds) for batch, speeds in found["tok_s"].items()} == {"1": 2, "20": 2}
    assert most == [128]
    monkeypatch.setattr(sys, "argv", [*argv, "1,200"])
    with pytest.raises(SystemExit, match="20 GSM8K rows, too few for 200"):
        check_vllm.main()


ESTIMATE = {"seconds": {"expected": 11.0, "low": 10.0, "high": 12.0, "load": 1.0}, "completion_tokens": {}, "trial": {}}
STATS = {"session": {"seconds": {"total": 10.0, "load": 2.0}}, "tokens": {"completion": 5}, "device": "cpu"}


@pytest.mark.parametrize(("code", "stdout"), [(1, ""), (1, "{"), (2, json.dumps(ESTIMATE))])
def test_an_estimate_that_fails_does_not_end_the_check(
    code: int, stdout: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of its stderr is reported, and the other jobs run: of these, the last writes no statistics."""
    import check_estimate

    ran: list[str] = []

    def run(arguments: list[str], **_: Any) -> Any:
        kind, path = arguments[3], Path(arguments[4])
        ran.append(kind)
        if len(ran) == 1:
            return SimpleNamespace(returncode=code, stdout=stdout, stderr="no such model")
        if kind == "generate" and ran.count("generate") == 1:
            path.with_name("results.stats.json").write_text(json.dumps(STATS))
        return SimpleNamespace(returncode=0, stdout=json.dumps(ESTIMATE), stderr="the disk is full")

    monkeypatch.setattr(check_estimate.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["check_estimate.py", "--jobs", "plain,drafts,single", "--warm"])
    with pytest.raises(SystemExit, match="1"):
        check_estimate.main()
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["failed"] == f"exit code {code}: no such model"
    assert (second["error"], second["run_error"]) == (0.1, 0.25)
    assert third["failed"] == "exit code 0: the disk is full"
    assert ran == ["estimate", *["estimate", "estimate", "generate"] * 2]
