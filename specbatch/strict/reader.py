"""The strict reader of dataclasses, which reads the options of a run and eval tasks from YAML.

Every mistake is a ConfigError that names the full path, the legal values and the nearest name. Nothing is guessed, and
nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union

from specbatch.errors import ConfigError, FieldError, cut, shown
from specbatch.strict.other_names import option_meant
from specbatch.strict.yaml import YamlProblem, load_yaml

_KINDS: Mapping[Any, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Mapping: "a mapping",
}
_LISTS: Mapping[Any, str] = {str: "text or a list of texts", int: "a list of integers"}


@dataclass(frozen=True)
class Option:
    """The values that a field of a dataclass may hold."""

    name: str
    kind: Any  # str, int, float, bool, a Literal, a dataclass or Mapping; for a list, the type of its elements
    nullable: bool
    names: tuple[str, ...]  # texts that the option may be as well, such as auto
    is_list: bool
    is_required: bool
    legal: Callable[[str, Any], None] | None  # see `specbatch.strict.option.option`
    read: Callable[[Reader, Any, str], Any] | None

    def wanted(self) -> str:
        """The type in words."""
        if self.is_list:
            return _LISTS.get(self.kind, "a list of mappings")
        kind = _KINDS[typing.get_origin(self.kind) or self.kind]
        limits = getattr(self.legal, "words", "")
        choices = [f"{kind}{' ' if limits else ''}{limits}", *self.names, *(["null"] if self.nullable else [])]
        return " or ".join(choices)


@functools.cache
def options_of(cls: Any) -> Mapping[str, Option]:
    """Return the options of a dataclass by name. A field with `in_file: False` in its metadata is no option."""
    hints = typing.get_type_hints(cls)
    return {f.name: _option(f, hints[f.name]) for f in dataclasses.fields(cls) if f.metadata.get("in_file", True)}


def _option(field: dataclasses.Field[Any], annotation: Any) -> Option:
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    kind, *others = (k for k in kinds if k is not type(None))
    assert not others or "read" in field.metadata, f"{field.name} has several types, and no function that reads it"
    is_list = typing.get_origin(kind) is tuple
    return Option(
        name=field.name,
        kind=typing.get_args(kind)[0] if is_list else kind,
        nullable=type(None) in kinds,
        names=tuple(name for other in others for name in typing.get_args(other)),
        is_list=is_list,
        is_required=field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        legal=field.metadata.get("legal"),
        read=field.metadata.get("read"),
    )


def option_paths(cls: Any, prefix: str = "") -> list[str]:
    """List the full path of every option, in the order of the fields."""
    paths: list[str] = []
    for name, option in options_of(cls).items():
        is_section = dataclasses.is_dataclass(option.kind) and not option.is_list
        paths += option_paths(option.kind, f"{prefix}{name}.") if is_section else [prefix + name]
    return paths


# What people write for true and false. The YAML reader leaves it text, as YAML 1.2 does.
SWITCHES = {"yes": True, "on": True, "no": False, "off": False}


class Reader:
    """A reader of mappings into the dataclass `root` and the dataclasses in it."""

    def __init__(
        self,
        root: Any,
        explain: Callable[[str, Mapping[str, Option], str, Any], str | None] | None = None,
    ) -> None:
        """`explain(prefix, options, key, value)`: returns a hint for an unknown name, or None for the usual hint."""
        self._root = root
        self._explain = explain

    def read(self, cls: Any, tree: Any, path: str) -> Any:
        """Make an instance of the dataclass `cls` from the mapping `tree`; null is an empty mapping. It raises
        ConfigError."""
        if tree is None:
            tree = {}
        if not isinstance(tree, Mapping):
            names = ", ".join(options_of(cls))
            raise ConfigError(f"{path} must be a mapping of options, not {described(tree)}", f"known here: {names}")
        options = options_of(cls)
        values: dict[str, Any] = {}
        for key, value in tree.items():
            if key not in options:
                self.refuse(cls, path, key, value)
            if options[key].kind is bool and isinstance(value, str):
                value = SWITCHES.get(value.lower(), value)
            values[key] = self.value(options[key], value, join(path, str(key)))
        missing = [join(path, name) for name, option in options.items() if option.is_required and name not in values]
        if missing:
            raise ConfigError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        try:
            return cls(**values)
        except FieldError as exc:  # values that do not go together
            raise FieldError(exc.type, join(path, exc.message), exc.hint) from exc

    def value(self, option: Option, value: Any, path: str) -> Any:
        """Return `value` as the dataclass holds it. It raises ConfigError, and FieldError if a single value is
        wrong."""
        if value is None and option.nullable:
            return None
        if not option.is_list:
            return self._one(option, value, path)
        if option.kind is str and isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            raise FieldError("invalid_type", f"{path} must be {option.wanted()}, not {described(value)}")
        element = dataclasses.replace(option, is_list=False, nullable=False)
        return tuple(self._one(element, item, f"{path}[{i}]") for i, item in enumerate(value))

    def refuse(self, cls: Any, path: str, key: Any, value: Any) -> NoReturn:
        """Raise the error for a name that `cls`, the dataclass at `path`, does not have."""
        options = options_of(cls)
        name = cut(str(key))
        full = join(path, name)
        hint = self._explain(path, options, name, value) if self._explain is not None else None
        if hint is None:
            paths, near = option_paths(self._root), nearest(name, options)
            # The name of an option of another section or of another tool is likelier than one that is only like it.
            meant = option_meant(name, paths, similarity=1.0) or (join(path, near) if near else None)
            meant = meant or option_meant(name, paths, similarity=0.8)
            hint = f"did you mean {meant}?" if meant else f"known here: {', '.join(options) or 'none'}"
        raise ConfigError(f"unknown option {full}", hint)

    def _one(self, option: Option, value: Any, path: str) -> Any:
        kind = option.kind
        if option.read is not None:
            return option.read(self, value, path)
        if dataclasses.is_dataclass(kind):
            return self.read(kind, value, path)
        if typing.get_origin(kind) is Literal:
            return choose(typing.get_args(kind), value, path)
        if typing.get_origin(kind) is Mapping:
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise ConfigError(f"{path} must be a mapping with names as keys, not {described(value)}")
            return value
        return _scalar(option, value, path)


def _scalar(option: Option, value: Any, path: str) -> Any:
    kind = option.kind
    is_right = isinstance(value, int | float if kind is float else kind)
    if not is_right or (isinstance(value, bool) and kind is not bool):
        hint = "write text with { or [ in quotes" if kind is str and isinstance(value, dict | list) else None
        raise FieldError("invalid_type", f"{path} must be {option.wanted()}, not {shown(value)}", hint)
    if isinstance(value, float) and not math.isfinite(value):
        raise FieldError("invalid_value", f"{path} must be a finite number, not {value}")
    if option.legal is not None:
        option.legal(path, value)
    return kind(value)


def choose(choices: Iterable[str], value: Any, path: str) -> str:
    """Return `value`, which must be one of the texts `choices`. It raises FieldError."""
    names = list(choices)
    if isinstance(value, str) and value in names:
        return value
    if value is False and "off" in names:  # as JSON and older YAML have it
        return "off"
    near = nearest(cut(str(value)).lower(), names)
    raise FieldError(
        "invalid_value",
        f"{path} must be one of {', '.join(names)}, not {shown(value)}",
        f"did you mean {near}?" if near else None,
    )


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that was probably meant by `name`, or None."""
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else None


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def described(value: Any) -> str:
    """Describe a value of the wrong type, for a message."""
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else shown(value)


def read_text(path: Path, what: str, names: Iterable[str] = ()) -> str:
    """Read the text of a YAML file. It raises ConfigError, whose hint is the nearest file name in its folder, or the
    nearest of `names`, which are names of other files."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        folder = path.parent
        files = {p.name: p for p in folder.glob("*.y*ml")} if folder.is_dir() else {}
        others = list(names)
        near = nearest(path.name, [*files, *others])
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        hint = f"did you mean {files.get(near, near)}?" if near else None
        if hint is None and others:
            hint = f"give a file, or one of these names: {', '.join(others)}"
        raise ConfigError(f"cannot read the {what} {path}: {reason}", hint) from exc


# What people mean that write such YAML.
_YAML_HINTS = {
    "mapping values are not allowed": "write text with a colon in quotes, or after | on lines of its own",
    "cannot be a key": "write text that begins with {{ in quotes, or after | on lines of its own",
    "found character '\\t'": "indent with spaces",
}


def read_mapping(text: str, name: str) -> dict[str, Any]:
    """Return the mapping that a YAML text holds; an empty text is an empty mapping. It raises ConfigError with
    `name`."""
    try:
        tree = load_yaml(text)
    except YamlProblem as exc:
        hint = next((words for part, words in _YAML_HINTS.items() if part in str(exc)), None)
        raise ConfigError(f"{name} is not valid YAML: {exc}", hint) from exc
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} must hold a mapping of options, not {described(tree)}")
    return tree
