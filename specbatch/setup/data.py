"""The `data` options that depend on the model."""

from __future__ import annotations

from typing import Any

from specbatch.config import DataSection
from specbatch.errors import ConfigError


def has_chat_template(data: DataSection, tokenizer: Any) -> bool:
    """Return whether chats can be written, with the configuration's template or with the model's own."""
    return bool(data.chat_template or getattr(tokenizer, "chat_template", None))


def runs_prompts_as_chat(data: DataSection, tokenizer: Any) -> bool:
    """Return data.prompts_as_chat. If it is not set, it is true if there is a chat template. Raise ConfigError if it is
    set and there is none."""
    has_template = has_chat_template(data, tokenizer)
    if data.prompts_as_chat and not has_template:
        raise ConfigError(
            "data.prompts_as_chat needs a chat template, and the model has none",
            "--set data.prompts_as_chat=false runs prompts as text to continue; or give data.chat_template",
        )
    return has_template if data.prompts_as_chat is None else data.prompts_as_chat


def note_on_prompts(as_chat: bool) -> str:
    """Says what was decided where data.prompts_as_chat was left open."""
    if as_chat:
        return "data.prompts_as_chat: true (the model has a chat template: a prompt is one user message)"
    return "data.prompts_as_chat: false (the model has no chat template: a prompt is text to continue)"
