"""The chat template of a run: the configuration's or the model's own.

A template comes with a model from anywhere. transformers runs it in Jinja's sandbox; what it may take is bounded here.
"""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from specbatch.config import DataSection
from specbatch.engine.resolve_data import has_chat_template
from specbatch.errors import ConfigError, ModelError, RowError, SpecbatchError
from specbatch.job.bounds import Bounded, OutOfBounds

# For templates that take the date they print as a variable, Llama 3.2's own fallback: a row must not depend on the day.
_DATE_STRING = "26 Jul 2024"
_GREETING = [{"role": "user", "content": "Hello"}]
_LONGEST_GREETING = 1 << 20  # characters


class ChatTemplate:
    """Writes messages as text. `tokenizer` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any, data: DataSection, bounded: Bounded | None = None) -> None:
        self.exists = has_chat_template(data, tokenizer)
        self._tokenizer = tokenizer
        self._given = data.chat_template  # None: the tokenizer's own
        self._bounded = bounded or Bounded()

    @property
    def prints_today(self) -> bool:
        """Whether it writes the current date and takes none from us: then a job belongs to its day."""
        return "strftime_now" in self._text and "date_string" not in self._text

    def write(self, messages: list[dict[str, Any]]) -> str:
        """With the opening of the answer. Raises RowError."""
        if not self.exists:
            raise RowError("no_chat_template", "the model has no chat template; set data.chat_template")
        if self._problem is not None:
            raise RowError("chat_template_error", self._problem.message)
        try:
            return self._render(messages)
        except OutOfBounds as exc:
            raise RowError("chat_template_error", f"the chat template does not finish: {exc}") from exc
        except Exception as exc:  # templates refuse what they do not know (roles, their order) in ways of their own
            raise RowError("chat_template_error", f"the chat template refuses these messages: {exc}") from exc

    def check(self) -> None:
        """Raises ConfigError (or ModelError for the model's own) for a template that no messages can be written with:
        it is not valid, or does not come to an end."""
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
        except (SyntaxError, RecursionError) as exc:  # it became Python that is nested too deeply
            return self._unusable(f"is not valid: {exc}")
        except OutOfBounds as exc:
            return self._unusable(f"does not finish: {exc} for a message of one word")
        except Exception:  # it refuses this message, and may take those of the rows
            return None
        if len(text) > _LONGEST_GREETING:
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
    """`9 ** 9 ** 9` is one operation of hours, which nothing can interrupt."""
    before = "("
    for line, kind, value in jinja2.Environment().lex(template):
        if kind == "whitespace":
            continue
        if kind == "operator" and value == "**" and before not in ("(", ","):  # those pass arguments on
            raise jinja2.TemplateSyntaxError("powers (**) are not supported", line)
        before = value
