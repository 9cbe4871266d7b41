"""The fields of stats.json and their types, of which its JSON Schema is made. `stats` fills them."""

# No `from __future__ import annotations`: Python 3.11 would then take each field for a required one.
import types
import typing
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, Union

SCHEMA_VERSION = 1  # version of the configuration, results, stats.json and reports; raised when a reader must change


class Rows(TypedDict):
    """Numbers of rows."""

    total: int
    ok: int
    failed: int
    errors: dict[str, int]
    finish_reasons: dict[str, int]


class Answers(TypedDict):
    """Numbers of completions: all; those that were cut; of these, those that their grammar does not let end there."""

    total: int
    cut: int
    incomplete: int


class Tokens(TypedDict):
    """Numbers of tokens."""

    prompt: int
    completion: int


class Counts(TypedDict):
    """Speculation in the whole file."""

    acceptance_length: float | None
    acceptance_rate: float | None
    rounds: int
    drafted: int
    accepted: int
    committed: int
    accept_histogram: list[int]


class Seconds(TypedDict):
    """Wall time of a session."""

    total: float
    load: float
    prefill: float
    decode: float
    input_wait: float
    io: float


class DistinctExperts(TypedDict):
    """Rounds with about the same number of tokens; means."""

    tokens: float
    experts: float
    rounds: int


class Experts(TypedDict):
    """The experts that tokens chose in rounds."""

    number: int
    peak_load: float
    peak_load_by_layer: list[float]
    effective_number: float
    unused: int
    distinct: list[DistinctExperts]


class DraftsOfSource(TypedDict):
    """Drafts of one source: the row's own text, the job's outputs, or `speculation.corpus`."""

    drafted: int
    accepted: int


class SessionStats(TypedDict):
    """The work of the last process."""

    rows: int
    resumed_rows: int
    seconds: Seconds
    output_tokens: int
    output_tokens_per_second: float | None
    output_tokens_per_second_of_total: float | None
    joules: float | None
    output_tokens_per_joule: float | None
    prompt_tokens: int
    prefill_tokens: int
    cache_hit_rate: float | None
    engine_rounds: int
    preemptions: int
    memory_shortages: int
    late_graphs: int
    late_graph_seconds: float
    grammars: dict[str, int]
    acceptance_length: float | None
    acceptance_rate_by_position: list[float | None]
    draft_rate_by_position: list[float | None]
    drafts_by_source: NotRequired[dict[str, DraftsOfSource] | None]
    experts: NotRequired[Experts | None]
    workers: NotRequired[list[dict[str, Any]]]


class OutputFile(TypedDict):
    """Values that identify the output."""

    bytes: int
    rows: int
    sha256: str


class EarlierTemplate(TypedDict):
    """A prompt template, and the number of rows whose answers are of it: `--retry-errors` had another one later."""

    prompt_template: str
    rows: int


class Stats(TypedDict):
    """Statistics of a finished job. Merged shards have `shards` in place of `session`, `commit` and `device`."""

    schema_version: int
    simulated: bool
    random_weights: bool
    input: str
    output: str
    rows: Rows
    answers: Answers
    tokens: Tokens
    speculation: Counts
    session: NotRequired[SessionStats]
    shards: NotRequired[list[dict[str, Any]]]
    versions: dict[str, str]
    commit: NotRequired[str | None]
    device: NotRequired[str]
    models: dict[str, str]
    notes: list[str]
    config: dict[str, Any]
    job: dict[str, Any]
    margins: NotRequired[dict[str, Any] | None]
    output_file: OutputFile
    weights: dict[str, Any]
    longest_row: NotRequired[int | None]
    earlier_templates: NotRequired[list[EarlierTemplate]]


def wrong_type(value: Any, hint: Any = Stats, name: str = "") -> str | None:
    """The name of the first field in a report whose value has another type; None: there is none. Fields that other
    versions do not have may be missing, and others are not looked at."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is NotRequired:
        return wrong_type(value, arguments[0], name)
    if origin in (Union, types.UnionType):
        found = [wrong_type(value, kind, name) for kind in arguments]
        return None if None in found else found[0]
    if typing.is_typeddict(hint):
        if not isinstance(value, Mapping):
            return name
        fields = [(value[key], kind, key) for key, kind in typing.get_type_hints(hint).items() if key in value]
    elif origin is dict:
        if not isinstance(value, Mapping):
            return name
        fields = [(element, arguments[1], key) for key, element in value.items()]
    elif origin is list:
        if not isinstance(value, list):
            return name
        fields = [(element, arguments[0], str(index)) for index, element in enumerate(value)]
    else:
        return None if _is_a(value, hint) else name
    for element, kind, key in fields:
        if (found_name := wrong_type(element, kind, f"{name}.{key}" if name else str(key))) is not None:
            return found_name
    return None


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if isinstance(value, bool):  # it is an int, too
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
