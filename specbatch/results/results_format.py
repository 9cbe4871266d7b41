"""Result lines, native and OpenAI Batch: their fields, in their order. Nothing in them depends on scheduling or timing.

Native:

    {"id", "index", "text", "reasoning_content" and "tool_calls" if there are any, "finish_reason",
     "incomplete": true if the text was cut before its grammar allows an end,
     "usage": {"prompt_tokens", "completion_tokens"}, "speculation": {...},
     "certificate": {"margin", "position"} with output.certificate, "logprobs": [...] if requested,
     "prompt_logprobs": [...] if requested, "choice_scores": [...] of rows with score_choices,
     "choices": [...] if n > 1, "metadata": {...} if there is any}

With n > 1, usage and speculation are sums, and what is not in `choices` is that of choice 0. Only greedy rows have a
certificate; their choices are equal. A failed row has text null, finish_reason "error" and `error: {type, message}`.
If only some of its completions or score_choices failed, it has those that finished, too: in `choices` or
`choice_scores`, where each failed one has its `error`.

OpenAI Batch (platform.openai.com/docs/guides/batch): a failed line has `response: null` and `error: {code, message}`.
If some completions finished, it has a response with these.
OpenAI makes ids at random and `created` from the clock. Here ids are made from the row's index and `created` is 0, so
that a resumed job writes the same bytes. `body.speculation`, `body.prompt_logprobs` and `incomplete` of a choice are
additions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbatch.counts import SpeculationCounts
from specbatch.errors import RowError
from specbatch.files.line_types import BATCH_ID
from specbatch.logprobs import TokenLogprobs
from specbatch.results.logprob_json import LogprobJson
from specbatch.rows.row import Row
from specbatch.text.chat_output import Answer, ToolCall
from specbatch.types import NO_MARGIN, Completion, FinishReason, Margin


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion with its final text."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: TokenLogprobs | None
    speculation: SpeculationCounts
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    error: RowError | None = None  # why it failed; then it has no text
    incomplete: bool = False  # see `Completion`


def failed_choice(error: RowError) -> Choice:
    return Choice("", [], FinishReason.ERROR, None, SpeculationCounts(), error=error)


def choice_of(completion: Completion, answer: Answer) -> Choice:
    """Make the choice of a completion. `answer`: the parts of the completion's text."""
    reason = completion.finish_reason
    if answer.tool_calls and reason is FinishReason.STOP:
        reason = FinishReason.TOOL_CALLS
    return Choice(
        answer.text,
        completion.token_ids,
        reason,
        completion.logprobs,
        completion.speculation,
        answer.reasoning,
        answer.tool_calls,
        incomplete=completion.incomplete,
    )


def error_line(row: Row, error: RowError) -> dict[str, Any]:
    """The result line of a row that failed."""
    if row.api is not None:
        return {"id": _batch_id(row), "custom_id": row.id, "response": None, "error": _failure(error, "code")}
    line: dict[str, Any] = {
        "id": row.id,
        "index": row.index,
        "text": None,
        "finish_reason": "error",
        "error": _failure(error, "type"),
    }
    if row.metadata is not None:
        line["metadata"] = row.metadata
    return line


def _failure(error: RowError, kind: Literal["type", "code"]) -> dict[str, str]:
    return {kind: error.type, "message": error.message}


def result_line(
    row: Row,
    choices: Sequence[Choice],
    logprob_json: LogprobJson,
    *,
    model: str,
    simulated: bool = False,
    margin: Margin = NO_MARGIN,
    prompt_logprobs: TokenLogprobs | None = None,
    from_first: bool = True,
    first_text: int | None = None,
    choice_scores: Sequence[dict[str, Any]] | None = None,
    error: RowError | None = None,
) -> dict[str, Any]:
    """The result line of a row that ran on `model`. `simulated`: speculation.simulate_acceptance is set. `margin`: the
    row's certificate, if it is wanted. `from_first`: `prompt_logprobs` are of the whole prompt, whose first token has
    none. `first_text`: see `LogprobJson.prompt`. `error`: why a part of the row failed; then the whole row counts as
    failed, and has what finished. Values of log-probabilities are `Encoded`: the line is for `encode_line`."""
    usage = {"prompt_tokens": len(row.token_ids), "completion_tokens": sum(len(c.token_ids) for c in choices)}
    total = SpeculationCounts()
    for choice in choices:
        total.add(choice.speculation)
    counts = {"speculation": _speculation(total, simulated)}
    if margin != NO_MARGIN:
        counts["certificate"] = certificate(margin)
    scores: dict[str, Any] = {} if choice_scores is None else {"choice_scores": choice_scores}
    if prompt_logprobs is not None:
        scores["prompt_logprobs"] = logprob_json.prompt(prompt_logprobs, from_first=from_first, first_text=first_text)
    if row.api is not None:
        return _openai_line(row, usage, {**counts, **scores}, choices, logprob_json, model, error)
    first = choices[0] if error is None else failed_choice(error)
    line: dict[str, Any] = {
        "id": row.id,
        "index": row.index,
        **_native_parts(row, 0, first),
        "usage": usage,
        **counts,
    }
    if first.logprobs is not None:
        line["logprobs"] = logprob_json.native(first.logprobs)
    line |= scores
    if len(choices) > 1:
        line["choices"] = [_choice(row, i, choice, logprob_json, simulated) for i, choice in enumerate(choices)]
    if row.metadata is not None:
        line["metadata"] = row.metadata
    return line


def certificate(margin: Margin) -> dict[str, Any]:
    """Return the JSON fields of a row's margin."""
    return {"margin": margin.value, "position": margin.position}


def _speculation(counts: SpeculationCounts, simulated: bool) -> dict[str, Any]:
    """acceptance_length: tokens committed per round. accept_histogram[a]: rounds that accepted `a` draft tokens.
    `simulated` exists only if it is true: the text is then not an answer of the model."""
    length = counts.acceptance_length
    return {
        **({"simulated": True} if simulated else {}),
        "rounds": counts.rounds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_length": None if length is None else round(length, 4),
        "accept_histogram": list(counts.histogram),
    }


def _choice(row: Row, i: int, choice: Choice, logprob_json: LogprobJson, simulated: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "index": i,
        **_native_parts(row, i, choice),
        "usage": {"completion_tokens": len(choice.token_ids)},
        "speculation": _speculation(choice.speculation, simulated),
    }
    if choice.logprobs is not None:
        entry["logprobs"] = logprob_json.native(choice.logprobs)
    return entry


def _native_parts(row: Row, i: int, choice: Choice) -> dict[str, Any]:
    """The text and the end of completion `i`."""
    if choice.error is not None:
        return {"text": None, "finish_reason": "error", "error": _failure(choice.error, "type")}
    end = {"finish_reason": str(choice.finish_reason), **_incomplete(choice)}
    return {"text": choice.text, **_chat_parts(row, i, choice), **end}


def _chat_parts(row: Row, i: int, choice: Choice) -> dict[str, Any]:
    """Reasoning and calls of completion `i` of a row, as far as there are any. OpenAI makes ids at random; here they
    are the row's index, `i`, and the number of the call."""
    parts: dict[str, Any] = {}
    if choice.reasoning:
        parts["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        parts["tool_calls"] = [
            {
                "id": f"call_{row.index:012d}_{i}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(choice.tool_calls)
        ]
    return parts


def _openai_line(
    row: Row,
    usage: dict[str, int],
    counts: Mapping[str, Any],
    choices: Sequence[Choice],
    logprob_json: LogprobJson,
    model: str,
    error: RowError | None,
) -> dict[str, Any]:
    chat = row.api == "chat"
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.index:012d}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [_openai_choice(row, i, choice, logprob_json) for i, choice in enumerate(choices)],
        "usage": {**usage, "total_tokens": sum(usage.values())},
        **counts,
    }
    return {
        "id": _batch_id(row),
        "custom_id": row.id,
        "response": {"status_code": 200, "request_id": f"req_{row.index:012d}", "body": body},
        "error": None if error is None else _failure(error, "code"),
    }


def _batch_id(row: Row) -> str:
    return f"{BATCH_ID}{row.index:012d}"


def _openai_choice(row: Row, i: int, choice: Choice, logprob_json: LogprobJson) -> dict[str, Any]:
    chat = row.api == "chat"
    failed = choice.error is not None
    text: dict[str, Any] = {"text": None if failed else choice.text}
    if chat:
        content = choice.text if choice.text or not (choice.tool_calls or failed) else None
        message = {"role": "assistant", "content": content, "refusal": None, **_chat_parts(row, i, choice)}
        text = {"message": message}
    logprobs = None
    if choice.logprobs is not None:
        logprobs = (logprob_json.chat if chat else logprob_json.completion)(choice.logprobs)
    error = {} if choice.error is None else {"error": _failure(choice.error, "code")}
    parts = {"logprobs": logprobs, "finish_reason": choice.finish_reason, **_incomplete(choice), **error}
    return {"index": i, **text, **parts}


def _incomplete(choice: Choice) -> dict[str, bool]:
    return {"incomplete": True} if choice.incomplete else {}
