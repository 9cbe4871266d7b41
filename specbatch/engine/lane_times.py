"""Measures where two lanes are faster than one: both graphs of a round, replayed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.engine.lanes import LaneSizes
from specbatch.engine.round import Round
from specbatch.graphs.runner import GraphRunner

MIN_GAIN = 0.02  # of the time of a round, for which there are two lanes: less is noise
_WARM_SECONDS = 0.05  # a GPU that was idle takes a while to run at full speed


class LaneTimes(NamedTuple):
    """Median microseconds of a round."""

    one: float
    two: float

    @property
    def gains(self) -> bool:
        return self.two < (1 - MIN_GAIN) * self.one


@torch.inference_mode()
def time_lanes(round_: Round, requests: Sequence[int], size: int, lane: int, repeats: int = 20) -> LaneTimes:
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
        return _medians(runs, device, restore, repeats)
    finally:
        restore()


def _output(round_: Round, req_idx_B: Tensor, lane: int) -> Tensor:
    return round_(req_idx_B, False, lane=lane).committed.output_BZ


def _medians(
    runs: Sequence[Callable[[], Tensor]], device: torch.device, restore: Callable[[], None], repeats: int
) -> LaneTimes:
    """In turn, so that a change of the clock rate changes both."""
    found = [list[float]() for _ in runs]
    warm = time.perf_counter() + _WARM_SECONDS
    while len(found[-1]) < repeats:
        for run, times in zip(runs, found, strict=True):
            restore()
            micros = _micros(run, device)
            if time.perf_counter() >= warm:
                times.append(micros)
    return LaneTimes(*map(statistics.median, found))


def _micros(run: Callable[[], Tensor], device: torch.device) -> float:
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


def chosen(sizes: LaneSizes, measure: Callable[[int], LaneTimes]) -> tuple[LaneSizes, list[str]]:
    """`sizes` with two lanes only where they gain, and a note on each size. `measure`: of two lanes of this size."""
    times = {size: measure(size) for size in sizes.sizes}
    notes = [
        f"engine.two_batch_overlap: {2 * size} rows: {'two lanes' if at.gains else 'one lane'} (a round takes "
        f"{at.one:.0f} us in one lane, {at.two:.0f} us in two)"
        for size, at in times.items()
    ]
    return LaneSizes(sizes.sizes, frozenset(size for size, at in times.items() if not at.gains)), notes
