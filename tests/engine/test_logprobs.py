"""Rows with log-probabilities among others: in graphs, with as many of the most likely tokens as some row wants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specbatch.draft.shape import DraftShape
from specbatch.engine import executor
from specbatch.engine.engine import Engine
from specbatch.engine.executor import GraphMode
from specbatch.engine.logprobs import num_top_of
from specbatch.kernels import torch as reference
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.engine.graphs import Replays, assert_close_logprobs
from tests.oracle.engine import OracleEngine
from tests.tiny_models import random_prompts, tiny_device_engine, tiny_oracle

CASES = [("none", None), ("ngram", DraftShape(3, 1, 4)), ("eagle3", DraftShape(3, 4, 8))]
GREEDY = SamplingParams(max_tokens=8)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, seed=4)
WANTED = [None, 0, 3, 1, None, 20]
SETTINGS: dict[str, Any] = {"num_pages": 256, "max_batch_size": 4}


def run_mixed(engine: Engine | OracleEngine, params: SamplingParams, wanted: list[int | None]) -> list[Completion]:
    for i, (prompt, logprobs) in enumerate(zip(random_prompts(len(wanted), shared=6), wanted, strict=True)):
        engine.submit(Request(i, prompt, replace(params, logprobs=logprobs), RngKey(4, i, 0)))
    done: dict[int, Completion] = {}
    while len(done) < len(wanted):
        done |= {completion.request_id: completion for completion in engine.step()}
    return [done[i] for i in range(len(wanted))]


def check_mixed(engine: Engine, method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    found = run_mixed(engine, params, WANTED)
    expected = run_mixed(tiny_oracle(method, shape, **SETTINGS), params, WANTED)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert_close_logprobs(found, expected)
    for completion, number in zip(found, WANTED, strict=True):
        assert (completion.logprobs is None) == (number is None)
        assert all(len(one.top) == number for one in completion.logprobs or ())
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.parametrize(
    ("wanted", "num_top"),
    [([None], None), ([None, 0], 0), ([1, 0, None], 1), ([2], 5), ([5, 1], 5), ([6], 20), ([20], 20), ([], None)],
)
def test_how_many_are_found(wanted: list[int | None], num_top: int | None) -> None:
    assert num_top_of(wanted) == num_top


@pytest.mark.parametrize(
    ("method", "shape", "mode", "params"),
    [
        ("none", None, "round", SAMPLED),
        ("ngram", CASES[1][1], "round", GREEDY),
        ("eagle3", CASES[2][1], "round", GREEDY),
        ("eagle3", CASES[2][1], "round", SAMPLED),
    ],
)
def test_graphs_hold_log_probabilities(
    method: str, shape: DraftShape | None, mode: GraphMode, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No round is eager: each is captured when the first batch of its kind comes, and replayed from then on."""
    engine = tiny_device_engine(method, shape, **SETTINGS)
    engine.executor.mode = mode
    engine.executor.runner = runner = Replays(lambda key: False)  # type: ignore[assignment]
    monkeypatch.setattr(executor, "_restoring", None)  # only rounds that are no graphs call it
    check_mixed(engine, method, shape, params)
    kinds = {key[3].num_top for key in runner._captured}
    assert {5, 20} <= kinds <= {None, 0, 1, 5, 20}
    assert runner.num_replays > len(runner._captured)
    assert len(runner.tried) == len(set(runner.tried)), "a graph was captured twice"


def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch looks for the most likely tokens because another one did."""
    asked: list[int] = []
    logprobs = reference.logprobs

    def noted(logits: Any, index: Any, tokens: Any, num_top: int) -> Any:
        asked.append(num_top)
        return logprobs(logits, index, tokens, num_top)

    monkeypatch.setattr(reference, "logprobs", noted)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    engine = tiny_device_engine("none", None, **SETTINGS)
    for wanted in (None, 0, 1):
        run_mixed(engine, GREEDY, [wanted] * 3)
        assert set(asked) == {wanted} - {None}
        asked.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_on_a_gpu(
    method: str, shape: DraftShape | None, params: SamplingParams, graphs: GraphMode, dtype: torch.dtype
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "device": torch.device("cuda"), "graphs": graphs, "dtype": dtype}
    check_mixed(tiny_device_engine(method, shape, **settings, graph_tokens=128), method, shape, params)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_nothing_waits_for_the_device(method: str, shape: DraftShape | None, graphs: GraphMode) -> None:
    settings: dict[str, Any] = {**SETTINGS, "device": torch.device("cuda"), "graphs": graphs, "dtype": torch.float32}
    engine = tiny_device_engine(method, shape, **settings)
    run_mixed(engine, GREEDY, WANTED)  # compiles and captures
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_mixed(engine, GREEDY, WANTED)
    finally:
        torch.cuda.set_sync_debug_mode("default")
