"""`strftime_now` of a chat template, on a day that is given.

transformers has a function of this name that reads the clock. It passes no other functions to templates. So the
template gets a macro of this name, and the texts of all formats that it holds.
"""

from __future__ import annotations

from datetime import datetime

from jinja2 import nodes

from specbatch.text.template_variables import parsed

# Its line ends with a block: Jinja drops that line break, and reads the template as if it began there.
_MACRO = """{% macro strftime_now(format) %}\
{{ strftime_texts[format] if format in strftime_texts else \
raise_exception('strftime_now needs a format that the template has as a text') }}\
{% endmacro %}
"""


def reads_clock(template: str) -> bool:
    return "strftime_now" in template


def on_day(template: str, day: str) -> tuple[str, dict[str, dict[str, str]]]:
    """(a template that prints `day`, such as 2026-11-23, as the current one; the variables that it needs). The time is
    0:00. Raises jinja2.TemplateSyntaxError for a template that is not valid."""
    formats = {const.value for const in parsed(template).find_all(nodes.Const) if isinstance(const.value, str)}
    midnight = datetime.fromisoformat(day)
    return _MACRO + template, {"strftime_texts": {text: midnight.strftime(text) for text in formats}}
