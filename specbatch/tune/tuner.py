"""The parts of a tuning that take time: tracing rows, timing rounds. Each stops when its time is up."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.resolve import ResolvedRun
from specbatch.tune.costs import Measurement
from specbatch.tune.errors import TuningError
from specbatch.tune.kept import Kept
from specbatch.tune.measure import time_batch, time_plain, time_prompts
from specbatch.tune.report import duration
from specbatch.tune.rows import FEWEST_ROWS, Sample
from specbatch.tune.session import OutOfTime, Session
from specbatch.tune.trace import RowTrace, Trace

_WAVE_ROWS = 64  # traced at once, at most
_MOST_POSITIONS = 2**17  # of a trace: those of 8 branches and 8 steps take 4.6 KB each
_KEPT_EVERY = 10.0  # seconds
_CALM_SECONDS = 60.0  # for the trace; with less a CPU begins with few rows


@dataclass(frozen=True)
class Widest:
    """What drafts are traced and searched up to."""

    depth: int
    topk: int
    nodes: int
    verify_tokens: int  # of a round

    @staticmethod
    def of(method: str, on_device: bool) -> Widest:
        if method == "ngram":
            return Widest(0, 0, 33, 8192 if on_device else 512)
        return Widest(8, 8, 64, 4096) if on_device else Widest(6, 4, 24, 256)

    def schedule(self, max_batch_size: int) -> list[tuple[int, int, int, int]]:
        """For the engine to be built with: (max_batch, num_steps, topk, num_draft_tokens), trees as wide as the number
        of rows allows."""
        if not self.depth:
            return [(max_batch_size, self.nodes - 1, 1, self.nodes)]
        full = DraftShape(self.depth, self.topk, 2)
        nodes = min(self.nodes, full.num_candidates + 1)
        few = max(1, self.verify_tokens // nodes)
        wide = (min(few, max_batch_size), self.depth, self.topk, nodes)
        if few >= max_batch_size:
            return [wide]
        narrow = max(2, min(nodes, self.verify_tokens // max_batch_size))
        return [wide, (max_batch_size, self.depth, self.topk, narrow)]


class Tuner:
    """Runs the parts within the budget. What was measured is kept beside the output, for a tuning that was interrupted
    to go on from."""

    def __init__(
        self, session: Session, run: ResolvedRun, widest: Widest, sample: Sample, kept: Kept, say: Callable[[str], None]
    ) -> None:
        self._session = session
        self._run = run
        self._widest = widest
        self._sample = sample
        self._kept = kept
        self._say = say

    def trace(self, seconds: float, until: float = math.inf) -> Trace:
        """Wave after wave of rows until the time is up; in the order drawn, so that the first ones are a sample too.

        A wave that is not finished when the clock shows `until` is dropped. Raises TuningError if it was the first.
        """
        began = last_kept = time.perf_counter()
        requests, trace = self._sample.to_trace, self._kept.trace()
        rows: list[RowTrace] = [] if trace is None else list(trace.rows)
        before = num_kept = len(rows)
        if trace is not None:
            self._say(f"{before} rows were traced before")
        most = min(_WAVE_ROWS, self._run.engine.max_batch_size)
        try:
            while len(rows) < len(requests):
                # How long rows get is seen as they end: no more at once than have, or than may all be long.
                size = min(most, max(len(rows), FEWEST_ROWS, _MOST_POSITIONS // self._sample.max_tokens))
                if not rows and seconds < _CALM_SECONDS and not self._run.engine.on_device:
                    size = min(size, FEWEST_ROWS)  # how fast this machine is, is not known yet
                if why := _is_enough(rows, len(rows) - before, size, time.perf_counter() - began, seconds):
                    self._say(f"traced {len(rows)} of {len(requests)} rows: {why}")
                    break
                wave = requests[len(rows) : len(rows) + size]
                try:
                    found = self._session.trace(wave, self._widest.topk, self._widest.depth, until)
                except OutOfTime as error:
                    if len(rows) < FEWEST_ROWS:
                        spent = duration(time.perf_counter() - began)
                        raise TuningError(
                            f"the budget is too small: {len(wave)} rows were not finished after {spent}",
                            hint="give a larger --budget, or rows with a smaller max_tokens",
                        ) from error
                    self._say(f"traced {len(rows)} of {len(requests)} rows: the next went past the budget")
                    break
                rows += found.rows
                sampled = found.sampled or (trace is not None and trace.sampled)
                trace = replace(found, rows=tuple(rows), sampled=sampled)
                if time.perf_counter() - last_kept > _KEPT_EVERY:
                    self._kept.keep_trace(trace)
                    last_kept, num_kept = time.perf_counter(), len(rows)
        finally:
            if trace is not None and len(rows) > num_kept:
                self._kept.keep_trace(trace)
        assert trace is not None, "a sample has rows"
        return trace

    def measure(self, context: int, seconds: float) -> list[Measurement]:
        """Batch after batch, what was measured before left out, until the time is up; in any case one row, and the
        largest of the sizes that the cache holds."""
        began = time.perf_counter()
        engine, widest, found = self._run.engine, self._widest, self._kept.costs()
        if found:
            self._say(f"{len(found)} parts of rounds were timed before")
        else:
            found = time_prompts(self._session, engine.prefill_chunk_tokens)
            self._kept.keep_costs(found)
        session, widths = self._session, (widest.depth, widest.topk, widest.verify_tokens)
        if session.is_on_device:  # a graph or two for each: of all sizes, before what takes longer
            if not any(m.kind == "plain" for m in found):
                # Captured and compiled here, unless the prompts left it so: that may take longer than all that follows.
                session.use(ByBatch.always(None))
            until = time.perf_counter() + seconds / 3
            found = self._time("plain", lambda batch: time_plain(session, batch, context), found, until)
        found = self._time("verify", lambda batch: time_batch(session, batch, context, *widths), found, began + seconds)
        largest = max((m.batch for m in found if m.kind == "verify"), default=0)
        if not largest:
            raise TuningError(
                "not even one row of this length can be timed",
                hint="raise engine.kv_cache_tokens or engine.memory_fraction, or lower sampling.max_tokens",
            )
        if largest < engine.max_batch_size:
            self._say(f"timed batches of up to {largest} rows: larger ones are extrapolated")
        return found

    def _time(
        self, kind: str, time_one: Callable[[int], list[Measurement]], found: list[Measurement], until: float
    ) -> list[Measurement]:
        """`found`, and what `time_one` tells of the batch sizes that have no measurement of `kind`."""
        timed = {m.batch for m in found if m.kind == kind}
        sizes = deque(spread_out(self._run.engine.max_batch_size))
        while sizes:
            batch = sizes.popleft()
            if batch in timed:
                continue
            if len(timed) > 1 and time.perf_counter() > until:
                break
            if parts := time_one(batch):
                found = [*found, *parts]
                self._kept.keep_costs(found)
                timed.add(batch)
            elif batch == 1:
                break
            else:  # the cache does not hold so many rows: the next power of 2 below is the end
                sizes = deque(spread_out(2 ** ((batch - 1).bit_length() - 1)))
        return found


def _is_enough(rows: list[RowTrace], new: int, size: int, spent: float, seconds: float) -> str | None:
    """Why not to trace `size` more: None if nothing speaks against it. `new` of the rows took `spent` seconds."""
    if len(rows) < FEWEST_ROWS:
        return None
    if sum(row.num_output for row in rows) * (1 + size / len(rows)) > _MOST_POSITIONS:
        return "they are long, and more would take memory"
    if new and spent * (1 + size / new) > seconds:
        return "the next would go past the budget"
    return None


def spread_out(largest: int) -> list[int]:
    """Powers of 2 and the largest batch size, first the ends, then those in the middle of what is there already: where
    the time does not suffice, what is missing lies between two that were measured."""
    sizes = [*(2**k for k in range(largest.bit_length()) if 2**k < largest), largest]
    order, gaps = [0, len(sizes) - 1], [(0, len(sizes) - 1)]
    for low, high in gaps:  # grows as it goes
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(sizes[i] for i in order))
