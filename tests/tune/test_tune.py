"""`specbatch tune` as a user runs it, over models of random weights that take no time."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from specbatch.cli import app
from specbatch.config import Config
from specbatch.config_load import load_config
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.errors import ConfigError, SpecbatchError
from specbatch.models.pass_weights import distinct_experts
from specbatch.rows.chat_fields import NO_CHAT_FIELDS, ChatFields
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.setup import speculation as resolve_speculation
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.tune import command as command_module
from specbatch.tune import live as live_module
from specbatch.tune.command import _limits, _resolve_widest, _shared, part_seconds
from specbatch.tune.costs import CostModel
from specbatch.tune.live import (
    Live,
    drift,
    file_seconds,
    plans_to_run,
    repeated,
    run_plans,
    speedups,
    winner,
)
from specbatch.tune.output import _verdict
from specbatch.tune.profile import FileProfile
from specbatch.tune.sample import Sample, sample_rows
from specbatch.tune.search import Plan
from specbatch.tune.session import OutOfTime, Session
from specbatch.tune.start import cache_folder, rows_to_trace
from specbatch.tune.trace import Trace
from specbatch.tune.tuner import SearchLimits, Tuner
from specbatch.types import Request, RngKey, SamplingParams
from tests.tiny_models import tiny_device_engine, tiny_engine

CPU = ["engine.device=cpu", "engine.max_batch_size=4", "engine.prefill_chunk_tokens=64"]
BEFORE = "were traced before"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"prompt": f"The words that all rows begin with. {i}: " + "ab " * i, "max_tokens": 6 + i})
        for i in range(6)
    ]
    path.write_text("\n".join([*lines, "{broken"]) + "\n")
    return path


def tune(*args: str | Path, target: str | Path = "random:tiny", sets: Sequence[str] = ()) -> Result:
    """On a CPU, in small batches."""
    options = [part for one in (f"model.target={target}", *CPU, *sets) for part in ("--set", one)]
    return CliRunner().invoke(app, ["tune", *map(str, args), *options])


def drafting_with(model: Path) -> list[str]:
    return ["speculation.method=draft_model", f"speculation.draft={model}", "engine.prefix_cache=false"]


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as long as all the rest."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, searched or run."""
    monkeypatch.setattr(Tuner, "measure", Mock(side_effect=SpecbatchError("enough")))


@pytest.mark.parametrize(
    "has_draft",
    [
        pytest.param(False, id="ngram", marks=pytest.mark.slow),
        pytest.param(True, id="draft_model", marks=pytest.mark.wide),
    ],
)
def test_writes_a_configuration_that_runs(
    rows: Path, tmp_path: Path, tiny_model: Path, has_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "tuned.yaml"
    sets = drafting_with(tiny_model) if has_draft else []
    profile_of, repeating = Mock(side_effect=FileProfile.of), Mock(side_effect=repeated)
    monkeypatch.setattr(FileProfile, "of", profile_of)
    monkeypatch.setattr(live_module, "repeated", repeating)
    monkeypatch.setattr(live_module, "MAX_TRIALS", 2)
    if not has_draft:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = tune(rows, "-o", output, "--rows", "4", "--budget", "60s", target=tiny_model, sets=sets)
    assert found.exit_code == 0, found.output
    assert "1 of the 7 rows that were drawn fail and are left out" in found.output
    alike = "6 completions, 4 sampled; the prompts begin with the same 32 tokens"
    assert (alike in found.output) == (not has_draft), "which is of no account without a prefix cache"
    assert profile_of.call_args_list[0].args[-1] == 32 * (not has_draft), "the file's; live runs cache nothing"
    drawn, count, _ = repeating.call_args.args
    assert len({tuple(row.prompt_token_ids) for row in drawn}) == count == 6, "four traced, and the two that were not"
    assert [row.request_id for row in drawn] == [*range(6)], "those traced first"
    assert all(row.check_stop is None for row in drawn)
    assert "the minimum of each part took more" not in found.output
    text = output.read_text()
    assert text.startswith("# Written by `specbatch tune`.")
    config = load_config(output)
    resolve(config)
    if "Undecided" not in text:
        assert config.speculation.method != "auto", "the schedule is of the drafts that were tuned"
    assert (config.speculation.method == "none") == ("plain decoding was faster" in text)
    report = json.loads((tmp_path / "tuned.report.json").read_text())
    assert (report["made_by"]["rows"], report["made_by"]["traced_rows"]) == (4, 4)
    assert report["verdict"] in text
    assert {"plain", "best", "by_batch", "costs", "replays", "live", "made_by"} <= set(report)
    assert all(len(run["seconds"]) >= 2 for run in report["live_runs"])
    # What the schedule was chosen by is in the text.
    assert text.count("the whole file by that: ") == len(report["live_runs"])
    plain, off = report["live_runs"][-1], report["live"][-1]
    corrected = report["plain"]["seconds"] * off["predicted"] / off["measured"]
    assert plain["file_seconds"] == pytest.approx(corrected)
    generated = CliRunner().invoke(app, ["generate", str(rows), "-c", str(output), "-o", str(tmp_path / "out.jsonl")])
    assert generated.exit_code == 1, generated.output  # the broken row
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 7
    # Again: what was measured is still there.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    again = tune(rows, "-o", output, "--rows", "4", "--budget", "60s", target=tiny_model, sets=sets)
    assert again.exit_code == 0, again.output
    assert BEFORE in again.output
    assert "were timed before" in again.output
    assert "no plots: matplotlib is not installed" in again.output
    costs = json.loads((tmp_path / "tuned.measured" / "costs.json").read_text())
    assert {m["batch"] for m in costs if m["kind"] == "plain"} == {1, 2, 4}, "the rest was timed then"


@pytest.mark.usefixtures("trace_only")
def test_measurements_of_other_rows_are_not_used(rows: Path, tmp_path: Path, tiny_model: Path) -> None:
    found = [tune(rows, "-o", tmp_path / "t.yaml", "--rows", n, target=tiny_model).output for n in ("4", "5", "5")]
    assert [BEFORE in output for output in found] == [False, False, True]
    assert ["of another job: measured again" in output for output in found] == [False, True, False]


@pytest.mark.usefixtures("trace_only")
def test_measurements_in_other_numbers_are_not_used(rows: Path, tmp_path: Path, tiny_model: Path) -> None:
    """FP8 changes what rounds cost, and which tokens are accepted."""
    output = tmp_path / "t.yaml"
    fp8 = ["model.quantization=fp8", "engine.kv_dtype=fp8_e4m3"]
    for sets in ([], fp8[:1], fp8):
        found = tune(rows, "-o", output, "--rows", "4", target=tiny_model, sets=sets).output
        assert "traced 4 rows" in found
        assert ("of another job: measured again" in found) == bool(sets)
    assert BEFORE in tune(rows, "-o", output, "--rows", "4", target=tiny_model, sets=fp8).output


@pytest.mark.usefixtures("trace_only")
def test_one_sampled_row_among_those_that_run_live(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rounds have graphs of their own, whether that row is traced or not."""
    path, session = tmp_path / "rows.jsonl", Mock(side_effect=Session)
    rows = [{"prompt": f"Row {i}", "max_tokens": 6, "temperature": 0.7 * (i == 5)} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(command_module, "Session", session)
    sets = drafting_with(tiny_model)
    found = tune(path, "-o", tmp_path / "t.yaml", "--rows", "4", target=tiny_model, sets=sets)
    assert "enough" in found.output
    assert "the rows are sampled" not in found.output, "none of those that were traced"
    assert session.call_args.args[4]


@pytest.mark.usefixtures("trace_only")
def test_chains_of_sampled_rows_are_counted_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = tmp_path / "rows.jsonl", tmp_path / "t.yaml"
    rows = [{"prompt": f"Row {i}", "max_tokens": 6, "temperature": 0.7, "stop": ["zz"]} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counted, traced = list[list[Request]](), list[Request]()
    count_drawn, trace = Session.count_drawn, Session.trace

    def counting(session: Session, requests: Sequence[Request], *args: Any) -> Any:
        counted.append(list(requests))
        return count_drawn(session, requests, *args)

    def tracing(session: Session, requests: Sequence[Request], *args: Any) -> Any:
        traced.extend(requests)
        return trace(session, requests, *args)

    monkeypatch.setattr(Session, "count_drawn", counting)
    monkeypatch.setattr(Session, "trace", tracing)
    sets = drafting_with(tiny_model)
    for _ in range(2):
        found = tune(path, "-o", output, "--rows", "4", target=tiny_model, sets=sets)
        assert "corrected by a run that drew its drafts" in found.output
    assert len(counted) == 1, "the second time it is in the trace"
    assert len({id(request.check_stop) for request in (*counted[0], *traced)}) == 8, "each has a state, for one run"
    monkeypatch.setattr(Session, "count_drawn", Mock(side_effect=OutOfTime))
    found = tune(path, "-o", tmp_path / "other.yaml", "--rows", "4", target=tiny_model, sets=sets)
    assert "estimated from greedy ones" in found.output


@pytest.mark.usefixtures("trace_only")
def test_chains_of_many_rows_are_counted_in_parts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is built for rounds that verify a bounded number of tokens."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Row {i}", "max_tokens": 6, "temperature": 0.7} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    count_drawn, limits_of = Session.count_drawn, SearchLimits.of
    sizes, found = list[int](), list[NDArray[np.int64]]()

    def counting(session: Session, requests: Sequence[Request], *args: Any) -> NDArray[np.int64]:
        sizes.append(len(requests))
        found.append(count_drawn(session, requests, *args))
        return found[-1]

    def limited(*args: Any) -> SearchLimits:
        limits = limits_of(*args)
        return replace(limits, verify_tokens=2 * (limits.depth + 1))

    monkeypatch.setattr(Session, "count_drawn", counting)
    monkeypatch.setattr(SearchLimits, "of", limited)
    output = tmp_path / "t.yaml"
    tune(path, "-o", output, "--rows", "5", target=tiny_model, sets=drafting_with(tiny_model))
    assert sizes == [2, 2, 1]
    trace = Trace.load(cache_folder(output) / "trace.npz")
    assert trace.drawn is not None
    assert trace.drawn.tolist() == sum(found).tolist()


def test_how_many_rows_are_traced() -> None:
    assert [rows_to_trace(False, places) for places in (1, 16, 256)] == [64, 64, 64]
    assert [rows_to_trace(True, places) for places in (1, 8, 16, 32, 256)] == [64, 64, 128, 256, 256]
    found = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "200"})
    assert "64; on a GPU 8 batches, 64 to 256" in found.output


def test_rows_are_counted_where_nobody_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "rows.jsonl", Mock(side_effect=SpecbatchError("enough"))
    path.write_text('{"prompt": "a"}\n' * 5)
    monkeypatch.setattr(command_module, "sample_rows", asked)
    assert tune(path, "-o", tmp_path / "t.yaml").exit_code == 2
    assert asked.call_args.args[4] == 64


@pytest.mark.usefixtures("trace_only")
def test_packaged_examples(tmp_path: Path, tiny_model: Path) -> None:
    found = tune("-o", tmp_path / "t.yaml", "--rows", "4", target=tiny_model, sets=["sampling.max_tokens=8"])
    assert "packaged examples" in found.output
    assert "traced 4 rows, 32 tokens" in found.output
    assert "enough" in found.output


@pytest.mark.usefixtures("no_plots")
def test_a_budget_that_was_not_kept_is_named(
    rows: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "MAX_TRIALS", 1)
    late = [0.0]

    def slow(*args: Any) -> Any:
        late[0] = 100.0
        return run_plans(*args)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0], time=time.time)
    monkeypatch.setattr(command_module, "time", clock)
    monkeypatch.setattr(command_module, "run_plans", slow)
    found = tune(rows, "-o", tmp_path / "t.yaml", "--rows", "4", "--budget", "60s", target=tiny_model)
    assert found.exit_code == 0, found.output
    assert "--budget was 60.0 s, and the minimum of each part took more: start " in found.output
    assert "live runs 1 min 4" in found.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "soon"], "--budget soon: not a time"),
        (["--budget", "0s"], "--budget 0s: not a time"),
        (["--budget", "5"], "5s is seconds, 5m minutes"),
        (["-o", "nowhere/tuned.yaml"], "the folder of the output, nowhere, does not exist"),
        (["-o", "tuned.txt"], "is no .yaml file"),
        (["--set", "speculation.method=none"], "there is nothing to tune"),
        (["--set", "speculation.method=eagle3"], "needs speculation.draft"),
        (["--set", "speculation.simulate_acceptance=2"], "accepts drafts at random"),
        (["--set", "engine.kv_cache_tokens=16"], "cannot hold one request"),
    ],
)
def test_mistakes(rows: Path, tmp_path: Path, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = tune(rows, *args)
    assert found.exit_code == 2, found.output
    assert message in " ".join(found.output.split())


def test_copies_of_a_row_stop_by_themselves() -> None:
    request = Request(0, [1, 2], SamplingParams(stop=("x",)), RngKey(0, 5, 0))
    made = repeated([request, request], 5, lambda params: lambda tokens, new: None)
    assert len({id(r.check_stop) for r in made}) == len({r.request_id for r in made}) == 5
    assert len({r.rng.stream for r in made}) == 5


def test_speed_counts_the_tokens_of_each() -> None:
    """An option that writes less is not faster for it."""
    short, long = (
        Live(ByBatch.always(None), (1.0, 1.0), (50, 50), 1.0),
        Live(ByBatch.always(None), (2.0, 2.0), (100, 100), 1.0),
    )
    assert speedups([short, long]) == [pytest.approx((1.0, 1.0, 1.0))]


def live(*rates: float) -> Live:
    return Live(ByBatch.always(None), tuple(100 / rate for rate in rates), (100,) * len(rates), 1.0)


def test_the_noise_of_all_options_makes_the_interval() -> None:
    # Two options alone: Student's paired test. Logs differ by 0.1 and 0.3: mean 0.2, margin 6.31 * 0.1414 / sqrt(2).
    (pair,) = speedups([live(math.exp(0.1), math.exp(0.5)), live(1.0, math.exp(0.2))])
    assert pair == pytest.approx((math.exp(0.2), math.exp(0.2 - 0.631), math.exp(0.2 + 0.631)), rel=1e-4)
    # What slows all of a trial down by the same factor is no noise.
    assert speedups([live(12, 6), live(9, 4.5), live(10, 5)]) == [
        pytest.approx((1.2, 1.2, 1.2)),
        pytest.approx((0.9, 0.9, 0.9)),
    ]
    # 14% in each of two trials, among schedules that repeat within 3%: told from noise with four of them, not with two.
    options = [live(75.5, 78.2), live(59.2, 61.9), live(60.4, 62.0), live(66.5, 68.7)]
    assert speedups(options)[0][1] > 1.1
    (once,) = speedups([live(2.0), live(1.0)])
    assert once == (2.0, 0.0, math.inf)


SHAPES = tuple(ByBatch.always(DraftShape(steps, 1, steps + 1)) for steps in (1, 2, 3))


@pytest.mark.parametrize(
    ("rates", "best", "says"),
    [
        # By how far they repeat, trials of 30% more or less show nothing.
        ([(12, 12.1), (15, 15.1), (9, 9.1), (10, 10)], 1, "1.50x as fast as plain decoding (90% interval 1.4"),
        ([(12, 9), (10, 14), (9, 12), (10, 10)], None, "Undecided"),
        ([(9, 9.1), (8, 8.1), (7, 7.1), (10, 10)], 3, "Speculation does not pay"),
        ([(9, 9.1), (10, 10.1), (7, 7.1), (10, 10)], None, "Undecided"),  # one of them is as fast
        ([(20,), (15,), (12,), (10,)], None, "Undecided"),  # one trial does not show the noise
    ],
)
def test_the_fastest_wins_if_it_beats_plain_decoding_outside_the_noise(
    rates: list[tuple[float, ...]], best: int | None, says: str
) -> None:
    schedules = (*SHAPES, ByBatch.always(None))
    predicted: list[Any] = [SimpleNamespace(seconds=60, tokens_per_second=10) for _ in schedules]
    options = [Plan(*pair) for pair in zip(schedules, predicted, strict=True)]
    runs = [replace(live(*of), schedule=schedule) for of, schedule in zip(rates, schedules, strict=True)]
    found = winner(options, runs, file_seconds(options, runs, predicted))
    assert found is (None if best is None else options[best])
    tuned: Any = SimpleNamespace(winner=found, live=runs)
    assert _verdict(tuned).startswith(says)


def test_the_winner_is_the_fastest_with_the_whole_file() -> None:
    """The rows that run live may end, say, with a larger part of them alone: what is faster there was predicted so."""
    schedules = (*SHAPES[:2], ByBatch.always(None))
    whole: list[Any] = [SimpleNamespace(seconds=seconds) for seconds in (10.0, 10.2, 20.0)]
    options = [Plan(*pair) for pair in zip(schedules, whole, strict=True)]
    runs = [replace(live(rate, rate), schedule=s) for rate, s in zip((100, 105, 50), schedules, strict=True)]

    def best(*rates: float) -> Plan | None:
        predicted: list[Any] = [SimpleNamespace(tokens_per_second=rate) for rate in rates]
        return winner(options, runs, file_seconds(options, runs, predicted))

    assert best(100, 110, 50) is options[0]  # 10 against 10.2 * 110 / 105 = 10.7 seconds
    assert best(100, 100, 50) is options[1]  # 10.2 * 100 / 105 = 9.7 seconds


@pytest.mark.parametrize(
    ("num_rows", "seconds", "num_warm_up", "count"),
    [
        (10**6, 1000.0, 0, 800),  # eight batches
        (300, 1000.0, 0, 300),  # the file
        (10**6, 151.0, 0, 355),  # five trials of 355 rows, not of 533, in 151 seconds: three options and plain decoding
        (10**6, 151.0, 1, 236),  # six trials
        (10**6, 60.0, 0, 200),  # two batches, where five trials do not fit
        (10**6, 17.0, 0, 58),  # fewer, for two trials
        (10**6, 17.0, 1, 58),
        (10**6, 15.0, 1, 38),
        (10**6, 1.9, 0, 8),
    ],
)
def test_rows_of_a_live_run(num_rows: int, seconds: float, num_warm_up: int, count: int) -> None:
    options = [
        Plan(schedule, SimpleNamespace(seconds=1.0 + i))  # type: ignore[arg-type]
        for i, schedule in enumerate((*SHAPES, ByBatch.always(None)))
    ]
    result: Any = SimpleNamespace(best=options[0], fixed=options[:3], plain=options[3])
    forecast: Any = SimpleNamespace(
        limits=SimpleNamespace(max_running=100),
        # Two hundredths of a second a row.
        seconds=lambda schedule, count: 0.02 * count,
    )
    compared, found = plans_to_run(result, forecast, 0, num_rows, seconds, num_warm_up)
    assert (compared, found) == (options, count)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_comes_first_is_not_timed(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of so many rows takes longer, whichever option's it is: on a GPU their prompts become graphs. On
    a CPU only what any rows have in common."""
    known: set[int] = set()

    def run(requests: list[Request], until: float = math.inf) -> Any:
        count = len(requests)
        first = not known or (on_device and count not in known)
        known.add(count)
        counts = SimpleNamespace(acceptance_length=2.0)
        return SimpleNamespace(seconds=count + 100.0 * first, num_tokens=10 * count, counts=counts)

    session: Any = SimpleNamespace(use=Mock(), run=Mock(side_effect=run))
    options = (*SHAPES, ByBatch.always(None))
    requests = [Request(i, [1, 2], SamplingParams(max_tokens=100), RngKey(0, i, 0)) for i in range(20)]
    monkeypatch.setattr(live_module, "MAX_TRIALS", 3)
    plans: Any = [SimpleNamespace(schedule=schedule) for schedule in options]
    found = run_plans(session, plans, requests, 20, Mock(), math.inf, int(on_device))
    assert [one.seconds for one in found] == [(20.0,) * 3] * 4
    assert [len(call.args[0]) for call in session.run.call_args_list] == [20 if on_device else 2] * 4 + [20] * 12
    lengths = [call.args[0][0].params.max_tokens for call in session.run.call_args_list]
    assert lengths == [100 if on_device else 8] * 4 + [100] * 12
    used = [call.args for call in session.use.call_args_list]
    trial = used[:4]
    assert used == [*trial, *trial, *reversed(trial), *trial], "no schedule is always the first"


@pytest.mark.parametrize(
    ("seconds", "num_warm_up", "trials"),
    [(1e9, 0, 5), (100.0, 0, 3), (100.0, 1, 2), (125.0, 1, 3), (1.0, 0, 2), (1.0, 1, 2)],
)
def test_trials_end_before_the_time_is_up(
    seconds: float, num_warm_up: int, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial takes 30 seconds, and so does one that is not timed; there are two in any case."""
    now = [0.0]
    monkeypatch.setattr(command_module.time, "perf_counter", lambda: now[0])

    def run(requests: list[Request], until: float = math.inf) -> Any:
        now[0] += 15.0 * (len(requests) > 2)
        return SimpleNamespace(seconds=1.0, num_tokens=10, counts=SimpleNamespace(acceptance_length=2.0))

    def repeat(requests: list[Request], count: int, stop_check: Any) -> list[Request]:
        return requests[:count]

    monkeypatch.setattr(live_module, "repeated", repeat)
    session: Any = SimpleNamespace(use=Mock(), run=run)
    options: Any = [SimpleNamespace(schedule=SHAPES[0]), SimpleNamespace(schedule=ByBatch.always(None))]
    requests = [Request(i, [1, 2], SamplingParams(), RngKey(0, i, 0)) for i in range(20)]
    live = run_plans(session, options, requests, 10, Mock(), seconds, num_warm_up)
    assert [len(one.seconds) for one in live] == [trials, trials]
    assert now[0] == 30.0 * (trials + num_warm_up)


def test_a_trial_that_goes_past_the_budget_is_dropped() -> None:
    """But for the first: without it nothing ran live."""
    runs: list[float] = []

    def run(requests: list[Request], until: float = math.inf) -> Any:
        runs.append(until)
        if len(runs) == 2 + 5 and until < math.inf:
            raise OutOfTime
        return SimpleNamespace(seconds=1.0, num_tokens=10, counts=SimpleNamespace(acceptance_length=2.0))

    session: Any = SimpleNamespace(use=Mock(), run=run)
    began = time.perf_counter()
    options: Any = [SimpleNamespace(schedule=SHAPES[0]), SimpleNamespace(schedule=ByBatch.always(None))]
    live = run_plans(session, options, [Request(0, [1], SamplingParams(), RngKey(0, 0, 0))], 1, Mock(), 100.0, 1)
    assert runs == [math.inf] * 4 + [pytest.approx(began + 110, abs=5)] * 3
    assert [one.seconds for one in live] == [(1.0, 1.0)] * 2, "the third trial is not whole"


def test_a_change_of_the_machines_speed_is_seen() -> None:
    assert drift([live(10, 5), live(20, 10)]) == pytest.approx(2.0)
    assert drift([live(10, 10.1), live(20, 19.8)]) == pytest.approx(1.0, abs=0.01)
    assert drift([live(10), live(20)]) == 1.0


def test_little_time_is_for_fewer_options() -> None:
    options = [
        Plan(schedule, SimpleNamespace(seconds=1.0 + i))  # type: ignore[arg-type]
        for i, schedule in enumerate((*SHAPES, ByBatch.always(None)))
    ]
    result: Any = SimpleNamespace(best=options[0], fixed=options[:3], plain=options[3])
    forecast: Any = SimpleNamespace(limits=SimpleNamespace(max_running=100), seconds=lambda _, count: count)
    for seconds, compared, count in ((80.0, options, 8), (60.0, [*options[:2], options[3]], 8), (1.0, None, 4)):
        found = plans_to_run(result, forecast, 0, 1000, seconds, 0)
        assert found == (compared or [options[0], options[3]], count)


def test_three_options_at_most_and_all_traced_rows_run_live() -> None:
    schedules = [ByBatch.always(DraftShape(steps, 1, steps + 1)) for steps in (1, 2, 3, 4, 5)]
    options = [
        Plan(schedule, SimpleNamespace(seconds=1.0 + i))  # type: ignore[arg-type]
        for i, schedule in enumerate((*schedules, ByBatch.always(None)))
    ]
    result: Any = SimpleNamespace(best=options[0], fixed=options[:5], plain=options[5])
    forecast: Any = SimpleNamespace(limits=SimpleNamespace(max_running=4), seconds=lambda schedule, count: 0.02 * count)
    # 64 were traced: more than two batches, and more than eight.
    for seconds in (1000.0, 15.0):
        compared, count = plans_to_run(result, forecast, 64, 10**6, seconds, 0)
        assert compared == [*options[:3], options[5]]
        assert count == 64


def test_method_auto_is_tuned_as_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a target of which a head comes along."""
    sets = [*CPU, "model.target=random:smollm2-135m", "speculation.method=auto"]
    run, widest = _resolve_widest(load_config(None, sets), resolve)
    assert (run.config.speculation.method, widest.depth) == ("ngram", 0)
    head = "builtin:smollm2-135m-instruct-eagle3"
    monkeypatch.setattr(resolve_speculation, "builtin_head", lambda target, method: head)
    run, widest = _resolve_widest(load_config(None, sets), resolve)
    assert (run.config.speculation.method, run.config.speculation.draft) == ("eagle3", head)
    assert widest.depth > 1


def test_all_drafts_of_a_block_are_compared() -> None:
    """By default the built-in drafter has fewer."""
    sets = [*CPU, "model.target=random:smollm2-135m", "speculation.method=block"]
    sets += ["speculation.draft=builtin:smollm2-135m-instruct-block"]
    _, widest = _resolve_widest(load_config(None, sets), resolve)
    assert (widest.depth, widest.topk) == (8, 4)


def test_what_is_tuned_on_a_gpu_are_rounds_in_graphs() -> None:
    """The session captures them itself, and computes prompts as the job does."""

    def on_a_gpu(config: Config) -> ResolvedRun:
        run, graphs = resolve(config), config.engine.cuda_graphs
        engine = replace(run.engine, graphs="round" if graphs == "auto" else graphs, prompt_graphs="both")
        return replace(run, device=torch.device("cuda"), engine=engine)

    sets = [*CPU, "model.target=random:tiny", "speculation.method=ngram"]
    run, _ = _resolve_widest(load_config(None, sets), on_a_gpu)
    assert (run.engine.graphs, run.engine.prompt_graphs) == ("none", "both")
    with pytest.raises(ConfigError, match="cuda_graphs is none here"):
        _resolve_widest(load_config(None, [*sets, "engine.cuda_graphs=none"]), on_a_gpu)


@pytest.mark.wide
@pytest.mark.usefixtures("no_plots")
def test_the_experts_of_the_files_own_rows_are_counted(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost model gets the curve; timed requests have the file's tokens."""
    made, fit = list[Request](), Mock(side_effect=CostModel.fit)
    submit = Engine.submit

    def submitted(engine: Engine, request: Request) -> None:
        made.append(request)
        submit(engine, request)

    monkeypatch.setattr(Engine, "submit", submitted)
    monkeypatch.setattr(CostModel, "fit", fit)
    monkeypatch.setattr(live_module, "MAX_TRIALS", 2)
    sets = ["speculation.method=ngram"]
    output, target = tmp_path / "tuned.yaml", "random:tiny-experts?skew=1"
    found = tune(rows, "-o", output, "--rows", "4", "--budget", "3s", target=target, sets=sets)
    assert found.exit_code == 0, found.output
    assert "1, 4, 4 and 16 tokens read 2, " in found.output
    curve = fit.call_args.args[2]
    assert curve(1) == pytest.approx(2)
    assert 2 < curve(4) < distinct_experts(8, 2, 4), "the router has a skew"
    points = json.loads(output.with_suffix(".report.json").read_text())["experts"]
    assert {round(one["tokens"]) for one in points} >= {1, 4}
    timed = [request.prompt_token_ids for request in made if request.request_id < 0]
    known = {token for request in made if request.request_id >= 0 for token in request.prompt_token_ids}
    assert timed
    assert all(len(known.intersection(prompt)) > len(set(prompt)) / 4 for prompt in timed)


def test_too_few_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    found = tune(path, "-o", tmp_path / "t.yaml")
    assert found.exit_code == 2
    assert "3 rows to tune on, and 4 are needed (1 of 4 rows fail)" in " ".join(found.output.split())
    assert "shows the errors of rows that fail" in found.output
    # As many as there are may not be enough: told before a model is looked for.
    path.write_text('{"prompt": "a"}\n' * 3)
    found = tune(path, "-o", tmp_path / "t.yaml", target="missing.gguf")
    assert found.exit_code == 2
    assert "3 rows to tune on, and 4 are needed\nhint: give more rows" in found.output


def test_what_is_shared_are_full_pages_and_not_the_last_token() -> None:
    assert [_shared(common, 16) for common in (0, 1, 16, 17, 32, 33, 40)] == [0, 0, 0, 16, 16, 32, 32]
    assert [_shared(common, 1) for common in (0, 1, 2)] == [0, 0, 1]


PLAIN = SamplingParams()


def sampled(
    prompts: list[bytes], num_rows: int, params: SamplingParams = PLAIN, chat: ChatFields = NO_CHAT_FIELDS
) -> Sample:
    """Of rows whose prompts have a token for each byte."""
    source: Any = SimpleNamespace(rows=lambda: starmap(RawRow, enumerate(prompts)), name="rows")
    parser: Any = SimpleNamespace(parse=lambda raw: Row(raw.index, content=raw.data, params=params, chat=chat))
    texts: Any = SimpleNamespace(
        encode=lambda job, limits: [*job.content], stop_check=lambda params: None, bad_words=lambda params, limits: ()
    )
    limits: Any = None
    return sample_rows(source, parser, texts, limits, num_rows, 0)


@pytest.mark.parametrize(
    ("prompts", "common"),
    [(["abcd", "abce", "abc"], 3), (["abcd", "abcd"], 4), (["abc", "xbc", "abc"], 0), (["ab", "abcd", "abcx"], 2)],
)
def test_what_all_sampled_prompts_begin_with(prompts: list[str], common: int) -> None:
    assert sampled([prompt.encode() for prompt in prompts * 2], 4).common_prefix == common


def test_rows_with_grammars_are_noticed() -> None:
    prompts, calls = [b"x"] * 4, ChatFields(required=({},))
    assert not sampled(prompts, 4).has_grammars
    assert sampled(prompts, 4, SamplingParams(regex="a")).has_grammars
    assert sampled(prompts, 4, chat=calls).has_grammars


def test_rows_to_trace_and_rows_drawn_behind_them() -> None:
    prompts = [f"row {i}".encode() for i in range(2000)]
    sample = sampled(prompts, 64)
    assert (len(sample.requests), sample.num_to_trace, sample.num_rows) == (1024, 64, 2000)
    assert sample.to_trace == sample.requests[:64]
    assert [request.request_id for request in sample.requests] == [*range(1024)]
    assert len({request.rng.stream for request in sample.requests}) == 1024
    assert [len(request.prompt_token_ids) for request in sample.requests] == sample.prompt_tokens
    sample = sampled(prompts, 10**4)
    assert sample.to_trace == sample.requests, "no more are drawn than are traced"
    assert len(sample.requests) == sample.num_to_trace == 2000


def test_the_first_rows_are_a_sample_of_a_sorted_file() -> None:
    sample = sampled([b"a" * (1 + i) for i in range(1000)], 64)
    lengths = [len(request.prompt_token_ids) for request in sample.to_trace]
    assert 400 < np.mean(lengths) < 600, "whose standard error is 36"


@pytest.mark.parametrize(
    ("remaining", "seconds"), [(100.0, 40.0), (50.0, 20.0), (20.0, 10.0), (0.0, 10.0), (-30.0, 10.0)]
)
def test_a_part_has_its_share_of_what_remains_and_a_tenth_of_the_budget_at_least(
    remaining: float, seconds: float
) -> None:
    assert part_seconds(100.0, remaining, 0.4) == pytest.approx(seconds)


@pytest.mark.parametrize(("on_cuda", "async_depth"), [(True, 1), (False, 0)])
def test_limits_of_an_engine(on_cuda: bool, async_depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "on_cuda", on_cuda)
    engine = tiny_device_engine(num_layers=1)
    parts: Any = SimpleNamespace(net=None)
    sizes = SimpleNamespace(max_batch_size=4, prefill_chunk_tokens=32)
    resolved: Any = SimpleNamespace(engine=sizes, speculation=SimpleNamespace(block_size=16))
    limits = _limits(resolved, Session(engine, "none", parts, "none"), SearchLimits(1, 1, 2, 64))
    assert limits.chunk_cost == engine.chunk_cost
    assert (limits.kv_tokens, limits.page_size, limits.draft_kv_offset, limits.block_size) == (256, 4, None, 16)
    assert (limits.async_depth, limits.max_verify_tokens) == (async_depth, 64)
    on_cpu = Session(tiny_engine(), "none", parts, "none")
    assert _limits(resolved, on_cpu, SearchLimits(1, 1, 2, 64)).chunk_cost is None, "nothing is held there"
