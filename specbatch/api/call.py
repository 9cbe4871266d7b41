"""A call of the Python interface: its sampling options, and the objects that its answers become."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specbatch.api.results import Result
from specbatch.config_load import option_paths
from specbatch.errors import ConfigError, FieldError, RowError
from specbatch.rows.parameters import SAMPLING_NAMES
from specbatch.rows.parser import override
from specbatch.schemas.response_format import schema_of
from specbatch.schemas.short_schema import response_format_of
from specbatch.strict.other_names import option_meant
from specbatch.types import SamplingParams

# A pydantic class, a JSON Schema, a value of `response_format`, or the text that --schema takes.
Schema = type | Mapping[str, Any] | str
_HINTS = {
    "in_order": "stream(rows, in_order=False) yields results as they finish",
    "sampling_params": "give its fields: generate(rows, max_tokens=64, temperature=0.7)",
    "use_tqdm": "tqdm(llm.stream(rows)) shows a bar",
}


@dataclass(frozen=True)
class Call:
    """The settings of one call. `parse`: makes an object of an answer; None: answers are texts."""

    sampling: SamplingParams
    parse: Callable[[str], Any] | None

    def result(self, line: bytes) -> Result:
        """Return the result of a result line, with its object."""
        result = Result(json.loads(line))
        if self.parse is not None and result.is_whole:
            try:
                result.parsed = self.parse(result.text or "")
            except (ValueError, RecursionError) as exc:  # pydantic's error is a ValueError, too
                result.parse_error = str(exc)
        return result


def call_of(defaults: SamplingParams, schema: Schema | None, options: Mapping[str, Any]) -> Call:
    """Make the settings of a call. `defaults`: the sampling options of the configuration. `options`: those of the call.
    It raises ConfigError."""
    if unknown := [name for name in options if name not in SAMPLING_NAMES]:
        raise ConfigError(f"there is no sampling option {unknown[0]}", _hint(unknown[0]))
    if schema is not None:
        if options.get("response_format") is not None:
            raise ConfigError("schema and response_format are both given", "leave one of the two out")
        options = {**options, "response_format": _response_format(schema)}
    try:
        sampling = override(defaults, options)
        text = None if sampling.response_format is None else schema_of(sampling.response_format)
    except (RowError, FieldError) as exc:
        raise ConfigError(exc.message) from exc
    return Call(sampling, None if text is None else getattr(schema, "model_validate_json", json.loads))


def _response_format(schema: Schema) -> str:
    if isinstance(schema, str):
        return response_format_of(schema)
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise ConfigError(
            f"schema is of type {type(schema).__name__}",
            "give a pydantic class, a JSON Schema as a dict, or a text such as 'label: one of yes, no'",
        )
    if schema.get("type") not in ("json_schema", "json_object"):
        schema = {"type": "json_schema", "json_schema": {"schema": schema}}
    return json.dumps(schema)


def _hint(name: str) -> str:
    if name in _HINTS:
        return _HINTS[name]
    meant = option_meant(name, option_paths())
    if meant is None:
        return "see the section sampling of docs/options.md"
    section, _, last = meant.rpartition(".")
    if last == "response_format":
        return "schema=... takes a pydantic class or a JSON Schema"
    return f"did you mean {last}?" if section == "sampling" else f"{meant} is set by LLM(...), when the model is loaded"
