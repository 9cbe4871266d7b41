"""Bounds on the time and the memory of a block of code that runs a template."""

from __future__ import annotations

import ctypes
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

import psutil

SECONDS = 10.0  # seconds of this thread's CPU time; a template takes a millisecond
MEMORY = 1 << 30  # bytes more than the process has
_STATM_BYTES = 32
_PREAD = ctypes.PyDLL(None).pread  # with the interpreter held
_PREAD.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long
_LIMITED = threading.Lock()  # held by the block that has lowered the process's limit


class OutOfBounds(Exception):
    """A template took too much time or memory."""


def _late(seconds: float) -> str:
    return f"it takes more than {seconds:g} seconds"


class Bounded:
    """A context that raises OutOfBounds if its body takes too much memory or, in the main thread, too much time.
    Entering it takes 10 us.

    Memory is bounded by a limit on the address space of the process. While another thread's block has lowered it, that
    limit holds for this block. In a thread that is not the main one it is at least half of what the machine has free:
    it holds for all threads, and an engine that allocates meanwhile must not run into it. Time is bounded by a timer,
    which only the main thread can have: see `Stoppable`. Neither stops a single operation of the interpreter that takes
    no memory and does not end.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.seconds = seconds
        self._memory = memory
        self._allowed = memory  # memory that the current block may take
        self._began = 0.0
        self._handler: Callable[[int, FrameType | None], Any] | int | None = None
        self._timer: tuple[float, float] | None = None  # before; None: not set
        self._limit: tuple[int, int] | None = None  # before; None: not changed

    def __enter__(self) -> None:
        statm, is_main = _statm(), threading.current_thread() is threading.main_thread()
        self._allowed = self._memory if is_main else max(self._memory, _half_of_free())
        if statm is not None and _LIMITED.acquire(blocking=False):
            self._limit = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = _num_pages(statm) * resource.getpagesize() + self._allowed
            if soft == resource.RLIM_INFINITY or most < soft:
                resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        if not is_main:
            return
        self._began = time.thread_time()
        self._handler = signal.signal(signal.SIGALRM, self._on_alarm)
        # Again every second: a template's compiler can swallow the exception while it computes a constant.
        self._timer = signal.setitimer(signal.ITIMER_REAL, self.seconds, min(1.0, self.seconds))

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._began = math.inf  # an alarm raises nothing from here on: the rest must run
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            if self._timer[0]:
                signal.setitimer(signal.ITIMER_REAL, *self._timer)
            self._timer = None
        if self._limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, self._limit)
            self._limit = None
            _LIMITED.release()
        if isinstance(exc, MemoryError):
            raise OutOfBounds(f"it takes more than {self._allowed >> 20:,} MiB of memory") from exc

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        # The time of this thread counts, not that of other processes or while this one was stopped.
        if time.thread_time() - self._began >= self.seconds:
            raise OutOfBounds(_late(self.seconds))


class Stoppable:
    """A context for a thread that is not the main one. A thread that waits for it calls `stop_late`, which raises
    OutOfBounds in the block if that has taken too much CPU time. One thread at a time can be in the block."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._thread: int | None = None  # the thread that is in the block and has not been stopped
        self._began = 0.0
        self._is_looking = False  # `stop_late` runs
        self._is_stopped = False  # it has stopped the current block

    def stop_late(self) -> None:
        self._is_looking = True
        thread = self._thread
        if thread is not None and _cpu_seconds(thread) - self._began >= self._seconds:
            self._thread = None  # once is enough
            self._is_stopped = True
            # An exception without arguments: that is what the interpreter offers.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfBounds))
        self._is_looking = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._began = _cpu_seconds(threading.get_ident())
            self._is_stopped = False
            self._thread = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._thread = None
            while self._is_looking:
                time.sleep(0)
            # After a call an exception of `stop_late` is raised, so never after this block. Without one there is no
            # call, because it would release the interpreter, which takes milliseconds to get back from a busy engine.
            if self._is_stopped:
                time.sleep(0)
        except OutOfBounds as late:
            exc = late
        if isinstance(exc, OutOfBounds) and not exc.args:
            raise OutOfBounds(_late(self._seconds)) from None


def _cpu_seconds(thread: int) -> float:
    """Return the CPU seconds that a thread has used, or seconds of wall time if the system does not count these."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(thread)) if clock is not None else time.monotonic()


@functools.cache
def _half_of_free() -> int:
    """Bytes, when it is called for the first time."""
    return int(psutil.virtual_memory().available) // 2


def _num_pages(statm: int) -> int:
    """Return the number of pages in the address space of this process. `os.pread` would release the interpreter, which
    takes milliseconds to get back from a busy engine."""
    text = ctypes.create_string_buffer(_STATM_BYTES)
    _PREAD(statm, text, _STATM_BYTES - 1, 0)
    return int(text.value.split(b" ", 1)[0])


@functools.cache
def _statm() -> int | None:
    """The file with the memory of this process; None if the system has no such file (not Linux)."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
