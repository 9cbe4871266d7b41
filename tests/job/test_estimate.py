"""Estimates of files: tokens are exact, and a simulated machine takes what was estimated."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from specbatch.errors import InputError
from specbatch.job.estimate import FileTokens, Trial, count_tokens, draw_lengths, estimate
from specbatch.job.estimate_command import EstimateOptions, estimate_file, estimate_table
from specbatch.job.row_queue import RowPreparer
from specbatch.job.terminal import table_text
from specbatch.job.worker import Runtime
from specbatch.models.pass_weights import distinct_experts
from specbatch.results.finished import Finished
from specbatch.results.results import ResultFile
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import open_source
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import Completion, EngineLimits, FinishReason
from tests.job.test_generate import CONFIG, Run
from tests.stub_engine import VOCAB, StubEngine, StubRun, StubTokenizer, resolve


class Paced(StubEngine):
    """Rounds of known duration, on a clock of its own: a start and a part for each request."""

    def step(self) -> list[Completion]:
        before = self.num_running
        done = super().step()
        self.stats.decode_seconds += 0.01 + 0.002 * max(before, 1)
        return done


def estimated(
    run: Run, engine: type[StubEngine] = Paced, console: Console | None = None, **options: Any
) -> dict[str, Any]:
    def build(stub: StubRun, show: object) -> StubEngine:
        return engine(batch=stub.config.engine.max_batch_size or 16)

    runtime = Runtime(resolve, build, lambda config: {})
    console = console or Console(file=io.StringIO(), width=200)
    arguments = EstimateOptions(str(run.input), **options)
    return estimate_file(arguments, CONFIG, runtime, console, began=time.perf_counter())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.write([{"prompt": "p" * (1 + i % 40), "n": 1 + i % 3} for i in range(300)] + [{"prompt": ""}, b"{"])
    return run


def test_prompts_are_counted_exactly_and_nothing_is_written(run: Run) -> None:
    report = estimated(run, trial_rows=32)
    assert run() == 1
    stats = run.stats()
    assert report["rows"] == stats["rows"]["total"] == 302
    assert report["failed_rows"] == stats["rows"]["failed"] == 2
    # The prompt of a row with several completions counts once there.
    assert report["requests"] == sum(1 + i % 3 for i in range(300))
    assert report["prompt_tokens"] == sum((1 + i % 3) * (2 + i % 40) for i in range(300))
    expected = report["completion_tokens"]
    assert expected["low"] <= expected["expected"] <= expected["high"] <= expected["limit"] == 600 * 256
    assert stats["tokens"]["completion"] == pytest.approx(expected["expected"], rel=0.25)
    assert report["trial"]["rows"] == 32
    run.output.unlink()
    (run.folder / "d.results.stats.json").unlink()
    estimated(run, limit=5)
    assert [path.name for path in run.folder.iterdir()] == ["d.jsonl"]
    text = table_text(estimate_table(report))
    assert "300" in text or "302" in text
    assert json.dumps(report)


def test_the_peak_is_not_below_a_part_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache on a CPU takes memory where it is written to: the rows of the file fill a part of it."""

    class WithCache(Paced):
        num_pages, page_size = 1 << 20, 16

    monkeypatch.setattr(StubRun, "rows", SimpleNamespace(token_bytes=1 << 14), raising=False)
    gib = 1 << 30
    report = estimated(run, WithCache, trial_rows=2, trial_seconds=1)
    memory = report["memory"]
    work = report["prompt_tokens"] + report["completion_tokens"]["expected"]
    token_bytes = memory["kv_cache"] / (16 << 20)
    assert memory["kv_cache_used"] == pytest.approx(work * token_bytes, rel=0.001)
    assert memory["kv_cache"] > memory["peak"] > memory["kv_cache_used"] + gib / 20
    shown = f"KV cache {memory['kv_cache'] / gib:.2f} GiB, of which {memory['kv_cache_used'] / gib:.2f} are used, peak"
    assert shown in table_text(estimate_table(report))


@pytest.mark.wide
def test_the_peak_is_that_of_this_process(tmp_path: Path) -> None:
    """The system's own maximum begins with that of the process that started it."""
    code = """
import sys
from pathlib import Path
from tests.job.test_estimate import Run, estimated
run = Run(Path(sys.argv[1]))
run.write([{"prompt": "abc"}] * 4)
print(estimated(run, trial_rows=2)["memory"]["peak"])
"""
    large = np.ones(1 << 30, np.uint8)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 1 << 24 < int(done.stdout) < large.nbytes


def test_progress_of_an_estimate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.job.estimate_command.PLAIN_SECONDS", 0.0)
    log = io.StringIO()
    estimated(run, console=Console(file=log, width=200), trial_rows=20)
    assert "counting tokens: 100 of 302 rows" in log.getvalue()
    assert re.search(r"running some rows: \d+ of 20 rows have ended, 0 s of at most 60 s", log.getvalue())


def test_a_file_without_a_row_that_runs(run: Run) -> None:
    run.write([{"prompt": ""}, {"prompt": "a", "temperature": -1}])
    with pytest.raises(InputError, match="has no row that can run"):
        estimated(run)


def test_a_file_without_rows(run: Run) -> None:
    run.write([])
    with pytest.raises(InputError, match="has no rows"):
        estimated(run)


def test_rows_that_cannot_run_are_those_of_the_job(run: Run) -> None:
    """Also those whose grammar or rules cannot be used: a trial of them alone ended in a traceback."""
    wrong = [{"prompt": "a", "regex": "("}, {"prompt": "a", "allowed_token_ids": [10**6]}]
    run.write([*wrong, {"prompt": "a", "max_tokens": 7}])
    report = estimated(run)
    assert (report["rows"], report["failed_rows"], report["requests"]) == (3, 2, 1)
    run.write(wrong)
    with pytest.raises(InputError, match="has no row that can run"):
        estimated(run)


def test_rows_that_score_choices_generate_nothing(run: Run) -> None:
    run.write([{"prompt": "a", "score_choices": ["b", "c"]}, {"prompt": "a", "max_tokens": 7}])
    texts, limits = TextProcessor(StubTokenizer(), CONFIG.data), EngineLimits(400, VOCAB)
    prepare = RowPreparer(RowParser(CONFIG.sampling, CONFIG.data), texts, limits)
    found = count_tokens(open_source(str(run.input), CONFIG.data), prepare, limits, 8, 0)
    assert list(found.limits) == [0, 0, 7]


@pytest.mark.parametrize(
    ("share", "words"), [(1, "each of the 3 rows of the trial failed"), (0, "no row of the trial")]
)
def test_trials_without_tokens(run: Run, share: int, words: str) -> None:
    """All rows fail while they run, or none ends in time."""

    class Failing(StubEngine):
        def step(self) -> list[Completion]:
            return [replace(c, token_ids=[], finish_reason=FinishReason.ERROR) for c in super().step()] if share else []

    run.write([{"prompt": "a"}] * 3)
    with pytest.raises(InputError, match=words):
        estimated(run, Failing, trial_seconds=0.2)


def test_more_rows_run_while_a_trial_is_short(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all of the file. Of a slow machine it is two batches."""
    assert estimated(run)["trial"]["rows"] == 300
    monkeypatch.setattr("specbatch.job.estimate_command._MIN_TRIAL_SECONDS", 0.0)
    assert estimated(run)["trial"]["rows"] == 32


def test_rows_are_drawn_from_the_whole_file_in_groups(run: Run) -> None:
    run.write([{"prompt": "p" * (1 + i % 7), "n": 1 + i % 2} for i in range(400)])
    texts, limits = TextProcessor(StubTokenizer(), CONFIG.data), EngineLimits(400, VOCAB)
    prepare = RowPreparer(RowParser(CONFIG.sampling, CONFIG.data), texts, limits)
    found = count_tokens(open_source(str(run.input), CONFIG.data), prepare, limits, 90, 0, 40)
    indices = [raw.index for raw in found.drawn]
    assert len(set(indices)) == 90
    for group in (indices[:40], indices[40:80], indices[80:]):
        assert group == sorted(group)
        assert group[0] < 130
        assert group[-1] > 270
    assert found.drawn_prompts == [2 + i % 7 for i in indices for _ in range(1 + i % 2)]


class Quick(StubEngine):
    """What the host does takes all of the time."""

    def step(self) -> list[Completion]:
        self.stats.decode_seconds += 1e-6
        return super().step()


def test_what_the_file_of_results_takes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 rows, 30 were tried; the file took 0.3 s for them, and 0.2 s at the end of any job."""
    before = estimated(run, Quick, trial_rows=30, limit=64)["seconds"]["expected"]
    append, finish, kept = ResultFile.append, ResultFile.finish, []

    def slow_append(results: ResultFile, finished: Finished) -> None:
        time.sleep(0.01 * len(finished.rows))
        append(results, finished)
        kept.extend(row.index for row in finished.rows)

    def slow_finish(results: ResultFile) -> dict[str, Any]:
        time.sleep(0.2)
        return finish(results)

    monkeypatch.setattr(ResultFile, "append", slow_append)
    monkeypatch.setattr(ResultFile, "finish", slow_finish)
    found = estimated(run, Quick, trial_rows=30, limit=64)["seconds"]["expected"]
    assert len(kept) == len(set(kept)) == 30
    # What the end took for an empty file, too, does not grow with the rows.
    assert found - before == pytest.approx(0.3 * 64 / 30, abs=0.2)


class Late(Paced):
    """As a GPU where prompts are launched now and then: each second step launches no round, and waits for one."""

    owed = 0.0

    def step(self) -> list[Completion]:
        before = self.stats.decode_seconds
        if self.owed:
            self.stats.decode_seconds, self.owed = before + self.owed, 0.0
            return []
        done = super().step()
        self.stats.decode_seconds, self.owed = before, self.stats.decode_seconds - before
        return done


def test_a_round_that_a_later_step_waits_for(run: Run) -> None:
    """Its time counts, also where that step launches none."""
    run.write([{"prompt": "p" * 9}] * 600)
    at_once, late = (estimated(run, engine)["seconds"]["expected"] for engine in (Paced, Late))
    assert late == pytest.approx(at_once, rel=0.15)


class Capturing(Paced):
    """The first round captures graphs for a second."""

    def step(self) -> list[Completion]:
        if not self.stats.late_graph_seconds:
            self.stats.late_graph_seconds = 1.0
            self.stats.decode_seconds += 1.0
        return super().step()


def test_graphs_are_captured_once(run: Run) -> None:
    """The second is part of the trial, and of the job: not of each of its rounds."""
    run.write([{"prompt": "p" * 9}] * 600)
    plain, capturing = (estimated(run, engine)["seconds"]["expected"] for engine in (Paced, Capturing))
    assert capturing - plain == pytest.approx(1.0, abs=0.3)


def tokens(count: int, prompt: int, limit: int) -> FileTokens:
    found = FileTokens(count, prompts=array("q", [prompt] * count), limits=array("q", [limit] * count))
    found.drawn_prompts = [prompt] * 32
    return found


def trial(lengths: list[tuple[int, bool]]) -> Trial:
    """32 requests in batches of up to 8; a round of b requests takes 10 + 2 b ms, and writes 2 tokens of each."""
    rounds = [(b, 1, 0.010 + 0.002 * b) for b in (8, 8, 8, 8, 5, 3, 1)]
    seconds = sum(s for _, _, s in rounds)
    made = Trial(
        32,
        seconds + 1.0,
        prefill_seconds=1.0,
        decode_seconds=seconds,
        submitted=32,
        started=32,
        rounds=rounds,
        max_running=8,
        ended=lengths,
    )
    made.request_rounds = sum(b for b, _, _ in rounds)
    made.tokens = round(2 * made.request_rounds) + made.started
    return made


@pytest.mark.parametrize("count", [40, 800, 40_000])
def test_the_time_of_equal_rows(count: int) -> None:
    """Each waits for 50 rounds with 8 requests."""
    found = estimate(tokens(count, 100, 101), trial([(101, False)] * 32), max_batch_size=8)
    rounds = 50 * count / 8
    assert found.prefill_seconds == pytest.approx(count / 32)
    assert found.run_seconds.expected == pytest.approx(rounds * 0.026 + count / 32, rel=0.01)
    assert found.completion_tokens.expected == found.completion_tokens.high == 101 * count
    assert found.run_seconds.low < found.run_seconds.expected < found.run_seconds.high


def test_prompts_after_the_first_round_have_their_own_speed() -> None:
    """The first 8 take 0.6 s together (they may have computed what all share), each of the other 24 takes 0.05 s."""
    made = trial([(101, False)] * 32)
    made.prefill_seconds, made.first_started, made.first_prefill_seconds = 1.8, 8, 0.6
    assert made.prefill_seconds_of(1008, 1.0) == pytest.approx(0.6 + 1000 * 0.05)
    file = tokens(1008, 100, 101)
    file.shared, file.drawn_prompts = 60, [80] * 32
    assert file.work_ratio(32) == file.work_ratio(3) == 2.0
    found = estimate(file, made, max_batch_size=8)
    assert found.prefill_seconds == pytest.approx(2 * 50.6)


def test_the_cache_holds_fewer_requests_than_a_batch() -> None:
    lengths = [(101, False)] * 32
    full = estimate(tokens(800, 100, 101), trial(lengths), max_batch_size=64)
    assert full.run_seconds.expected == pytest.approx(100 * 50 * 0.026 + 25, rel=0.02)


def test_lengths_of_completions_that_were_cut_short() -> None:
    """Of exponential lengths with a mean of 100, cut at 80, the mean is found again."""
    rng = np.random.default_rng(1)
    true = rng.exponential(100, 400)
    ended = [(int(min(length, 80)) + 1, bool(length < 80)) for length in true]
    assert draw_lengths(ended, 20_000, rng).mean() == pytest.approx(100, rel=0.12)
    assert (draw_lengths([(7, True)] * 9, 50, rng) == 7).all()
    assert (draw_lengths([(7, False)] * 9, 50, rng) == np.inf).all()


def test_few_requests_read_few_experts() -> None:
    """A trial of full batches does not show what a round of few requests takes; the bytes that it reads do."""
    made = Trial(rounds=[(b, 1, 0.001 + 0.0001 * distinct_experts(128, 8, b)) for b in (64, 48, 32, 24, 16)])
    wanted = [0.001 + 0.0001 * distinct_experts(128, 8, b) for b in range(1, 65)]
    found = made.round_seconds(64, lambda batch: distinct_experts(128, 8, batch))
    assert found[1:] == pytest.approx(wanted, rel=1e-3)
    assert made.round_seconds(64)[1] > 2 * wanted[0], "a straight line over the requests"
