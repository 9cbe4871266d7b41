"""Input rows: what a row asks for, checked field by field, or the error that becomes its result.

Fields of a native row: exactly one of `prompt`, `messages`, `prompt_token_ids`; `id`; any sampling field; those of
chats (see `chat_fields`); `score_choices` (see `choice_scoring`). All other fields are `metadata` and come back
unchanged. An input `metadata` object is merged into that. If its keys collide with fields of the row, or if it is not
an object, it stays nested under its own name, so that nothing is lost. A field that is null counts as absent.

A parameter of another engine that would change the output is an error (see `parameters`), and so is a `model` that is
not the one that answers. With data.prompt_template or data.prompt_column, all columns of tables and data sets are data:
a column `temperature` is no sampling option then. JSON lines keep their sampling fields in every case; fields of chats
(`tools`), `score_choices` and other engines' parameters (`suffix`) are data there.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, Self

from specbatch.config import Config, DataSection, sampling_value
from specbatch.errors import FieldError, InputError, RowError, shown
from specbatch.files.csv_file import Cells
from specbatch.files.jsonl import BadRow, json_type
from specbatch.rows.cells import TemplateCell, fields_of
from specbatch.rows.chat_fields import CHAT_FIELDS, read_chat_fields, read_prediction
from specbatch.rows.choice_scoring import FIELD as CHOICES
from specbatch.rows.choice_scoring import read_choices
from specbatch.rows.messages import check_messages
from specbatch.rows.openai_batch import (
    CHAT_BODY,
    ENDPOINTS,
    KNOWN_BODY,
    foreign_endpoint,
    is_openai_line,
    read_batch_line,
    sampling_fields,
)
from specbatch.rows.parameters import (
    PROMPTS,
    SAMPLING_NAMES,
    UNSUPPORTED,
    bare_name,
    meant_by,
    refuse_unsupported,
    shown_name,
)
from specbatch.rows.row import PromptKind, Row
from specbatch.rows.sources import RawRow, Source
from specbatch.rows.templates import PromptTemplate
from specbatch.schemas.response_format import closes_objects
from specbatch.types import GRAMMAR_FIELDS, SamplingParams

_MAX_PREVIEW_ROWS = 100  # the most rows that are read before the model is loaded, if the first one lacks a field
_MAX_SHOWN = 12  # the most field names in a message
_AS_DATA = "put it under `metadata`, or set data.prompt_column"
_MAX_TOKENS = [name for name, field in SAMPLING_NAMES.items() if field == "max_tokens"]
_MAX_OVERRIDDEN = 64  # different sampling fields of rows that are kept
_MAX_FORMATS = 64  # response_formats whose remarks are kept


class RowParser:
    """A parser of rows with the defaults of a config. It raises ConfigError for a prompt template that cannot work.
    `model`: the model that answers; None: rows can name any model. `keeps_columns`: all fields but the id come back as
    metadata, as they are, for results that have the input's own columns."""

    def __init__(
        self, defaults: SamplingParams, data: DataSection, model: str | None = None, *, keeps_columns: bool = False
    ) -> None:
        self._defaults = defaults
        self._model = model
        # True: prompts are made of columns.
        self.makes_prompts = data.prompt_template is not None or data.prompt_column is not None
        self._template = PromptTemplate(data.prompt_template) if data.prompt_template is not None else None
        self._column = data.prompt_column
        self._id_column = data.id_column
        self._keeps_columns = keeps_columns
        self._kwargs = data.chat_template_kwargs or {}
        # The key is the id of the defaults, which are kept with the result, and the text of the fields.
        self._overridden: dict[tuple[int, str], tuple[SamplingParams, SamplingParams]] = {}
        self._closes_objects = functools.lru_cache(_MAX_FORMATS)(closes_objects)

    @classmethod
    def of_job(cls, config: Config) -> Self:
        """Make the parser of a file job."""
        keeps_columns = config.output.columns == "flat"
        return cls(config.sampling, config.data, config.model.target, keeps_columns=keeps_columns)

    @classmethod
    def of_fingerprint(cls, job: Mapping[str, Any]) -> Self:
        """Make a parser that reads prompts and answer formats as a job did. `job`: its fingerprint. Raises FieldError
        and ConfigError for values that this version does not take."""
        names = [name for name in GRAMMAR_FIELDS if job.get(f"sampling.{name}") is not None]
        sampling = {name: sampling_value(name, job[f"sampling.{name}"], name) for name in names}
        data = DataSection(
            prompt_template=job.get("data.prompt_template"),
            prompt_column=job.get("data.prompt_column"),
            id_column=job.get("data.id_column"),
        )
        return cls(SamplingParams(**sampling), data)

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """The sources of prompts and ids, in words, each with the fields of which a row must have one."""
        needs = self._prompt_needs()
        if self._id_column is not None:
            needs[f"{self._id_column!r}, which data.id_column names"] = (self._id_column,)
        return needs

    def _prompt_needs(self) -> dict[str, tuple[str, ...]]:
        if self._template is not None:
            return {f"{name!r}, which data.prompt_template uses": (name,) for name in self._template.fields}
        if self._column is not None:
            return {f"{self._column!r}, which data.prompt_column names": (self._column,)}
        return {"prompt, messages or prompt_token_ids": PROMPTS}

    def parse(self, raw: RawRow) -> Row:
        """Parse a row. An error in it becomes the row's `error`, and is never raised."""
        number = raw.index if raw.number is None else raw.number
        row = Row(number, raw.digest(), key=raw.index, params=raw.sampling or self._defaults)
        try:
            is_line = isinstance(raw.data, bytes)
            fields = raw.fields()
            if is_line and is_openai_line(fields):
                self._openai(fields, row)
            else:
                self._native(fields, row, is_line)
        except RowError as exc:
            row.error = exc
        return row

    def _native(self, fields: dict[str, Any], row: Row, is_line: bool) -> None:
        columns_are_data = self.makes_prompts and not is_line
        id_name = self._id_column or "id"
        used = {id_name}
        if not columns_are_data:
            used.update(SAMPLING_NAMES)
        if self._column is not None:
            used.add(self._column)
        elif self._template is None:
            used.update(PROMPTS)
        if not self.makes_prompts:
            used.update(CHAT_FIELDS, [CHOICES])
        extra = {k: v for k, v in fields.items() if k not in used}
        if self._keeps_columns:
            row.metadata = {name: value for name, value in fields.items() if name != id_name}
        else:
            row.metadata = _metadata(extra)
        row.id = _scalar_id(id_name, fields.get(id_name))
        if isinstance(fields, Cells):
            row.id = row.id or None
            fields = self._of_cells(fields)
        elif not is_line and self._template is None:
            fields = _as_line(fields)
        if not columns_are_data:
            row.params = self._override(row.params, fields)
        if not self.makes_prompts:
            refuse_unsupported(fields, row.params, _AS_DATA)
            self._check_model(fields.get("model"))
            row.chat, row.choices = read_chat_fields(fields, self._kwargs), read_choices(fields, row.params)
        self._note(row, {} if columns_are_data else fields)
        row.kind, row.content = self._prompt(fields)
        if not columns_are_data:
            read = ("metadata",) if self.makes_prompts else ("metadata", "model")
            row.unread_fields = [name for name in extra if name not in read]

    def _override(self, defaults: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
        """`override`, once for rows with equal fields, which then share the result."""
        given = {name: value for name, value in fields.items() if name in SAMPLING_NAMES and value is not None}
        if not given:
            return defaults
        key = id(defaults), repr(given)
        if key not in self._overridden:
            if len(self._overridden) >= _MAX_OVERRIDDEN:  # such as with a seed in each row
                self._overridden.clear()
            self._overridden[key] = defaults, override(defaults, given)
        return self._overridden[key][1]

    def _of_cells(self, cells: Cells) -> dict[str, Any]:
        if not self.makes_prompts:
            return fields_of(cells)
        if self._template is None:
            return {name: cell or None for name, cell in cells.items()}
        names = self._template.fields
        if names and not any(cells.get(name) for name in names):
            raise RowError("missing_prompt", f"the row has no content in {' and '.join(map(shown_name, names))}")
        return {name: TemplateCell(cell) for name, cell in cells.items()}

    def _check_model(self, named: Any) -> None:
        if named is None or self._model is None:
            return
        if not isinstance(named, str) or bare_name(named) != bare_name(self._model):
            message = f"model is {shown(named)}, but {self._model} answers; leave it out"
            raise RowError("unsupported_parameter", f"{message}; if it is only data, {_AS_DATA}")

    def _note(self, row: Row, fields: Mapping[str, Any]) -> None:
        """Fill in what is known from the row's sampling fields."""
        row.own_seed = fields.get("seed") is not None
        row.own_max_tokens = any(fields.get(name) is not None for name in _MAX_TOKENS)
        wanted = row.params.response_format
        row.closes_objects = self._closes_objects(wanted)

    def _prompt(self, fields: dict[str, Any]) -> tuple[PromptKind, Any]:
        if self._template is not None:
            return "prompt", self._template.fill(fields)
        if self._column is not None:
            value = fields.get(self._column)
            if value is None:
                raise RowError("missing_prompt", f"the row has no {self._column!r} (data.prompt_column)")
            if isinstance(value, list):
                return "messages", check_messages(value)
            return "prompt", _text(self._column, value)
        given = [name for name in PROMPTS if fields.get(name) is not None]
        if not given:
            names = ", ".join(list(fields)[:8]) or "none"
            raise RowError(
                "missing_prompt", f"the row has no prompt, messages or prompt_token_ids; its fields: {names}"
            )
        if len(given) > 1:
            raise RowError("invalid_type", f"the row has {' and '.join(given)}; give exactly one of them")
        value = fields[given[0]]
        if given[0] == "prompt":
            return "prompt", _text("prompt", value)
        if given[0] == "messages":
            return "messages", check_messages(value)
        return "token_ids", check_token_ids("prompt_token_ids", value)

    def _openai(self, fields: dict[str, Any], row: Row) -> None:
        body = read_batch_line(fields, row)
        chat = row.api == "chat"
        sampling = sampling_fields(body, chat)
        row.params = self._override(row.params, sampling)
        others = {name: value for name, value in body.items() if name not in KNOWN_BODY and value is not None}
        refuse_unsupported(others, row.params, "put it under `metadata`")
        for name in others:
            if name not in UNSUPPORTED and name != "do_sample":
                near = meant_by(name)
                hint = f"; did you mean {near}?" if near else ""
                raise RowError("unsupported_parameter", f"body.{name[:60]} is not a known parameter{hint}")
        if chat and body.get("logprobs") is False:
            row.params = replace(row.params, logprobs=None)
        self._note(row, sampling)
        content = body.get("messages" if chat else "prompt")
        if content is None:
            raise RowError("missing_prompt", f"body has no {'messages' if chat else 'prompt'}")
        if chat:
            row.chat = read_chat_fields(body, self._kwargs)
            row.prediction = read_prediction(body.get("prediction"))
            row.kind, row.content = "messages", check_messages(content)
            return
        row.raw = True
        if names := [name for name in CHAT_BODY if body.get(name) is not None]:
            raise RowError("unsupported_parameter", f"body.{names[0]} is a parameter of chat completions")
        if isinstance(content, str):
            row.content = content
            return
        if isinstance(content, list) and any(isinstance(part, str | list) for part in content):
            raise RowError("unsupported_parameter", "a list of prompts in one line is not supported; use one line each")
        row.kind, row.content = "token_ids", check_token_ids("prompt", content)


def override(defaults: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
    """`defaults` under the sampling fields of a row. Raises RowError."""
    changes: dict[str, Any] = {}
    for name, field in SAMPLING_NAMES.items():
        value = fields.get(name)
        if value is None:
            continue
        try:
            value = sampling_value(field, value, name)
        except FieldError as exc:
            raise RowError(exc.type, exc.message) from exc
        if changes.setdefault(field, value) != value:
            raise RowError("invalid_value", f"{name} is {value}, but another name of {field} has {changes[field]}")
    if any(name in changes for name in GRAMMAR_FIELDS):
        changes = {**dict.fromkeys(GRAMMAR_FIELDS), **changes}
    try:
        return replace(defaults, **changes) if changes else defaults
    except FieldError as exc:
        raise RowError(exc.type, exc.message) from exc


def check_token_ids(name: str, value: Any) -> list[int]:
    """Checks a list of integers >= 0; the vocabulary is checked when the prompt is encoded. Raises RowError."""
    if not isinstance(value, list):
        raise RowError("invalid_type", f"{name} must be a list of integers, not {json_type(value)}")
    for token in value:
        if type(token) is not int or token < 0:
            raise RowError("invalid_type", f"{name} must be a list of integers >= 0, but has {str(token)[:40]!r}")
    return value


def _metadata(extra: dict[str, Any]) -> dict[str, Any] | None:
    own = extra.get("metadata")
    if isinstance(own, dict) and not (own.keys() & extra.keys()):
        del extra["metadata"]
        return {**own, **extra}
    return extra or None


def _as_line(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a table as the fields of a JSON line. In pandas, a column of integers in which a value is missing
    has floats; data bases write integers as decimals. A struct has all fields of its column, with nulls where the row
    has none."""
    return {
        name: _number(value) if isinstance(value, float | Decimal) else _without_nulls(value)
        for name, value in columns.items()
    }


def _number(value: float | Decimal) -> int | float:
    if not math.isfinite(value):
        return float(value)
    whole, parts = value.as_integer_ratio()
    return whole if parts == 1 else float(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _scalar_id(name: str, value: Any) -> Any:
    if isinstance(value, dict | list):
        raise RowError("invalid_type", f"{name} must be text, a number, true, false or null, not {json_type(value)}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("invalid_type", f"{name} must be text, not {json_type(value)}")
    return value


def with_checked_fields(source: Source, parser: RowParser) -> Source:
    """`source`, after a check that its first rows have the fields that prompts are made of. The check ends at the first
    row that has all of them, and after one row of a table. A source that can be read only once loses no row.

    Raises InputError if none of the first rows has a field that is needed, if none of a table's can be read, or if all
    are OpenAI Batch lines for endpoints that do not exist here.
    """
    rows = source.rows()
    read: list[RawRow] = []
    needs = parser.needs
    urls: list[Any] = []
    names: dict[str, None] = {}
    count = 0
    for raw in itertools.islice(rows, _MAX_PREVIEW_ROWS):
        read.append(raw)
        try:
            fields = raw.fields()
        except RowError:  # becomes this row's own error
            continue
        if isinstance(raw.data, bytes) and is_openai_line(fields):  # its prompt is in its body
            urls.append(fields.get("url"))
            continue
        count += 1
        names.update(dict.fromkeys(fields))
        needs = {words: any_of for words, any_of in needs.items() if not fields.keys() & set(any_of)}
        if not needs or isinstance(raw.data, dict):
            break
    errors = [raw.data for raw in read if isinstance(raw.data, BadRow) and raw.data.type != "invalid_json"]
    if errors and len(errors) == len(read):
        hint = "a field with the delimiter in it is written in quotes; a line has no delimiter at its end"
        raise InputError(
            f"the first rows of {source.name} cannot be read: {errors[0].message}",
            hint if errors[0].type == "invalid_csv" else None,
        )
    if len(urls) == len(read) and urls and not any(url in ENDPOINTS for url in urls):
        message, instead = foreign_endpoint(urls[0])
        raise InputError(f"the first rows of {source.name} cannot run: url {message}", instead)
    if needs and count:
        raise _missing_fields(source, needs, list(names), count)
    opened = iter([itertools.chain(read, rows)])
    # The first call goes on with what is open; later ones open the source again.
    return replace(source, rows=lambda: next(opened, None) or source.rows())


def _missing_fields(source: Source, needs: dict[str, tuple[str, ...]], names: list[str], count: int) -> InputError:
    words, wanted = next(iter(needs.items()))
    lower = {name.lower(): name for name in names}
    near = [lower[n] for w in wanted for n in difflib.get_close_matches(w.lower(), lower, n=1)]
    hint = f"did you mean {shown_name(near[0])}? " if near else ""
    shown = ", ".join(shown_name(name) for name in names[:_MAX_SHOWN]) or "none"
    hint += f"fields found: {shown}{', ...' * (len(names) > _MAX_SHOWN)}"
    if len(wanted) > 1:  # neither a template nor a column was given
        hint += "; data.prompt_column and data.prompt_template make prompts of them"
    rows = "the first row" if count == 1 else f"none of the first {count} rows"
    has = "has no" if count == 1 else "has"
    return InputError(f"{rows} of {source.name} {has} {words}", hint)
