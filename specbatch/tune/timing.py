"""Times the parts of an engine's rounds: for tuning and for the benchmarks.

Requests of equal length are computed up to their first token, and then one round of them runs again and again. On CUDA
that round is one graph with events between its parts; elsewhere the wall clock times each part. The engine must be
idle, and is idle afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.draft.method import DraftMethod
from specbatch.engine.base import check_finite
from specbatch.engine.engine import Engine
from specbatch.engine.executor import PHASES
from specbatch.engine.round import Round, Verified
from specbatch.graphs.runner import GraphRunner
from specbatch.types import Request, RngKey, SamplingParams

TIMED_TOKENS = 128  # that a timed request may still write
_WARM_SECONDS = 0.05  # a GPU that was idle while the host compiled takes a while to run at full speed
_CUDA_REPEATS, _CPU_REPEATS = 20, 3
_WARM_STEPS = 3


def dummy_requests(vocab_size: int, count: int, tokens: int, max_tokens: int) -> list[Request]:
    """Greedy requests of `tokens` prompt tokens that end after `max_tokens` more."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = ([(i * 7919 + j * 104729) % vocab_size for j in range(tokens)] for i in range(count))
    return [Request(-1 - i, prompt, params, RngKey(0, i, 0)) for i, prompt in enumerate(prompts)]


@contextmanager
def dummy_batch(engine: Engine, batch_size: int, context: int) -> Iterator[None]:
    """`batch_size` requests of `context` tokens run, their prompts computed and read."""
    assert not engine.num_running, "requests are running"
    assert not engine.num_waiting, "requests are waiting"
    context = max(1, min(context, engine.limits.max_prompt_tokens - TIMED_TOKENS))
    for request in dummy_requests(engine.limits.vocab_size, batch_size, context, TIMED_TOKENS):
        engine.submit(request)
    while engine.num_waiting or not engine.is_prefilled:
        check_finite(engine.step())
    check_finite(engine.drain())
    assert engine.num_running == batch_size, "the cache does not hold that many requests"
    yield
    engine.abort_all()


def time_phases(engine: Engine, batch_size: int, context: int = 1000) -> dict[str, float]:
    """As `time_methods`, of what the engine drafts for that many requests."""
    with dummy_batch(engine, batch_size, context):
        return time_methods(engine, [engine.executor.rounds.at(batch_size).method])[0]


@torch.inference_mode()
def time_methods(engine: Engine, methods: Sequence[DraftMethod], repeats: int | None = None) -> list[dict[str, float]]:
    """Median milliseconds of draft, verify, extend and the whole round of a dummy batch, with each of the draft
    methods. The batch is left as it was. `repeats` None: 20 on CUDA, 3 elsewhere."""
    check_finite(engine.drain())
    running = engine.prepare_round()
    round_, on_cuda = engine.executor.rounds.items[0], engine.device.type == "cuda"
    padding = [round_.state.padding] * (engine.executor.padded_size(len(running)) - len(running))
    req_idx_B = torch.tensor(running + padding, device=engine.device)
    restore = round_.state.saved()
    times = []
    for method in methods:
        one = round_.drafting(method)
        if on_cuda:
            times.append(_time_graph(one, req_idx_B, restore, repeats or _CUDA_REPEATS))
        else:
            times.append(_time_calls(one, req_idx_B, restore, repeats or _CPU_REPEATS))
    return times


def time_steps(engine: Engine, steps: int) -> tuple[float, float]:
    """Median milliseconds of a round of a dummy batch as the engine drafts now, launched and read by its own steps:
    (all of it, the part in which the host was busy). Its requests must not end: each may write TIMED_TOKENS."""
    batch_size, rounds = engine.num_running, engine.stats.rounds
    whole, host = list[float](), list[float]()
    for _ in range(_WARM_STEPS + steps):
        began, waited = time.perf_counter(), engine.waited_seconds
        check_finite(engine.step())
        whole.append(1e3 * (time.perf_counter() - began))
        host.append(whole[-1] - 1e3 * (engine.waited_seconds - waited))
    assert engine.stats.rounds - rounds == _WARM_STEPS + steps, "not every step was a round"
    assert engine.num_running == batch_size, "requests have ended"
    return statistics.median(whole[_WARM_STEPS:]), statistics.median(host[_WARM_STEPS:])


def _time_graph(round_: Round, req_idx_B: Tensor, restore: Callable[[], None], repeats: int) -> dict[str, float]:
    runner, found = GraphRunner(req_idx_B.device), list[list[float]]()
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(len(PHASES) + 1)]
    # A capture runs the round, too: it must write nothing and advance no request.
    round_.state.ints_SF[:, Field.DONE] = 1
    try:
        runner.capture(("round",), lambda: _run(round_, req_idx_B, lambda i: events[i].record()))
        warm = time.perf_counter() + _WARM_SECONDS
        while len(found) < repeats:
            restore()
            runner.replay(("round",))
            torch.cuda.synchronize()
            if time.perf_counter() >= warm:
                found.append([events[0].elapsed_time(event) for event in events])
    finally:
        restore()
    return _medians(found)


def _time_calls(round_: Round, req_idx_B: Tensor, restore: Callable[[], None], repeats: int) -> dict[str, float]:
    found, marks = list[list[float]](), [0.0] * (len(PHASES) + 1)

    def mark(i: int) -> None:
        marks[i] = 1e3 * time.perf_counter()

    for _ in range(1 + repeats):
        try:
            _run(round_, req_idx_B, mark)
        finally:
            restore()
        found.append([one - marks[0] for one in marks])
    return _medians(found[1:])  # the first warms up


def _run(round_: Round, req_idx_B: Tensor, mark: Callable[[int], None]) -> Verified:
    """A greedy round. `mark` is called before each phase and after the last."""
    mark(0)
    rows, draft = round_.draft(req_idx_B, False)
    mark(1)
    verified = round_.verify(rows, draft, False)
    mark(2)
    round_.extend(verified)
    mark(3)
    return verified


def _medians(marks: list[list[float]]) -> dict[str, float]:
    """`marks`: milliseconds at which each phase began, and at which the round ended, of each run."""
    spans = {name: [m[i + 1] - m[i] for m in marks] for i, name in enumerate(PHASES)}
    spans["round"] = [m[-1] for m in marks]
    return {name: statistics.median(values) for name, values in spans.items()}
