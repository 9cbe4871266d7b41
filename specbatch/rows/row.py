"""A row: what it asks for, what its result repeats, and what the engine makes of it."""

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
# The text begins with the token that the tokenizer adds. A chat template has written the prompt already. The chat
# template leaves out the text next to a tool call.
Doubt = Literal["two_bos", "two_templates", "text_left_out"]


@dataclass(slots=True, eq=False)
class Row:
    """A row on its way from the input to its result line. `RowParser` fills in what it asks for, `RowPreparer` what the
    engine needs, and `RowRunner` its results. A row with an error has what was read before that."""

    index: int
    digest: int = 0  # RawRow.digest
    error: RowError | None = None  # why it cannot run

    # What its result repeats, error or not, and what remarks are made of.
    id: Any = None  # of an OpenAI Batch line its custom_id
    metadata: dict[str, Any] | None = None
    unread_fields: Sequence[str] = ()  # of a row that can run: became metadata; some may be misspelled parameters
    own_max_tokens: bool | None = None  # of a row that can run: whether it has its own
    closes_objects: bool = False  # see `response_format.closes_objects`
    api: Literal["chat", "completions"] | None = None  # of an OpenAI Batch line
    model: Any = None  # that an OpenAI Batch line names; the target of the config answers in any case
    doubts: Sequence[Doubt] = ()  # of a row that can run: its prompt can be other than it was meant

    # What it asks for.
    kind: PromptKind = "prompt"
    content: Any = None  # str, list of messages, or list of token ids
    params: SamplingParams = field(default_factory=SamplingParams)
    own_seed: bool = False  # the row has a seed
    raw: bool = False  # never through the chat template (OpenAI completions)
    chat: ChatFields = NO_CHAT_FIELDS
    choices: tuple[str, ...] = ()  # to be scored; then no text is generated

    # What the engine needs.
    token_ids: list[int] = field(default_factory=list)  # of the prompt
    bad_words: tuple[tuple[int, ...], ...] = ()  # `params.bad_words` as token ids
    choice_tokens: Sequence[ChoiceTokens | RowError] = ()
    reader: AnswerReader = field(default_factory=AnswerReader)  # of its answers

    results: list[Completion | RowError | None] = field(default_factory=list)  # of its requests; None: it runs

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
