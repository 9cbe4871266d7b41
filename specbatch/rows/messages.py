"""Chat messages of a row, checked."""

from __future__ import annotations

from typing import Any

from specbatch.errors import RowError
from specbatch.files.jsonl import decode_object, json_type

_MEDIA = ("audio", "audios", "image", "images", "video", "videos")  # next to the content, as in Ollama


def check_messages(value: Any) -> list[dict[str, Any]]:
    """The messages without fields that are null. A content is text or a list of parts with a text, and arguments of
    tool calls are objects. `message_form` gives them to a template in the form that it reads. Raises RowError."""
    if not isinstance(value, list):
        raise RowError("invalid_type", f"messages must be a list, not {json_type(value)}")
    if not value:
        raise RowError("empty_prompt", "messages is empty")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(path: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError("invalid_type", f"{path} must be an object, not {json_type(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowError("invalid_type", f"{path}.role must be text")
    # Templates write a null as `None`; a field that is missing as nothing.
    given = {name: item for name, item in message.items() if item is not None}
    for name in ("function_call", *_MEDIA):
        if given.get(name):
            raise RowError("unsupported_parameter", f"{path}.{name} is not supported")
    for name in ("tool_call_id", "name", "reasoning_content"):
        if not isinstance(given.get(name, ""), str):
            raise RowError("invalid_type", f"{path}.{name} must be text, not {json_type(given[name])}")
    if (calls := given.pop("tool_calls", [])) != []:
        if role != "assistant":
            raise RowError("invalid_value", f"{path}.tool_calls: only messages of the assistant have tool calls")
        given["tool_calls"] = _tool_calls(f"{path}.tool_calls", calls)
    content = given.get("content")
    if isinstance(content, list):
        given["content"] = [{"type": "text", "text": _part(path, part)} for part in content]
    elif content is None and role == "assistant" and ("content" in message or calls):
        pass
    elif not isinstance(content, str):
        found = "missing" if content is None else json_type(content)
        raise RowError("invalid_type", f"{path}.content must be text, but is {found}")
    return given


def _part(path: str, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RowError("invalid_type", f"{path}.content must be a list of objects with a type")
    if part["type"] != "text":
        raise RowError("unsupported_parameter", f"{path}.content: parts of type {part['type']!r:.40} are not supported")
    if not isinstance(part.get("text"), str):
        raise RowError("invalid_type", f"{path}.content: the text of a part must be text")
    return part["text"]


def _tool_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError("invalid_type", f"{path} must be a list, not {json_type(calls)}")
    return [_tool_call(f"{path}[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(path: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RowError("invalid_type", f'{path} must be {{"type": "function", "function": {{"name", "arguments"}}}}')
    if not isinstance(function.get("name"), str):
        raise RowError("invalid_type", f"{path}.function.name must be text")
    arguments = function.get("arguments")
    if arguments in (None, ""):
        arguments = {}
    elif isinstance(arguments, str):  # OpenAI's form
        arguments = decode_object(arguments)
    if not isinstance(arguments, dict):
        raise RowError("invalid_value", f"{path}.function.arguments must be an object, or the JSON of one")
    given = {name: item for name, item in call.items() if item is not None}
    return {**given, "type": "function", "function": {**function, "arguments": arguments}}
