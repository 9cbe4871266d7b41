"""Templates that write prompts, with bounds on their time and memory.

A prompt template comes from the configuration, a chat template with a model from anywhere. transformers runs chat
templates in Jinja's sandbox; a template can still ask for hours and for gigabytes.
"""

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

import jinja2

from specbatch.config import DataSection
from specbatch.engine.resolve_data import has_chat_template
from specbatch.errors import ConfigError, ModelError, RowError, SpecbatchError

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


# Some templates take the date that they print as a variable. A row must not depend on the day: Llama 3.2's default.
_DATE_STRING = "26 Jul 2024"
_GREETING = [{"role": "user", "content": "Hello"}]
_MAX_GREETING = 1 << 20  # characters


class ChatTemplate:
    """Writes messages as text. `tokenizer` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any, data: DataSection, bounded: Bounded | None = None) -> None:
        self.exists = has_chat_template(data, tokenizer)
        self._tokenizer = tokenizer
        self._given = data.chat_template  # None: the tokenizer's own
        self._bounded = bounded or Bounded()

    @property
    def prints_today(self) -> bool:
        """Whether it prints the current date, and takes none as a variable. The job then includes the date."""
        return "strftime_now" in self._text and "date_string" not in self._text

    def write(self, messages: list[dict[str, Any]]) -> str:
        """The text, with the beginning of the answer. Raises RowError."""
        if not self.exists:
            raise RowError("no_chat_template", "the model has no chat template; set data.chat_template")
        if self._problem is not None:
            raise RowError("chat_template_error", self._problem.message)
        try:
            return self._render(messages)
        except OutOfBounds as exc:
            raise RowError("chat_template_error", f"the chat template does not end: {exc}") from exc
        except Exception as exc:  # templates raise many kinds: unknown roles, a wrong order of roles
            raise RowError("chat_template_error", f"the chat template refuses these messages: {exc}") from exc

    def check(self) -> None:
        """Raises ConfigError (ModelError for the model's own template) if it is not valid or does not end."""
        if self._problem is not None:
            raise self._problem

    @functools.cached_property
    def _problem(self) -> SpecbatchError | None:
        if not self.exists:
            return None
        try:
            with self._bounded:
                _refuse_powers(self._text)
            text = self._render(_GREETING)
        except jinja2.TemplateSyntaxError as exc:
            return self._unusable(f"is not valid: {exc.message} (line {exc.lineno})")
        except (SyntaxError, RecursionError) as exc:  # the Python code made of it is nested too deeply
            return self._unusable(f"is not valid: {exc}")
        except OutOfBounds as exc:
            return self._unusable(f"does not end: {exc} for a message of one word")
        except Exception:  # it refuses this message; those of the rows can be right
            return None
        if len(text) > _MAX_GREETING:
            return self._unusable(f"writes {len(text):,} characters for a message of one word")
        return None

    @property
    def _text(self) -> str:
        template = self._given or getattr(self._tokenizer, "chat_template", None) or ""
        if isinstance(template, dict):  # several by name; chats use this one
            template = template.get("default", "")
        return str(template)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        with self._bounded:
            return self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._given,
                tokenize=False,
                add_generation_prompt=True,
                date_string=_DATE_STRING,
            )

    def _unusable(self, why: str) -> SpecbatchError:
        if self._given is not None:
            return ConfigError(f"data.chat_template {why}")
        return ModelError(
            f"the model's chat template {why}",
            "data.chat_template gives another; data.prompts_as_chat: false runs prompts as text to continue",
        )


def _refuse_powers(template: str) -> None:
    """`9 ** 9 ** 9` is one operation that takes hours, and nothing can interrupt it."""
    before = "("
    for line, kind, value in jinja2.Environment().lex(template):
        if kind == "whitespace":
            continue
        if kind == "operator" and value == "**" and before not in ("(", ","):  # those pass arguments on
            raise jinja2.TemplateSyntaxError("powers (**) are not supported", line)
        before = value
