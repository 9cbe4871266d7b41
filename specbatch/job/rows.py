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

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specbatch.config import DataSection, sampling_value
from specbatch.errors import FieldError, InputError, RowError
from specbatch.job.jsonl import decode_line
from specbatch.job.openai_batch import (
    KNOWN_BODY,
    Envelope,
    check_request,
    is_openai_line,
    read_envelope,
    sampling_fields,
)
from specbatch.job.parameters import PROMPTS, SAMPLING_NAMES, UNSUPPORTED, meant_by, refuse_unsupported, shown_name
from specbatch.job.sources import RawRow, Source
from specbatch.job.templates import PromptTemplate
from specbatch.types import SamplingParams


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Messages with text content. Text parts are joined with newlines. Raises RowError."""
    if not isinstance(value, list):
        raise RowError("invalid_type", f"messages must be a list, not {type(value).__name__}")
    if not value:
        raise RowError("empty_prompt", "messages is empty")
    return [_message(i, message) for i, message in enumerate(value)]


def _message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError("invalid_type", f"messages[{i}] must be an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowError("invalid_type", f"messages[{i}].role must be text")
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if message.get(name):
            raise RowError("unsupported_parameter", f"messages[{i}].{name} is not supported")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(i, part) for part in content)
    if not isinstance(content, str):
        found = "missing" if content is None else type(content).__name__
        raise RowError("invalid_type", f"messages[{i}].content must be text, but is {found}")
    return {**message, "content": content}


def _part(i: int, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RowError("invalid_type", f"messages[{i}].content must hold objects with a type")
    if part["type"] != "text":
        raise RowError(
            "unsupported_parameter", f"messages[{i}].content: parts of type {part['type']!r:.40} are not supported"
        )
    if not isinstance(part.get("text"), str):
        raise RowError("invalid_type", f"messages[{i}].content: a text part must hold text")
    return part["text"]


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
            value = sampling_value(field, value, name)
        except FieldError as exc:
            raise RowError(exc.type, exc.message) from exc
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


_MOST_ROWS = 100  # that are looked at where the first does not have all
_MOST_SHOWN = 12


def with_checked_fields(source: Source, parser: RowParser) -> Source:
    """`source`, whose first rows are known to have what prompts are made of: the first with all of it ends the search,
    and a table is known by its first row. No row is lost where a source can be read but once.

    Raises InputError where none of the first rows has a field that is needed.
    """
    rows = source.rows()
    head: list[RawRow] = []
    needs = parser.needs
    names: dict[str, None] = {}
    count = 0
    for raw in itertools.islice(rows, _MOST_ROWS):
        head.append(raw)
        if isinstance(raw.data, dict):
            fields = raw.data
        else:
            try:
                fields = decode_line(raw.data)
            except RowError:  # becomes this row's own error
                continue
            if is_openai_line(fields):  # prompts come in their bodies
                continue
        count += 1
        names.update(dict.fromkeys(fields))
        needs = {words: anyone for words, anyone in needs.items() if not fields.keys() & set(anyone)}
        if not needs or isinstance(raw.data, dict):
            break
    if needs and count:
        raise _missing(source, needs, list(names), count)
    rest = iter([itertools.chain(head, rows)])
    return replace(source, rows=lambda: _first_of(rest, source))


def _first_of(rest: Iterator[Iterator[RawRow]], source: Source) -> Iterator[RawRow]:
    """What has been opened, at the first time; later, what the source opens anew."""
    opened = next(rest, None)
    yield from source.rows() if opened is None else opened


def _missing(source: Source, needs: dict[str, tuple[str, ...]], names: list[str], count: int) -> InputError:
    words, wanted = next(iter(needs.items()))
    lower = {name.lower(): name for name in names}
    near = [lower[n] for w in wanted for n in difflib.get_close_matches(w.lower(), lower, n=1)]
    hint = f"did you mean {shown_name(near[0])}? " if near else ""
    shown = ", ".join(shown_name(name) for name in names[:_MOST_SHOWN]) or "none"
    hint += f"the fields there: {shown}{', ...' * (len(names) > _MOST_SHOWN)}"
    if len(wanted) > 1:  # neither a template nor a column was given
        hint += "; data.prompt_column and data.prompt_template make prompts of them"
    rows = "the first row" if count == 1 else f"none of the first {count} rows"
    has = "has no" if count == 1 else "has"
    return InputError(f"{rows} of {source.name} {has} {words}", hint)
