"""A row of the input, with its requests and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specbatch.errors import RowError
from specbatch.rows.chat_fields import NO_CHAT_FIELDS, ChatFields
from specbatch.rows.choice_scoring import ChoiceTokens
from specbatch.text.chat_output import AnswerReader
from specbatch.types import GRAMMAR_FIELDS, Completion, SamplingParams

PromptKind = Literal["prompt", "messages", "token_ids"]
# two_bos: the text begins with the token that the tokenizer adds. two_templates: a chat template has already written
# the prompt. text_left_out: the chat template leaves out the text next to a tool call. unused_prediction: no draft
# comes from `prediction`.
Doubt = Literal["two_bos", "two_templates", "text_left_out", "unused_prediction"]


@dataclass(slots=True, eq=False)
class Row:
    """A row on its way from the input to its result line. `RowParser` fills in the fields that the row gives,
    `RowPreparer` those that the engine needs, and `RowRunner` the results. A row with an error has the fields that were
    read before it."""

    index: int  # the one of the result; it decides the default seed
    digest: int = 0  # RawRow.digest
    error: RowError | None = None  # the reason why it cannot run
    key: int = 0  # RawRow.index: the index of the row where it runs

    # These fields are repeated in the result, also in an error, or lead to warnings.
    id: Any = None  # the custom_id, if this is an OpenAI Batch line
    metadata: dict[str, Any] | None = None
    unread_fields: Sequence[str] = ()  # fields that became metadata; some may be misspelled parameters
    own_max_tokens: bool | None = None  # True: the row gives max_tokens; None: the row cannot run
    closes_objects: bool = False  # see `response_format.closes_objects`
    api: Literal["chat", "completions"] | None = None  # the API of an OpenAI Batch line
    model: Any = None  # the model that an OpenAI Batch line names; the target of the config answers in any case
    doubts: Sequence[Doubt] = ()  # reasons why the prompt may not be what was meant

    # These fields are what the row asks for.
    kind: PromptKind = "prompt"
    content: Any = None  # str, list of messages, or list of token ids
    params: SamplingParams = field(default_factory=SamplingParams)
    own_seed: bool = False  # the row has a seed
    raw: bool = False  # True: the prompt never goes through the chat template (OpenAI completions)
    chat: ChatFields = NO_CHAT_FIELDS
    prediction: str | None = None  # a text that the answer may be like, from which n-gram drafts come
    choices: tuple[str, ...] = ()  # texts to score; with them no text is generated

    # These fields are for the engine.
    token_ids: list[int] = field(default_factory=list)  # the prompt's tokens
    predicted_ids: list[int] = field(default_factory=list)  # `prediction` as tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # `params.bad_words` as token ids
    choice_tokens: Sequence[ChoiceTokens | RowError] = ()
    reader: AnswerReader = field(default_factory=AnswerReader)  # the reader of its answers

    results: list[Completion | RowError | None] = field(default_factory=list)  # one for each request; None: it runs

    @property
    def has_grammar(self) -> bool:
        return bool(self.chat.required) or has_grammar(self.params)

    @property
    def num_requests(self) -> int:
        """The number of its n completions that are computed (greedy ones are all equal), or the number of its
        choices."""
        if self.choices:
            return len(self.choices)
        return self.params.n if self.params.temperature > 0 else 1


def has_grammar(params: SamplingParams) -> bool:
    return any(getattr(params, name) is not None for name in GRAMMAR_FIELDS)
