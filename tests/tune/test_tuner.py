"""The parts of a tuning that take time: in which order, for how long, and what is cached of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from specbatch.draft.schedule import ByBatch
from specbatch.errors import TuningError
from specbatch.tune import tuner as tuner_module
from specbatch.tune.costs import Measurement
from specbatch.tune.session import OutOfTime
from specbatch.tune.trace import RowTrace, Trace
from specbatch.tune.tuner import SearchLimits, TuneCache, Tuner, spread_out


class Clock:
    """Moves by itself alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(tuner_module, "time", SimpleNamespace(perf_counter=lambda: self.now))


def tracing_tuner(
    folder: Path,
    num_rows: int,
    trace_one: Callable[[int], Trace],
    logged: list[str] | None = None,
    places: int = 4,
    max_tokens: int = 10,
    on_cuda: bool = True,
) -> Tuner:
    """Of up to `places` rows at once, row i is request i. `trace_one` traces it."""

    def trace(requests: list[int], topk: int, depth: int, until: float) -> Trace:
        rows = [row for request in requests for row in trace_one(request).rows]
        return Trace(tuple(rows), 0, 0)

    session: Any = SimpleNamespace(trace=trace, on_cuda=on_cuda)
    run: Any = SimpleNamespace(engine=SimpleNamespace(max_batch_size=places))
    sample: Any = SimpleNamespace(to_trace=[*range(num_rows)], max_tokens=max_tokens)
    return Tuner(
        session,
        run,
        SearchLimits(0, 0, 2, 64),
        sample,
        TuneCache(folder, {}),
        [].append if logged is None else logged.append,
    )


def traced(num_output: int, row: int) -> Trace:
    return Trace((RowTrace(1, np.full(1 + num_output, row, np.int32)),), 0, 0)


def rows_of(trace: Trace | None) -> list[int]:
    assert trace is not None
    return [int(row.tokens[0]) for row in trace.rows]


def test_rows_are_traced_in_batches_until_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, logged = Clock(monkeypatch), list[str]()

    def trace_one(row: int) -> Trace:
        clock.now += 1.0
        return traced(5, row)

    # A third batch would end at 12 seconds.
    found = tracing_tuner(tmp_path, 20, trace_one, logged).trace(11.0)
    assert rows_of(found) == [*range(8)]
    assert logged == ["traced 8 of 20 rows: the next would exceed the budget"]
    # It goes on from there. A second batch of these would end at 8 seconds.
    found = tracing_tuner(tmp_path, 20, trace_one, logged).trace(7.0)
    assert rows_of(found) == [*range(12)]
    assert logged[1] == "8 rows were traced before"
    found = tracing_tuner(tmp_path, 20, trace_one).trace(8.0)
    assert rows_of(found) == [*range(20)]
    assert clock.now == 20.0


def test_a_cpu_with_little_time_begins_with_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, batches = Clock(monkeypatch), list[int]()

    def trace_one(row: int) -> Trace:
        clock.now += 1.0
        return traced(5, row)

    for seconds, on_cuda, first in ((30.0, False, 4), (30.0, True, 16), (300.0, False, 16)):
        tuner = tracing_tuner(tmp_path / f"{seconds}{on_cuda}", 40, trace_one, places=16, on_cuda=on_cuda)
        trace = Mock(side_effect=tuner.session.trace)
        monkeypatch.setattr(tuner.session, "trace", trace)
        tuner.trace(seconds)
        batches.append(len(trace.call_args_list[0].args[0]))
        assert batches[-1] == first


def test_a_batch_that_goes_past_the_budget_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, logged = Clock(monkeypatch), list[str]()

    def trace_one(row: int) -> Trace:
        clock.now += 1.0
        if row >= late:
            raise OutOfTime
        return traced(5, row)

    late = 6
    assert rows_of(tracing_tuner(tmp_path, 20, trace_one, logged).trace(1e9)) == [*range(4)]
    assert logged == ["traced 4 of 20 rows: the next would exceed the budget"]
    late = 2
    with pytest.raises(TuningError, match=r"the budget is too small: 4 rows were not finished after 3\.0 s") as error:
        tracing_tuner(tmp_path / "other", 20, trace_one).trace(1e9)
    assert error.value.hint is not None
    assert "--budget" in error.value.hint


def test_long_rows_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "_MAX_POSITIONS", 100)
    logged = list[str]()
    found = tracing_tuner(tmp_path, 20, lambda row: traced(10, row), logged).trace(1e9)
    assert rows_of(found) == [*range(8)], "twelve would be too long"
    assert logged == ["traced 8 of 20 rows: they are long, and more would take too much memory"]
    # Again: there are no more, and nothing is written.
    keep = Mock()
    monkeypatch.setattr(TuneCache, "save_trace", keep)
    assert rows_of(tracing_tuner(tmp_path, 20, lambda row: traced(10, row)).trace(1e9)) == [*range(8)]
    assert not keep.called


def test_the_first_batch_is_as_small_as_rows_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "_MAX_POSITIONS", 100)
    batches = list[int]()

    def trace_one(row: int) -> Trace:
        batches.append(row)
        return traced(20, row)

    # Of ten rows of ten tokens at once; a row may have ten, and has twenty.
    found = tracing_tuner(tmp_path, 64, trace_one, places=64).trace(1e9)
    assert len(found.rows) == len(batches) == 10
    found = tracing_tuner(tmp_path / "long", 64, trace_one, places=64, max_tokens=1000).trace(1e9)
    assert len(found.rows) == 4, "the fewest that log something"
    # They might have been long: 4, and then as many at once as have ended.
    tuner = tracing_tuner(tmp_path / "short", 64, lambda row: traced(1, row), places=64, max_tokens=1000)
    trace = Mock(side_effect=tuner.session.trace)
    monkeypatch.setattr(tuner.session, "trace", trace)
    assert len(tuner.trace(1e9).rows) == 64
    assert [len(call.args[0]) for call in trace.call_args_list] == [4, 4, 8, 16, 32]


def test_short_rows_before_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first long ones come, no more run than had ended: 4, 4, and then 8."""
    monkeypatch.setattr(tuner_module, "_MAX_POSITIONS", 100)
    logged = list[str]()
    tuner = tracing_tuner(tmp_path, 64, lambda row: traced(10 if row > 3 else 1, row), logged, 64, max_tokens=1000)
    assert len(tuner.trace(1e9).rows) == 16
    assert logged == ["traced 16 of 64 rows: they are long, and more would take too much memory"]


def test_one_sampled_batch_of_two(tmp_path: Path) -> None:
    tuner = tracing_tuner(tmp_path, 8, lambda row: traced(1, row))
    batches = [replace(traced(1, row), sampled=row == 0) for row in range(2)]
    tuner.session.trace = Mock(side_effect=[replace(w, rows=w.rows * 4) for w in batches])  # type: ignore[method-assign]
    assert tuner.trace(1e9).sampled


@pytest.mark.parametrize("places", [1, 4])
def test_the_first_rows_are_traced_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: int) -> None:
    monkeypatch.setattr(tuner_module, "_MAX_POSITIONS", 1)
    found = tracing_tuner(tmp_path, 20, lambda row: traced(10, row), places=places).trace(0.0)
    assert rows_of(found) == [*range(4)]


@pytest.mark.parametrize("broken", [KeyboardInterrupt, RuntimeError])
def test_traced_rows_are_cached(tmp_path: Path, broken: type[BaseException]) -> None:
    def trace_one(row: int) -> Trace:
        if row == 9:
            raise broken
        return traced(5, row)

    with pytest.raises(broken):
        tracing_tuner(tmp_path, 20, trace_one).trace(1e9)
    assert rows_of(TuneCache(tmp_path, {}).load_trace()) == [*range(8)], "whole batches"


def test_traces_are_saved_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time all of them are written: not after every batch."""
    clock, keep = Clock(monkeypatch), Mock()

    def trace_one(row: int) -> Trace:
        clock.now += 1.5
        return traced(5, row)

    monkeypatch.setattr(TuneCache, "save_trace", keep)
    tracing_tuner(tmp_path, 20, trace_one).trace(1e9)
    assert [len(call.args[0].rows) for call in keep.call_args_list] == [8, 16, 20]


def test_batch_sizes_from_both_ends() -> None:
    assert [spread_out(largest) for largest in (1, 2, 3, 6)] == [[1], [1, 2], [1, 3, 2], [1, 6, 2, 4]]
    assert spread_out(256) == [1, 256, 16, 4, 64, 2, 8, 32, 128]
    assert sorted(spread_out(200)) == [1, 2, 4, 8, 16, 32, 64, 128, 200]


def timing_tuner(
    session: Any,
    time_one: Callable[[str, int], bool],
    cache: TuneCache,
    log: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Tuner:
    """Of up to 64 rows. `time_one` is told of each kind and batch size, and says whether the cache holds so many."""

    def timing(kind: str) -> Callable[..., list[Measurement]]:
        return lambda session, batch, *rest: [Measurement(kind, batch, 1, 1.0)] if time_one(kind, batch) else []

    monkeypatch.setattr(tuner_module, "time_batch", timing("verify"))
    monkeypatch.setattr(tuner_module, "time_plain", timing("plain"))
    monkeypatch.setattr(tuner_module, "time_prompts", lambda session, chunk: [Measurement("prefill", 1, 1, 1.0)])
    run: Any = SimpleNamespace(engine=SimpleNamespace(max_batch_size=64, prefill_chunk_tokens=32))
    sample: Any = SimpleNamespace()
    return Tuner(session, run, SearchLimits(1, 1, 2, 64), sample, cache, log)


@pytest.mark.parametrize(
    ("fitting", "seconds", "before", "timed"),
    [
        (64, 1e9, [], [1, 64, 8, 2, 16, 4, 32]),
        (64, 0.0, [], [1, 64]),  # the ends in any case
        (20, 0.0, [], [1, 16]),  # the cache does not hold 64 or 32 rows
        (40, 0.0, [], [1, 32]),  # not 64, and the next is tried
        (64, 0.0, [1, 64], []),
        (64, 0.0, [1], [64]),
        (64, 1e9, [1, 64, 8, 2], [16, 4, 32]),
        (20, 1e9, [1, 16, 4], [2, 8]),
        (0, 1e9, [], None),
    ],
)
@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
def test_sizes_that_are_timed(
    on_cuda: bool,
    fitting: int,
    seconds: float,
    before: list[int],
    timed: list[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, list[int]] = {"plain": [], "verify": []}

    def time_one(kind: str, batch: int) -> bool:
        if batch > fitting:
            return False
        assert kind == "plain" or not on_cuda or found["plain"] or before, "plain rounds come first"
        assert used or before or not on_cuda, "kernels are compiled first"
        found[kind].append(batch)
        return True

    used: list[object] = []
    session = SimpleNamespace(on_cuda=on_cuda, use=used.append)
    cache, logged = TuneCache(tmp_path / "cache", {}), list[str]()
    kinds = ["plain", "verify"] if on_cuda else ["verify"]
    if before:
        cache.save_costs([Measurement(kind, batch, 1, 1.0) for kind in kinds for batch in before])
    tuner = timing_tuner(session, time_one, cache, logged.append, monkeypatch)
    if timed is None:
        with pytest.raises(TuningError, match="not even one row"):
            tuner.measure(100, seconds)
        return
    measured = tuner.measure(100, seconds)
    assert found == {"plain": timed if on_cuda else [], "verify": timed}
    for kind in kinds:
        assert [m.batch for m in measured if m.kind == kind] == [*before, *timed]
    assert [m.batch for m in cache.load_costs()] == [m.batch for m in measured]
    assert any("larger ones are extrapolated" in line for line in logged) == (fitting < 64)


@pytest.mark.parametrize(
    ("compiling", "each", "plain", "verify"),
    [
        (100.0, 1.0, [1, 64, 8, 2, 16, 4, 32], [1, 64]),  # no time of the plain rounds' own, but the rest's
        (0.0, 4.0, [1, 64, 8], [1, 64, 8, 2, 16]),  # a third of 30 s, and what is left of them
        (0.0, 0.1, [1, 64, 8, 2, 16, 4, 32], [1, 64, 8, 2, 16, 4, 32]),
    ],
)
def test_plain_rounds_have_a_third_of_the_time_and_what_is_compiled_is_no_part_of_it(
    compiling: float, each: float, plain: list[int], verify: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, found = [0.0], list[tuple[str, int]]()

    def use(schedule: ByBatch[None]) -> None:
        assert schedule == ByBatch.always(None)
        assert not found, "before anything is timed"
        now[0] += compiling

    def time_one(kind: str, batch: int) -> bool:
        now[0] += each
        found.append((kind, batch))
        return True

    monkeypatch.setattr(tuner_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    session = SimpleNamespace(on_cuda=True, use=use)
    cache = TuneCache(tmp_path / "cache", {})
    timing_tuner(session, time_one, cache, lambda line: None, monkeypatch).measure(100, 30.0)
    assert found == [*(("plain", batch) for batch in plain), *(("verify", batch) for batch in verify)]
