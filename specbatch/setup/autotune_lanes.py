"""Measures where two lanes are faster than one: both graphs of a round, replayed in turn.

Ranks measure together. Each computes the same rounds in the same order, and all decide by the times of rank 0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.engine.engine import Engine
from specbatch.engine.overlap.lanes import NEVER, LaneSizes
from specbatch.engine.round import Round
from specbatch.graphs.runner import GraphRunner
from specbatch.parallel.group import Group
from specbatch.setup.dummies import dummy_batch, fits
from specbatch.setup.round_parts import Rounds
from specbatch.setup.sizing import Sized
from specbatch.setup.trial import trial_prompt

MIN_GAIN = 0.02  # least gain, as a share of a round's time, for which there are two lanes: less is noise
_REPEATS = {"cpu": 3, "cuda": 20}
_MIN_REPEATS = 3  # repeats of a variant that takes long
# time budget for the repeats of one variant, in microseconds, if it is enough for more than _MIN_REPEATS
_MICROS = 200_000
_FOLLOWS = {"cpu": False, "cuda": True}  # see `_rounds_that_gain`
_CONTEXT = {"cpu": 32, "cuda": 1000}  # tokens of a request, if the prompts of all have no more than this:
_PROMPT_TOKENS, _MIN_CONTEXT = 32768, 128
_PROMPT = 1024  # tokens of a prompt of a chunk


class LaneTimes(NamedTuple):
    """Median microseconds of a round."""

    one: float
    two: float

    @property
    def gains(self) -> bool:
        return self.two < (1 - MIN_GAIN) * self.one


def median_times(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    restore: Callable[[], None],
    group: Group | None = None,
) -> LaneTimes:
    """Return the median times of the runs. They run in turn, so that a change of the clock rate changes all of them. On
    a GPU, as many short runs come before, because an idle GPU takes a while to run at full speed. `group`: the ranks,
    which all run the same number of times."""
    found = [list[float]() for _ in runs]

    def run_all() -> None:
        for run, times in zip(runs, found, strict=True):
            restore()
            times.append(_micros(run, device))

    run_all()
    run_all()  # the first may have compiled kernels
    longest = max(times[1] for times in found)
    longest = longest if group is None else group.of_first([longest])[0]
    repeats = min(_REPEATS[device.type], max(_MIN_REPEATS, int(_MICROS / longest)))
    is_short = device.type == "cuda" and _MIN_REPEATS * longest < _MICROS
    for _ in range(repeats * (1 + is_short)):
        run_all()
    return LaneTimes(*(statistics.median(times[-repeats:]) for times in found))


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
    """Time a greedy round of these request indices: as one lane of `size` requests, padding included, and as two lanes
    of `lane` requests each. The requests are left as they were."""
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
    return round_(req_idx_B, lane=lane).output_BZ


def chosen(
    sizes: Sequence[int], measure: Callable[[int], LaneTimes], larger_follow: bool
) -> tuple[set[int], list[str]]:
    """Choose which of these sizes, in ascending order, have one lane. Return them and notes on what was found.
    `measure`: the times of one lane and of two lanes for a size. `larger_follow`: from the first size that gains on,
    all sizes have two lanes."""
    single, notes = set[int](), list[str]()
    for size in sizes:
        times, last = measure(size), sizes[-1]
        rows = f"{2 * size} to {2 * last}" if times.gains and larger_follow and size != last else f"{2 * size}"
        took = f"a round of {2 * size} takes {times.one:.0f} us in one lane, {times.two:.0f} us in two"
        lanes = "two lanes" if times.gains else "one lane"
        notes.append(f"engine.two_batch_overlap: {rows} rows: {lanes} ({took})")
        if times.gains and larger_follow:
            break
        if not times.gains:
            single.add(size)
    return single, notes


def with_lanes_that_gain(
    sized: Sized, engine: Engine, group: Group | None, measure: Measure | None = None
) -> tuple[Sized, list[str]]:
    """Keep two lanes only where they gain; return notes on what was found, too. `engine`: an idle engine with these
    rounds and without graphs. `group`: the ranks that share the target."""
    rounds = sized.rounds
    measure = partial(median_times, group=group) if measure is None else measure
    lanes, notes = None, list[str]()
    if rounds.lanes is not None:
        lanes, notes = _rounds_that_gain(sized, engine, rounds.lanes, group, measure)
    prompts, note = _with_prompts_that_gain(sized, engine, group, measure)
    return replace(sized, rounds=replace(prompts, lanes=lanes)), [*notes, note]


def _rounds_that_gain(
    sized: Sized, engine: Engine, lanes: LaneSizes, group: Group | None, measure: Measure
) -> tuple[LaneSizes, list[str]]:
    """Find the sizes of rounds for which two lanes gain. If ranks are GPUs, lanes gain more with more tokens: sums grow
    with them, while the time to read the weights, which each lane does, stays the same. So for each draft shape, sizes
    are measured only up to the first that gains."""
    executor = engine.executor
    batches = {size: min(2 * size, sized.max_batch_size) for size in lanes.sizes}
    context = min(_CONTEXT[engine.device.type], max(_MIN_CONTEXT, _PROMPT_TOKENS // max(batches.values(), default=1)))
    known = {size: batch for size, batch in batches.items() if fits(engine, batch, context)}
    single, notes = set(batches.keys() - known.keys()), list[str]()
    if known:
        with torch.inference_mode(), dummy_batch(engine, max(known.values()), context):
            running = engine.prepare_round()

            def times(size: int) -> LaneTimes:
                batch = known[size]
                round_, padded = executor.rounds.at(batch), executor.padded_size(batch)
                return _of_first(time_lanes(round_, running[:batch], padded, size, measure), group)

            follow = group is not None and _FOLLOWS[engine.device.type]
            for _, of_shape in groupby(known, key=lambda size: executor.rounds.index(known[size])):
                found, more = chosen(list(of_shape), times, follow)
                single, notes = single | found, [*notes, *more]
    if too_large := batches.keys() - known.keys():
        notes.append(
            f"engine.two_batch_overlap: {2 * min(too_large)} rows and more: one lane (the cache does not hold as many "
            f"requests of {context} tokens)"
        )
    return replace(lanes, single=frozenset(single)), notes


def _with_prompts_that_gain(sized: Sized, engine: Engine, group: Group | None, measure: Measure) -> tuple[Rounds, str]:
    """Find from which size on two lanes gain in prompt chunks: 1, 2, 4... times the least number of tokens for two
    lanes are measured, up to the first size that gains. Without ranks there is nothing to wait for."""
    option, rounds = "engine.two_batch_overlap: prompts", sized.rounds
    round_ = rounds.items.items[0]
    lanes, device = round_.two_lanes, engine.device
    assert lanes is not None, "rounds were made for one lane"
    num_tokens, largest = (
        2 * lanes.min_prompt_lane,
        min(sized.prefill_chunk_tokens, engine.num_pages * engine.page_size),
    )
    one = rounds.with_two_lanes(replace(lanes, min_prompt_lane=NEVER))
    if group is None or num_tokens > largest:
        why = "there are no other ranks" if group is None else f"no chunk has {num_tokens} tokens"
        return one, f"{option}: one lane ({why})"

    def run(with_lanes: Round) -> Callable[[], None]:
        # Attention of one long prompt would take longer than that of most chunks.
        return lambda: trial_prompt(with_lanes, num_tokens, num_tokens // _PROMPT if num_tokens > _PROMPT else None)

    runs = [run(one.items.items[0]), run(round_)]
    while True:
        times = _of_first(measure(runs, device, lambda: None), group)
        took = f"a chunk of {num_tokens} tokens takes {times.one:.0f} us in one lane, {times.two:.0f} us in two"
        if times.gains:
            found = replace(lanes, min_prompt_lane=num_tokens // 2)
            return rounds.with_two_lanes(found), f"{option}: two lanes from {num_tokens} tokens on ({took})"
        if 2 * num_tokens > largest:
            return one, f"{option}: one lane ({took})"
        num_tokens *= 2


def _of_first(times: LaneTimes, group: Group | None) -> LaneTimes:
    return times if group is None else LaneTimes(*group.of_first(list(times)))
