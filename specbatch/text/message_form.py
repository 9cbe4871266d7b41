"""The form in which a chat template reads messages, found by rendering marks.

Templates differ in what they read. Some want a content as text, others as a list of parts (Llama Guard). Some cannot
write a message without a content. Some want a call's arguments as an object, others as text (DeepSeek R1). A template
that is given another form can write nothing where the text should be. It also writes nothing for a role that it has no
branch for.

So a *probe* is rendered: the same conversation, with a mark for each text. The form of a conversation is the first one
whose marks all reach the prompt. A probe depends on the roles and on which fields there are, and not on the texts: all
conversations of one shape share it, and a row's result does not depend on the rows before it.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specbatch.text.bounds import OutOfBounds

Messages = list[dict[str, Any]]
Render = Callable[[Messages, Mapping[str, Any], list[dict[str, Any]]], str]

_MAX_SHAPES = 1024  # whose forms are kept
_MARK = "Zq{}z{}qZ"  # letters and digits, because templates trim and escape
_A_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "description": "A place."}},
            "required": ["where"],
        },
    },
}
# A list that is written as it is, and not part by part: the template does not read lists.
_WRITTEN_LIST = re.compile(r"""["']text["']: ?["']zq\d+z""", re.IGNORECASE)


@dataclass(frozen=True)
class Form:
    """The form in which messages are given to a template."""

    contents: Literal["text", "parts", "part"] = "text"  # "part": a list with one part
    has_content: bool = False  # a message without a content is given an empty one
    arguments: Literal["object", "text"] = "object"

    def of(self, messages: Messages) -> Messages:
        """`messages` in this form. They are those of `check_messages`, and are not changed."""
        return [self._of_one(message) for message in messages]

    def _of_one(self, message: dict[str, Any]) -> dict[str, Any]:
        formed, texts = dict(message), _parts(message)
        if not texts and self.has_content:
            texts = [""]
        if texts:
            joined = "\n".join(texts)
            if self.contents == "part":
                texts = [joined]
            formed["content"] = joined if self.contents == "text" else [{"type": "text", "text": t} for t in texts]
        if self.arguments == "text" and "tool_calls" in message:
            formed["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return formed


@dataclass(frozen=True)
class Loss:
    """A part of a message that does not reach the prompt."""

    index: int  # index of the message
    what: Literal["text", "call"]


@dataclass(frozen=True)
class Found:
    """The way in which a template reads the conversations of one shape."""

    form: Form = Form()
    losses: tuple[Loss, ...] = ()
    left_out: bool = False  # an assistant's text next to a call does not reach the prompt; the call does
    is_refused: bool = False  # the template cannot write a probe


class FormFinder:
    """Finds the forms of conversations. `render` writes messages with the template, or raises."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._found = functools.lru_cache(_MAX_SHAPES)(self._find)

    def find(self, messages: Messages, kwargs: Mapping[str, Any], has_tools: bool) -> Found:
        """Raises OutOfBounds."""
        return self._found(json.dumps([_probe(messages), dict(kwargs)], sort_keys=True), has_tools)

    def _find(self, shape: str, has_tools: bool) -> Found:
        probe, kwargs = json.loads(shape)
        best: Found | None = None
        for form in _forms(probe):
            try:
                prompt = self._render(form.of(probe), kwargs, [_A_TOOL] if has_tools else [])
            except OutOfBounds:
                raise
            except Exception:  # templates raise many kinds
                continue
            if form.contents != "text" and _WRITTEN_LIST.search(prompt):
                continue
            found = found_in(prompt, probe, form)
            if best is None or len(found.losses) < len(best.losses):
                best = found
            if not best.losses:
                break
        return best or Found(is_refused=True)


def found_in(prompt: str, messages: Messages, form: Form) -> Found:
    """Says what of `messages`, given in this form, is in their `prompt`. Capitals do not matter."""
    losses, left_out, prompt = [], False, prompt.casefold()
    for index, message in enumerate(messages):
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if any(name.casefold() not in prompt for name in calls):
            losses.append(Loss(index, "call"))
        if any(text.strip().casefold() not in prompt for text in _texts(message)):
            # Several models' templates write either a call or a text. That is the model's format.
            if calls:
                left_out = True
            else:
                losses.append(Loss(index, "text"))
    return Found(form, tuple(losses), left_out)


def _forms(messages: Messages) -> Iterator[Form]:
    """The forms in which these messages differ, the usual one first."""
    contents: list[Literal["text", "parts", "part"]] = ["text"]
    if any(_texts(message) for message in messages):
        contents.append("parts")
    if any(len(_parts(message)) > 1 for message in messages):
        contents.append("part")
    has_content = [False, True] if not all(_parts(message) for message in messages) else [False]
    arguments: list[Literal["object", "text"]] = ["object"]
    if any("tool_calls" in message for message in messages):
        arguments.append("text")
    for content, with_content, argument in itertools.product(contents, has_content, arguments):
        yield Form(content, with_content, argument)


def _probe(messages: Messages) -> Messages:
    """The shape of a conversation: the same fields, and marks in place of texts."""
    ids: dict[str, str] = {}

    def known_id(value: Any) -> Any:
        """Templates compare ids, and check their length."""
        if not isinstance(value, str):
            return _plain(value)
        return ids.setdefault(value, str(len(ids)).zfill(len(value)))

    probe = []
    for i, message in enumerate(messages):
        marked: dict[str, Any] = {}
        for name, value in message.items():
            if name == "role":
                marked[name] = value
            elif name == "content":
                marks = [_MARK.format(i, j) if text.strip() else "" for j, text in enumerate(_parts(message))]
                is_list = isinstance(value, list)
                marked[name] = [{"type": "text", "text": mark} for mark in marks] if is_list else "".join(marks)
            elif name == "tool_call_id":
                marked[name] = known_id(value)
            elif name == "tool_calls":
                marked[name] = [
                    {
                        **({"id": known_id(call["id"])} if "id" in call else {}),
                        "type": "function",
                        "function": {
                            "name": _MARK.format(i, f"c{k}"),
                            "arguments": {"where": "here"} if call["function"]["arguments"] else {},
                        },
                    }
                    for k, call in enumerate(value)
                ]
            else:
                marked[name] = _plain(value)
        probe.append(marked)
    return probe


def _plain(value: Any) -> Any:
    """A value of the same kind, on which no row's own text depends."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return "x" if value.strip() else ""
    return value if isinstance(value, bool | None) else 1


def _parts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a content."""
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [] if content is None else [content]


def _texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a content that are not blank. The others need not reach the prompt."""
    return [text for text in _parts(message) if text.strip()]


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
