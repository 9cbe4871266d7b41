"""A forward pass in stages, so that two passes can take turns.

A stage is half a layer: attention, or the MLP. The sum over ranks at its end is launched before the pass yields, and
awaited when it goes on: meanwhile the other pass computes. On CUDA the second pass has a stream of its own, which one
graph can hold together with the first, and runs half a layer later: one computes attention, the other an MLP. On a CPU
the two alternate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

from specbatch.kernels.trace_marks import marked
from specbatch.parallel.group import Group

T = TypeVar("T")
Stages = Generator[None, None, T]


def completed(stages: Stages[T]) -> T:
    """Run a pass alone and return its result."""
    one = _Pass(stages)
    while not one.is_done:
        one.go_on()
    return one.result


class Turn:
    """The order of a pass among two that run at the same time."""

    is_second = False

    def wrote(self, layer: int) -> None:
        """Its keys and values of the layer are launched."""

    def will_read(self, layer: int) -> None:
        """Attention of the layer is launched next."""


class _Second(Turn):
    is_second = True


FIRST, SECOND = Turn(), _Second()


class _Writer(Turn):
    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.written: dict[int, torch.cuda.Event | None] = {}

    def wrote(self, layer: int) -> None:
        self.written[layer] = torch.cuda.current_stream().record_event() if self._is_cuda else None


class _Reader(_Second):
    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def will_read(self, layer: int) -> None:
        event = self._writer.written[layer]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def turns_over_one_sequence(device: torch.device) -> tuple[Turn, Turn]:
    """Return the turns of two passes over the first and the later tokens of one sequence: the second reads what the
    first writes. It does not wait for the sum over ranks that follows."""
    writer = _Writer(device)
    return writer, _Reader(writer)


class TwoPasses:
    """Runs two passes of one model. They need working memory of their own each."""

    def __init__(self, device: torch.device, group: Group | None = None) -> None:
        """Prepare the streams of the passes. `group`: the ranks that share the model."""
        self._group = group
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, first: Stages[T], second: Stages[T]) -> tuple[T, T]:
        """Run both passes and return their results. The caller keeps their inputs until then: memory that it frees
        earlier may be given to others while the second pass still runs."""
        one, other = _Pass(first), _Pass(second)
        with self._lane(0):
            one.go_on()
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        try:
            while not (one.is_done and other.is_done):
                with self._on_side(), self._lane(1):
                    other.go_on()
                with self._lane(0):
                    one.go_on()
        finally:
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
        return one.result, other.result

    def _on_side(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    @contextlib.contextmanager
    def _lane(self, number: int) -> Iterator[None]:
        group = self._group
        with (
            marked(f"lane {1 + number}"),
            contextlib.nullcontext() if group is None else group.one_of_two_passes(number),
        ):
            yield


class _Pass(Generic[T]):
    result: T

    def __init__(self, stages: Stages[T]) -> None:
        self._stages = stages
        self.is_done = False

    def go_on(self) -> None:
        """Run the next stage, if there is one."""
        if self.is_done:
            return
        try:
            next(self._stages)
        except StopIteration as end:
            self.result, self.is_done = end.value, True
