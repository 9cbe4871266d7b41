"""Bounds on what templates may take: a model's template, or a row's format, can ask for hours and for gigabytes."""

from __future__ import annotations

import functools
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SECONDS = 10.0  # of this thread's CPU time; a template takes a millisecond
MEMORY = 1 << 30  # bytes more than the process has


class OutOfBounds(Exception):
    """A template took more time or memory than it may."""


class Bounded:
    """A context that raises OutOfBounds where the time is over or the memory is used up. Entering it takes 10 us.

    Memory is bounded by a limit of the process on its address space, time by a timer: both in the main thread only, for
    they belong to the whole process. Neither can stop a single operation of the interpreter that takes no memory and
    does not end.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._seconds = seconds
        self._memory = memory
        self._began = 0.0
        self._handler: Callable[[int, FrameType | None], Any] | int | None = None
        self._timer: tuple[float, float] | None = None  # as it was; None: not set
        self._limit: tuple[int, int] | None = None  # as it was; None: not changed

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        statm = _statm()
        if statm is not None:
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = int(os.pread(statm, 32, 0).split(b" ", 1)[0]) * resource.getpagesize() + self._memory
            if soft == resource.RLIM_INFINITY or most < soft:
                resource.setrlimit(resource.RLIMIT_AS, (most, hard))
                self._limit = soft, hard
        self._began = time.thread_time()
        self._handler = signal.signal(signal.SIGALRM, self._on_alarm)
        # Again every second: a template's compiler may swallow the exception while it computes a constant.
        self._timer = signal.setitimer(signal.ITIMER_REAL, self._seconds, min(1.0, self._seconds))

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._began = math.inf  # an alarm from now on raises nothing: what follows must be done
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            if self._timer[0]:
                signal.setitimer(signal.ITIMER_REAL, *self._timer)
            self._timer = None
        if self._limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, self._limit)
            self._limit = None
        if isinstance(exc, MemoryError):
            raise OutOfBounds(f"it takes more than {self._memory >> 20:,} MiB of memory") from exc

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        # Other processes may have had the processor, or this one may have been stopped: its own time counts.
        if time.thread_time() - self._began >= self._seconds:
            raise OutOfBounds(f"it takes more than {self._seconds:g} seconds")


@functools.cache
def _statm() -> int | None:
    """The file that says how much memory this process has; None where there is none (no Linux)."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
