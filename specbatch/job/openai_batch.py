"""OpenAI Batch: request lines in, response lines out (platform.openai.com/docs/guides/batch).

A line that fails has `response: null` and `error: {code, message}`. Everything that OpenAI draws at random or from the
clock is made from the row's index, and `created` is 0, so that a resumed run writes the same bytes. `body.speculation`
is an addition of ours. Whatever `model` a request names, the target of the config answers, and is named in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbatch.errors import RowError
from specbatch.job.parameters import ALIASES
from specbatch.job.results_format import LOWEST_LOGPROB, Choice, TokenTexts, speculation_dict, sum_speculation
from specbatch.types import TokenLogprob

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    *ALIASES,
)
# What changes no output here: who asks, where it is stored and billed.
_IGNORED = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream_options",
)
KNOWN_BODY = frozenset(
    (
        *_SAMPLING,
        *_IGNORED,
        "messages",
        "prompt",
        "logprobs",
        "top_logprobs",
        "parallel_tool_calls",
    )
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What ties an output line to its request line."""

    custom_id: Any
    chat: bool
    model: Any = None  # that was asked for


def is_openai_line(row: dict[str, Any]) -> bool:
    """Whether a row is a Batch line (perhaps a broken one) and no native row."""
    if "custom_id" in row:
        return any(name in row for name in ("body", "method", "url"))
    # Tables of web pages have a `url` and a `body` too: theirs is no object, and no endpoint of this API.
    return isinstance(row.get("body"), dict) and str(row.get("url")).startswith("/v1/")


def read_envelope(row: dict[str, Any]) -> Envelope:
    """The envelope of a Batch line; tolerant, so that the error of a broken line still carries its custom_id."""
    custom_id, body = row.get("custom_id"), row.get("body")
    return Envelope(
        custom_id if isinstance(custom_id, str | int | float) else None,
        row.get("url") == _CHAT,
        body.get("model") if isinstance(body, dict) else None,
    )


def check_request(row: dict[str, Any]) -> dict[str, Any]:
    """The body of a Batch line. Raises RowError for a broken envelope."""
    if not isinstance(row.get("custom_id"), str):
        raise RowError("invalid_type", "custom_id must be text")
    if row.get("method", "POST") != "POST":
        raise RowError("unsupported_parameter", "method must be POST")
    if row.get("url") not in (_CHAT, _COMPLETIONS):
        raise RowError(
            "unsupported_parameter", f"url must be {_CHAT} or {_COMPLETIONS}, not {str(row.get('url'))[:80]!r}"
        )
    body = row.get("body")
    if not isinstance(body, dict):
        raise RowError("invalid_type", "body must be an object")
    return body


def sampling_fields(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    """The sampling fields of a body, as a native row would have them. Raises RowError."""
    fields = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if not chat:
        if top is not None:
            raise RowError("unsupported_parameter", "top_logprobs belongs to chat completions; use logprobs")
        fields["logprobs"] = logprobs
        return fields
    if logprobs is not None and not isinstance(logprobs, bool):
        raise RowError("invalid_type", "logprobs must be true or false in chat completions")
    if top is not None and not logprobs:
        raise RowError("invalid_value", "top_logprobs needs logprobs: true")
    if logprobs:
        fields["logprobs"] = 0 if top is None else top
    return fields


def openai_error(index: int, envelope: Envelope, error: RowError) -> dict[str, Any]:
    """The output line of a failed request."""
    return {
        "id": _batch_id(index),
        "custom_id": envelope.custom_id,
        "response": None,
        "error": {"code": error.type, "message": error.message},
    }


def openai_result(
    index: int,
    envelope: Envelope,
    model: str,
    prompt_tokens: int,
    choices: Sequence[Choice],
    texts: TokenTexts,
    *,
    simulated: bool = False,
) -> dict[str, Any]:
    """The output line of a request that ran. `simulated`: see `results_format.native_result`."""
    completion_tokens = sum(len(c.token_ids) for c in choices)
    body = {
        "id": f"{'chatcmpl' if envelope.chat else 'cmpl'}-{index:012d}",
        "object": "chat.completion" if envelope.chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [_choice(i, choice, envelope.chat, texts) for i, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "speculation": speculation_dict(sum_speculation(choices), simulated),
    }
    return {
        "id": _batch_id(index),
        "custom_id": envelope.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{index:012d}", "body": body},
        "error": None,
    }


def index_of(line_id: str) -> int:
    """The row's index in the `id` of an output line. Raises ValueError."""
    if not line_id.startswith("batch_req_"):
        raise ValueError(line_id)
    return int(line_id.removeprefix("batch_req_"))


def _batch_id(index: int) -> str:
    return f"batch_req_{index:012d}"


def _choice(i: int, choice: Choice, chat: bool, texts: TokenTexts) -> dict[str, Any]:
    if chat:
        logprobs = None if choice.logprobs is None else _chat_logprobs(choice.logprobs, texts)
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
    logprobs = None if choice.logprobs is None else _completion_logprobs(choice.logprobs, texts)
    return {"index": i, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _chat_logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = texts.token_text(token_id)
        return {"token": token, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(token.encode("utf-8"))}

    content = [
        {**entry(lp.token_id, lp.logprob), "top_logprobs": [entry(token, value) for token, value in lp.top]}
        for lp in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    tokens = [texts.token_text(lp.token_id) for lp in logprobs]
    offsets, length = [], 0
    for token in tokens:
        offsets.append(length)
        length += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(lp.logprob, LOWEST_LOGPROB) for lp in logprobs],
        "top_logprobs": [
            {texts.token_text(token): max(value, LOWEST_LOGPROB) for token, value in lp.top} for lp in logprobs
        ],
        "text_offset": offsets,
    }
