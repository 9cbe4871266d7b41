"""Exact patterns for formats of JSON Schema. llguidance allows too much there: 29 February of any year, the year 0, and
the second 60 of any minute. `datetime` reads every text that these patterns match."""

from __future__ import annotations

import json

from specbatch.schemas.json_schema import all_schemas

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
