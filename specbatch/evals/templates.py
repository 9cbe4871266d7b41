"""Jinja templates of tasks, over the fields of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbatch.errors import ConfigError, InputError
from specbatch.text.bounds import Bounded, OutOfBounds

Row = Mapping[str, Any]


def check_template(path: str, text: str) -> None:
    """Raises ConfigError, with `path`, for what is not a valid template."""
    _compiled(path, text)  # not only parsed: that finds unknown filters


def _compiled(path: str, text: str) -> jinja2.Template:
    # Templates see a row and nothing else: sandboxed, and a field that the row does not have is an error.
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = _regex_replace
    try:
        with Bounded():  # constants are computed here: {{ 'x' * 9999999999 }}
            return environment.from_string(text)
    except (jinja2.TemplateError, SyntaxError, RecursionError, OutOfBounds) as exc:
        raise ConfigError(f"{path} is not a valid template: {exc}") from exc


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return re.sub(pattern, replacement, text, count=count)


class Renderer:
    """Fills one template. Raises InputError for a row that it does not fit."""

    def __init__(self, path: str, template: str) -> None:
        """`path`: the option that holds the template."""
        self._path = path
        self._template = _compiled(path, template)
        self._bounded = Bounded()  # tasks come from anywhere, too

    def __call__(self, row: Row, where: str, response: str | None = None) -> str:
        """`where`: names the row in errors; `response`: one more field, for programs."""
        fields = row if response is None else {**row, "response": response}
        try:
            with self._bounded:
                return self._template.render(fields)
        except Exception as exc:  # templates fail in many ways, and all of them mean: not this row
            names = ", ".join(list(row)[:8]) or "none"
            raise InputError(f"{self._path} does not fit {where}: {exc}", f"its fields: {names}") from exc
