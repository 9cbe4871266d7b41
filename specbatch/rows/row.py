"""A row: what it asks for, and what its result repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbatch.rows.chat_fields import NO_CHAT_FIELDS, ChatFields
from specbatch.types import GRAMMAR_FIELDS, SamplingParams

PromptKind = Literal["prompt", "messages", "token_ids"]
# The text begins with the token that the tokenizer adds. A chat template has written the prompt already. The chat
# template leaves out the text next to a tool call.
Doubt = Literal["two_bos", "two_templates", "text_left_out"]


@dataclass(slots=True)
class RowInfo:
    """What a row's result repeats, error or not, and what remarks are made of."""

    index: int
    id: Any = None  # of an OpenAI Batch line its custom_id
    metadata: dict[str, Any] | None = None
    unread_fields: Sequence[str] = ()  # of a row that can run: became metadata; some may be misspelled parameters
    own_max_tokens: bool | None = None  # of a row that can run: whether it has its own
    closes_objects: bool = False  # see `response_format.closes_objects`
    api: Literal["chat", "completions"] | None = None  # of an OpenAI Batch line
    model: Any = None  # that an OpenAI Batch line names; the target of the config answers in any case
    doubts: Sequence[Doubt] = ()  # of a row that can run: its prompt can be other than it was meant


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a row that can run asks for, before the prompt is tokenized."""

    kind: PromptKind
    content: Any  # str, list of messages, or list of token ids
    params: SamplingParams
    own_seed: bool = False  # the row has a seed
    raw: bool = False  # never through the chat template (OpenAI completions)
    chat: ChatFields = NO_CHAT_FIELDS
    choices: tuple[str, ...] = ()  # to be scored; then no text is generated

    @property
    def has_grammar(self) -> bool:
        return bool(self.chat.required) or has_grammar(self.params)

    @property
    def num_requests(self) -> int:
        """How many of its n completions are computed: greedy ones are all equal. Or the number of its choices."""
        if self.choices:
            return len(self.choices)
        return self.params.n if self.params.temperature > 0 else 1


def has_grammar(params: SamplingParams) -> bool:
    return any(getattr(params, name) is not None for name in GRAMMAR_FIELDS)
