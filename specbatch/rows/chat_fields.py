"""The fields of a row that only chats have: what its template is given, and what is read from its answer.

`tools`, `tool_choice`, `parallel_tool_calls` and `reasoning_effort` are OpenAI's, `chat_template_kwargs` is vLLM's and
SGLang's, `separate_reasoning` is SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbatch.errors import FieldError, RowError, shown
from specbatch.files.jsonl import json_type
from specbatch.types import check_unicode

CHAT_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_effort",
    "separate_reasoning",
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's


@dataclass(frozen=True, slots=True)
class ChatFields:
    kwargs: Mapping[str, Any] | None = None  # variables of the template; None: those of the configuration
    tools: tuple[dict[str, Any], ...] = ()  # tools that the model can call; empty with `tool_choice: none`
    parallel_tool_calls: bool = True  # False: at most one call
    separate_reasoning: bool | None = None  # None: the configuration decides
    required: tuple[dict[str, Any], ...] = ()  # tools of which the answer must call one; empty: it need not
    given: tuple[str, ...] = ()  # the fields that the row has, and that change a chat

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


NO_CHAT_FIELDS = ChatFields()


def read_chat_fields(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatFields:
    """Read the chat fields of a native row, or of the body of an OpenAI Batch line. `defaults`:
    data.chat_template_kwargs; a name that the row gives has precedence. It raises RowError."""
    if all(fields.get(name) is None for name in CHAT_FIELDS):
        return NO_CHAT_FIELDS
    own = _kwargs(fields)
    tools = _tools(fields.get("tools"))
    tools, required = _chosen(fields.get("tool_choice"), tools)
    parallel = _flag(fields, "parallel_tool_calls")
    separate = _flag(fields, "separate_reasoning")
    changing = {"tools": tools, "chat_template_kwargs": own, "separate_reasoning": separate}
    given = tuple(name for name, value in changing.items() if value)
    return ChatFields({**defaults, **own}, tools, parallel is not False, separate, required, given)


def read_prediction(value: Any) -> str | None:
    """Read `prediction` of an OpenAI Batch line: a text that the answer may be like. It raises RowError."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "content":
        raise RowError("invalid_value", f'prediction must be {{"type": "content", "content": ...}}, not {shown(value)}')
    content = value.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for i, part in enumerate(parts):
        path = "prediction.content" + (f"[{i}]" if isinstance(content, list) else "")
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RowError("invalid_type", f'{path} must be {{"type": "text", "text": ...}}, not {shown(part)}')
        if not isinstance(text := part.get("text"), str):
            raise RowError("invalid_type", f"{path} must be text or a list of text parts, not {json_type(text)}")
        try:
            check_unicode(path, text)
        except FieldError as exc:
            raise RowError(exc.type, exc.message) from exc
        texts.append(text)
    return "".join(texts)


def _kwargs(fields: Mapping[str, Any]) -> dict[str, Any]:
    value, effort = fields.get("chat_template_kwargs"), fields.get("reasoning_effort")
    if not isinstance(value, dict | None):
        raise RowError("invalid_type", f"chat_template_kwargs must be an object, not {json_type(value)}")
    kwargs = {name: item for name, item in (value or {}).items() if item is not None}
    if effort is None:
        return kwargs
    if effort not in EFFORTS:
        raise RowError("invalid_value", f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {shown(effort)}")
    if kwargs.setdefault("reasoning_effort", effort) != effort:
        raise RowError(
            "invalid_value",
            f"reasoning_effort is {effort}, but chat_template_kwargs has {shown(kwargs['reasoning_effort'])}",
        )
    return kwargs


def _chosen(choice: Any, tools: tuple[dict[str, Any], ...]) -> tuple[tuple[dict[str, Any], ...], ...]:
    """Return the tools that the template gets, and the tools of which the answer must call one."""
    if choice in (None, "auto"):
        return tools, ()
    if choice == "none":
        return (), ()
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        wanted = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise RowError("invalid_value", f"tool_choice must be {wanted}, not {shown(choice)}")
    if not tools:
        raise RowError("invalid_value", "tool_choice asks for a call, but the row has no tools")
    required = tools if choice == "required" else tuple(t for t in tools if t["function"]["name"] == name)
    if not required:
        raise RowError("invalid_value", f"tool_choice: no tool has the name {shown(name)}")
    return tools, required


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise RowError("invalid_type", f"{name} must be true or false, not {json_type(value)}")
    return value


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError("invalid_type", f"tools must be a list, not {json_type(value)}")
    names: set[str] = set()
    for i, tool in enumerate(value):
        path = f"tools[{i}]"
        if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict):
            raise RowError("invalid_type", f'{path} must be {{"type": "function", "function": {{"name", ...}}}}')
        if tool.get("type", "function") != "function":
            raise RowError("unsupported_parameter", f"{path}.type must be function, not {shown(tool['type'])}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise RowError("invalid_type", f"{path}.function.name must be text")
        if name in names:
            raise RowError("invalid_value", f"{path}.function.name: an earlier tool has the name {shown(name)}, too")
        if not isinstance(parameters, dict | None):
            raise RowError("invalid_type", f"{path}.function.parameters must be an object, not {json_type(parameters)}")
        kind = (parameters or {}).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise RowError(
                "invalid_value", f"{path}.function.parameters must describe an object: its type is {shown(kind)}"
            )
        if not isinstance(function.get("description"), str | None):
            raise RowError("invalid_type", f"{path}.function.description must be text")
        if not isinstance(strict := function.get("strict"), bool | None):
            raise RowError("invalid_type", f"{path}.function.strict must be true or false, not {shown(strict)}")
        names.add(name)
    return tuple(value)
