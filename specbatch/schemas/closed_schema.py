"""Closes the objects of a JSON Schema, so that they have no keys that the schema does not name.

JSON Schema allows any other key where `additionalProperties` is not given. A model then writes keys until it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from specbatch.errors import FieldError
from specbatch.schemas.json_schema import all_schemas, changed

_ALTERNATIVES = ("anyOf", "oneOf")
_SAME_OBJECT = ("allOf", *_ALTERNATIVES)  # keywords with lists of schemas for the same object
# Conditions, keywords that depend on a condition, and the schema of a string's content: llguidance refuses or ignores
# them.
_LEFT_AS_THEY_ARE = ("not", "if", "then", "else", "dependencies", "contentSchema")
_NOT_COPIED = ("$defs", "definitions", "$id", "$anchor", "$schema", "x-guidance")
_COPY = "closed-{}"  # the name of a copy in `$defs`
_MAX_ADDED = 100_000  # the most keys and definitions that are added: parts of an object get the keys of all others
_OPEN = "additionalProperties or strict: false leave it open"


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` in each object that names keys (`properties` or
    `patternProperties`) and does not say which other keys may come. An object that names no keys stays open.

    Each part of one object (`allOf`, `anyOf`, `oneOf`, `$ref` and the keywords next to them) gets the keys of the other
    parts, because closed alone they would exclude each other. So the result can have a definition twice, if a reference
    points to it.

    It raises FieldError for a schema with too many such parts, and RecursionError for one that is nested too deeply."""
    closing = _Closing(schema)
    result = closing.close(schema, _Keys())
    if closing.copies:
        result["$defs"] = {**result.get("$defs", {}), **closing.copies}
    return result


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of an object. `is_open`: the schema itself says which other keys may come."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    is_open: bool = False

    def __bool__(self) -> bool:
        return bool(self.names or self.patterns or self.is_open)


class _Closing:
    """The work of `closed` for one schema. `copies`: copies of definitions for references whose object has other keys,
    too."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._room = _MAX_ADDED
        self._anchored: dict[str, Any] | None = None
        self._names: dict[tuple[str, _Keys], str] = {}
        self.copies: dict[str, Any] = {}

    def close(self, schema: Any, outer: _Keys) -> Any:
        """Close a schema. `outer`: the keys that other parts of the same object name."""
        if not isinstance(schema, Mapping):
            return schema
        parts = {(name, i): self._keys_of(part) for name, i, part in _parts(schema)}
        own = _own_keys(schema)

        def close_part(keyword: str, number: int, part: Any) -> Any:
            if keyword in _LEFT_AS_THEY_ARE:
                return part
            is_same = keyword in _SAME_OBJECT
            return self.close(part, _union([outer, own, *_others(parts, keyword, number)]) if is_same else _Keys())

        result = changed(schema, close_part)
        if isinstance(reference := schema.get("$ref"), str):
            result["$ref"] = self._reference(reference, _union([outer, own, *_others(parts, "$ref", 0)]))
        if _names_keys(schema) and "additionalProperties" not in schema:
            self._close_here(result, _union([outer, own, *parts.values()]))
        return result

    def _close_here(self, schema: dict[str, Any], keys: _Keys) -> None:
        if keys.is_open:
            return
        for field, names in (("properties", keys.names), ("patternProperties", keys.patterns)):
            known = schema.get(field, {})
            added = {name: True for name in names if name not in known}
            self._count(len(added))
            if added or field == "properties":
                schema[field] = {**known, **added}
        schema["additionalProperties"] = False

    def _count(self, num_added: int) -> None:
        self._room -= num_added
        if self._room < 0:
            raise FieldError("invalid_value", f"the schema has too many parts of one object to close it: {_OPEN}")

    def _reference(self, reference: str, outer: _Keys) -> str:
        """Return a reference to the same definition, or to a copy of it that also allows the keys of `outer`."""
        is_part = not set(_SAME_OBJECT).isdisjoint(reference.split("/"))  # True: its own position closes it differently
        target = self._target(reference)
        if not isinstance(target, Mapping) or not (outer or is_part):
            return reference
        name = self._names.get((reference, outer))
        if name is None:
            taken = self._root.get("$defs", {})
            numbers = (_COPY.format(i) for i in range(len(self.copies) + 1, len(self.copies) + len(taken) + 2))
            name = next(name for name in numbers if name not in taken)
            self._names[reference, outer] = name
            self.copies[name] = True  # a placeholder until it is closed, because it can refer to itself
            self._count(1 + len(outer.names))
            self.copies[name] = self.close({k: v for k, v in target.items() if k not in _NOT_COPIED}, outer)
        return f"#/$defs/{name}"

    def _keys_of(self, schema: Any) -> _Keys:
        """Return the keys that a part of an object names, with all that it refers to."""
        found, stack, seen = [], [schema], set[str]()
        while stack:
            part = stack.pop()
            if not isinstance(part, Mapping):
                continue
            found.append(_own_keys(part))
            for name, _, other in _parts(part):
                if name != "$ref":
                    stack.append(other)
                elif (reference := other["$ref"]) not in seen:
                    seen.add(reference)
                    target = self._target(reference)
                    stack.append({"additionalProperties": True} if target is None else target)
        return _union(found[:1] + found[:0:-1])

    def _target(self, reference: str) -> Any:
        """Return the schema that a reference points to. Returns None if it is in another document, or if it is missing,
        which the compiler reports."""
        if not reference.startswith("#"):
            return None
        if not reference.startswith("#/"):
            if self._anchored is None:
                self._anchored = _anchors(self._root)
            return self._root if reference == "#" else self._anchored.get(reference[1:])
        found: Any = self._root
        for step in unquote(reference[2:]).split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Yield the schemas for the same object: keyword, number, schema."""
    for name in _SAME_OBJECT:
        if isinstance(members := schema.get(name), list):
            yield from ((name, i, part) for i, part in enumerate(members))
    if isinstance(schema.get("$ref"), str):
        yield "$ref", 0, {"$ref": schema["$ref"]}


def _others(parts: Mapping[tuple[str, int], _Keys], name: str, number: int) -> Iterator[_Keys]:
    """Yield the keys of all parts except this one, and except other alternatives of its keyword, which do not hold at
    the same time."""
    for (other, i), keys in parts.items():
        if other != name or (name not in _ALTERNATIVES and i != number):
            yield keys


def _names_keys(schema: Mapping[str, Any]) -> bool:
    return any(isinstance(schema.get(name), Mapping) for name in ("properties", "patternProperties"))


def _own_keys(schema: Mapping[str, Any]) -> _Keys:
    named = schema.get("properties")
    names = list(named) if isinstance(named, Mapping) else []
    if isinstance(required := schema.get("required"), list):
        names += [name for name in required if isinstance(name, str)]
    names = list(dict.fromkeys(names))
    patterns = schema.get("patternProperties")
    patterns = tuple(patterns) if isinstance(patterns, Mapping) else ()
    fewest = schema.get("minProperties")
    has_others = isinstance(fewest, int | float) and fewest > len(names) and not patterns
    says = [schema[name] for name in ("additionalProperties", "unevaluatedProperties") if name in schema]
    return _Keys(tuple(names), patterns, has_others or any(value is not False for value in says))


def _union(keys: Iterable[_Keys]) -> _Keys:
    keys = list(keys)
    names = dict.fromkeys(name for one in keys for name in one.names)
    patterns = dict.fromkeys(pattern for one in keys for pattern in one.patterns)
    return _Keys(tuple(names), tuple(patterns), any(one.is_open for one in keys))


def _anchors(root: Mapping[str, Any]) -> dict[str, Any]:
    found = dict[str, Any]()
    for schema in all_schemas(root):
        if isinstance(anchor := schema.get("$anchor"), str):
            found.setdefault(anchor, schema)
    return found
