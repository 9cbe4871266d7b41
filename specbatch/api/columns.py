"""Results as typed columns of Arrow: the rows' own fields, the properties of the answers' schema, and the texts."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from specbatch.files.flat_table import free_name
from specbatch.files.jsonl import valid_text
from specbatch.schemas.column_kinds import Kind, answer_kind, cell, either, kind_of

if TYPE_CHECKING:
    import pyarrow as pa

    from specbatch.api.results import Result

_WHOLE = "answer"  # the column of an answer that is no object


def result_columns(results: Sequence[Result], response_format: str | None) -> dict[str, pa.Array]:
    """Return the columns of a table of results: id (if a row has one), the rows' own fields, and those of answers."""
    columns: dict[str, pa.Array] = {}
    ids = [result.get("custom_id", result.get("id")) for result in results]
    if any(value is not None for value in ids):
        columns["id"] = _array(ids, _kind_of_all(ids))
    fields = [result.get("metadata") or {} for result in results]
    for name in dict.fromkeys(name for one in fields for name in one):
        values = [one.get(name) for one in fields]
        columns[free_name(valid_text(name), columns)] = _array(values, _kind_of_all(values))
    return columns | columns_of_answers(results, response_format, columns)


def columns_of_answers(
    results: Sequence[Result], response_format: str | None, taken: Collection[str]
) -> dict[str, pa.Array]:
    """Return the columns of answers: the properties of the schema, text, finish_reason and error. Types depend on the
    schema alone. A row without a valid answer has nulls. A name in `taken` gets a suffix."""
    columns: dict[str, pa.Array] = {}

    def add(name: str, values: list[Any], kind: Kind) -> None:
        columns[free_name(valid_text(name), {*taken, *columns})] = _array(values, kind)

    if (kind := answer_kind(response_format)) is not None:
        answers = [json.loads(result.text or "") if result.has_answer else None for result in results]
        if isinstance(kind, dict) and "object" in kind:
            for name, part in kind["object"].items():
                # A row with a response_format of its own can have another answer.
                add(name, [one.get(name) if isinstance(one, dict) else None for one in answers], part)
        else:
            add(_WHOLE, answers, kind)
    for name in ("text", "finish_reason", "error"):
        add(name, [getattr(result, name) for result in results], "text")
    return columns


def _kind_of_all(values: Sequence[Any]) -> Kind:
    """Return the kind of a column whose type no schema says."""
    found: Kind | None = None
    for value in values:
        found = either(found, kind_of(value))
    return found or "text"


def _array(values: Sequence[Any], kind: Kind) -> pa.Array:
    from specbatch.files.parquet import array_of  # it imports pyarrow

    return array_of([cell(kind, value) for value in values], kind)
