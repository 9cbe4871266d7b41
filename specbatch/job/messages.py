"""Chat messages: the checks that turn any JSON into what a chat template may be given."""

from __future__ import annotations

from typing import Any

from specbatch.errors import RowError


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Messages with text content. Text parts are joined with newlines. Raises RowError."""
    if not isinstance(value, list):
        raise RowError("invalid_type", f"messages must be a list, not {type(value).__name__}")
    if not value:
        raise RowError("empty_prompt", "messages is empty")
    return [_message(i, message) for i, message in enumerate(value)]


def _message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError("invalid_type", f"messages[{i}] must be an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowError("invalid_type", f"messages[{i}].role must be text")
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if message.get(name):
            raise RowError("unsupported_parameter", f"messages[{i}].{name} is not supported")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(i, part) for part in content)
    if not isinstance(content, str):
        found = "missing" if content is None else type(content).__name__
        raise RowError("invalid_type", f"messages[{i}].content must be text, but is {found}")
    return {**message, "content": content}


def _part(i: int, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RowError("invalid_type", f"messages[{i}].content must hold objects with a type")
    if part["type"] != "text":
        raise RowError(
            "unsupported_parameter", f"messages[{i}].content: parts of type {part['type']!r:.40} are not supported"
        )
    if not isinstance(part.get("text"), str):
        raise RowError("invalid_type", f"messages[{i}].content: a text part must hold text")
    return part["text"]
