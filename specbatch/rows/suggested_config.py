"""A configuration for a file of rows: a template of its columns, its ids and a schema, as a beginning to edit."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.defaults

from specbatch.config import DataSection
from specbatch.errors import InputError, RowError
from specbatch.rows.parameters import PROMPTS
from specbatch.rows.sources import open_source

_ROWS = 200  # rows that are looked at
_ID = re.compile(r"id|.*[_ -]id|uuid|key|custom_id", re.IGNORECASE)
_NAME = re.compile(r"[^\W\d]\w*")
_WORDS = (
    *("true", "false", "none", "and", "or", "not", "in", "is", "if", "else", "row", "self"),
    *jinja2.defaults.DEFAULT_NAMESPACE,
)  # which have a meaning in a template
_MAX_TOKENS = 256
_OR = ' or "-"'  # It is for columns that some rows leave empty.


@dataclass(frozen=True)
class _Columns:
    ids: str | None
    texts: dict[str, bool]  # other columns; True: some rows have nothing there


def suggested_config(ref: str, response_format: str | None) -> str:
    """Return the YAML of a configuration for the rows of `ref`. `response_format`: JSON; None: no schema. Raises
    InputError for a file that cannot be read or has no columns to make a prompt of."""
    columns = _columns(ref)
    ids = [] if columns.ids is None or columns.ids == "id" else [f"  id_column: {_quoted(columns.ids)}"]
    lines = [
        f"    {_title(name)}: {{{{ {_field(name)}{_OR if gaps else ''} }}}}" for name, gaps in columns.texts.items()
    ]
    schema = [] if response_format is None else [f"  response_format: {response_format}"]
    return "\n".join(
        [
            f"# For {Path(ref).name}. The other options: specbatch config, docs/options.md.",
            "data:",
            *ids,
            "  prompt_template: |",
            "    Answer for this row. (Say here what you want to know.)",
            "",
            *lines,
            "output:",
            "  columns: flat",
            "sampling:",
            f"  max_tokens: {_MAX_TOKENS}",
            *schema,
            "",
        ]
    )


def _field(name: str) -> str:
    """Return the expression of a column."""
    is_name = _NAME.fullmatch(name) and name.lower() not in _WORDS
    return name if is_name else f"row[{_quoted(name)}]"


def _quoted(text: str) -> str:
    """Return a text as YAML and Jinja read it in quotes: a line separator (U+2028) would end a line of YAML."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _title(name: str) -> str:
    return " ".join(re.sub(r"[{}]", " ", name).split()) or "text"


def _columns(ref: str) -> _Columns:
    rows: list[Mapping[str, Any]] = []
    for raw in itertools.islice(open_source(ref, DataSection()).rows(), _ROWS):
        try:
            rows.append(raw.fields())
        except RowError:
            continue
    names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    if not rows or not names:
        raise InputError(f"{ref} has no row with fields", "specbatch init writes a configuration for any file")
    if own := [name for name in PROMPTS if name in names]:
        raise InputError(f"{ref} has {own[0]}, so it needs no template", f"specbatch generate {ref}")
    ids = next((name for name in names if _ID.fullmatch(name) and _differ(name, rows)), None)
    texts = {name: any(row.get(name) in (None, "") for row in rows) for name in names if name != ids}
    if not texts:
        raise InputError(f"{ref} has no column but {ids}, of which no prompt can be made")
    return _Columns(ids, texts)


def _differ(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    values = [row.get(name) for row in rows]
    return all(isinstance(value, str | int) and value != "" for value in values) and len(set(values)) == len(values)
