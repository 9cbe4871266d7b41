"""The grammar of an answer that calls tools, in the format of the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal

from specbatch.grammar.constraint import Constraint

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
    call = {"anyOf": [_call(tool["function"], arguments) for tool in tools]}
    rules = f"call: %json {json.dumps(call)}\n"
    if calls == "llama3":
        return Constraint("tool_choice", "grammar", f"start: call\n{rules}")
    begin, end = (mark if mark in tokens else json.dumps(mark) for mark in (_BEGIN, _END))
    one = f'{begin} "\\n" call "\\n" {end}'
    more = f' ("\\n" {one})*' if several else ""
    return Constraint("tool_choice", "grammar", f"start: {one}{more}\n{rules}")


def _call(function: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            arguments: function.get("parameters") or {"type": "object"},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
        # As the compiler writes JSON on one line.
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    }
