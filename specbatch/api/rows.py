"""Arguments of calls: rows, and conversations that become rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specbatch.errors import InputError
from specbatch.rows.chat_fields import CHAT_FIELDS

# `Any` is for a table of pandas, polars, Arrow or `datasets`, whose types are not known here.
Rows = str | Mapping[str, Any] | Iterable[Mapping[str, Any] | str] | Any
Messages = Iterable[Mapping[str, Any]] | Iterable[Iterable[Mapping[str, Any]]]


def conversations(messages: Any, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the row of each conversation. It moves the fields of chats from `fields` to the rows. It raises InputError
    at once for what is no conversation, and later for such an item."""
    wanted = "a conversation is a list of messages such as {'role': 'user', 'content': 'Hello'}"
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InputError(f"messages are of type {type(messages).__name__}", f"{wanted}; generate() runs prompts")
    extra = {name: fields.pop(name) for name in CHAT_FIELDS if name in fields}
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
        messages = [messages]

    def rows() -> Iterator[dict[str, Any]]:
        for number, conversation in enumerate(messages):
            if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes):
                raise InputError(f"conversation {number} is of type {type(conversation).__name__}", wanted)
            yield {"messages": list(conversation), **extra}

    return rows()
