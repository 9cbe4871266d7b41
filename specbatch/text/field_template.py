"""Jinja templates over the fields of a row: of prompts, and of evaluation tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbatch.errors import ConfigError
from specbatch.text.bounds import Bounded, OutOfBounds

_NONE: Mapping[str, Callable[..., Any]] = {}


def compiled(
    path: str,
    text: str,
    filters: Mapping[str, Callable[..., Any]] = _NONE,
    finalize: Callable[[Any], Any] | None = None,
) -> jinja2.Template:
    """Compile a template. It sees the fields of a row and nothing else, and a field that the row does not have is an
    error when it is rendered. `path`: the option that holds it. `finalize`: what is made of a value before it is
    written. Raises ConfigError for what is not a valid template."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=finalize
    )
    environment.filters.update(filters)
    try:
        with Bounded():  # constants are computed here: {{ 'x' * 9999999999 }}
            return environment.from_string(text)
    except (jinja2.TemplateError, SyntaxError, RecursionError, OutOfBounds) as exc:
        raise ConfigError(f"{path} is not a valid template: {exc}") from exc
