"""Handlers of SIGINT and SIGTERM that are set during a `with` block."""

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
    """Set the handler during the block. In other threads than the main thread this does nothing, because Python does
    not allow it there. A handler that a program has set without Python stays, because Python could not set it again."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in numbers if signal.getsignal(number) is not None}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Handle signals that come during the block after its end. Some libraries crash later if an exception is raised
    inside them."""
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
    """A KeyboardInterrupt of a separate type. After a plain KeyboardInterrupt inside exec(), which dataclasses use,
    Python ignores the exit code and ends by SIGINT."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise an exception at SIGTERM as at Ctrl-C, so that files are closed and an unfinished download is removed."""
    raise Interrupted
