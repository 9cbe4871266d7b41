"""The prompt template of a configuration.

It is a Jinja template over the fields of a row. A text with `{name}` is a short form, in the syntax of Python's
`str.format`, and becomes one: `{name}` is `{{ name }}`.
"""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import TemplateReference

from specbatch.errors import ConfigError, RowError
from specbatch.text.bounds import Bounded
from specbatch.text.field_template import compiled
from specbatch.text.template_variables import parsed, variables_of

_PATH = "data.prompt_template"
_HINT = "fields are written {name} or {name[key]}, with literal braces doubled, or {{ name }} as in Jinja"
# "{{" and a space begin a field of Jinja, also in a short form with JSON in doubled braces.
_JINJA_HINT = (
    "a text with {% or with {{ and a space is a Jinja template: fields are written {{ name }}, "
    "and single braces are text"
)
_FIELD = re.compile(r"([^.\[\]]+)((?:\[[^\]]+\])*)")  # no attributes: {x.__class__} would read the interpreter
_MAX_WIDTH = 10_000  # characters that a format can ask for
_ROW = "row"  # the name of the whole row in a template: {{ row["First name"] }}
_OF_JINJA = re.compile(r"\{[%#]|\{\{-?\s")  # no short form has these
_BRACED = re.compile(r"\{([^{}]+)\}")
_SHORT_FIELD = re.compile(r"\{[^\W\d]\w*(\[[^\]{}]+\])*(![rsa])?(:[^{}\n]*)?\}")


class PromptTemplate:
    """data.prompt_template: a prompt made of a row's fields.

    A null is written as nothing, and `{{ name or "-" }}` is text for it. Raises ConfigError for what no row can fill
    (wrong syntax, fields without a name, unknown filters, conversions and formats), for a template without fields, and
    for one that mixes both forms.
    """

    def __init__(self, text: str) -> None:
        literals = _jinja_literals(text)
        is_jinja = literals is not None
        # Texts in single braces, which are meant as fields if rows have fields of these names.
        self._braced = [name for part in literals or () for name in _BRACED.findall(part)]
        source = text if is_jinja else "".join(_parts(text))
        self._bounded = Bounded()
        self._template = compiled(_PATH, source, {"format_as": _format_as, "at": _at}, _written)
        names = _jinja_names(text) if is_jinja else _short_names(text)
        self.fields = tuple(dict.fromkeys(names))  # names of the row's fields that the template needs
        self._reads_row = is_jinja and _reads_row(text)
        if not self.fields and not (is_jinja and variables_of(text)):
            raise ConfigError(f"{_PATH} names no field, so all rows would have the same prompt", _hint(text))

    def fill(self, row: Mapping[str, Any]) -> str:
        """The prompt of a row. Raises RowError."""
        for name in self.fields:
            if name not in row:
                raise RowError("missing_prompt", f"the row has no {name!r}, which {_PATH} uses")
        if self._reads_row and _ROW in row:
            raise RowError(
                "missing_prompt",
                f"in {_PATH}, row is the whole row; the row's field of this name is row['row']",
            )
        if meant := next((name for name in self._braced if name in row), None):
            raise RowError("missing_prompt", f"{_mixes(f'{{{meant}}}')}; {_MIX_HINT}")
        if self.fields and all(row[name] is None for name in self.fields):
            raise RowError("missing_prompt", f"the row has no content in {' and '.join(map(repr, self.fields))}")
        try:
            with self._bounded:  # a format that the row gives can ask for gigabytes
                return self._template.render({**row, _ROW: row})
        except Exception as exc:  # a lookup, filter or format that this row's value does not support
            raise RowError("missing_prompt", f"{_PATH} does not fit the row: {exc}") from exc


def _written(value: Any) -> Any:
    """Return what is written of a value. Raises TypeError for objects of the interpreter, such as the method that
    `{{ order.items }}` is if `order` has no such key."""
    if isinstance(value, jinja2.Undefined):
        return value  # its conversion to text says which name is missing
    if callable(value) or isinstance(value, Iterator | TemplateReference):
        raise TypeError(f"{type(value).__name__} is no text; for a field named so write row['name']")
    return "" if value is None else value


def _jinja_literals(text: str) -> list[str] | None:
    """Return the texts between the fields of a Jinja template; None: it is a short form. Raises ConfigError if it mixes
    both."""
    if not _OF_JINJA.search(text) and ("{{" not in text or any(field for field, _, _ in _fields(text))):
        return None
    try:
        jinja2.Environment().parse(text)
        literals = [value for _, kind, value in jinja2.Environment().lex(text) if kind == "data"]
    except jinja2.TemplateError as exc:
        raise ConfigError(f"{_PATH} is not a valid template: {exc}", _JINJA_HINT) from exc
    if short := next((found[0] for part in literals if (found := _SHORT_FIELD.search(part))), None):
        raise ConfigError(_mixes(short), _MIX_HINT)
    return literals


_MIX_HINT = "write {{ name }} for a field in it, and {{ '{name}' }} for text in braces"


def _mixes(short: str) -> str:
    return f"{_PATH} is a Jinja template, in which {short} is no field"


def _jinja_names(text: str) -> Iterator[str]:
    """Yield the fields that a template reads, but for those that it can do without."""
    tree = parsed(text)
    tests: list[nodes.Node | None] = [
        node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")
    ]
    tests += [node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    optional = {node.name for node in tests if isinstance(node, nodes.Name)}
    names = variables_of(text)
    columns = {id(node): name for node, name in _columns(tree)} if _ROW in names else {}
    optional |= {columns[id(node)] for node in tests if id(node) in columns}
    yield from sorted(((names - {_ROW}) | set(columns.values())) - optional)


def _columns(tree: nodes.Template) -> Iterator[tuple[nodes.Node, str]]:
    """Yield the expressions that read a field of the row by its name, `row["name"]`, and these names."""
    for node in tree.find_all(nodes.Getitem):
        if isinstance(node.node, nodes.Name) and node.node.name == _ROW and isinstance(node.arg, nodes.Const):
            yield node, str(node.arg.value)


def _reads_row(text: str) -> bool:
    """Return whether a Jinja template reads the row as a whole, and not only fields of it by name."""
    tree = parsed(text)
    reads = [node for node in tree.find_all(nodes.Name) if node.name == _ROW and node.ctx == "load"]
    return _ROW in variables_of(text) and len(reads) > len(list(_columns(tree)))


def _fields(text: str) -> list[tuple[str | None, str, str | None]]:
    """Return the fields of a short form: name, format and conversion. It is empty if the text is none."""
    try:
        return [(field, spec or "", to) for _, field, spec, to in string.Formatter().parse(text) if field is not None]
    except ValueError:
        return []


def _short_names(text: str) -> Iterator[str]:
    for field, spec, _ in _fields(text):
        yield _matched(field)[1]
        yield from _short_names(spec)


def _parts(text: str) -> Iterator[str]:
    """Yield the parts of the Jinja template of a short form. Raises ConfigError."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as exc:
        raise ConfigError(f"{_PATH} is not a valid template: {exc}", _HINT) from exc
    for literal, field, spec, conversion in parts:
        if literal:
            yield f"{{{{ {_constant(literal)} }}}}"
        if field is None:
            continue
        matched = _matched(field)
        if conversion not in (None, "r", "s", "a"):
            shown = f"{{{field}!{conversion}}}"
            raise ConfigError(f"{_PATH}: {shown} has an unknown conversion; use !r, !s or !a")
        if spec and "{" not in spec:
            _check_spec(field, spec, text_only=conversion is not None)
        value = f"{_ROW}|at({_constant(matched[1])})" + "".join(map(_key, re.findall(r"\[([^\]]+)\]", matched[2])))
        if spec or conversion:
            value += f"|format_as({_constant(conversion or '')}, {_spec(spec or '')})"
        yield f"{{{{ {value} }}}}"


def _constant(text: str) -> str:
    """Return the constant of Jinja that is a text. Jinja does not read pairs of `\\u` escapes as one character."""
    return json.dumps(text, ensure_ascii=False)


def _spec(text: str) -> str:
    """Return the expression of a format, which can have fields."""
    parts = [part[2:-2].strip() for part in _parts(text)] if "{" in text else [_constant(text)]
    return " ~ ".join(["''", *(f"({part})" for part in parts)])


def _key(key: str) -> str:
    return f"|at({int(key)})" if key.isdecimal() else f"|at({_constant(key)})"


def _matched(field: str | None) -> re.Match[str]:
    matched = _FIELD.fullmatch(field or "")
    if matched is None or matched[1].isdigit():
        raise ConfigError(f"{_PATH}: {{{field}}} does not name a field of the row", _HINT)
    return matched


def _at(value: Any, key: str | int) -> Any:
    """Return the part of a value under a key, as `str.format` does. Jinja's `value[key]` also reads attributes."""
    try:
        return value[key]
    except LookupError as exc:
        raise LookupError(f"it has no {key!r}") from exc


def _format_as(value: Any, conversion: str, spec: str) -> str:
    """Apply a conversion and a format of `str.format`."""
    to_text: dict[str, Callable[[Any], str]] = {"r": repr, "s": str, "a": ascii}
    converted = to_text[conversion](value) if conversion else value
    return "" if value is None and not conversion else format(converted, spec)


def _hint(text: str) -> str:
    if len(text) < 256 and "{" not in text and os.path.exists(text):
        return f"@{text} reads the file"
    return f"{_HINT}; @PATH reads a file"


def _check_spec(field: str, spec: str, *, text_only: bool) -> None:
    """Raises ConfigError if no value can have this format: text or a number, or a date if it has a `%`."""
    shown = f"{_PATH}: {{{field}:{spec[:60]}}}"
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
