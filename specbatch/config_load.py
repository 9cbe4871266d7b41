"""Reads a configuration: YAML and `--set a.b=c` -> `Config`, strictly.

Every mistake is a ConfigError that names the full path and the legal values; nothing is guessed and nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from specbatch.config import Config, FieldProblem, sampling_value
from specbatch.errors import ConfigError, cut, shown
from specbatch.retired import RETIRED_OPTIONS
from specbatch.strict_yaml import YamlProblem, load_yaml
from specbatch.types import SamplingParams

LOCAL_NAME = "specbatch.yaml"

_AT_LEAST_1: tuple[Callable[[Any], bool], str] = (lambda v: v >= 1, ">= 1")
# Legal ranges outside `sampling` (whose rules rows share: config.sampling_value). None is checked by type alone.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "speculation.num_steps": _AT_LEAST_1,
    "speculation.topk": _AT_LEAST_1,
    "speculation.num_draft_tokens": _AT_LEAST_1,
    "speculation.schedule[].max_batch": _AT_LEAST_1,
    "speculation.schedule[].num_steps": (lambda v: v >= 0, ">= 0 (0 = plain decoding)"),
    "speculation.schedule[].topk": _AT_LEAST_1,
    "speculation.schedule[].num_draft_tokens": _AT_LEAST_1,
    "speculation.simulate_acceptance": _AT_LEAST_1,
    "speculation.ngram.min_match": _AT_LEAST_1,
    "speculation.ngram.max_match": _AT_LEAST_1,
    "engine.max_batch_size": _AT_LEAST_1,
    "engine.page_size": _AT_LEAST_1,
    "engine.kv_cache_tokens": _AT_LEAST_1,
    "engine.prefill_chunk_tokens": _AT_LEAST_1,
    "engine.memory_fraction": (lambda v: 0 < v <= 1, "> 0 and <= 1"),
    "engine.seed": (lambda v: 0 <= v < 2**63, ">= 0 and < 2^63"),
}


def load_config(path: Path | str | None = None, sets: typing.Sequence[str] = ()) -> Config:
    """The configuration of `path` (None: ./specbatch.yaml where it exists, else the packaged default) under `sets`.

    Options that a file leaves out have the defaults of `specbatch.config`. Raises ConfigError.
    """
    name, text = _read(path)
    try:
        tree = load_yaml(text)
    except YamlProblem as exc:
        raise ConfigError(f"{name} is not valid YAML: {exc}") from exc
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} must hold a mapping of sections, not {_kind(tree)}")
    for item in sets:
        _apply_set(tree, item)
    config = _section(Config, tree, "")
    _check_relations(config)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and scalars, in schema order: what YAML and JSON can hold."""
    return _plain(config)


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def default_config_text() -> str:
    """The packaged default.yaml, comments included."""
    return resources.files("specbatch").joinpath("default.yaml").read_text(encoding="utf-8")


def write_template(path: Path) -> None:
    """The packaged default.yaml as a file to edit. Raises ConfigError; an existing file is not touched."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(default_config_text())
    except FileExistsError as exc:
        raise ConfigError(f"{path} exists already", "specbatch init OTHER.yaml writes elsewhere") from exc
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc


def _read(path: Path | str | None) -> tuple[str, str]:
    if path is None:
        if not Path(LOCAL_NAME).is_file():
            return "the packaged default.yaml", default_config_text()
        path = LOCAL_NAME
    path = Path(path)
    try:
        return str(path), path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        folder = path.parent
        names = [p.name for p in folder.glob("*.y*ml")] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"did you mean {folder / near[0]}?" if near else None
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}", hint) from exc


def _apply_set(tree: dict[str, Any], item: str) -> None:
    path, equals, text = item.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"--set {cut(item)}: expected a.b=value", "for example --set sampling.temperature=0.7")
    keys = path.split(".")
    annotation: Any = Config
    for depth, key in enumerate(keys):
        if not dataclasses.is_dataclass(annotation):
            raise ConfigError(f"--set {cut(item)}: {'.'.join(keys[:depth])} has no options of its own")
        annotation = _hints(annotation).get(key) or _unknown(annotation, ".".join(keys[:depth]), cut(key), text)
    value = _set_value(item, text, annotation)
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):  # the file is wrong here; conversion will say so
            return
        node = child
    old = node.get(keys[-1])
    node[keys[-1]] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def _set_value(item: str, text: str, annotation: Any) -> Any:
    """YAML, except that an option which holds text takes the text as it stands ("Q: {question}" is no mapping)."""
    takes_text = str in _alternatives(annotation)
    try:
        value = load_yaml(text)
    except YamlProblem as exc:
        if takes_text:
            return text
        raise ConfigError(f"--set {cut(item)}: the value is not valid YAML: {exc}") from exc
    if takes_text and not isinstance(value, str) and not (value is None and text.strip() in ("null", "~")):
        return text
    return value


def _section(cls: Any, tree: Any, path: str) -> Any:
    if tree is None:  # a section whose every line is commented out
        tree = {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} must be a mapping of options, not {_kind(tree)}")
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            _unknown(cls, path, cut(str(key)), value)
        full = f"{path}.{key}" if path else str(key)
        if cls is SamplingParams:
            values[key] = _sampling(str(key), value)
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = _section(hints[key], value, full)
        elif value is not None and (element := _element(hints[key])) is not None:
            convert = _section if dataclasses.is_dataclass(element) else _leaf
            if not isinstance(value, list):
                of = "mappings" if convert is _section else "integers"
                raise ConfigError(f"{full} must be a list of {of}, not {_kind(value)}")
            values[key] = tuple(convert(element, item, f"{full}[{i}]") for i, item in enumerate(value))
        else:
            values[key] = _leaf(hints[key], value, full)
    missing = [f.name for f in dataclasses.fields(cls) if _is_required(f) and f.name not in values]
    if missing:
        raise ConfigError(f"{path} needs {' and '.join(missing)}")
    return cls(**values)


def _element(annotation: Any) -> Any:
    """Of what an option is a list, a dataclass or int; None for other options."""
    for kind in _alternatives(annotation):
        if typing.get_origin(kind) is tuple:
            return typing.get_args(kind)[0]
    return None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _sampling(name: str, value: Any) -> Any:
    if value is None and name in ("seed", "logprobs"):
        return None
    try:
        return sampling_value(name, value)
    except FieldProblem as exc:
        raise ConfigError(f"sampling.{exc.message}") from exc


def _leaf(annotation: Any, value: Any, path: str) -> Any:
    kinds = _alternatives(annotation)
    choices = [c for k in kinds if typing.get_origin(k) is Literal for c in typing.get_args(k)]
    if value is None and type(None) in kinds:
        return None
    if choices:
        if value in choices and isinstance(value, str):
            return value
        near = difflib.get_close_matches(cut(str(value)).lower(), choices, n=1)
        raise ConfigError(
            f"{path} must be one of {', '.join(choices)}, not {shown(value)}",
            f"did you mean {near[0]}?" if near else None,
        )
    if isinstance(value, bool) and bool not in kinds:
        raise _wrong_type(path, kinds, value)
    if float in kinds and isinstance(value, int | float):
        value = float(value)
        if not math.isfinite(value):
            raise ConfigError(f"{path} must be a finite number, not {value}")
    elif not any(isinstance(value, k) for k in kinds):
        raise _wrong_type(path, kinds, value)
    legal = _RANGES.get(re.sub(r"\[\d+\]", "[]", path))
    if legal and not legal[0](value):
        raise ConfigError(f"{path} must be {legal[1]}, not {shown(value)}")
    return value


def _check_relations(config: Config) -> None:
    ngram = config.speculation.ngram
    if ngram.max_match < ngram.min_match:
        raise ConfigError(
            f"speculation.ngram.max_match ({ngram.max_match}) must be >= "
            f"speculation.ngram.min_match ({ngram.min_match})"
        )
    if config.data.prompt_template is not None and config.data.prompt_column is not None:
        raise ConfigError(
            "data.prompt_template and data.prompt_column are both set; a prompt comes from one of them",
            'with one column, data.prompt_template="{column}" says the same as data.prompt_column=column',
        )


def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _unknown(cls: Any, path: str, key: str, value: Any) -> typing.NoReturn:
    names = list(_hints(cls))
    near = difflib.get_close_matches(key, names, n=1)
    prefix = f"{path}." if path else ""
    if (retired := RETIRED_OPTIONS.get(f"{prefix}{key}")) is not None:
        raise ConfigError(f"{prefix}{key} was removed", retired)
    if key == "num_speculative_tokens":  # near num_draft_tokens by its name, and one less
        hint = _of_vllm(f"{prefix if 'num_steps' in names else 'speculation.'}num_steps", str(value))
    elif near:
        hint = f"did you mean {prefix}{near[0]}?"
    else:
        # The right option in the wrong section is the next likeliest mistake.
        elsewhere = [p for p in option_paths() if p.rsplit(".", 1)[-1] == key]
        hint = f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(names)}"
    raise ConfigError(f"unknown option {prefix}{key}", hint)


def _of_vllm(option: str, value: str) -> str:
    drafts, nodes = (f": {value}", str(int(value) + 1)) if value.isdecimal() else ("", "one more")
    return (
        f"vLLM's num_speculative_tokens{drafts} is {option}{drafts}; num_draft_tokens is {nodes}, for it counts the "
        "last committed token too"
    )


def option_paths(cls: Any = Config, prefix: str = "") -> list[str]:
    """Every option's full path, in schema order."""
    paths: list[str] = []
    for name, annotation in _hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            paths += option_paths(annotation, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


_NAMES: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}


def _wrong_type(path: str, kinds: tuple[Any, ...], value: Any) -> ConfigError:
    wanted = " or ".join(_NAMES[k] for k in kinds)
    return ConfigError(f"{path} must be {wanted}, not {shown(value)}")


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}
    return kinds.get(type(value)) or shown(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value
