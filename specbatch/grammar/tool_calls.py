"""The grammar for an answer that calls tools, in the format of the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal
from urllib.parse import unquote

from specbatch.errors import FieldError, shown
from specbatch.grammar.constraint import ONE_LINE, Constraint, with_exact_formats
from specbatch.schemas.closed_schema import closed

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MAX_REFERENCES = 16  # the most references that are followed, one after the other


def calls_of(
    tools: Sequence[dict[str, Any]],
    calls: Literal["hermes", "llama3", "harmony"],
    *,
    several: bool,
    tokens: Collection[str],
) -> Constraint:
    """Return the constraint for an answer that is a call of one of these OpenAI tools, and nothing else. `several`: the
    answer may have several calls, if the format has that. `tokens`: the format's marks that are tokens."""
    if calls == "harmony":
        return _harmony_call_of(tools)
    arguments = "arguments" if calls == "hermes" else "parameters"
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        head, tail = _literal(f'{{"name": {name}, "{arguments}": '), _literal("}")
        # Each tool's parameters stay a whole schema, so that their references and their $id keep their meaning.
        schema = arguments_schema(tool)
        rules += [f"call_{i}: {head} arguments_{i} {tail}", f"arguments_{i}: %json {schema}"]
    answer = "call"
    if calls == "hermes":
        begin, end = (mark if mark in tokens else _literal(mark) for mark in (_BEGIN, _END))
        line = _literal("\n")
        answer = f"{begin} {line} call {line} {end}"
        answer += f" ({line} {answer})*" if several else ""
    return Constraint("tool_choice", "grammar", "\n".join([f"start: {answer}", *rules, ""]))


def _harmony_call_of(tools: Sequence[dict[str, Any]]) -> Constraint:
    """Return the constraint for one message that calls a tool, after a message with reasoning."""
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules = [f"start: <|start|> {_literal('assistant')} <|channel|> ({calls})"]
    for i, tool in enumerate(tools):
        head = _literal(f"commentary to=functions.{tool['function']['name']} ")
        rules += [
            f"call_{i}: {head} <|constrain|> {_literal('json')} <|message|> arguments_{i}",
            f"arguments_{i}: %json {arguments_schema(tool)}",
        ]
    return Constraint("tool_choice", "grammar", "\n".join([*rules, ""]))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def arguments_schema(tool: dict[str, Any]) -> str:
    """Return the JSON Schema, as JSON, of a call's arguments. They are an object, even if the tool's parameters allow
    other types. With OpenAI's `strict: true`, they have no other keys than those that the parameters name. It raises
    FieldError if the parameters cannot be closed like this."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if function.get("strict"):
        try:
            parameters = closed(parameters)
        except FieldError as exc:
            raise FieldError(exc.type, f"parameters of the tool {shown(function['name'])}: {exc.message}") from exc
        except RecursionError:
            message = f"parameters of the tool {shown(function['name'])}: the schema is nested too deeply"
            raise FieldError("invalid_value", message) from None
    guidance = parameters.get("x-guidance", {})
    schema = {**parameters, "x-guidance": ONE_LINE | guidance if isinstance(guidance, dict) else guidance}
    # Next to a reference that points back to itself, the library accepts no other keyword.
    if not _is_object(parameters):
        schema["type"] = "object"
    return with_exact_formats(json.dumps(schema))


def _is_object(schema: dict[str, Any]) -> bool:
    """Return whether the schema says that its type is an object. It follows references such as "#/$defs/node", with
    which the parameters of a class begin that has itself as a field."""
    one: Any = schema
    for _ in range(_MAX_REFERENCES):
        if not isinstance(one, dict):
            return False
        if one.get("type") == "object":
            return True
        if not isinstance(reference := one.get("$ref"), str) or not reference.startswith("#/"):
            return False
        one = schema
        for name in reference[2:].split("/"):
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            one = one.get(name) if isinstance(one, dict) else None
    return False
