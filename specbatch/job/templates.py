"""The prompt template of a configuration, and bounds on the time and memory of all templates."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import resource
import signal
import string
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from specbatch.errors import ConfigError, RowError

SECONDS = 10.0  # of this thread's CPU time; a template takes a millisecond
MEMORY = 1 << 30  # bytes more than the process has


class OutOfBounds(Exception):
    """A template took too much time or memory."""


class Bounded:
    """A context that raises OutOfBounds if its body takes too much time or memory. Entering it takes 10 us.

    Memory is bounded by a limit on the address space of the process, time by a timer. Both are of the whole process, so
    they are set in the main thread only. Neither stops a single operation of the interpreter that takes no memory and
    does not end.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._seconds = seconds
        self._memory = memory
        self._began = 0.0
        self._handler: Callable[[int, FrameType | None], Any] | int | None = None
        self._timer: tuple[float, float] | None = None  # before; None: not set
        self._limit: tuple[int, int] | None = None  # before; None: not changed

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
        # Again every second: a template's compiler can swallow the exception while it computes a constant.
        self._timer = signal.setitimer(signal.ITIMER_REAL, self._seconds, min(1.0, self._seconds))

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
        if isinstance(exc, MemoryError):
            raise OutOfBounds(f"it takes more than {self._memory >> 20:,} MiB of memory") from exc

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        # The time of this thread counts, not that of other processes or while this one was stopped.
        if time.thread_time() - self._began >= self._seconds:
            raise OutOfBounds(f"it takes more than {self._seconds:g} seconds")


@functools.cache
def _statm() -> int | None:
    """The file with the memory of this process; None if the system has no such file (not Linux)."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


_HINT = "fields are written {name} or {name[key]}; literal braces are doubled: {{ }}"
_FIELD = re.compile(r"([^.\[\]]+)(\[[^\]]+\])*")  # no attributes: {x.__class__} would read the interpreter
_MAX_WIDTH = 10_000  # characters that a format can ask for


class PromptTemplate:
    """data.prompt_template: a prompt made of a row's fields, in the syntax of str.format.

    Raises ConfigError for what no row can fill: wrong syntax, fields without a name, unknown conversions and formats.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._has_nested = False
        self.fields = tuple(dict.fromkeys(self._checked(text)))  # of the row, by name

    def fill(self, row: Mapping[str, Any]) -> str:
        """The prompt of a row. Raises RowError."""
        for name in self.fields:
            if row.get(name) is None:
                raise RowError("missing_prompt", f"the row has no {name!r}, which data.prompt_template uses")
        try:
            # A format that the row gives ({x:{width}}) can ask for gigabytes.
            with Bounded() if self._has_nested else contextlib.nullcontext():
                return self._text.format_map(row)
        except Exception as exc:  # a lookup or format that this row's value does not support
            raise RowError("missing_prompt", f"data.prompt_template does not fit the row: {exc!r}") from exc

    def _checked(self, text: str) -> list[str]:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as exc:
            raise ConfigError(f"data.prompt_template is not a valid template: {exc}", _HINT) from exc
        names: list[str] = []
        for _, field, spec, conversion in parts:
            if field is None:
                continue
            matched = _FIELD.fullmatch(field)
            if matched is None or matched[1].isdigit():
                raise ConfigError(f"data.prompt_template: {{{field}}} does not name a field of the row", _HINT)
            names.append(matched[1])
            if conversion not in (None, "r", "s", "a"):
                shown = f"{{{field}!{conversion}}}"
                raise ConfigError(f"data.prompt_template: {shown} has an unknown conversion; use !r, !s or !a")
            if spec and "{" in spec:
                self._has_nested = True
                names += self._checked(spec)
            elif spec:
                _check_spec(field, spec, text_only=conversion is not None)
        return names


def _check_spec(field: str, spec: str, *, text_only: bool) -> None:
    """Raises ConfigError if no value can have this format: text or a number, or a date if it has a `%`."""
    shown = f"data.prompt_template: {{{field}:{spec[:60]}}}"
    if any(int(number[:9]) > _MAX_WIDTH for number in re.findall(r"[1-9]\d*", spec)):
        raise ConfigError(f"{shown} asks for more than {_MAX_WIDTH:,} characters")
    samples: tuple[Any, ...] = ("",) if text_only else ("", 0, 0.0)
    if not any(_takes(value, spec) for value in samples) and (text_only or "%" not in spec):
        raise ConfigError(f"{shown} is not a format for text or a number", "such as {name:>10} or {share:.2f}")


def _takes(value: Any, spec: str) -> bool:
    try:
        format(value, spec)
    except ValueError:
        return False
    return True
