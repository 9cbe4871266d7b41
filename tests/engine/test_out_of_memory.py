"""Memory that runs out while rows run: no text changes, nothing is lost, and what cannot go on says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.engine.executor import RoundBatch
from specbatch.engine.prefill.models import EAGER
from specbatch.engine.reports import Report
from specbatch.engine.round import Launched, Round
from specbatch.errors import MemoryShortage
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.engine.graphs import Replays, Shortage
from tests.engine.test_constrained import requests as grammar_requests
from tests.grammar.tiny_tokenizer import END
from tests.tiny_models import random_prompts, run, steps_until, tiny_device_engine, tiny_engine, tiny_oracle

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(3, 4, 8)
CASES = [("ngram", CHAIN), ("draft_model", CHAIN), ("eagle3", TREE)]
GREEDY = SamplingParams(max_tokens=7)
SAMPLED = SamplingParams(max_tokens=7, temperature=0.9, top_p=0.9, logprobs=2)


def run_short(engine: Engine, prompts: list[list[int]], params: SamplingParams, mode: Shortage) -> dict[int, Any]:
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    done: dict[int, Completion] = {}
    for _ in steps_until(done, len(prompts)):
        with mode:
            finished = engine.step()
        done |= {completion.request_id: completion for completion in finished}
        engine.check_integrity()
    return done


def compare(done: dict[int, Completion], expected: list[Completion]) -> None:
    assert [done[i].token_ids for i in range(len(expected))] == [c.token_ids for c in expected]
    assert [done[i].finish_reason for i in range(len(expected))] == [c.finish_reason for c in expected]
    assert [done[i].speculation for i in range(len(expected))] == [c.speculation for c in expected]
    for i, theirs in enumerate(expected):
        mine = [one.logprob for one in done[i].logprobs or []]
        assert mine == pytest.approx([one.logprob for one in theirs.logprobs or []], abs=1e-6)


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


PROMPTS = random_prompts(3, shared=9, longest=30)
SETTINGS: dict[str, Any] = {"num_pages": 128, "eos": (5,), "prefill_chunk_tokens": 24}


@cache
def by_the_oracle(method: str, shape: DraftShape | None, params: SamplingParams) -> list[Completion]:
    return run(tiny_oracle(method, shape, **SETTINGS), PROMPTS, params)


def check_shortages(
    method: str, shape: DraftShape | None, params: SamplingParams, runs: int, padded: bool, cpu: bool = False
) -> None:
    """Chunks of prompts, in pieces too, and rounds: each run with a shortage at some operation, others soon after it,
    and one in the first chunk."""
    prompts = PROMPTS

    def made() -> Engine:
        if cpu:
            return tiny_engine(method, shape, **SETTINGS)
        return tiny_device_engine(method, shape, **SETTINGS, graph_tokens=128 if padded else 0)

    expected = by_the_oracle(method, shape, params)
    whole = Shortage()
    compare(run_short(made(), prompts, params, whole), expected)
    failed = 0
    for first in random.Random(len(method)).sample(range(1, whole.count), runs):
        # Four in a row end the run, as they should: the first chunk has its own only if it is far from the others.
        mode = Shortage({first, first + 7, first + 90} | ({40} if first > whole.count // 2 else set()))
        engine = made()
        compare(run_short(engine, prompts, params, mode), expected)
        assert engine.stats.memory_shortages == mode.raised
        assert engine.stats.prompt_tokens == sum(map(len, prompts))
        failed += mode.raised
    assert failed > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_operations_run_out(method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    check_shortages(method, shape, params, runs=1, padded=params is GREEDY)
    check_shortages(method, shape, params, runs=1, padded=False, cpu=True)


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("runs", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_operations_of_a_hybrid_run_out(runs: int, cpu: bool) -> None:
    """Some layers have replayed the last round then, and others not. Checkpoints that were not written are not used."""
    settings: dict[str, Any] = {**SETTINGS, "family": "qwen3.5", "num_layers": 3}
    make = tiny_engine if cpu else tiny_device_engine
    expected = run(tiny_engine("none", **settings, prefix_cache=False), PROMPTS, GREEDY)
    whole = Shortage()
    run_short(make("ngram", CHAIN, **settings), PROMPTS, GREEDY, whole)
    for first in random.Random(runs).sample(range(1, whole.count), runs):
        mode = Shortage({first, first + 90})
        done = run_short(make("ngram", CHAIN, **settings), PROMPTS, GREEDY, mode)
        assert [done[i].token_ids for i in range(len(expected))] == [c.token_ids for c in expected]
        assert mode.raised > 0


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["as they are", "padded"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), [*CASES, ("draft_model", TREE)])
def test_many_operations_run_out(method: str, shape: DraftShape | None, params: SamplingParams, padded: bool) -> None:
    check_shortages(method, shape, params, runs=60, padded=padded)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_a_graph_that_does_not_fit(method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    """That batch runs eagerly, its capture is not tried again, and the other sizes are graphs as ever. Rows enter and
    leave while the capture breaks off."""
    prompts = random_prompts(5, shared=9, longest=30)
    settings: dict[str, Any] = {"num_pages": 256, "eos": (5,)}
    expected = run(tiny_oracle(method, shape, **settings), prompts, params)
    engine = tiny_device_engine(method, shape, **settings)
    executor = engine.executor
    runner = Replays(lambda key: key[1] == 4)
    executor.mode, executor.runner = "round", runner  # type: ignore[assignment]
    done = run(engine, prompts, params)
    compare(dict(enumerate(done)), expected)
    assert [key[1] for key in runner.tried].count(4) == 1
    assert runner.num_replays > 0
    assert 4 not in {key[1] for key in runner._captured}
    assert engine.stats.memory_shortages == 0, "nothing had to become smaller"
    for key in runner._captured:
        assert isinstance(runner.outputs[key], Launched), "what else a round leaves is memory of other sizes"


def test_prompts_whose_graph_does_not_fit() -> None:
    prompts = random_prompts(5, shared=9, longest=30)
    settings: dict[str, Any] = {"num_pages": 256, "eos": (5,)}
    expected = run(tiny_oracle("draft_model", CHAIN, **settings), prompts, GREEDY)
    engine = tiny_device_engine("draft_model", CHAIN, **settings, graph_tokens=128)
    engine.executor.mode = "round"
    engine.prompts.runner = runner = Replays(lambda key: True)  # type: ignore[assignment]
    compare(dict(enumerate(run(engine, prompts, GREEDY))), expected)
    assert len(runner.tried) == len(set(runner.tried)) > 1
    assert not runner.num_replays


def test_batches_become_smaller_and_stay_so() -> None:
    prompts = random_prompts(12, longest=12)
    settings: dict[str, Any] = {"num_pages": 256, "max_batch_size": 8}
    expected = run(tiny_oracle("draft_model", CHAIN, **settings), prompts, GREEDY)
    engine = tiny_device_engine("draft_model", CHAIN, **settings)
    executor, most = engine.executor, []
    launch = executor.run

    def short(batch: RoundBatch) -> Report:
        most.append(len(batch.sequences))
        if len(batch.sequences) > 3:
            with Shortage({200}):
                return launch(batch)
        return launch(batch)

    executor.run = short  # type: ignore[method-assign]
    compare(dict(enumerate(run(engine, prompts, GREEDY))), expected)
    assert most[:3] == [8, 4, 2]
    assert max(most[2:]) == 2
    assert engine.stats.memory_shortages == 2
    assert engine.stats.preemptions == 6


@pytest.mark.parametrize("make", [tiny_engine, tiny_device_engine])
def test_a_round_that_runs_out_after_the_commit(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The request table has advanced by tokens that nobody reads: it is set back, and the round runs again."""
    prompts = random_prompts(3, longest=12)
    expected = run(tiny_oracle("draft_model", CHAIN, num_pages=256), prompts, GREEDY)
    engine, extend, calls = make("draft_model", CHAIN, num_pages=256), Round.extend, 0

    def short(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            _no_memory()
        extend(*args)

    monkeypatch.setattr(Round, "extend", short)
    compare(dict(enumerate(run(engine, prompts, GREEDY))), expected)
    assert engine.stats.memory_shortages == 1


def test_graphs_go_before_the_job_does() -> None:
    """One row alone does not fit beside them. The round that still runs is read first: it may be one of theirs."""
    prompts = random_prompts(3, longest=12)
    settings: dict[str, Any] = {"num_pages": 256, "max_batch_size": 1}
    expected = run(tiny_oracle("draft_model", CHAIN, **settings), prompts, GREEDY)
    engine = tiny_device_engine("draft_model", CHAIN, **settings)
    executor = engine.executor
    executor.mode, executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    launch, release, unread = executor.run, executor.release_graphs, []

    def short(batch: RoundBatch) -> Report:
        if executor.runner is not None and engine.stats.rounds >= 3:
            _no_memory()
        return launch(batch)

    def give_back() -> bool:
        unread.append(len(engine._in_flight))
        return release()

    executor.run, executor.release_graphs = short, give_back  # type: ignore[method-assign]
    compare(dict(enumerate(run(engine, prompts, GREEDY))), expected)
    assert executor.runner is None
    assert executor.mode == "none"
    assert unread == [0]
    assert engine.stats.memory_shortages == 1


def test_graphs_of_prompts_go_where_rounds_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(3, longest=12)
    expected = run(tiny_oracle("none", None, num_pages=256), prompts, GREEDY)
    engine = tiny_engine("none", None, num_pages=256, piece_sizes=(16, 64))
    prefill = Round.prefill

    def short(*args: Any) -> Any:
        return prefill(*args) if args[-1] is EAGER else _no_memory()

    monkeypatch.setattr(Round, "prefill", short)
    compare(dict(enumerate(run(engine, prompts, GREEDY))), expected)
    assert engine.stats.memory_shortages > 0


@pytest.mark.parametrize("part", ["rounds", "prompts"])
def test_what_does_not_fit_at_all_ends_the_job_with_an_error(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_device_engine("none", None, num_pages=256)
    monkeypatch.setattr(Round, "begin" if part == "rounds" else "prefill", _no_memory)
    with pytest.raises(MemoryShortage, match="memory ran out") as caught:
        run(engine, random_prompts(5), GREEDY)
    assert "finished rows are kept" in (caught.value.hint or "")
    assert engine.stats.memory_shortages <= 12


def _no_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")


def test_an_error_that_is_none_of_memory_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Round, "prefill", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(tiny_device_engine("none", None), random_prompts(2), GREEDY)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_meant(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_an_error_over_one_of_memory_is_one() -> None:
    """A capture that breaks off for want of memory may end with another error."""
    with pytest.raises(RuntimeError) as caught:
        _broken_capture()
    assert is_out_of_memory(caught.value)


def _broken_capture() -> None:
    try:
        _no_memory()
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_cpu_goes_on_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that does not fit is tried again with fewer requests; where none fits, the job ends with an error."""
    prompts, limit = random_prompts(4), [2]
    begin = Round.begin

    def short(round_: Round, req_idx_B: Tensor, *args: Any) -> Any:
        if len(req_idx_B) > limit[0]:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 8")
        return begin(round_, req_idx_B, *args)

    expected = run(tiny_oracle("draft_model", CHAIN, num_pages=256), prompts, GREEDY)
    monkeypatch.setattr(Round, "begin", short)
    engine = tiny_engine("draft_model", CHAIN, num_pages=256)
    compare(dict(enumerate(run(engine, prompts, GREEDY))), expected)
    assert engine.stats.memory_shortages == 1
    limit[0] = 0
    with pytest.raises(MemoryShortage, match="the machine's memory ran out while 1 rows ran"):
        run(engine, prompts, GREEDY)


@pytest.mark.parametrize("make", [tiny_engine, tiny_device_engine])
def test_a_round_that_can_be_begun_and_never_be_closed(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with grammars."""

    def finish(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(Round, "finish", finish)
    engine = make("ngram", CHAIN, eos=(END,), max_batch_size=2)
    for request in grammar_requests((0.0,), ["schema", "regex"]):
        engine.submit(request)
    with pytest.raises(MemoryShortage):
        steps(engine, 50)
