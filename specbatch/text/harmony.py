"""Harmony, the format in which gpt-oss answers: messages, each in a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. A header can have a recipient, such as `to=functions.weather`, before or
after the channel's name; then the body is the arguments of a call, and the message ends with `<|call|>`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL = "final"  # the channel of the answer
_CONSTRAIN = "<|constrain|>"
END = "<|end|>"  # the end of a message that others follow
_ENDS = (END, "<|return|>", "<|call|>")
HARMONY_MARKS = (_START, CHANNEL, MESSAGE, _CONSTRAIN, *_ENDS)
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))
# The last channel of a header counts.
_NAME, _RECIPIENT = re.compile(r".*<\|channel\|>\s*(\w+)", re.DOTALL), re.compile(r"\bto=([^\s<]+)")
# The begin of a header: a role, a channel and a type. It can be cut anywhere.
_TO = r"(\s+to=[^\s<]*)?"
_CUT_HEADER = re.compile(rf"\w*{_TO}(<\|channel\|>\s*\w*{_TO}\s*(<\|constrain\|>)?\w*\s*)?")
# A body up to a channel. The model has left out the begin of that channel's message.
_BODY_TO_CHANNEL = re.compile(r"(<\|message\|>(?:(?!<\|start\|>).)*?)(?=<\|channel\|>)", re.DOTALL)
_FUNCTION = "functions."


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """A message of an answer. `raw`: the message as the model wrote it, without its marks of begin and end."""

    channel: str | None
    function: str | None  # the function that it calls
    body: str
    raw: str


def is_harmony(marks: Collection[str] | str) -> bool:
    """Return whether a chat template, or a tokenizer with these tokens, is for Harmony."""
    return CHANNEL in marks and MESSAGE in marks


def open_header(prompt: str) -> str:
    """Return what a prompt has written of the message that the answer continues, such as "assistant". Only the end of
    the prompt counts."""
    return prompt.rpartition(_START)[2] if _START in prompt else ""


def begins_final(header: str) -> bool:
    """Return whether a prompt has begun the body of the final message. `header`: see `open_header`."""
    name = _NAME.search(header)
    return MESSAGE in header and name is not None and name[1] == FINAL


def messages_of(text: str, begin: str) -> list[HarmonyMessage]:
    """Return the messages of an answer. `begin`: see `open_header`. A header that was cut is left out. Text that is in
    no message is one without a channel."""
    found: list[HarmonyMessage] = []
    for i, part in enumerate(_BODY_TO_CHANNEL.sub(rf"\1{_START}", begin + text).split(_START)):
        header, mark, body = part.partition(MESSAGE)
        raw = part
        if i == 0:  # the prompt has written `begin`
            raw, body = part.removeprefix(begin), body.removeprefix(begin.partition(MESSAGE)[2])
        if not mark:
            is_other_format = i == 0 and CHANNEL not in header
            if is_other_format or not _CUT_HEADER.fullmatch(header):
                found.append(HarmonyMessage(None, None, _ANY_END.sub("", raw), raw))
            continue
        body, rest = _divided(body)
        name, recipient = _NAME.search(header), _RECIPIENT.search(header)
        function = None
        if recipient is not None and recipient[1].startswith(_FUNCTION):
            function = recipient[1].removeprefix(_FUNCTION)
        found.append(HarmonyMessage(name and name[1], function, body, raw))
        if rest.strip():
            found.append(HarmonyMessage(None, None, rest, rest))
    return found


def _divided(body: str) -> tuple[str, str]:
    """Return a body before its end mark, and what comes after it, which a model should not write."""
    end = _ANY_END.search(body)
    return (body, "") if end is None else (body[: end.start()], body[end.end() :])
