"""Rows -> jobs: what a row asks for, checked field by field, or the error that becomes its result.

Fields of a native row: exactly one of `prompt`, `messages`, `prompt_token_ids`; `id`; any sampling field; everything
else is `metadata` and comes back as it was. An input `metadata` object is merged into that; where its keys collide
with fields of the row, or where it is no object, it stays nested under its own name, so that nothing is lost.
A field that is null counts as absent.

A parameter that other engines know and that would change the output is an error (see `parameters`). With
data.prompt_template or data.prompt_column, the columns of tables and data sets are data throughout: a column
`temperature` is then the weather and no override. JSON lines keep their sampling fields in every case; only what other
engines call a parameter (`suffix`, `tools`) is data there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specbatch.config import DataSection, FieldProblem, sampling_value
from specbatch.errors import RowError
from specbatch.job.jsonl import decode_line
from specbatch.job.messages import check_messages
from specbatch.job.openai_batch import (
    KNOWN_BODY,
    Envelope,
    check_request,
    is_openai_line,
    read_envelope,
    sampling_fields,
)
from specbatch.job.parameters import PROMPTS, SAMPLING_NAMES, UNSUPPORTED, meant_by, refuse_unsupported
from specbatch.job.prompt_template import PromptTemplate
from specbatch.job.sources import RawRow
from specbatch.types import SamplingParams


@dataclass(slots=True)
class RowHead:
    """What every result of a row repeats, error or not."""

    index: int
    id: Any = None
    metadata: dict[str, Any] | None = None
    kept_fields: Sequence[str] = ()  # of a row that may run: became metadata where a parameter might have been meant
    envelope: Envelope | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A row that may run, before its prompt is encoded."""

    kind: Literal["prompt", "messages", "token_ids"]
    content: Any  # str, list of messages, or list of token ids
    params: SamplingParams
    own_seed: bool  # the row brought a seed
    raw: bool = False  # never through the chat template (OpenAI completions)

    @property
    def num_computed(self) -> int:
        """How many of its n completions are computed: greedy ones are all alike."""
        return self.params.n if self.params.temperature > 0 else 1


class RowParser:
    """Parses rows under the defaults of a config. Raises ConfigError for a prompt template that cannot work."""

    def __init__(self, defaults: SamplingParams, data: DataSection) -> None:
        self._defaults = defaults
        self.makes_prompts = data.prompt_template is not None or data.prompt_column is not None  # of columns
        self._template = PromptTemplate(data.prompt_template) if data.prompt_template is not None else None
        self._column = data.prompt_column

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """What prompts are made of, in words -> the fields of which a row must have one."""
        if self._template is not None:
            return {f"{name!r}, which data.prompt_template uses": (name,) for name in self._template.fields}
        if self._column is not None:
            return {f"{self._column!r}, which data.prompt_column names": (self._column,)}
        return {"prompt, messages or prompt_token_ids": PROMPTS}

    def parse(self, raw: RawRow) -> tuple[RowHead, Job | RowError]:
        """The job of a row or its error; never raises for what a row holds."""
        head = RowHead(raw.index)
        try:
            is_line = isinstance(raw.data, bytes)
            row = decode_line(raw.data) if isinstance(raw.data, bytes) else raw.data
            if is_line and is_openai_line(row):
                return head, self._openai(row, head)
            return head, self._native(row, head, columns_are_data=self.makes_prompts and not is_line)
        except RowError as exc:
            return head, exc

    def _native(self, row: dict[str, Any], head: RowHead, columns_are_data: bool) -> Job:
        used = {"id"}
        if not columns_are_data:
            used.update(SAMPLING_NAMES)
        if self._column is not None:
            used.add(self._column)
        elif self._template is None:
            used.update(PROMPTS)
        extra = {k: v for k, v in row.items() if k not in used}
        head.metadata = _metadata(extra)
        head.id = _scalar_id(row.get("id"))
        params = self._defaults if columns_are_data else override(self._defaults, row)
        if not self.makes_prompts:
            refuse_unsupported(row, params, "put it under `metadata`, or set data.prompt_column")
        own_seed = not columns_are_data and row.get("seed") is not None
        kind, content = self._prompt(row)
        if not columns_are_data:
            head.kept_fields = [name for name in extra if name != "metadata"]
        return Job(kind, content, params, own_seed)

    def _prompt(self, row: dict[str, Any]) -> tuple[Literal["prompt", "messages", "token_ids"], Any]:
        if self._template is not None:
            return "prompt", self._template.fill(row)
        if self._column is not None:
            value = row.get(self._column)
            if value is None:
                raise RowError("missing_prompt", f"the row has no {self._column!r} (data.prompt_column)")
            if isinstance(value, list):
                return "messages", check_messages(value)
            return "prompt", _text(self._column, value)
        given = [name for name in PROMPTS if row.get(name) is not None]
        if not given:
            fields = ", ".join(list(row)[:8]) or "none"
            raise RowError(
                "missing_prompt", f"the row has no prompt, messages or prompt_token_ids; its fields: {fields}"
            )
        if len(given) > 1:
            raise RowError("invalid_type", f"the row has {' and '.join(given)}; give exactly one of them")
        value = row[given[0]]
        if given[0] == "prompt":
            return "prompt", _text("prompt", value)
        if given[0] == "messages":
            return "messages", check_messages(value)
        return "token_ids", check_token_ids("prompt_token_ids", value)

    def _openai(self, row: dict[str, Any], head: RowHead) -> Job:
        head.envelope = envelope = read_envelope(row)
        head.id = envelope.custom_id
        body = check_request(row)
        sampling = sampling_fields(body, envelope.chat)
        params = override(self._defaults, sampling)
        others = {name: value for name, value in body.items() if name not in KNOWN_BODY}
        refuse_unsupported(others, params, "put it under `metadata`")
        for name in others:
            if name not in UNSUPPORTED and name != "do_sample":
                near = meant_by(name)
                hint = f"; did you mean {near}?" if near else ""
                raise RowError("unsupported_parameter", f"body.{name[:60]} is not a parameter that is known here{hint}")
        if envelope.chat and body.get("logprobs") is False:
            params = replace(params, logprobs=None)
        own_seed = sampling.get("seed") is not None
        if envelope.chat:
            if body.get("messages") is None:
                raise RowError("missing_prompt", "body has no messages")
            return Job("messages", check_messages(body["messages"]), params, own_seed)
        prompt = body.get("prompt")
        if prompt is None:
            raise RowError("missing_prompt", "body has no prompt")
        if isinstance(prompt, str):
            return Job("prompt", prompt, params, own_seed, raw=True)
        if isinstance(prompt, list) and any(isinstance(p, str | list) for p in prompt):
            raise RowError("unsupported_parameter", "a list of prompts in one line is not supported; use one line each")
        return Job("token_ids", check_token_ids("prompt", prompt), params, own_seed, raw=True)


def override(defaults: SamplingParams, row: Mapping[str, Any]) -> SamplingParams:
    """`defaults` under the sampling fields of `row`. Raises RowError."""
    changes: dict[str, Any] = {}
    for name, field in SAMPLING_NAMES.items():
        value = row.get(name)
        if value is None:
            continue
        try:
            value = sampling_value(field, value)
        except FieldProblem as exc:
            raise RowError(exc.type, exc.message if name == field else f"{name}: {exc.message}") from exc
        if changes.setdefault(field, value) != value:
            raise RowError("invalid_value", f"{name} is {value}, and another name of {field} says {changes[field]}")
    return replace(defaults, **changes) if changes else defaults


def check_token_ids(name: str, value: Any) -> list[int]:
    """A list of integers >= 0; the vocabulary is checked when the prompt is encoded. Raises RowError."""
    if not isinstance(value, list):
        raise RowError("invalid_type", f"{name} must be a list of integers, not {type(value).__name__}")
    for token in value:
        if type(token) is not int or token < 0:
            raise RowError("invalid_type", f"{name} must be a list of integers >= 0; it holds {str(token)[:40]!r}")
    return value


def _metadata(extra: dict[str, Any]) -> dict[str, Any] | None:
    own = extra.get("metadata")
    if isinstance(own, dict) and not (own.keys() & extra.keys()):
        del extra["metadata"]
        return {**own, **extra}
    return extra or None


def _scalar_id(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise RowError("invalid_type", f"id must be text, a number, true, false or null, not {type(value).__name__}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("invalid_type", f"{name} must be text, not {type(value).__name__}")
    return value
