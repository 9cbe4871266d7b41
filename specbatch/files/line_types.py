"""The fields of result lines and their types. The JSON Schema of results and the columns of parquet are made of this.

`results_format` makes the lines. A field that is not always there is NotRequired.
"""

# No `from __future__ import annotations`: Python 3.11 would then take each field for a required one.
import json
import re
from typing import Any, Literal, NotRequired, TypedDict

Finish = Literal["stop", "length", "tool_calls", "error"]


class Usage(TypedDict):
    """Tokens of a row. Of several completions the sum."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: NotRequired[int]  # only in an OpenAI Batch line


class Speculation(TypedDict):
    """Statistics of a row's drafting. `simulated` exists only if the text is no answer."""

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
    """The probability that the model gives to one of the row's `score_choices`."""

    text: str
    logprob: float | None  # None: it failed
    num_tokens: int
    error: NotRequired[Failure]


class NativeLine(TypedDict):
    """The result of a row in the native format."""

    id: Any
    index: int
    text: str | None
    reasoning_content: NotRequired[str]  # only in the result of a chat
    tool_calls: NotRequired[list[Any]]  # calls have the form of OpenAI's messages
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


BATCH_ID = "batch_req_"  # before the row index, in the id of an OpenAI Batch result


def index_of(line: dict[str, Any]) -> int:
    """The row index of a result line. Raises LookupError, ValueError, TypeError or AttributeError for other lines."""
    if "index" in line:
        index = line["index"]
    elif line["id"].startswith(BATCH_ID):
        index = int(line["id"].removeprefix(BATCH_ID))
    else:
        raise ValueError(line["id"])
    if type(index) is not int or index < 0:
        raise TypeError(index)
    return index


# The first keys of a line, if its id is not an object or a list.
_BEGIN = re.compile(
    rb'''\{"id": (?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\w.+-]++), "index": ([0-9]++), "'''
    rb"""|\{"id": "batch_req_([0-9]++)", "custom_id": """
)


def line_index(line: bytes) -> int:
    """`index_of` an encoded line. It reads the beginning only, if that is enough. Raises LookupError, ValueError,
    TypeError, AttributeError or RecursionError for other lines."""
    found = _BEGIN.match(line)
    return index_of(json.loads(line)) if found is None else int(found[1] or found[2])
