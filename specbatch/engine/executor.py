"""Launches rounds: pads the batch to a captured size and replays its graph, or runs the round eagerly.

With `graphs: round` one graph is a whole round; with `phases` draft, verify and draft-extend are graphs of their own,
as in other engines; with `none` every kernel is launched by the host.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specbatch.cache.request_table import Field, RequestTable
from specbatch.draft.schedule import ByBatch
from specbatch.engine.round import Logprobs, Round, Verified
from specbatch.engine.transfers import Transfers
from specbatch.graphs.runner import GraphRunner, ladder
from specbatch.kernels.out_of_memory import is_out_of_memory

GraphMode = Literal["round", "phases", "none"]
PHASES = ("draft", "verify", "extend")
_WARM_SECONDS = 0.05  # a GPU that was idle while the host compiled takes a while to run at full speed


def padded_sizes(items: ByBatch[Any], max_batch_size: int) -> list[tuple[int, int]]:
    """Each size of the ladder with the index of each item that is run padded to it, the largest first."""
    sizes = ladder(max_batch_size)
    return sorted(
        {
            (next(size for size in sizes if size >= batch_size), i)
            for i in range(len(items.items))
            for batch_size in items.batches(i, max_batch_size)
        },
        reverse=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """What a round will have decided, valid until the next launch."""

    output_BZ: Tensor  # see `Committed`
    logprobs: Logprobs | None

    @staticmethod
    def of(verified: Verified) -> Launched:
        return Launched(verified.committed.output_BZ, verified.logprobs)


class RoundExecutor:
    """Runs rounds on lists of slots, each by the number of them.

    A batch size whose graph does not fit into memory runs eagerly from then on. An eager round that runs out of memory
    raises, and leaves all slots as they were before it.
    """

    def __init__(
        self,
        rounds: ByBatch[Round],
        max_batch_size: int,
        device: torch.device,
        mode: GraphMode,
        *,
        eager_phases: frozenset[str] = frozenset(),
    ) -> None:
        """`eager_phases`: with `phases`, those to leave uncaptured, for measurements."""
        self.rounds = rounds
        self._sizes = ladder(max_batch_size)
        self._captures = padded_sizes(rounds, max_batch_size)
        self.mode: GraphMode = mode if device.type == "cuda" else "none"
        self._eager_phases = eager_phases
        self._transfers = Transfers(device)
        self._padding = rounds.items[0].state.padding
        self._rows_B = torch.full((max_batch_size,), self._padding, dtype=torch.int64, device=device)
        self._uploaded: list[int] = []
        self._uncaptured: set[tuple[int, int, bool]] = set()  # for want of memory
        self.runner: GraphRunner | None = GraphRunner(device) if self.mode != "none" else None

    @property
    def num_graphs(self) -> int:
        return 0 if self.runner is None else len(self.runner)

    def release_graphs(self) -> bool:
        """Give the memory of all graphs back; from now on rounds run eagerly. Nothing may be in flight. Returns whether
        there were graphs."""
        had_graphs, self.runner, self.mode = self.runner is not None, None, "none"
        return had_graphs

    def capture(self, sampled: bool, show: Callable[[str], None]) -> None:
        """Capture all sizes for batches that hold sampled requests, or none. The rows must be padding. `show` is told
        how far it is."""
        gc.collect()  # graphs of a round that is no more keep memory: once, for it takes as long as a capture
        for number, (size, i) in enumerate(self._captures, start=1):
            show(f"capturing CUDA graphs: {number} of {len(self._captures)}, {size} rows{', sampled' * sampled}")
            self._capture(size, i, sampled)

    def capture_largest(self) -> None:
        """Capture what takes the most memory: for a trial, which wants to know how much."""
        largest = {i: size for size, i in reversed(self._captures)}
        for i, size in largest.items():
            for sampled in (False, True):
                self._capture(size, i, sampled)

    def _capture(self, size: int, i: int, sampled: bool) -> None:
        """Leaves the size uncaptured where memory runs out."""
        assert self.runner is not None
        key, saved = (size, i, sampled), self._uploaded
        self._uploaded = []
        self._rows_B[:size].fill_(self._padding)
        try:
            self._capture_round(self.runner, *key)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._uncaptured.add(key)
            for name in ("round", *PHASES):
                self.runner.drop((name, *key))
        if saved:
            self._upload(saved)

    def _capture_round(self, runner: GraphRunner, size: int, i: int, sampled: bool) -> None:
        req_idx_B, round_, key = self._rows_B[:size], self.rounds.items[i], (size, i, sampled)
        if self.mode == "round":
            # The report alone: what else a round leaves is memory that other sizes can use.
            runner.capture(("round", *key), lambda: Launched.of(round_(req_idx_B, sampled)))
            return
        rows, draft = runner.capture(("draft", *key), lambda: round_.draft(req_idx_B, sampled))
        verified = runner.capture(("verify", *key), lambda: round_.verify(rows, draft, sampled))
        runner.capture(("extend", *key), lambda: round_.extend(verified))
        if not self._eager_phases:  # which write to the others' outputs
            runner.replace_output(("draft", *key), None)
            runner.replace_output(("verify", *key), Launched.of(verified))

    def _upload(self, padded: list[int]) -> None:
        if padded != self._uploaded:
            self._rows_B[: len(padded)].copy_(self._transfers.upload(np.array(padded, dtype=np.int64)))
            self._uploaded = padded

    def run(self, slots: list[int], sampled: bool, logprobs: bool) -> Launched:
        """Launch a round of these slots."""
        size, i = self._padded(len(slots)), self.rounds.index(len(slots))
        self._upload(slots + [self._padding] * (size - len(slots)))
        req_idx_B = self._rows_B[:size]
        round_, key = self.rounds.items[i], (size, i, sampled)
        if self.runner is None or logprobs:
            return self._eager(round_, req_idx_B, sampled, logprobs)
        first = ("round" if self.mode == "round" else "draft", *key)
        if first not in self.runner and key not in self._uncaptured:  # the first batch of its kind
            self._capture(*key)
        if key in self._uncaptured:
            return self._eager(round_, req_idx_B, sampled, logprobs)
        launched: Launched
        if self.mode == "round":
            launched = self.runner.replay(("round", *key))
            return launched
        if self._eager_phases:
            rows, draft = self._phase("draft", key, lambda: round_.draft(req_idx_B, sampled))
            verified = self._phase("verify", key, lambda: round_.verify(rows, draft, sampled))
            self._phase("extend", key, lambda: round_.extend(verified))
            return Launched.of(verified)
        self.runner.replay(("draft", *key))
        launched = self.runner.replay(("verify", *key))
        self.runner.replay(("extend", *key))
        return launched

    def _eager(self, round_: Round, req_idx_B: Tensor, sampled: bool, logprobs: bool) -> Launched:
        put_back = _kept(round_.state)
        try:
            return Launched.of(round_(req_idx_B, sampled, logprobs))
        except Exception as error:
            # Past the commit, the slots have moved on, and nobody would ever read where to. What else a round writes
            # lies past the committed slots of each row: the next one writes it again.
            if is_out_of_memory(error):
                put_back()
            raise

    def _padded(self, batch_size: int) -> int:
        return next(size for size in self._sizes if size >= batch_size)

    def _phase(self, name: str, key: tuple[int, int, bool], function: Callable[[], Any]) -> Any:
        """Replay a phase; an eager one writes its output where the captured phases behind it look for it."""
        assert self.runner is not None
        if name not in self._eager_phases:
            return self.runner.replay((name, *key))
        output = self.runner.output((name, *key))
        _copy_into(output, function())
        return output

    def time_phases(self, slots: list[int], repeats: int) -> dict[str, float]:
        """Median milliseconds of each phase and of the round that they make, one graph with events between its phases,
        over these slots as they stand; what they hold is put back after every round."""
        size, round_ = self._padded(len(slots)), self.rounds.at(len(slots))
        req_idx_B = torch.full((size,), self._padding, dtype=torch.int64, device=self._rows_B.device)
        req_idx_B[: len(slots)] = torch.tensor(slots, device=self._rows_B.device)
        runner, state = GraphRunner(self._rows_B.device), round_.state
        marks = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(len(PHASES) + 1)]

        def marked() -> Verified:
            marks[0].record()
            rows, draft = round_.draft(req_idx_B, False)
            marks[1].record()
            verified = round_.verify(rows, draft, False)
            marks[2].record()
            round_.extend(verified)
            marks[3].record()
            return verified

        times: dict[str, list[float]] = {name: [] for name in (*PHASES, "round")}
        with _put_back(state) as put_back:
            state.ints_SF[:, Field.DONE] = 1  # captures run rounds, too: these must write nothing and advance nobody
            runner.capture(("round",), marked)
            until = time.perf_counter() + _WARM_SECONDS
            while len(times["round"]) < repeats:
                put_back()
                runner.replay(("round",))
                torch.cuda.synchronize()
                if time.perf_counter() < until:
                    continue
                for name, before, after in zip(times, (*marks[:-1], marks[0]), (*marks[1:], marks[-1]), strict=True):
                    times[name].append(before.elapsed_time(after))
        return {name: statistics.median(values) for name, values in times.items()}


def _kept(state: RequestTable) -> Callable[[], None]:
    """What makes all slots as they are now. It takes no memory on the device."""
    ints, features = state.ints_SF.clone(), state.features_SE.clone()

    def put_back() -> None:
        state.ints_SF.copy_(ints)
        state.features_SE.copy_(features)

    return put_back


@contextmanager
def _put_back(state: RequestTable) -> Iterator[Callable[[], None]]:
    """What makes all slots as they were; they are made so in the end, too."""
    put_back = _kept(state)
    try:
        yield put_back
    finally:
        put_back()


def _copy_into(target: Any, source: Any) -> None:
    """Copy every tensor of a nest of dataclasses, tuples and lists onto its counterpart."""
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, tuple | list):
        for mine, theirs in zip(target, source, strict=True):
            _copy_into(mine, theirs)
    elif dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            _copy_into(getattr(target, field.name), getattr(source, field.name))
