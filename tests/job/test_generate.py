"""The file job over the stub engine: order, faults, resume, memory."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from specbatch.config import Config, DataSection, EngineSection, SpeculationSection
from specbatch.errors import InputError, ModelError
from specbatch.files.paths import partial_path
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.pool import LocalPool
from specbatch.job.worker import Runtime, Worker
from specbatch.results.results import ResultFile
from specbatch.types import Completion, FinishReason, Request, RngKey, SamplingParams
from tests.files.test_jsonl import BAD_LINES, BAD_ROWS
from tests.rows.test_openai_batch import BAD_REQUESTS
from tests.stub_engine import EOS, StubEngine, StubRun, build_engine, resolve, stub_tokens

RAW = DataSection(prompts_as_chat=False)
CONFIG = Config(sampling=SamplingParams(temperature=1.0), data=RAW)


class Run:
    """One command in a folder; each call is a session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input = folder / "d.jsonl"
        self.output = folder / "d.results.jsonl"
        self.models: dict[str, Path] = {}
        self.on_build: Callable[[], Any] = lambda: None
        self.engines: list[StubEngine] = []
        self.log = ""

    def write(self, rows: list[Any]) -> None:
        self.input.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))

    def __call__(self, config: Config = CONFIG, engine: StubEngine | None = None, **options: Any) -> int:
        def build(run: StubRun, show: Callable[[str], None]) -> StubEngine:
            self.on_build()
            self.engines.append(engine or build_engine(run))
            return self.engines[-1]

        console = Console(file=io.StringIO(), width=200)
        try:
            arguments = GenerateOptions(**{"input": str(self.input), **options})
            pool = LocalPool(Worker(Runtime(resolve, build, lambda _: self.models), console.print))
            return run_file_job(arguments, config, pool, console, began=time.perf_counter()).exit_code
        finally:
            self.log = console.file.getvalue()  # type: ignore[attr-defined]

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def stats(self) -> dict[str, Any]:
        return json.loads((self.folder / "d.results.stats.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_live_line_counts_all_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are done, that run and that wait are all rows, also those that no engine has yet."""
    for name in ("PLAIN_SECONDS", "_FORECAST_SECONDS"):
        monkeypatch.setattr(f"specbatch.job.progress.{name}", 0.0)
    run.write([{"prompt": "p" * (1 + i % 40)} for i in range(600)])
    assert run() == 0
    shown = re.findall(r"(\d+)/600 rows.* (\d+) running, (\d+) waiting", run.log)
    assert len(shown) > 20
    assert {sum(map(int, counts)) for counts in shown[1:]} == {600}
    assert max(int(waiting) for _, _, waiting in shown) > 500


class Failing(StubEngine):
    """The model has no finite logits where a prompt begins with x: of completion 2 where there are several."""

    def _complete(self, request: Request) -> Completion:
        done = super()._complete(request)
        if request.prompt_token_ids[1] == ord("x") and request.rng.sample == min(1, request.params.n - 1):
            done.token_ids, done.finish_reason = done.token_ids[:2], FinishReason.ERROR
        return done


def test_logits_that_are_not_finite_make_one_error_row_each(run: Run) -> None:
    chat = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "xyz", "max_tokens": 20}}
    run.write([
        {"prompt": "abc"},
        {"prompt": "xyz", "id": "bad", "topic": 7},
        {"prompt": "xyz", "n": 3},
        {"custom_id": "c", **chat},
        {"prompt": "xy"} | {"stop": ["a"], "logprobs": 2},
        {"prompt": "def"},
    ])  # fmt: skip
    assert run(engine=Failing()) == 1
    good, bad, several, openai, stopped, last = run.results()
    assert good["finish_reason"] != "error"
    assert last["finish_reason"] != "error"
    message = (
        "the model's logits are not finite (NaN or infinity) at token 3: a damaged checkpoint, or an overflow in "
        "float16: try model.dtype: bfloat16 or float32"
    )
    error = {"type": "non_finite", "message": message}
    assert bad == {
        "id": "bad",
        "index": 1,
        "text": None,
        "finish_reason": "error",
        "error": error,
        "metadata": {"topic": 7},
    }
    assert several["error"]["message"] == message.replace("token 3", "token 3 of completion 2 of 3")
    assert several["text"] is None
    assert [choice["finish_reason"] == "error" for choice in several["choices"]] == [False, True, False]
    assert openai["response"] is None
    assert openai["error"] == {"code": "non_finite", "message": message}
    assert stopped["error"] == error
    assert run.stats()["rows"]["errors"] == {"non_finite": 4}
    assert "4 of 6 rows failed: 4 non_finite" in run.log
    assert "speculation.draft" not in run.log


def test_broken_drafts_are_reported_once(run: Run) -> None:
    run.write([{"prompt": f"p{i}"} for i in range(9)])
    engine = StubEngine()
    engine.stats.broken_drafts = 1234
    assert run(engine=engine) == 0
    assert run.log.count("the probabilities of 1,234 sampled drafts were not finite") == 1
    assert any("1,234 sampled drafts" in note for note in run.stats()["notes"])


def test_rows_come_out_in_order_with_all_fields(run: Run) -> None:
    run.write([{"prompt": f"p{i}", "id": f"r{i}", "k": i, "logprobs": 1, "n": 1 + i % 2} for i in range(50)])
    assert run() == 0
    results = run.results()
    assert [r["index"] for r in results] == list(range(50))
    row = results[1]
    assert list(row) == [
        "id", "index", "text", "finish_reason", "usage", "speculation", "logprobs", "choices", "metadata"
    ]  # fmt: skip
    tokens = stub_tokens([256, *b"p1"], RngKey(0, 1, 0), 256, False)
    assert row["text"] == bytes(t for t in tokens if t != EOS).decode()
    assert row["choices"][0]["text"] == row["text"]
    assert row["usage"]["prompt_tokens"] == 3
    assert row["usage"]["completion_tokens"] == sum(c["usage"]["completion_tokens"] for c in row["choices"])
    assert row["logprobs"][0] == {
        "token": chr(tokens[0]),
        "token_id": tokens[0],
        "logprob": -0.5,
        "top": [{"token": "a", "token_id": 97, "logprob": -0.0}],
    }
    assert row["metadata"] == {"k": 1}
    stats = run.stats()
    assert stats["rows"]["ok"] == 50
    assert stats["tokens"]["completion"] == sum(r["usage"]["completion_tokens"] for r in results)
    assert stats["speculation"]["acceptance_length"] == 3.0
    assert stats["session"]["acceptance_rate_by_position"] == [1.0, 1.0, 0.0]
    assert stats["config"]["model"]["dtype"] == "float32"
    assert {"versions", "commit", "device"} <= stats.keys()
    assert not partial_path(run.output).exists()


def test_results_do_not_depend_on_batching(run: Run) -> None:
    run.write([{"prompt": f"p{i % 7}", "n": 1 + i % 3} for i in range(60)])
    contents = set()
    for batch in (1, 3, 16):
        run(replace(CONFIG, engine=EngineSection(max_batch_size=batch)), overwrite=True)
        contents.add(run.output.read_bytes())
    assert len(contents) == 1


def test_noise_keys(run: Run) -> None:
    run.write([{"prompt": "a", "seed": 5}, {"prompt": "a"}, {"prompt": "a", "seed": 5}])
    run()
    own, other, again = (r["text"] for r in run.results())
    assert own == again != other
    # A seed of the config keys by row, too: it is a seed for the run.
    run(replace(CONFIG, sampling=SamplingParams(seed=5)), overwrite=True)
    assert len({r["text"] for r in run.results()}) == 2
    tokens = stub_tokens([256, 97], RngKey(5, 1, 0), 256, False)
    assert run.results()[1]["text"] == bytes(t for t in tokens if t != EOS).decode()


def test_stop_strings_cut_the_text(run: Run) -> None:
    run.write([{"prompt": f"p{i}", "stop": ["e", "ab"]} for i in range(40)])
    run()
    texts = [r["text"] for r in run.results()]
    assert not any("e" in t or "ab" in t for t in texts)
    run.write([{"prompt": f"p{i}"} for i in range(40)])
    run(overwrite=True)
    for text, whole in zip(texts, (r["text"] for r in run.results()), strict=True):
        assert whole.startswith(text)


def bad_rows() -> Iterator[Any]:
    """Every way to be bad that the tests know, over and over."""
    native = [row for row, _ in BAD_ROWS]
    batch = [row for row, _ in BAD_REQUESTS]
    lines = [line for line, _ in BAD_LINES if len(line) < 10_000]
    encode = [
        {"prompt": ""},
        {"prompt": "\ud800"},
        {"prompt": "x" * 1000},
        {"prompt_token_ids": [10**6]},
        {"prompt_token_ids": []},
        {"messages": [{"role": "refused", "content": "x"}]},
        {"prompt": "x", "meta\ud800": "\udc00", "n": "1"},
    ]
    while True:
        yield from (*native, *batch, *lines, *encode)


def test_hundreds_of_bad_rows_among_thousands(run: Run) -> None:
    bad = bad_rows()
    rows = [next(bad) if i % 10 == 7 else {"prompt": f"p{i}", "id": i} for i in range(2_000)]
    run.write(rows)
    assert run() == 1
    results = run.results()
    assert len(results) == 2_000
    for i, result in enumerate(results):
        failed = i % 10 == 7
        assert bool(result.get("error")) is failed, (rows[i], result)
        if "index" in result:
            assert result["index"] == i
        else:
            assert result["id"] == f"batch_req_{i:012d}"
        if not failed:
            assert result["id"] == i
    stats = run.stats()
    assert (stats["rows"]["ok"], stats["rows"]["failed"]) == (1800, 200)
    assert sum(stats["rows"]["errors"].values()) == 200
    expected = {
        "invalid_json", "invalid_text", "invalid_type", "invalid_value", "missing_prompt", "empty_prompt",
        "unsupported_parameter", "prompt_too_long", "chat_template_error",
    }  # fmt: skip
    assert set(stats["rows"]["errors"]) == expected
    assert run.log.strip().splitlines()[-1].startswith("200 of 2,000 rows failed")
    good = [r["text"] for r in results if not r.get("error")]
    assert all(isinstance(t, str) for t in good)
    # Rows among bad ones are as they are among others.
    run.write([{"prompt": "another"} if i % 10 == 7 else row for i, row in enumerate(rows[:200])])
    assert run(overwrite=True) == 0
    assert [result for i, result in enumerate(run.results()) if i % 10 != 7] == [
        result for i, result in enumerate(results[:200]) if i % 10 != 7
    ]


def test_look_ahead_is_bounded(run: Run) -> None:
    run.write([{"prompt": f"p{i}"} for i in range(500)])
    run(replace(CONFIG, engine=EngineSection(max_batch_size=4)))
    assert run.engines[0].most_waiting <= 8


def test_resume_after_an_engine_failure_keeps_what_was_done(run: Run) -> None:
    run.write([{"prompt": f"p{i}"} if i % 9 else b"broken" for i in range(200)])
    assert run() == 1
    whole = run.output.read_bytes()
    run.output.unlink()
    with pytest.raises(RuntimeError, match="broke"):
        run(engine=StubEngine(fail_at=10))
    done = partial_path(run.output).read_bytes().count(b"\n") - 2  # the job, the longest row
    assert 0 < done < 200
    assert run() == 1
    assert run.output.read_bytes() == whole
    stats = run.stats()
    assert stats["session"]["resumed_rows"] == done
    assert stats["session"]["rows"] == 200 - done
    assert stats["rows"]["total"] == 200
    assert run.engines[-1].stats.generated_tokens < stats["tokens"]["completion"]


@pytest.mark.parametrize(
    "damage", ["torn", "torn in a character", "blank", "not json", "foreign", "half a row", "header only"]
)
def test_damaged_partial_files(run: Run, damage: str) -> None:
    run.write([{"prompt": f"p{i}", "note": "é" * 20} for i in range(60)])
    run()
    whole = run.output.read_bytes()
    run.output.unlink()
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=6))
    partial = partial_path(run.output)
    header, *lines = partial.read_bytes().splitlines(keepends=True)
    last = lines.pop()
    if damage == "torn":
        lines.append(last[:30])
    elif damage == "torn in a character":
        lines.append(last[: last.index("é".encode()) + 1])
    elif damage == "blank":
        lines.append(b"\0" * 40 + b"\n")
    elif damage == "not json":
        lines.insert(1, b"{]\n")
    elif damage == "foreign":
        lines[1:1] = [b'{"id": 5}\n', b'{"index": 0, "response": {"body": {"choices": []}}}\n', b"7\n"]
    elif damage == "half a row":
        lines.insert(0, b'{"index": 0, "id": null, "usage": {}}\n')
        lines = [line for line in lines if b'"index": 0,' not in line or b"{}" in line]
    else:
        header, lines = header[:20], []
    partial.write_bytes(header + b"".join(lines))
    assert run() == 0
    assert run.output.read_bytes() == whole


def test_finished_jobs_are_left_alone(run: Run) -> None:
    run.write([{"prompt": "a"}, b"broken"])
    assert run() == 1
    before = run.output.stat().st_mtime_ns
    assert run() == 1
    assert "nothing to do" in run.log
    assert len(run.engines) == 1
    assert run.output.stat().st_mtime_ns == before
    assert run(overwrite=True) == 1
    assert len(run.engines) == 2


def test_killed_between_sorting_and_the_end(run: Run) -> None:
    """All rows are done, the partial file is still there: no model is loaded to finish the job."""
    run.write([{"prompt": f"p{i}"} for i in range(20)])
    original = ResultFile.finish
    try:
        ResultFile.finish = lambda self: (_ for _ in ()).throw(RuntimeError("killed"))  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="killed"):
            run()
    finally:
        ResultFile.finish = original  # type: ignore[method-assign]
    assert run() == 0
    assert len(run.engines) == 1
    assert len(run.results()) == 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"config": replace(CONFIG, sampling=SamplingParams(temperature=0.7))}, "sampling.temperature: 1.0 -> 0.7"),
        ({"config": replace(CONFIG, engine=EngineSection(seed=3))}, "engine.seed: 0 -> 3"),
        ({"config": replace(CONFIG, data=replace(RAW, system_prompt="S"))}, "data.system_prompt: none -> S"),
        ({"limit": 3}, "limit: none -> 3"),
        ({"input": True}, "input.sha256"),
        ({"config": replace(CONFIG, engine=EngineSection(kv_cache_tokens=300))}, "engine.kv_cache_tokens"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_a_different_job_is_refused_by_name(run: Run, change: dict[str, Any], named: str, finished: bool) -> None:
    run.write([{"prompt": f"p{i}"} for i in range(50)])
    if finished:
        run()
    else:
        with pytest.raises(RuntimeError):
            run(engine=StubEngine(fail_at=4))
    if "input" in change:
        run.write([{"prompt": f"q{i}"} for i in range(50)])
        change = {}
    kept = sorted(p.name for p in run.folder.iterdir())
    with pytest.raises(InputError) as caught:
        run(**change)
    assert named in caught.value.message
    assert "--overwrite" in (caught.value.hint or "")
    assert kept == sorted(p.name for p in run.folder.iterdir())
    assert run(**change, overwrite=True) == 0


def test_capacity_may_change_between_sessions(run: Run) -> None:
    run.write([{"prompt": f"p{i}"} for i in range(50)])
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=4))
    engine = EngineSection(max_batch_size=3, page_size=32, kv_cache_tokens=10**6, prefix_cache=False)
    assert run(replace(CONFIG, engine=engine)) == 0


def test_output_that_nobody_vouches_for(run: Run) -> None:
    run.write([{"prompt": "a"}])
    run.output.write_text("precious")
    with pytest.raises(InputError, match="exists") as caught:
        run()
    assert "--overwrite" not in str(caught.value.hint), "it is nothing that specbatch wrote"
    assert run.output.read_text() == "precious"
    partial_path(run.output).write_text("precious\n")
    with pytest.raises(InputError, match="was not written by specbatch"):
        run()
    assert partial_path(run.output).read_text() == "precious\n"


def test_an_output_that_was_made_while_the_job_was_stopped(run: Run) -> None:
    run.write([{"prompt": f"p{i}"} for i in range(50)])
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=4))
    run.output.write_text("precious\n")
    with pytest.raises(InputError, match=r"d\.results\.jsonl was not written by specbatch") as caught:
        run()
    assert "move it away" in (caught.value.hint or "")
    assert run.output.read_text() == "precious\n"
    run.output.unlink()
    assert run() == 0
    assert "resuming" in run.log


class InterruptedAtOnce(StubEngine):
    """Ctrl-C before a row has finished."""

    def step(self) -> list[Completion]:
        os.kill(os.getpid(), signal.SIGINT)
        return []


def test_no_file_is_named_that_is_not_kept(run: Run) -> None:
    run.write([{"prompt": "a"}])
    assert run(engine=InterruptedAtOnce()) == 130
    assert run.log.startswith("interrupted: no row is finished\nrun the same command again")
    assert os.listdir(run.folder) == ["d.jsonl"]


def test_a_linked_output_stays_a_link(run: Run) -> None:
    run.write([{"prompt": "a"}])
    (run.folder / "disk").mkdir()
    link, far = run.folder / "link.jsonl", run.folder / "disk" / "far.jsonl"
    link.symlink_to(far)
    assert run(output=link) == 0
    assert link.is_symlink()
    assert len(far.read_bytes().splitlines()) == 1
    assert sorted(os.listdir(run.folder / "disk")) == ["far.jsonl", "far.stats.json"]
    assert run(output=link) == 0, "finished already"
    assert len(run.engines) == 1


def test_the_partial_file_is_opened_through_no_link(run: Run) -> None:
    """Not even one that was made after the checks."""
    partial_path(run.output).symlink_to(run.folder / "other")
    with pytest.raises(InputError, match="symbolic links"):
        ResultFile(run.output, {}, overwrite=True)
    assert not (run.folder / "other").exists()


def test_impossible_outputs(run: Run) -> None:
    run.write([{"prompt": "a"}])
    with pytest.raises(InputError, match="is the input, so the output"):
        run(output=run.input)
    with pytest.raises(InputError, match="does not exist"):
        run(output=run.folder / "no" / "x.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        run(output=run.folder)
    assert not run.engines


def test_an_output_that_may_not_be_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write([{"prompt": "a"}])
    assert run() == 0
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert run() == 0, "finished already: nothing is written"
    with pytest.raises(InputError, match="is write-protected"):
        run(overwrite=True)
    assert len(run.engines) == 1


def test_a_full_disk_at_the_end_is_no_internal_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write([{"prompt": f"p{i}"} for i in range(5)])

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        with pytest.raises(InputError, match="No space left") as caught:
            run()
    assert "run the same command again" in (caught.value.hint or "")
    assert run() == 0
    assert len(run.engines) == 1
    assert len(run.results()) == 5


def test_two_processes_on_one_output(run: Run) -> None:
    run.write([{"prompt": "a"}])
    other = ResultFile(run.output, {}, overwrite=False)
    with pytest.raises(InputError, match="another process"):
        run()
    with pytest.raises(InputError, match="another process"):
        run(overwrite=True)
    other.close()
    assert not partial_path(run.output).exists()
    assert run() == 0


def test_limit_and_empty_inputs(run: Run) -> None:
    run.write([{"prompt": f"p{i}"} for i in range(10)])
    assert run(limit=3) == 0
    assert [r["index"] for r in run.results()] == [0, 1, 2]
    run.write([])
    assert run(overwrite=True) == 0
    assert run.results() == []
    assert len(run.engines) == 1


def test_simulated_results_are_marked_everywhere(run: Run) -> None:
    batch_line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    run.write([{"prompt": "p", "n": 2}, batch_line])
    assert run() == 0
    assert run.stats()["simulated"] is run.stats()["random_weights"] is False
    assert "simulated" not in run.output.read_text()
    assert "SIMULATED" not in run.log
    simulated = replace(CONFIG, speculation=SpeculationSection(simulate_acceptance=2.5))
    with pytest.raises(InputError, match=r"simulate_acceptance: none -> 2\.5"):
        run(simulated)
    assert run(simulated, overwrite=True) == 0
    native, batch = run.results()
    assert native["speculation"]["simulated"] is True
    assert [choice["speculation"]["simulated"] for choice in native["choices"]] == [True, True]
    assert batch["response"]["body"]["speculation"]["simulated"] is True
    assert run.stats()["simulated"] is True
    assert "SIMULATED acceptance of 2.5 tokens per round: the texts are not answers" in run.log


def measure_growth(run: Run, rows: int) -> float:
    """Growth of the resident set in MiB, at its most, over a job of `rows` rows; prints rows/s."""
    with run.input.open("w") as file:
        for i in range(rows):
            file.write(json.dumps({"prompt": f"row {i} " + "x" * 100, "id": i, "topic": "y" * 50}) + "\n")
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    most = 0
    step = StubEngine.step

    class Watched(StubEngine):
        def step(self) -> Any:
            nonlocal most
            if self._steps % 500 == 0:
                most = max(most, process.memory_info().rss)
            return step(self)

    began = time.perf_counter()
    assert run(engine=Watched(batch=64)) == 0
    print(f"{rows / (time.perf_counter() - began):.0f} rows/s")
    most = max(most, process.memory_info().rss)
    with run.output.open() as file:
        assert all(json.loads(line)["index"] == i for i, line in enumerate(file))
    return (most - before) / 2**20


@pytest.mark.wide
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    measure_growth(Run(small), 1_000)
    growth = measure_growth(Run(large), 10_000)  # about 3.5 MiB of results, several times that as objects
    assert growth < 6, growth


@pytest.mark.slow
def test_a_million_rows_stay_below_200_mb(tmp_path: Path) -> None:
    growth = measure_growth(Run(tmp_path), 1_000_000)
    print(
        f"{growth:.1f} MiB for 1,000,000 rows, {os.path.getsize(tmp_path / 'd.results.jsonl') / 2**20:.0f} MiB written"
    )
    assert growth < 200, growth


class RowLimits(StubEngine):
    """An engine for rows of `longest` tokens, where `capacity` fit."""

    def __init__(self, longest: int, capacity: int | None = None, fail_at: int = 0) -> None:
        super().__init__(max_prompt_tokens=longest - 1, capacity=capacity, fail_at=fail_at)


def _errors(run: Run) -> list[int]:
    return [row["index"] for row in run.results() if row["finish_reason"] == "error"]


def test_a_resumed_job_keeps_the_length_of_rows(run: Run) -> None:
    """Rows of 100 tokens are errors in the first session, and so they are in a second one that has more memory."""
    run.write([{"prompt": "x" * (100 if i % 3 == 0 else 5)} for i in range(60)])
    with pytest.raises(RuntimeError):
        run(engine=RowLimits(64, fail_at=4))
    assert run(engine=RowLimits(256)) == 1
    assert "longest row: 64 tokens, as in the first run" in run.log
    assert _errors(run) == list(range(0, 60, 3))


def test_a_resumed_job_that_does_not_fit_is_refused(run: Run) -> None:
    run.write([{"prompt": "x" * (100 if i % 3 == 0 else 5)} for i in range(60)])
    with pytest.raises(RuntimeError):
        run(engine=RowLimits(256, fail_at=4))
    with pytest.raises(ModelError, match="a row of 256 tokens does not fit"):
        run(engine=RowLimits(64))
    assert partial_path(run.output).exists(), "what is finished is kept"
    assert run(engine=RowLimits(64, capacity=300)) == 0, "a little less memory changes the default, and not the job"
    assert not _errors(run)


def test_a_job_that_was_killed_before_its_first_row_is_open(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of the length of rows, which nobody has measured."""
    run.write([{"prompt": "x" * 100}])
    monkeypatch.setattr(ResultFile, "close", lambda results: results._file.close())  # as kill -9
    monkeypatch.setattr(ResultFile, "settle_longest_row", lambda results, tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(engine=RowLimits(64))
    monkeypatch.undo()
    assert partial_path(run.output).exists()
    assert run(engine=RowLimits(256)) == 0


def test_a_lost_length_of_rows_is_said(run: Run) -> None:
    """Its line is damaged. A file that holds nothing else is removed."""
    run.write([{"prompt": f"p{i}"} for i in range(50)])
    with pytest.raises(RuntimeError):
        run(engine=RowLimits(64, fail_at=1))
    assert not partial_path(run.output).exists()
    with pytest.raises(RuntimeError):
        run(engine=RowLimits(64, fail_at=4))
    partial = partial_path(run.output).read_bytes()
    partial_path(run.output).write_bytes(partial.replace(b'longest_row": 64', b'longest_row": 65', 1))
    with pytest.raises(RuntimeError):
        run(engine=RowLimits(100, fail_at=3))
    assert "longest row: 100 tokens from now on" in run.log
    assert run(engine=RowLimits(256)) == 0
    assert "longest row: 100 tokens, as in the first run" in run.log
