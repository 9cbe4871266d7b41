"""The chat template of a model or of the configuration: it writes messages, tools and its variables as one text.

It can come from anywhere. transformers runs it in Jinja's sandbox, where it can still ask for hours and for gigabytes.
What it reads and how its model answers is seen in its text.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import jinja2
from jinja2 import nodes

from specbatch.config import DataSection
from specbatch.errors import ConfigError, ModelError, RowError, SpecbatchError, shown
from specbatch.setup.sampling import has_chat_template
from specbatch.strict.reader import nearest
from specbatch.text.bounds import Bounded, OutOfBounds, Stoppable
from specbatch.text.chat_output import CallFormat, call_format, thinks
from specbatch.text.message_form import FormFinder, Loss, found_in
from specbatch.text.template_variables import parsed, variables_of

# Some templates take the date that they print as a variable. A row must not depend on the day: Llama 3.2's default.
_DATE_STRING, _DEFAULT_DAY = "26 Jul 2024", "2024-07-26"
_ROLES = ("system", "user", "assistant", "tool")  # roles that most templates write
_GREETING = [{"role": "user", "content": "Hello"}]
_MAX_GREETING = 1 << 20  # characters
_A_MARK = re.compile(r"<[^\s<>]+>|\[[A-Z_/]+\]")
# transformers has a function `strftime_now` that reads the clock, and passes no other functions to templates. So the
# template gets a macro of this name, and the texts of all formats that it holds.
# Its line ends with a block: Jinja drops that line break, and reads the template as if it began there.
_MACRO = """{% macro strftime_now(format) %}\
{{ strftime_texts[format] if format in strftime_texts else \
raise_exception('strftime_now needs a format that the template has as a text') }}\
{% endmacro %}
"""


@dataclass(frozen=True)
class TemplateFacts:
    """Facts that the text of a template shows."""

    variables: frozenset[str]  # variables that the template reads
    calls: CallFormat | None = None  # how its model calls tools
    thinks: bool = False  # whether its model writes reasoning before its answer

    @classmethod
    def of(cls, template: str) -> TemplateFacts:
        """Raises jinja2.TemplateSyntaxError for a template that is not valid."""
        return cls(variables_of(template), call_format(template), thinks(template))


class ChatTemplate:
    """Writes messages as text. `tokenizer` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any, data: DataSection, bounded: Bounded | None = None) -> None:
        self.exists = has_chat_template(data, tokenizer)
        self._tokenizer = tokenizer
        self._given = data.chat_template  # None: the tokenizer's own
        self._kwargs = data.chat_template_kwargs or {}
        self._system = data.system_prompt
        self._day = data.chat_template_date or date.today().isoformat()
        self._on_day = functools.cache(on_day)
        self._bounded = bounded or Bounded()
        self._stoppable = Stoppable(self._bounded.seconds)
        self._forms = FormFinder(self._render)

    def examine(self) -> None:
        """Find out what is asked of the template's text, in the main thread, where each step is bounded. Then `write`
        can be called in another thread."""
        _ = self._problem, self.facts, self.tool_facts, self.printed_day, self.marks

    def stop_late(self) -> None:
        """See `Stoppable.stop_late`: of a `write` in another thread."""
        self._stoppable.stop_late()

    @functools.cached_property
    def facts(self) -> TemplateFacts:
        """The facts about the template. Without chats, and for a template that does not work, it reads nothing."""
        return self._facts(self._text)

    @functools.cached_property
    def printed_day(self) -> str | None:
        """The day that it prints as the current one; None: it prints none, or takes one as a variable."""
        texts = (self._variant("default"), self._variant("tool_use"))
        return self._day if any(reads_clock(text) and "date_string" not in text for text in texts) else None

    @functools.cached_property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that the template writes before a message of the user, such as [INST] and <|user|>."""
        try:
            before, _, _ = self.write(_GREETING).partition(_GREETING[0]["content"])
        except RowError:
            return ()
        return tuple(_A_MARK.findall(before))

    def write(
        self,
        messages: list[dict[str, Any]],
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The text, with the beginning of the answer, after data.system_prompt if there is no system message. `kwargs`:
        variables of the template; None: the configuration's. Raises RowError, also for a message whose text the
        template leaves out."""
        if not self.exists:
            raise RowError("no_chat_template", "the model has no chat template; set data.chat_template")
        if self._problem is not None:
            raise RowError("chat_template_error", self._problem.message)
        kwargs = self._kwargs if kwargs is None else kwargs
        facts = self.tool_facts if tools else self.facts
        if tools and "tools" not in facts.variables:
            raise RowError("unsupported_parameter", "the chat template does not read tools, so it cannot show them")
        if unread := self._unread(kwargs, facts):
            raise RowError("unsupported_parameter", unread)
        given = self._with_system(messages)
        try:
            found = self._forms.find(given, kwargs, bool(tools))
            text = self._render(found.form.of(given), kwargs, tools) if not found.losses else ""
        except OutOfBounds as exc:
            raise RowError("chat_template_error", f"the chat template does not end: {exc}") from exc
        except Exception as exc:  # templates raise many kinds: unknown roles, a wrong order of roles
            raise RowError("chat_template_error", f"the chat template refuses these messages: {exc}") from exc
        if found.is_refused:  # it writes these texts, and not those of the probe
            found = found_in(text, given, found.form)
        if found.losses:
            raise RowError("chat_template_error", _sentence(found.losses[0], messages, len(given) - len(messages)))
        return text

    def leaves_out_text(
        self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any] | None = None, has_tools: bool = False
    ) -> bool:
        """Return whether `write` leaves out the text of a message with tool calls although it writes the calls."""
        if not any("tool_calls" in message and message.get("content") for message in messages):
            return False
        kwargs = self._kwargs if kwargs is None else kwargs
        return self._forms.find(self._with_system(messages), kwargs, has_tools).left_out

    def check(self) -> None:
        """Raises ConfigError (ModelError for the model's own template) if it is not valid or does not end, if it does
        not write a message, or if it does not read a variable or the system prompt of the configuration."""
        if self._problem is not None:
            raise self._problem
        if unread := self._unread(self._kwargs, self.facts):
            raise ConfigError(f"data.{unread.removeprefix('data.')}")
        try:
            if self._forms.find(_GREETING, self._kwargs, False).losses:
                raise self._unusable("does not write the text of a user's message")
            if self._system is not None:
                self.write(_GREETING)
        except OutOfBounds as exc:
            raise self._unusable(f"does not end: {exc} for a message of one word") from exc
        except RowError as exc:
            hint = "give the text in the rows' messages of the user, or give another data.chat_template"
            raise ConfigError(f"data.system_prompt: {exc.message.removeprefix('data.system_prompt: ')}", hint) from exc

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._system is None or any(message["role"] in ("system", "developer") for message in messages):
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    @functools.cached_property
    def _problem(self) -> SpecbatchError | None:
        if not self.exists:
            return None
        try:
            with self._bounded:
                _refuse_powers(self._text)
            text = self._render(_GREETING, {})
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
        return self._variant("default")

    @functools.cached_property
    def tool_facts(self) -> TemplateFacts:
        """`facts` of the template for rows with tools."""
        return self._facts(self._variant("tool_use"))

    def _variant(self, name: str) -> str:
        """Some models have several templates by name. transformers takes `tool_use` for rows with tools."""
        template = self._given or getattr(self._tokenizer, "chat_template", None) or ""
        if isinstance(template, dict):
            template = template.get(name) or template.get("default", "")
        return str(template)

    def _facts(self, text: str) -> TemplateFacts:
        if self._problem is not None:
            return TemplateFacts(frozenset())
        with self._bounded:
            return TemplateFacts.of(text)

    def _unread(self, kwargs: Mapping[str, Any], facts: TemplateFacts) -> str | None:
        """Return a message that names one of `kwargs` that would have no effect, or None."""
        if not kwargs:
            return None
        legal = facts.variables - self._reserved
        name = next((name for name in kwargs if name not in legal), None)
        if name is None:
            return None
        shown = name if name == "reasoning_effort" else f"chat_template_kwargs.{name[:60]}"
        if name in facts.variables:
            return f"{shown} cannot be set: {name} has its own field"
        near = nearest(name, legal)
        meant = f"; did you mean {near}?" if near is not None else ""
        special = getattr(self._tokenizer, "special_tokens_map", {})
        names = ", ".join(sorted(legal - set(special))) or "no variable of this kind"
        return f"{shown} has no effect: the chat template reads {names}{meant}"

    @functools.cached_property
    def _reserved(self) -> frozenset[str]:
        """The variables of templates that have fields of their own."""
        return frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters) | {"messages"}

    def _render(
        self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any], tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        variables = {"date_string": _DATE_STRING, **kwargs}
        template = self._given
        with self._bounded, self._stoppable:
            if reads_clock(text := self._variant("tool_use" if tools else "default")):
                # Not the day of the clock: a job can run over midnight.
                template, texts = self._on_day(text, self.printed_day or _DEFAULT_DAY)
                variables |= texts
            return self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )

    def _unusable(self, why: str) -> SpecbatchError:
        if self._given is not None:
            return ConfigError(f"data.chat_template {why}")
        return ModelError(
            f"the model's chat template {why}",
            "data.chat_template gives another; data.prompts_as_chat: false runs prompts as text to continue",
        )


def _sentence(loss: Loss, messages: Sequence[Mapping[str, Any]], num_before: int) -> str:
    """Says what is lost. `messages`: of the row. `num_before`: messages that the template was given before these."""
    index = loss.index - num_before
    if index < 0:
        return "data.system_prompt: the chat template leaves out its text: it does not write the role 'system' here"
    role = messages[index]["role"]
    lost = "its text" if loss.what == "text" else "its tool calls"
    known = role.strip().lower()
    if known != role and known in _ROLES:
        hint = f"; did you mean {known!r}?"
    elif role == "developer":
        hint = "; most templates write the role 'system' instead"
    elif role == "system" and index > 0:
        hint = "; most templates write a system message only at the beginning"
    else:
        hint = ""
    return f"messages[{index}] (role {shown(role)}): the chat template leaves out {lost}{hint}"


def _refuse_powers(template: str) -> None:
    """`9 ** 9 ** 9` is one operation that takes hours, and nothing can interrupt it."""
    before = "("
    for line, kind, value in jinja2.Environment().lex(template):
        if kind == "whitespace":
            continue
        if kind == "operator" and value == "**" and before not in ("(", ","):  # those pass arguments on
            raise jinja2.TemplateSyntaxError("powers (**) are not supported", line)
        before = value


def reads_clock(template: str) -> bool:
    return "strftime_now" in template


def on_day(template: str, day: str) -> tuple[str, dict[str, dict[str, str]]]:
    """(a template that prints `day`, such as 2026-11-23, as the current one; the variables that it needs). The time is
    0:00. Raises jinja2.TemplateSyntaxError for a template that is not valid."""
    formats = {const.value for const in parsed(template).find_all(nodes.Const) if isinstance(const.value, str)}
    midnight = datetime.fromisoformat(day)
    return _MACRO + template, {"strftime_texts": {text: midnight.strftime(text) for text in formats}}
