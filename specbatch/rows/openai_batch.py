"""OpenAI Batch: request lines (platform.openai.com/docs/guides/batch). `results_format` has the response lines."""

from __future__ import annotations

from typing import Any

from specbatch.errors import RowError
from specbatch.rows.chat_fields import CHAT_FIELDS
from specbatch.rows.parameters import ALIASES, SAMPLING_FIELDS
from specbatch.rows.row import Row

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (_CHAT, _COMPLETIONS)
_TEXT_ONLY = "specbatch writes text only"
# What to do with lines for other endpoints of OpenAI, by the part of the path after /v1/.
_INSTEAD = {
    "responses": f"write the lines for {_CHAT}: `input` and `instructions` become messages, max_output_tokens "
    "max_completion_tokens, and text.format response_format",
    "embeddings": f"{_TEXT_ONLY}; compute embeddings with sentence-transformers or `vllm run-batch`",
    "moderations": f"ask for the category in a line for {_CHAT}, with response_format",
    "images": _TEXT_ONLY,
    "videos": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
}
_SAMPLING = (*(name for name in SAMPLING_FIELDS if name != "logprobs"), *ALIASES)
# What changes no output here: who asks, where it is stored and billed.
_IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
CHAT_BODY = ("prediction", *CHAT_FIELDS)
_OTHERS = ("messages", "prompt", "logprobs", "top_logprobs", "stream_options", *CHAT_BODY)
KNOWN_BODY = frozenset((*_SAMPLING, *_IGNORED, *_OTHERS))


def is_openai_line(fields: dict[str, Any]) -> bool:
    """Return whether a row is a Batch line, even a broken one, and not a native row."""
    if "custom_id" in fields:
        return any(name in fields for name in ("body", "method", "url"))
    # Tables of web pages have a `url` and a `body` too: their body is not an object, and their url no endpoint.
    return isinstance(fields.get("body"), dict) and str(fields.get("url")).startswith("/v1/")


def read_batch_line(fields: dict[str, Any], row: Row) -> dict[str, Any]:
    """The body of a Batch line; fills in what its result repeats. Raises RowError for a line that breaks the format,
    with all of `row` filled in that the line has."""
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    row.api = "chat" if url == _CHAT else "completions"
    row.id = custom_id if isinstance(custom_id, str | int | float) else None
    row.model = body.get("model") if isinstance(body, dict) else None
    if not isinstance(custom_id, str):
        raise RowError("invalid_type", "custom_id must be text")
    if fields.get("method", "POST") != "POST":
        raise RowError("unsupported_parameter", "method must be POST")
    if url not in ENDPOINTS:
        message, hint = foreign_endpoint(url)
        raise RowError("unsupported_parameter", f"url {message}; {hint}" if hint else f"url {message}")
    if not isinstance(body, dict):
        raise RowError("invalid_type", "body must be an object")
    return body


def foreign_endpoint(url: Any) -> tuple[str, str | None]:
    """Say what is wrong with the URL of a line, and what to do instead if it is known."""
    kind = str(url).removeprefix("/v1/").partition("/")[0]
    return f"must be {_CHAT} or {_COMPLETIONS}, not {str(url)[:80]!r}", _INSTEAD.get(kind)


def sampling_fields(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    """The sampling fields of a body, as a native row would have them. Raises RowError."""
    fields = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if not chat:
        if top is not None:
            raise RowError("unsupported_parameter", "top_logprobs is a parameter of chat completions; use logprobs")
        fields["logprobs"] = logprobs
        return fields
    if logprobs is not None and not isinstance(logprobs, bool):
        raise RowError("invalid_type", "logprobs must be true or false in chat completions")
    if top is not None and not logprobs:
        raise RowError("invalid_value", "top_logprobs needs logprobs: true")
    if logprobs:
        fields["logprobs"] = 0 if top is None else top
    return fields
