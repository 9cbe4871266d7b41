"""The constraint that a request's sampling options put on its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from specbatch.errors import FieldError
from specbatch.grammar.formats import with_exact_formats
from specbatch.schemas.response_format import schema_of
from specbatch.types import GRAMMAR_FIELDS, SamplingParams

# The `x-guidance` of a schema, with which llguidance writes JSON as `json.dumps` does.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_CHARS = 1 << 20  # An option has room for 30,000 choices, or for 70,000 nested rules.


@dataclass(frozen=True, slots=True)
class Constraint:
    """A formal language: the texts that may be the output."""

    option: str  # the option that it comes from, for messages
    kind: Literal["json_schema", "regex", "grammar"]
    text: str


def constraint_of(params: SamplingParams) -> Constraint | None:
    """Return the constraint of a request, or None if any text may be the output. It raises FieldError if another option
    contradicts the constraint, or if it is too large."""
    option = next((name for name in GRAMMAR_FIELDS if getattr(params, name) is not None), None)
    if option is None:
        return None
    value = getattr(params, option)
    if (size := sum(map(len, value)) if option == "choice" else len(value)) > MAX_CHARS:
        raise FieldError("invalid_value", f"{option} has {size:,} characters, and {MAX_CHARS:,} can be compiled")
    if option == "response_format":
        schema = schema_of(value)
        found = None if schema is None else Constraint(option, "json_schema", with_exact_formats(schema))
    elif option == "choice":
        found = Constraint(option, "regex", _any_of(value))
    else:
        found = Constraint(option, "regex" if option == "regex" else "grammar", value)
    if found is not None and params.ignore_eos:
        raise FieldError("invalid_value", f"ignore_eos and {option} are given, but a complete text has to end")
    return found


def _any_of(texts: tuple[str, ...]) -> str:
    # Each character that could have a meaning in a regex is written as its number.
    return "|".join(re.sub(r"[^0-9A-Za-z]", lambda c: f"\\x{{{ord(c[0]):x}}}", text) for text in texts)
