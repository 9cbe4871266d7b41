"""The Python interface over the stub engine: the same results as the command, in either order, and clear errors."""

from __future__ import annotations

import gc
import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

import specbatch
from specbatch import LLM, generate_file
from specbatch.errors import ConfigError, InputError
from specbatch.scaleout.pool import Pool
from tests.scaleout.simulation import Simulation
from tests.stub_engine import StubEngine, StubRun, build_engine

TRUE_FREEZE_COUNT = gc.get_freeze_count  # conftest.py replaces it before the first test
ROWS: list[Any] = [
    *({"prompt": f"p{i}", "id": i, "temperature": 1.0} for i in range(60)),
    {"messages": [{"role": "user", "content": "hi"}], "n": 3, "temperature": 1.0},
    {"prompt": 7},
    {"prompt": "x", "logprobs": 1},
]


pytestmark = pytest.mark.usefixtures("stub")


def test_results_are_those_of_a_file_job() -> None:
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    report = generate_file("d.jsonl", max_batch_size=8)
    assert report.output == Path("d.results.jsonl")
    assert (report.num_rows, report.num_failed) == (len(ROWS), 1)
    with LLM(max_batch_size=8) as llm:
        results = list(llm.generate(ROWS))
        assert llm.stats.generated_tokens > 0
    assert results == list(report.results())
    assert [r["index"] for r in results] == list(range(len(ROWS)))


def test_results_as_they_finish_are_the_same_ones() -> None:
    with LLM(max_batch_size=8) as llm:
        in_order, unordered = list(llm.generate(ROWS)), list(llm.stream(ROWS, in_order=False))
    assert in_order != unordered
    assert in_order == sorted(unordered, key=lambda result: result["index"])


@pytest.mark.parametrize("in_order", [True, False])
def test_a_row_that_kills_its_workers_has_an_error(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specbatch.api.loaded_model.open_pool", lambda config, console: Pool(simulation, 2, clock=simulation.clock)
    )
    simulation = Simulation(batch=4, killers=[3])
    with LLM() as llm:
        results = sorted(llm.stream([f"p{i}" for i in range(20)], in_order=in_order), key=lambda r: r["index"])
    assert [r["index"] for r in results] == list(range(20))
    assert [r["index"] for r in results if "error" in r] == [3]
    assert results[3]["error"]["type"] == "worker_died"
    assert "died 3 times while it ran this row" in results[3]["error"]["message"]


def test_rows_are_read_as_they_are_needed() -> None:
    read = 0

    def rows() -> Iterator[str]:
        nonlocal read
        for read in range(1, 100_000):
            yield f"p{read}"

    with LLM(max_batch_size=4) as llm:
        results = llm.stream(rows())
        assert next(results)["index"] == 0
        assert read < 100
        with pytest.raises(InputError, match="running already"):
            llm.generate(["x"])
        results.close()
        assert [r["index"] for r in llm.generate(["a", "b"])] == [0, 1]


def test_lines_are_those_of_a_result_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "logprobs": i % 3} for i in range(20)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    with LLM() as llm:
        assert b"".join(llm.stream_lines(rows)) == report.output.read_bytes()
        unordered = llm.stream_lines(rows, in_order=False)
        assert sorted(unordered, key=lambda line: int(json.loads(line)["index"])) == list(llm.stream_lines(rows))
        unread = llm.stream_lines(["x"])
        assert list(llm.generate(["y"]))
        assert list(unread)


@pytest.fixture
def thawed_heap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thaw the heap, as it is in a user's program. The tests after this one are a tenth faster with a frozen heap."""
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", TRUE_FREEZE_COUNT)
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("thawed_heap")
@pytest.mark.wide
def test_the_heap_is_frozen_while_a_model_is_loaded() -> None:
    with LLM() as llm:
        assert gc.get_freeze_count() > 0
        list(llm.generate(["x"]))
        with LLM() as other:
            list(other.generate(["x"]))
        assert gc.get_freeze_count() > 0, "the second one had not frozen it"
    assert gc.get_freeze_count() == 0
    dropped = LLM()
    assert gc.get_freeze_count() > 0
    del dropped
    gc.collect()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed_heap")
def test_a_heap_that_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with LLM():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_an_engine_that_is_dropped_is_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts refer to each other, as graphs and rounds do. So it must not be part of the frozen heap."""
    engines: list[weakref.ref[StubEngine]] = []

    def build(run: StubRun, show: object) -> StubEngine:
        engine = build_engine(run, show)
        engine.itself = engine  # type: ignore[attr-defined]
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(sys.modules["specbatch.setup.build"], "build_engine", build)
    llm = LLM()
    list(llm.generate(["x"]))
    del llm
    gc.collect()
    assert engines[0]() is None


def test_after_an_interrupt_the_model_runs_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when a step has taken completions from the engine, and has not returned them."""
    step = StubEngine.step
    calls_after: int | None = None  # calls after the signal

    def interrupted(self: StubEngine) -> Any:
        nonlocal calls_after
        done = step(self)
        if calls_after is not None:
            calls_after += 1
            assert calls_after < 10000, "the engine waits for a completion that is lost"
        elif done:
            calls_after = 0
            signal.raise_signal(signal.SIGINT)
        return done

    # A process that a shell started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LLM(max_batch_size=8) as llm:
            expected = list(llm.generate(ROWS))
            monkeypatch.setattr(StubEngine, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(llm.generate(ROWS))
            assert list(llm.generate(ROWS)) == expected
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_works_where_signals_are_handled_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_handler(number: int, handler: object) -> None:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")

    with LLM() as llm:
        monkeypatch.setattr(signal, "getsignal", lambda number: None)
        monkeypatch.setattr(signal, "signal", set_handler)
        assert len(list(llm.generate(ROWS))) == len(ROWS)


def test_two_iterators_do_not_take_each_others_rows() -> None:
    with LLM(max_batch_size=4) as llm:
        first, second = llm.stream([f"p{i}" for i in range(30)]), llm.stream(["q"])
        next(first)
        with pytest.raises(InputError, match="running already"):
            next(second)
        assert len(list(first)) == 29


def test_prompts_that_are_no_rows_are_refused() -> None:
    with LLM() as llm:
        with pytest.raises(InputError, match="row 1 is of type int"):
            list(llm.generate(["x", 3]))
        assert len(list(llm.generate(["x"]))) == 1


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", float("inf"), {("a", 1): 2}])
def test_values_that_json_has_not_are_refused(value: object) -> None:
    with LLM() as llm, pytest.raises(InputError, match="row 1 is not JSON: "):
        list(llm.generate(["x", {"prompt": "y", "note": value}]))


def test_a_closed_model_runs_nothing() -> None:
    with LLM() as llm:
        begun = llm.stream(["a", "b"])
        assert next(begun)["index"] == 0
    with pytest.raises(InputError, match="closed"):
        llm.generate(["x"])
    with pytest.raises(InputError, match="closed"):
        list(begun)
    assert llm.stats.generated_tokens > 0


@pytest.mark.parametrize("num_after", [0, 3])
def test_the_rows_can_close_the_model(num_after: int) -> None:
    """Nobody prepares the rows that wait then."""
    llm = LLM()

    def rows() -> Iterator[str]:
        yield from "abc"
        llm.close()
        yield from "d" * num_after

    with pytest.raises(InputError, match="closed"):
        list(llm.generate(rows()))


def test_close_frees_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another model has room, while the closed LLM still exists."""
    engines: list[weakref.ref[StubEngine]] = []

    def build(run: StubRun, show: object) -> StubEngine:
        engine = build_engine(run)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(sys.modules["specbatch.setup.build"], "build_engine", build)
    with LLM() as llm:
        assert len(list(llm.generate(["x"]))) == 1
        assert engines[0]() is not None
    assert engines[0]() is None
    assert llm.stats.generated_tokens > 0


def test_a_row_that_kills_its_workers_does_not_stop_a_long_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """More results than are held wait for it."""
    monkeypatch.setattr(
        "specbatch.api.loaded_model.open_pool", lambda config, console: Pool(simulation, 2, clock=simulation.clock)
    )
    simulation = Simulation(batch=100, killers=[3], seconds_of=lambda index: 0.01)
    with LLM() as llm:
        results = [result["index"] for result in llm.stream(f"p{i}" for i in range(11_500))]
    assert results == list(range(11_500))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"the option seed could be .*engine\.seed"),
        ({"max_batch": 8}, "there is no option max_batch"),
        ({"max_batch_size": 0}, r"engine\.max_batch_size"),
        ({"speculation.num_steps": "three"}, r"speculation\.num_steps"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_options_have_whole_names_and_short_ones() -> None:
    with LLM(**{"sampling.seed": 5}, temperature=1.0) as seeded, LLM(temperature=1.0) as plain:
        row = {"prompt": "p", "seed": 5}
        assert seeded.generate(["p"])[0]["text"] != plain.generate(["p"])[0]["text"]
        assert plain.generate([row])[0]["usage"]["completion_tokens"] > 0


def test_a_finished_job_is_not_run_again_and_an_interrupted_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setenv("STUB_FAIL_AT", "4")
    with pytest.raises(RuntimeError, match="broke"):
        generate_file("d.jsonl", "out.jsonl")
    monkeypatch.delenv("STUB_FAIL_AT")
    report = generate_file("d.jsonl", "out.jsonl")
    assert report.stats["session"]["resumed_rows"] > 0
    monkeypatch.setenv("STUB_FAIL_AT", "1")
    assert generate_file("d.jsonl", "out.jsonl").stats == report.stats


def test_a_shard_has_its_own_rows() -> None:
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    report = generate_file("d.jsonl", shard="1/10")
    assert report.output == Path("d.results.01-of-10.jsonl")
    assert [r["index"] for r in report.results()] == list(range(1, len(ROWS), 10))


def test_it_works_in_a_thread() -> None:
    """Python allows handlers of signals in the main thread only."""
    Path("d.jsonl").write_text('{"prompt": "x"}\n')
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(generate_file("d.jsonl")))
    thread.start()
    thread.join()
    assert reports[0].num_rows == 1


def test_the_package_imports_no_torch() -> None:
    code = "import sys, specbatch; assert 'torch' not in sys.modules; from specbatch import LLM"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        _ = specbatch.llm


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(specbatch.__file__).resolve().parent.parent
    if not (root / "README.md").is_file():
        pytest.skip("no checkout")
    (code,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 4, printed
    assert "tokens per round" in printed[-1]


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(specbatch.__file__).resolve().parent.parent
    page = root / "docs" / "python.md"
    if not page.is_file():
        pytest.skip("no checkout")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    Path("examples").symlink_to(root / "examples")
    exec(compile("\n".join(blocks), page.name, "exec", dont_inherit=True), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert printed.startswith("None ")
    assert "\ncapital " in printed
    assert "\nanswers.jsonl 12 0\n" in printed
    assert re.search(r"^there is no option max_batch did you mean .*\?$", printed, re.MULTILINE)


def test_one_text_is_one_row_and_a_table_its_rows() -> None:
    frame = pandas.DataFrame({"prompt": ["p0", "p1"], "id": [5, 6], "temperature": [1.0, None]})
    with LLM() as llm:
        (alone,) = llm.generate("p0")
        (as_dict,) = llm.generate({"prompt": "p0"})
        assert alone == as_dict == llm.generate(["p0"])[0]
        assert [(r["id"], r["index"]) for r in llm.generate(frame)] == [(5, 0), (6, 1)]
        assert list(llm.generate(frame)) == list(
            llm.generate([{"prompt": "p0", "id": 5, "temperature": 1}, {"prompt": "p1", "id": 6}])
        )
        with pytest.raises(InputError, match="of type NoneType"):
            llm.generate(None)
