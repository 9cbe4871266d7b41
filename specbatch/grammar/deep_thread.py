"""A thread for work that is deeply recursive and cannot be interrupted: the compilation of a grammar."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

STACK_BYTES = 512 << 20  # This reserves addresses only. A level of recursion uses about 5 KB.
_SIGNAL_STACK_BYTES = 1 << 16
_LOOK_SECONDS = 0.1  # the time between two checks of `is_ending`
_DISABLED = 2  # SS_DISABLE of signal.h


class Abandoned(Exception):
    """The caller no longer waits for the result. The thread goes on until its work is done, or the process ends."""


class DeepThread(Generic[T]):
    """A daemon thread that calls `work`. It does not keep the process from ending."""

    def __init__(self, work: Callable[[], T], stack_bytes: int = STACK_BYTES) -> None:
        self._work = work
        self._is_done = threading.Event()
        thread = threading.Thread(target=self._run, name="specbatch-grammar", daemon=True)
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)

    def result(self, seconds: float, is_ending: threading.Event) -> T:
        """Return the result of `work`, or raise its error; a panic of Rust becomes a RuntimeError. It raises Abandoned
        after `seconds`, or when `is_ending` is set."""
        left = seconds
        while not self._is_done.wait(min(left, _LOOK_SECONDS)):
            left -= _LOOK_SECONDS
            if left <= 0 or is_ending.is_set():
                raise Abandoned
        if self._error is not None and not isinstance(self._error, Exception):  # a panic of Rust
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        self._error: BaseException | None = None
        try:
            with _signal_stack():
                self._result = self._work()
        except BaseException as exc:
            self._error = exc
        self._is_done.set()


@contextlib.contextmanager
def _signal_stack() -> Iterator[None]:
    """Give the thread a stack for signal handlers, so that `faulthandler` can report a stack that has overflowed.
    Python itself gives one to the main thread only."""
    if sys.platform != "linux":
        yield
        return
    memory = ctypes.create_string_buffer(_SIGNAL_STACK_BYTES)
    set_stack = ctypes.CDLL(None).sigaltstack
    set_stack(ctypes.byref(_Stack(ctypes.addressof(memory), 0, _SIGNAL_STACK_BYTES)), None)
    try:
        yield
    finally:
        set_stack(ctypes.byref(_Stack(None, _DISABLED, 0)), None)


class _Stack(ctypes.Structure):
    """The type stack_t of signal.h."""

    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
