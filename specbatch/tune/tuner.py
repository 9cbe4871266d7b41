"""The parts of a tuning that take time: tracing rows, timing rounds. Each stops when its time is over."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specbatch.draft import METHODS
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.files.local import write_whole
from specbatch.setup.resolve import ResolvedRun
from specbatch.tune.costs import Measurement
from specbatch.tune.report import duration
from specbatch.tune.sample import MIN_ROWS, Sample
from specbatch.tune.session import OutOfTime, Session
from specbatch.tune.start import COSTS, IDENTITY, TRACE
from specbatch.tune.timing import time_batch, time_plain, time_prompts
from specbatch.tune.trace import RowTrace, Trace

_TRACED_AT_ONCE = 64  # rows, at most
_MAX_CANDIDATES = 456  # candidates of a position: 8 branches and 8 steps, which take 4.6 KB
_MAX_POSITIONS = 2**17  # positions of a trace
_SAVED_EVERY = 10.0  # seconds
_PASS_DEPTH = 15  # drafts of a head that makes all of them in one pass
_LITTLE_TIME = 60.0  # seconds for the trace; with less a CPU begins with few rows


@dataclass(frozen=True)
class SearchLimits:
    """Up to what drafts are traced and searched."""

    depth: int
    topk: int
    nodes: int
    verify_tokens: int  # largest number of tokens that a round verifies

    @staticmethod
    def of(method: str, on_cuda: bool, max_drafts: int | None = None) -> SearchLimits:
        """Return the limits of a draft method. `max_drafts`: those of a block; None: there is no block drafter."""
        if method == "ngram":
            return SearchLimits(0, 0, 33, 8192 if on_cuda else 512)
        limits = SearchLimits(8, 8, 64, 4096) if on_cuda else SearchLimits(6, 4, 24, 256)
        entry = METHODS[method]
        if entry.chains_only:
            return replace(limits, topk=1, nodes=limits.depth + 1)
        if not entry.one_pass:
            return limits
        # All drafts cost about what one does. Deep trees are narrow, because a trace has all of their candidates.
        depth, topk = max_drafts or _PASS_DEPTH, limits.topk
        while topk > 2 and DraftShape(depth, topk, 2).num_candidates > _MAX_CANDIDATES:
            topk //= 2
        return SearchLimits(depth, topk, max(limits.nodes, depth + 1), 8192 if on_cuda else 512)

    def schedule(self, max_batch_size: int) -> list[tuple[int, int, int, int]]:
        """Return the schedule with which the engine is built: (max_batch, num_steps, topk, num_draft_tokens), with
        trees as wide, or chains as long, as the number of requests allows."""
        if not self.depth:
            return [(max_batch_size, self.nodes - 1, 1, self.nodes)]
        nodes = min(self.nodes, DraftShape(self.depth, self.topk, 2).num_candidates + 1)
        few = max(1, self.verify_tokens // nodes)
        wide = (min(few, max_batch_size), self.depth, self.topk, nodes)
        if few >= max_batch_size:
            return [wide]
        narrow = max(2, min(nodes, self.verify_tokens // max_batch_size))
        return [wide, (max_batch_size, narrow - 1 if self.topk == 1 else self.depth, self.topk, narrow)]


class TuneCache:
    """The folder of one tuning's traces and timings, next to its output: an interrupted run resumes from them, and so
    does another budget. Those of another model, other rows or another device are deleted: `is_stale`.

    Raises TuningError for a folder that cannot be written to.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        text = json.dumps(identity, indent=1, sort_keys=True, default=str)
        try:
            folder.mkdir(exist_ok=True)
            known = folder / IDENTITY
            has_other = known.is_file() and known.read_text(encoding="utf-8") != text
            self.is_stale = has_other and any((folder / name).exists() for name in (TRACE, COSTS))
            if has_other or not known.is_file():
                for name in (TRACE, COSTS):
                    (folder / name).unlink(missing_ok=True)
                known.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TuningError(
                f"cannot write to {folder}: {error.strerror or error}", hint="-o names another"
            ) from error

    def load_trace(self) -> Trace | None:
        path = self._folder / TRACE
        return Trace.load(path) if path.is_file() else None

    def save_trace(self, trace: Trace) -> None:
        trace.save(self._folder / TRACE)

    def load_costs(self) -> list[Measurement]:
        path = self._folder / COSTS
        if not path.is_file():
            return []
        try:
            return [Measurement(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, TypeError) as error:
            raise TuningError(f"cannot read {path}: {error}", hint="delete it and tune again") from error

    def save_costs(self, measurements: Sequence[Measurement]) -> None:
        write_whole(self._folder / COSTS, json.dumps([asdict(m) for m in measurements], indent=0).encode())


@dataclass(frozen=True)
class Tuner:
    """Runs the parts within the budget. Measurements are cached, for an interrupted tuning to resume from."""

    session: Session
    run: ResolvedRun
    limits: SearchLimits
    sample: Sample
    cache: TuneCache
    log: Callable[[str], None]

    def trace(self, seconds: float, until: float = math.inf) -> Trace:
        """Batch after batch of rows until the time is over; in the order drawn, so that the first ones are a sample
        too.

        A batch that is not finished when the clock shows `until` is dropped. Raises TuningError if it was the first.
        """
        began = last_saved = time.perf_counter()
        requests, trace = self.sample.to_trace, self.cache.load_trace()
        rows: list[RowTrace] = [] if trace is None else list(trace.rows)
        before = num_saved = len(rows)
        if trace is not None:
            self.log(f"{before} rows were traced before")
        most = min(_TRACED_AT_ONCE, self.run.engine.max_batch_size)
        try:
            while len(rows) < len(requests):
                # How long rows become is known when they end: no more at once than have, or than may all be long.
                size = min(most, max(len(rows), MIN_ROWS, _MAX_POSITIONS // self.sample.max_tokens))
                if not rows and seconds < _LITTLE_TIME and not self.session.on_cuda:
                    size = min(size, MIN_ROWS)  # the speed of this machine is not known yet
                if why := _is_enough(rows, len(rows) - before, size, time.perf_counter() - began, seconds):
                    self.log(f"traced {len(rows)} of {len(requests)} rows: {why}")
                    break
                batch = requests[len(rows) : len(rows) + size]
                try:
                    found = self.session.trace(batch, self.limits.topk, self.limits.depth, until)
                except OutOfTime as error:
                    if len(rows) < MIN_ROWS:
                        spent = duration(time.perf_counter() - began)
                        raise TuningError(
                            f"the budget is too small: {len(batch)} rows were not finished after {spent}",
                            hint="give a larger --budget, or rows with a smaller max_tokens",
                        ) from error
                    self.log(f"traced {len(rows)} of {len(requests)} rows: the next would exceed the budget")
                    break
                rows += found.rows
                sampled = found.sampled or (trace is not None and trace.sampled)
                trace = replace(found, rows=tuple(rows), sampled=sampled)
                if time.perf_counter() - last_saved > _SAVED_EVERY:
                    self.cache.save_trace(trace)
                    last_saved, num_saved = time.perf_counter(), len(rows)
        finally:
            if trace is not None and len(rows) > num_saved:
                self.cache.save_trace(trace)
        assert trace is not None, "a sample has rows"
        return trace

    def measure(self, context: int, seconds: float) -> list[Measurement]:
        """Batch size after batch size, without those that were measured before, until the time is over; in any case one
        request, and the largest of the sizes that the cache holds."""
        began = time.perf_counter()
        session, engine, limits, found = self.session, self.run.engine, self.limits, self.cache.load_costs()
        if found:
            self.log(f"{len(found)} parts of rounds were timed before")
        else:
            found = time_prompts(session, engine.prefill_chunk_tokens)
            self.cache.save_costs(found)
        widths = limits.depth, limits.topk, limits.verify_tokens
        if session.on_cuda:  # a graph or two for each: of all sizes, before what takes longer
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
            self.log(f"timed batches of up to {largest} requests: larger ones are extrapolated")
        return found

    def _time(
        self, kind: str, time_one: Callable[[int], list[Measurement]], found: list[Measurement], until: float
    ) -> list[Measurement]:
        """`found`, and what `time_one` finds of the batch sizes that have no measurement of `kind`."""
        timed = {m.batch for m in found if m.kind == kind}
        sizes = deque(spread_out(self.run.engine.max_batch_size))
        while sizes:
            batch = sizes.popleft()
            if batch in timed:
                continue
            if len(timed) > 1 and time.perf_counter() > until:
                break
            if parts := time_one(batch):
                found = [*found, *parts]
                self.cache.save_costs(found)
                timed.add(batch)
            elif batch == 1:
                break
            else:  # the cache does not hold that many requests: the next power of 2 below is the end
                sizes = deque(spread_out(2 ** ((batch - 1).bit_length() - 1)))
        return found


def _is_enough(rows: list[RowTrace], new: int, size: int, spent: float, seconds: float) -> str | None:
    """Return the reason against tracing `size` more rows, or None. `new` of the rows took `spent` seconds."""
    if len(rows) < MIN_ROWS:
        return None
    if sum(row.num_output for row in rows) * (1 + size / len(rows)) > _MAX_POSITIONS:
        return "they are long, and more would take too much memory"
    if new and spent * (1 + size / new) > seconds:
        return "the next would exceed the budget"
    return None


def spread_out(largest: int) -> list[int]:
    """Powers of 2 and the largest batch size, first the ends, then the middle of each gap: a size for which no time is
    left lies between two that were measured."""
    sizes = [*(2**k for k in range(largest.bit_length()) if 2**k < largest), largest]
    order, gaps = [0, len(sizes) - 1], [(0, len(sizes) - 1)]
    for low, high in gaps:  # grows as it goes
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(sizes[i] for i in order))
