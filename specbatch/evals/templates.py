"""Jinja templates of tasks, over the fields of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specbatch.errors import InputError
from specbatch.text.bounds import Bounded
from specbatch.text.field_template import compiled

Row = Mapping[str, Any]


def check_template(path: str, text: str) -> None:
    """Raises ConfigError, with `path`, for what is not a valid template."""
    compiled(path, text, _FILTERS)  # not only parsed: that finds unknown filters


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return re.sub(pattern, replacement, text, count=count)


_FILTERS = {"regex_replace": _regex_replace}


class Renderer:
    """Fills one template. Raises InputError for a row that it does not fit."""

    def __init__(self, path: str, template: str) -> None:
        """`path`: the option that holds the template."""
        self._path = path
        self._template = compiled(path, template, _FILTERS)
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
