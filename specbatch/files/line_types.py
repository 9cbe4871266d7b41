"""The fields of result lines and their types. The JSON Schema of results and the columns of parquet are made of this.

`results_format` makes the lines. A field that is not always there is NotRequired.
"""

# No `from __future__ import annotations`: Python 3.11 would then take each field for a required one.
from typing import Any, Literal, NotRequired, TypedDict

Finish = Literal["stop", "length", "tool_calls", "error"]


class Usage(TypedDict):
    """Tokens of a row. Of several completions the sum."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: NotRequired[int]  # of an OpenAI Batch line


class Speculation(TypedDict):
    """How a row was drafted. `simulated` exists only if the text is no answer."""

    simulated: NotRequired[bool]
    rounds: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    accept_histogram: list[int]


class Certificate(TypedDict):
    """The smallest margin of a row, and its token: see `types.Margin`."""

    margin: float
    position: int


class Failure(TypedDict):
    """Why a row failed. A native line has `type`, an OpenAI Batch line has `code`."""

    type: NotRequired[str]
    code: NotRequired[str]
    message: str


class ChoiceScore(TypedDict):
    """How likely the model finds one of the row's `score_choices`."""

    text: str
    logprob: float | None  # None: it failed
    num_tokens: int
    error: NotRequired[Failure]


class NativeLine(TypedDict):
    """The result of a row in the native format."""

    id: Any
    index: int
    text: str | None
    reasoning_content: NotRequired[str]  # of a chat
    tool_calls: NotRequired[list[Any]]  # as in OpenAI's messages
    finish_reason: Finish
    incomplete: NotRequired[bool]  # cut before its grammar allows an end
    usage: NotRequired[Usage]
    speculation: NotRequired[Speculation]
    certificate: NotRequired[Certificate]
    error: NotRequired[Failure]
    logprobs: NotRequired[list[Any]]
    choice_scores: NotRequired[list[ChoiceScore]]
    prompt_logprobs: NotRequired[list[Any]]
    choices: NotRequired[list[Any]]
    metadata: NotRequired[dict[str, Any]]


class BatchLine(TypedDict):
    """The result of a row in the format of the OpenAI Batch API."""

    id: str
    custom_id: Any
    response: dict[str, Any] | None
    error: Failure | None
