"""Substitutes for CUDA graphs, for a lack of memory and for measured times, on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbatch.engine.transfers import Transfers
from specbatch.engine.verify_budget import RoundTimes, SharedTimes, TimeCurve
from specbatch.types import Completion

# Beside views: a copy in place, which puts slots back, and what numpy asks of a report that is there.
_NO_MEMORY = (torch.ops.aten.copy_.default, torch.ops.aten.resolve_conj.default, torch.ops.aten.resolve_neg.default)


class Shortage(TorchDispatchMode):
    """Operations on tensors within `step` are counted. The first one from each number in `at` on that may allocate
    raises: between the launch of a chunk or a round and its end, most do. Copies to the host never raise: on CUDA
    `Transfers.download` has another way for them."""

    def __init__(self, at: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__()
        self._at = set(at)
        self.count = self.raised = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        due = {number for number in self._at if number <= self.count}
        if due and not (func.is_view or func in _NO_MEMORY or _is_download()):
            self._at -= due
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return func(*args, **(kwargs or {}))


def _is_download() -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code is not Transfers.download.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def copy_into(target: Any, source: Any) -> None:
    """Copy every tensor of a nest of dataclasses, tuples and lists onto its counterpart."""
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, tuple | list):
        for mine, theirs in zip(target, source, strict=True):
            copy_into(mine, theirs)
    elif is_dataclass(target):
        for field in fields(target):
            copy_into(getattr(target, field.name), getattr(source, field.name))


class Replays:
    """Stands in for a `GraphRunner` on a CPU. A capture runs its function twice, as a GPU's does, and runs out of
    memory the second time where `fails` says so of its key. A replay writes where the captured function did."""

    def __init__(self, fails: Callable[[Any], bool]) -> None:
        self._fails = fails
        self._captured: dict[Any, tuple[Callable[[], Any], Any]] = {}
        self.outputs: dict[Any, Any] = {}
        self.tried: list[Any] = []
        self.num_replays, self.seconds = 0, 0.0

    def __contains__(self, key: Any) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, key: Any, function: Callable[[], Any]) -> Any:
        assert key not in self._captured
        self.tried.append(key)
        function()
        with Shortage({5} if self._fails(key) else set()):
            self.outputs[key] = function()
        self._captured[key] = function, self.outputs[key]
        return self.outputs[key]

    def drop(self, key: Any) -> None:
        self._captured.pop(key, None)

    def replace_output(self, key: Any, output: Any) -> None:
        self.outputs[key] = output

    def output(self, key: Any) -> Any:
        return self.outputs[key]

    def replay(self, key: Any) -> Any:
        self.num_replays += 1
        function, memory = self._captured[key]
        copy_into(memory, function())
        return self.outputs[key]


def round_times(num_nodes: list[float], milliseconds: list[float], ms_per_cached_token: float = 0.0) -> RoundTimes:
    """Make times of rounds. Those whose chains share a budget take as long as others with the same number of nodes."""
    curve = TimeCurve(num_nodes, milliseconds)
    return RoundTimes(curve, SharedTimes([1], [curve]), ms_per_cached_token)


def assert_close_logprobs(found: list[Completion], expected: list[Completion]) -> None:
    """Of tokens that are equal."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        for a, b in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
            assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-5)
