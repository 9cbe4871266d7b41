"""Parser of a chat's answer: reasoning, text, and calls of tools.

A part that is not in the model's format stays text, so that nothing is lost: marks that only quote, a call whose JSON
is not valid, a call of a function that `tools` does not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbatch.files.jsonl import begin_object
from specbatch.text.harmony import is_harmony, messages_of

CallFormat = Literal["hermes", "llama3", "harmony"]
# How the reasoning of an answer begins: "open": in the prompt; "marked": with `<think>`, or without a mark; "closed":
# with `<think>`, or there is none; "harmony": it is in a channel of its own; "none": nothing is read as reasoning.
Thinking = Literal["none", "marked", "closed", "open", "harmony"]
_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_ARGUMENTS = "arguments", "parameters"  # models write either, whatever their template shows
_LABELS = {"name", "type", "id"}
_BEGINS, _ENDS = re.compile(rf"{_THINK}|{_CALL}\s*\{{"), re.compile(_END_THINK)
_QUOTES = ("`", '"', "'")
REASONING_MARKS = _THINK, _END_THINK
MARKS = (_THINK, _END_THINK, _CALL, _END_CALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # the JSON of an object


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()


def call_format(template: str) -> CallFormat | None:
    """Return the format in which the model of this chat template writes calls. Returns None if it is unknown here."""
    if is_harmony(template):
        return "harmony"
    if _CALL in template:  # Qwen3-Coder and GLM write XML between the same marks
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if _PYTHON in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None


def thinks(template: str) -> bool:
    """Return whether the model of this chat template writes reasoning before its answer: `<think>reasoning</think>`,
    or a message of Harmony."""
    return _END_THINK in template or is_harmony(template)


def thinking_after(prompt: str) -> Thinking:
    """Return whether reasoning is open where the answer to this prompt begins. Only the end of the prompt counts."""
    prompt = prompt.rstrip()
    return "open" if prompt.endswith(_THINK) else "closed" if prompt.endswith(_END_THINK) else "marked"


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the answers of a row. Without arguments, all of an answer is text."""

    thinking: Thinking = "none"
    calls: CallFormat | None = None
    tool_names: frozenset[str] = frozenset()
    max_calls: int | None = None  # None: no limit
    header: str = ""  # the part of the first message of Harmony that the prompt has written

    def read(self, text: str) -> Answer:
        if "harmony" in (self.thinking, self.calls):
            return self._read_harmony(text)
        reasoning = None
        if self.thinking != "none":
            text, reasoning = _split_reasoning(text, self.thinking)
        if self.calls is None:
            return Answer(text, reasoning)
        found = _hermes_calls(text) if self.calls == "hermes" else _llama3_calls(text)
        if found is None or not all(call.name in self.tool_names for call in found[1]):
            return Answer(text, reasoning)
        return Answer(found[0], reasoning, found[1][: self.max_calls])

    def _read_harmony(self, text: str) -> Answer:
        """Read messages by their channels. Where reasoning is not separated, messages keep their marks."""
        rest: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        is_separate = self.thinking == "harmony"
        messages = messages_of(text, self.header)
        for message in messages:
            call = None
            if self.calls == "harmony" and message.function in self.tool_names:
                call = _call({"name": message.function, "arguments": message.body})
            if call is not None:
                calls.append(call)
            elif is_separate and message.channel == "analysis":
                reasoning.append(message.body)
            else:
                rest.append(message.body if is_separate and message.function is None else message.raw)
        if not is_separate and not calls:
            return Answer(text)
        return Answer("\n".join(rest), "\n".join(reasoning) if reasoning else None, calls[: self.max_calls])


def _split_reasoning(text: str, thinking: Thinking) -> tuple[str, str | None]:
    """Divide a text into (answer, reasoning). Reasoning without an end is the whole text, which was cut in it."""
    if (body := text.lstrip()).startswith(_THINK):
        reasoning, _, answer = body.removeprefix(_THINK).partition(_END_THINK)
    elif thinking == "open":
        reasoning, _, answer = text.partition(_END_THINK)
    elif thinking == "marked" and (end := _unquoted_end(text)) is not None:
        # Models that learnt from prompts that begin the reasoning leave out the mark after others, too.
        reasoning, answer = text[:end], text[end + len(_END_THINK) :]
    else:
        return text, None
    return answer.lstrip("\n"), reasoning.strip("\n")


def _unquoted_end(text: str) -> int | None:
    """Return the index of the mark that ends reasoning which began without a mark. An end mark that is quoted, or that
    comes after the begin of reasoning or of a call, is a part of the answer. Returns None if there is no other."""
    begin = _BEGINS.search(text)
    for end in _ENDS.finditer(text, 0, begin.start() if begin is not None else len(text)):
        before, after = text[: end.start()][-1:], text[end.end() :][:1]
        if before != after or before not in _QUOTES:
            return end.start()
    return None


def _hermes_calls(text: str) -> tuple[str, list[ToolCall]] | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, with text between them; (text, calls),
    or None without a call or if one is not valid. The last end mark can be missing."""
    rest: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(_CALL, position)) >= 0:
        rest.append(text[position:start])
        found = begin_object(text, start + len(_CALL))
        call = _call(found[0]) if found is not None else None
        if found is None or call is None:
            return None
        calls.append(call)
        after = text[found[1] :].lstrip()
        if after and not after.startswith(_END_CALL):
            return None
        position = len(text) - len(after.removeprefix(_END_CALL))
    rest.append(text[position:])
    return ("\n".join(part for part in map(str.strip, rest) if part), calls) if calls else None


def _llama3_calls(text: str) -> tuple[str, list[ToolCall]] | None:
    """`{"name": ..., "parameters": {...}}`, several with semicolons between them, and nothing else."""
    body = text.strip().removeprefix(_PYTHON)
    calls: list[ToolCall] = []
    position = 0
    while True:
        found = begin_object(body, position)
        call = _call(found[0]) if found is not None else None
        if found is None or call is None:
            return None
        calls.append(call)
        after = body[found[1] :].lstrip()
        if not after:
            return "", calls
        if not after.startswith(";"):
            return None
        position = len(body) - len(after) + 1


def _call(value: dict[str, Any]) -> ToolCall | None:
    """Read a call. Returns None if the object is no call. A call without arguments has no fields but those of
    `_LABELS`."""
    given = [value[name] for name in _ARGUMENTS if name in value]
    if not isinstance(name := value.get("name"), str) or len(given) > 1 or (not given and value.keys() - _LABELS):
        return None
    arguments = given[0] if given else None
    if isinstance(arguments, str) and arguments.strip():  # OpenAI's messages have arguments as the text of an object.
        found = begin_object(arguments, 0)
        arguments = found[0] if found is not None and not arguments[found[1] :].strip() else arguments
    elif isinstance(arguments, str | None):
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:  # 1e999
        return None
