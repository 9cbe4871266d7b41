"""Handlers of SIGINT and SIGTERM, for the time of a `with` block."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # the exit code
Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def on_signals(handler: Handler) -> Iterator[None]:
    """Python allows handlers in the main thread only: other threads go on without."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Handle signals that come in the block after it. Some libraries crash later if an exception comes inside them."""
    came: list[int] = []
    try:
        with on_signals(lambda number, frame: came.append(number)):
            yield
    finally:
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process if nothing is open. An exception could come anywhere inside the import of a library, and some
    libraries catch it."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


class Interrupted(KeyboardInterrupt):
    """A separate type: after a KeyboardInterrupt inside exec() (dataclasses use it), Python ignores the exit code and
    ends by SIGINT."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM raises an exception like Ctrl-C: files are closed, and an unfinished download is removed."""
    raise Interrupted
