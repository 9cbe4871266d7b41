"""The constraint that a request's sampling options put on its text."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Literal

from specbatch.errors import FieldError
from specbatch.schemas.json_schema import all_schemas
from specbatch.schemas.response_format import schema_of
from specbatch.types import GRAMMAR_FIELDS, SamplingParams

# The `x-guidance` of a schema, with which llguidance writes JSON as `json.dumps` does.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Constraints of that number of schemas are kept, because most rows of a job have the same schema, and it takes a
# millisecond to change one. A longer schema is changed for each row.
_MAX_KEPT, _MAX_KEPT_CHARS = 256, 1 << 16
MAX_CHARS = 1 << 20  # An option has room for 30,000 choices, or for 70,000 nested rules.

# Exact patterns for formats of JSON Schema. llguidance allows too much there: 29 February of any year, the year 0, and
# the second 60 of any minute. `datetime` reads every text that these patterns match.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"  # from 04 to 96
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)"
_DAY_OF_MONTH = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_MINUTE})"  # RFC 3339, with a bound for the fraction
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


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
        found = _of_format(value) if len(value) <= _MAX_KEPT_CHARS else _of_format.__wrapped__(value)
    elif option == "choice":
        found = Constraint(option, "regex", _any_of(value))
    else:
        found = Constraint(option, "regex" if option == "regex" else "grammar", value)
    if found is not None and params.ignore_eos:
        raise FieldError("invalid_value", f"ignore_eos and {option} are given, but a complete text has to end")
    return found


@functools.lru_cache(_MAX_KEPT)
def _of_format(response_format: str) -> Constraint | None:
    schema = schema_of(response_format)
    return None if schema is None else Constraint("response_format", "json_schema", with_exact_formats(schema))


def _any_of(texts: tuple[str, ...]) -> str:
    # Each character that could have a meaning in a regex is written as its number.
    return "|".join(re.sub(r"[^0-9A-Za-z]", lambda c: f"\\x{{{ord(c[0]):x}}}", text) for text in texts)


def with_exact_formats(schema: str) -> str:
    """Return the schema, as JSON, with patterns in place of these formats."""
    if '"format"' not in schema:
        return schema
    root = json.loads(schema)
    for one in all_schemas(root):
        if not isinstance(name := one.get("format"), str) or name not in _PATTERNS:
            continue
        del one["format"]
        if "pattern" not in one:
            one["pattern"] = _PATTERNS[name]
        elif isinstance(others := one.setdefault("allOf", []), list):  # else it is not valid, which the library reports
            others.append({"pattern": _PATTERNS[name]})
    return json.dumps(root)
