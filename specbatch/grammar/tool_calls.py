"""The grammar of an answer that calls tools, in the format of the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal

from specbatch.grammar.constraint import ONE_LINE, Constraint

_BEGIN, _END = "<tool_call>", "</tool_call>"


def calls_of(
    tools: Sequence[dict[str, Any]],
    calls: Literal["hermes", "llama3"],
    *,
    several: bool,
    tokens: Collection[str],
) -> Constraint:
    """An answer that is a call of one of these OpenAI tools, and nothing else; `several`: or of more than one, where
    the format has that. `tokens`: marks that are tokens."""
    arguments = "arguments" if calls == "hermes" else "parameters"
    # On one line, as the compiler writes other JSON. The library reads this at the root of a schema only.
    kinds = [_call(tool["function"], arguments, f"#/anyOf/{i}") for i, tool in enumerate(tools)]
    call = {"anyOf": kinds, "x-guidance": ONE_LINE}
    rules = f"call: %json {json.dumps(call)}\n"
    if calls == "llama3":
        return Constraint("tool_choice", "grammar", f"start: call\n{rules}")
    begin, end = (mark if mark in tokens else json.dumps(mark) for mark in (_BEGIN, _END))
    one = f'{begin} "\\n" call "\\n" {end}'
    more = f' ("\\n" {one})*' if several else ""
    return Constraint("tool_choice", "grammar", f"start: {one}{more}\n{rules}")


def _call(function: dict[str, Any], arguments: str, pointer: str) -> dict[str, Any]:
    """The schema of a call. `pointer`: to it, from the root of the whole schema."""
    parameters = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            arguments: _moved(parameters, f"{pointer}/properties/{arguments}"),
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, pointer: str) -> Any:
    """A schema that is not the root any more: what its references point to has moved, too."""
    if isinstance(schema, list):
        return [_moved(item, pointer) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, pointer) for name, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = pointer + reference[1:]
    return moved
