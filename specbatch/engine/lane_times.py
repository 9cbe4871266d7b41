"""Measures where two lanes are faster than one: both graphs of a round, replayed in turn.

Ranks measure together. Each computes the same rounds in the same order, and all decide by the times of rank 0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.engine.dummies import dummy_batch, fits
from specbatch.engine.engine import Engine
from specbatch.engine.lanes import LaneSizes
from specbatch.engine.round import Round
from specbatch.engine.round_parts import Rounds
from specbatch.engine.sizing import Sized
from specbatch.engine.trial import trial_prompt
from specbatch.engine.two_lanes import NEVER
from specbatch.graphs.runner import GraphRunner
from specbatch.parallel.group import Group

MIN_GAIN = 0.02  # of the time of a round, for which there are two lanes: less is noise
_REPEATS = {"cpu": 3, "cuda": 20}
_WARM = {"cpu": 1, "cuda": 20}  # rounds before: a GPU that was idle takes a while to run at full speed
_CONTEXT = {"cpu": 32, "cuda": 1000}  # tokens of a request


class LaneTimes(NamedTuple):
    """Median microseconds of a round."""

    one: float
    two: float

    @property
    def gains(self) -> bool:
        return self.two < (1 - MIN_GAIN) * self.one


def median_times(runs: Sequence[Callable[[], object]], device: torch.device, restore: Callable[[], None]) -> LaneTimes:
    """In turn, so that a change of the clock rate changes both. How often does not depend on times: ranks would differ
    in it."""
    found = [list[float]() for _ in runs]
    for _ in range(_WARM[device.type] + _REPEATS[device.type]):
        for run, times in zip(runs, found, strict=True):
            restore()
            times.append(_micros(run, device))
    return LaneTimes(*(statistics.median(times[_WARM[device.type] :]) for times in found))


def _micros(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return 1e3 * first.elapsed_time(last)


# One lane and two, the device, and what leaves the requests as they were.
Measure = Callable[[Sequence[Callable[[], object]], torch.device, Callable[[], None]], LaneTimes]


@torch.inference_mode()
def time_lanes(
    round_: Round, requests: Sequence[int], size: int, lane: int, measure: Measure = median_times
) -> LaneTimes:
    """Of a greedy round of these request indices: as one lane of `size` rows, padding included, and as two of `lane`.
    The requests are left as they were."""
    device, padding = round_.state.ints_SF.device, [round_.state.padding]
    half = -(-len(requests) // 2)
    single = [*requests, *padding * (size - len(requests))]
    first, second = ([*part, *padding * (lane - len(part))] for part in (requests[:half], requests[half:]))
    one, two = torch.tensor(single, device=device), torch.tensor([*first, *second], device=device)
    restore = round_.state.saved()
    try:
        if device.type == "cuda":
            # A capture runs the round, too: it must write nothing and advance no request.
            round_.state.ints_SF[:, Field.DONE] = 1
            runner = GraphRunner(device)
            runner.capture((0,), lambda: _output(round_, one, 0))
            runner.capture((lane,), lambda: _output(round_, two, lane))
            runs = [lambda: runner.replay((0,)), lambda: runner.replay((lane,))]
        else:
            runs = [lambda: _output(round_, one, 0), lambda: _output(round_, two, lane)]
        return measure(runs, device, restore)
    finally:
        restore()


def _output(round_: Round, req_idx_B: Tensor, lane: int) -> Tensor:
    return round_(req_idx_B, False, lane=lane).committed.output_BZ


def chosen(sizes: LaneSizes, measure: Callable[[int], LaneTimes]) -> tuple[LaneSizes, list[str]]:
    """`sizes` with two lanes only where they gain, and a note on each size. `measure`: of two lanes of this size."""
    times = {size: measure(size) for size in sizes.sizes}
    notes = [
        f"engine.two_batch_overlap: {2 * size} rows: {'two lanes' if at.gains else 'one lane'} (a round takes "
        f"{at.one:.0f} us in one lane, {at.two:.0f} us in two)"
        for size, at in times.items()
    ]
    return LaneSizes(sizes.sizes, frozenset(size for size, at in times.items() if not at.gains)), notes


def with_lanes_that_gain(
    sized: Sized, engine: Engine, group: Group | None, measure: Measure = median_times
) -> tuple[Sized, list[str]]:
    """With two lanes only where they gain, and what was found. `engine`: idle, of these rounds, without graphs.
    `group`: of ranks that share the target."""
    rounds = sized.rounds
    assert rounds.lanes is not None, "rounds were made for one lane"
    executor, context = engine.executor, _CONTEXT[engine.device.type]
    batches = {size: min(2 * size, sized.max_batch_size) for size in rounds.lanes.sizes}
    known = {size: batch for size, batch in batches.items() if fits(engine, batch, context)}
    times: dict[int, LaneTimes] = {}
    if known:
        with torch.inference_mode(), dummy_batch(engine, max(known.values()), context):
            running = engine.prepare_round()
            for size, batch in known.items():
                of_size = time_lanes(
                    executor.rounds.at(batch), running[:batch], executor.padded_size(batch), size, measure
                )
                times[size] = _of_first(of_size, group)
    sizes, notes = chosen(replace(rounds.lanes, sizes=tuple(known)), times.__getitem__)
    too_large = batches.keys() - known.keys()
    single = sizes.single | too_large
    if too_large:
        notes.append(
            f"engine.two_batch_overlap: {2 * min(too_large)} rows and more: one lane (the cache does not hold as many "
            f"requests of {context} tokens)"
        )
    prompts, note = _with_prompts_that_gain(sized, engine, group, measure)
    found = replace(prompts, lanes=replace(rounds.lanes, single=frozenset(single)))
    return replace(sized, rounds=found), [*notes, note]


def _with_prompts_that_gain(sized: Sized, engine: Engine, group: Group | None, measure: Measure) -> tuple[Rounds, str]:
    """Prompt chunks stay one lane where there are no ranks: pieces of prompts as graphs are faster than both."""
    option, rounds = "engine.two_batch_overlap: prompts", sized.rounds
    round_ = rounds.items.items[0]
    lanes, device = round_.two_lanes, engine.device
    assert lanes is not None, "rounds were made for one lane"
    num_tokens = 2 * lanes.min_prompt_lane
    one = rounds.with_two_lanes(replace(lanes, min_prompt_lane=NEVER))
    if group is None or num_tokens > sized.prefill_chunk_tokens or num_tokens > engine.num_pages * engine.page_size:
        why = "one process has them as graphs" if group is None else f"chunks have less than {num_tokens} tokens"
        return one, f"{option}: one lane ({why})"

    def run(with_lanes: Round) -> Callable[[], None]:
        return lambda: trial_prompt(with_lanes, num_tokens)

    runs = [run(one.items.items[0]), run(round_)]
    times = _of_first(measure(runs, device, lambda: None), group)
    took = f"a chunk of {num_tokens} tokens takes {times.one:.0f} us in one lane, {times.two:.0f} us in two"
    return (rounds, f"{option}: two lanes ({took})") if times.gains else (one, f"{option}: one lane ({took})")


def _of_first(times: LaneTimes, group: Group | None) -> LaneTimes:
    return times if group is None else LaneTimes(*group.of_first(list(times)))
