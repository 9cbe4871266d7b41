"""The automaton of a JSON Schema: the texts that llguidance accepts for it.

llguidance writes keys in the order of the schema. Schemas that contain themselves and values of any kind are not
regular: they are nested as deep as the automaton has room for, and deeper texts leave it. What is rare is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from specbatch.grammar import characters, numbers
from specbatch.grammar.automaton import Automaton, AutomatonBuilder
from specbatch.grammar.characters import MAX_STATES, ByteTable, CharAutomaton, NotRegularError, TooLargeError
from specbatch.grammar.constraint import ONE_LINE

_NOTES = frozenset(("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"))
_NOTES |= frozenset(("$id", "$schema", "$comment", "$anchor", "$defs", "definitions", "discriminator", "x-guidance"))
_NOTES |= frozenset(("contentEncoding", "contentMediaType"))
_KEYS = {
    "null": frozenset[str](),
    "boolean": frozenset[str](),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
    ),
}
_KEYS["integer"] = _KEYS["number"]
_ALL_KEYS = frozenset().union(*_KEYS.values())
_MAX_ITEMS = 1_000  # the most items of an array, one after the other
_MAX_DEPTH = 64
_MAX_KEPT_STATES = 1 << 17  # the most states of leaves that are kept, with a kilobyte each
_MAX_COPIES = 10_000  # the most parts of a schema, one for each place where it is used
# The most states of an automaton in which schemas contain themselves that often, at least; more levels are added while
# the automaton is smaller than that.
_MAX_STATES_OF = {1: MAX_STATES, 2: 8192, 3: 4096}
MAX_LEVELS, _MAX_ANY_LEVELS = 8, 4  # the most levels; those of values of any kind are needed less often
_ANY = "any value"  # the name of the schema that allows any value, where references are counted

_OCTET = "(?:[0-9]|[1-9][0-9]|25[0-5]|2[0-4][0-9]|1[0-9][0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_LABEL, _HEX = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?", "[0-9a-fA-F]"
_ATOM, _PART = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+", "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_FORMATS = {
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_PART}(?:\.{_PART})*|\[{_IPV4}\])",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "unknown": "(?s:.*)",
}
_ESCAPES = rf"[dD][0-7]{_HEX}{{2}}|[dD][89aAbB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_QUOTED = rf'"(?:[^"\\\x00-\x1f\x7f]|\\[bfnrt"\\]|\\u(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|{_ESCAPES}))*"'


class Leaves:
    """Automata of strings and numbers, which several schemas, and threads, can share."""

    def __init__(self) -> None:
        self._known: dict[Any, ByteTable] = {}
        self._num_states = 0  # the states of what is known

    def of(self, key: Any, make: Callable[[], ByteTable]) -> ByteTable:
        found = self._known.get(key)
        if found is None:
            found = make()
            if self._num_states + len(found.next_QB) > _MAX_KEPT_STATES:
                self._known.clear()
                self._num_states = 0
            self._known[key] = found
            self._num_states += len(found.next_QB)
        return found


def schema_automaton(schema_json: str, leaves: Leaves, max_levels: int = MAX_LEVELS) -> Automaton:
    """Return the automaton of a schema. `max_levels`: how often a schema may contain itself, at most. It
    raises NotRegularError if it has none, or none that is small."""
    root = json.loads(schema_json)
    options: Any = root.get("x-guidance", ONE_LINE) if isinstance(root, dict) else ONE_LINE
    if not isinstance(options, dict) or not options.keys() <= ONE_LINE.keys():
        raise NotRegularError("its x-guidance has other options")
    options = dict[str, Any](item_separator=",", key_separator=":", whitespace_flexible=True) | options
    if options["whitespace_flexible"]:
        raise NotRegularError("it allows any spaces")
    found: Automaton | None = None
    num_before = 0
    for levels in range(1, max_levels + 1):
        most = _MAX_STATES_OF[min(levels, max(_MAX_STATES_OF))]
        if found is not None and 2 * len(found) - num_before > most:
            break  # A level adds no fewer states than the one before.
        made = _SchemaBuilder(root, leaves, options["item_separator"], options["key_separator"], levels)
        try:
            start = made.parts.state()
            made.parts.skip(made.add(root, start, ()), made.parts.end)
            more = made.parts.build(start)
        except TooLargeError:
            if found is None:
                raise
            break
        if found is not None and len(more) > most:
            break
        found, num_before = more, 0 if found is None else len(found)
        if not made.is_cut or len(found) == num_before:
            break
    assert found is not None
    return found


class _SchemaBuilder:
    """A builder of the automaton of `root`. Its methods add a part after a state and return the state after it.
    `levels`: how often a schema may contain itself. Where it would once more, `is_cut` is set, and texts leave the
    automaton."""

    def __init__(self, root: Any, leaves: Leaves, comma: str, colon: str, levels: int) -> None:
        self._root, self._leaves, self._levels = root, leaves, levels
        self.is_cut = False
        self._comma, self._colon = (_as_literal(text) for text in (comma, colon))
        self.parts = AutomatonBuilder()
        self._num_parts = 0

    def add(self, schema: Any, state: int, references: tuple[str, ...]) -> int:
        """Add the texts of a schema. `references`: those that led to it."""
        self._num_parts += 1
        if self._num_parts > _MAX_COPIES or len(references) > _MAX_DEPTH:
            raise TooLargeError("it is too large")
        if schema is False:
            return self.parts.state()  # No text comes here.
        keys = set() if schema is True else schema.keys() - _NOTES
        if not keys:
            return self._any_value(state, references)
        if "$ref" in keys:
            if keys != {"$ref"}:
                raise NotRegularError("a reference has other keys")
            if self._is_deep(name := schema["$ref"], references):
                return self._leave(state)
            return self.add(self._found(name), state, (*references, name))
        for several in ("anyOf", "oneOf"):  # llguidance refuses oneOf unless its schemas have no text in common
            if several in keys:
                if keys != {several}:
                    raise NotRegularError(f"{several} has other keys")
                return self._any_of([partial(self.add, one, references=references) for one in schema[several]], state)
        if "allOf" in keys:
            if keys != {"allOf"} or len(schema["allOf"]) != 1:
                raise NotRegularError("allOf has several schemas")
            return self.add(schema["allOf"][0], state, references)
        if "const" in keys or "enum" in keys:
            return self._constants(schema, keys, state)
        types = schema.get("type")
        if types is None:
            raise NotRegularError("it has no type")
        if keys - {"type"} - _ALL_KEYS:
            raise NotRegularError("it has a key that is rare")
        of_types = [types] if isinstance(types, str) else types
        return self._any_of([partial(self._typed, schema, name, references=references) for name in of_types], state)

    def _any_value(self, state: int, references: tuple[str, ...]) -> int:
        if self._is_deep(_ANY, references):
            return self._leave(state)
        types = ("null", "boolean", "number", "string", "array", "object")
        deeper = (*references, _ANY)
        return self._any_of([partial(self._typed, {}, name, references=deeper) for name in types], state)

    def _is_deep(self, name: str, references: tuple[str, ...]) -> bool:
        return references.count(name) >= (min(self._levels, _MAX_ANY_LEVELS) if name == _ANY else self._levels)

    def _leave(self, state: int) -> int:
        self.is_cut = True
        self.parts.skip(state, self.parts.exit)
        return self.parts.state()  # No text comes here.

    def _any_of(self, options: Sequence[Callable[[int], int]], state: int) -> int:
        if len(options) == 1:
            return options[0](state)
        after = self.parts.state()
        for add in options:
            self.parts.skip(add(state), after)
        return after

    def _found(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise NotRegularError("a reference is not within the schema")
        one = self._root
        if reference not in ("#", "#/"):
            for name in reference.removeprefix("#/").split("/"):
                key = unquote(name).replace("~1", "/").replace("~0", "~")
                if isinstance(one, list) and key.isdigit() and int(key) < len(one):
                    one = one[int(key)]
                elif isinstance(one, dict) and key in one:
                    one = one[key]
                else:
                    raise NotRegularError("a reference leads nowhere")
                if isinstance(one, dict) and "$id" in one:
                    raise NotRegularError("a schema has a name")
        return one

    def _constants(self, schema: dict[str, Any], keys: set[str], state: int) -> int:
        values = [schema["const"]] if "const" in keys else schema["enum"]
        if not keys <= {"const", "type"} and not keys <= {"enum", "type"}:
            raise NotRegularError("an enum has other keys")
        if (types := schema.get("type")) is not None:
            of_types = [types] if isinstance(types, str) else types
            values = [value for value in values if any(_has_type(value, name) for name in of_types)]
        if not values:
            raise NotRegularError("no value is left")
        if all(isinstance(value, str) for value in values):
            made = partial(_strings, tuple(values))
            return self.parts.part(state, self._leaves.of(("strings", *values), made))
        return self._any_of([partial(self._constant, value) for value in values], state)

    def _constant(self, value: Any, state: int) -> int:
        if isinstance(value, str):
            return self.parts.part(state, self._leaves.of(("strings", value), partial(_strings, (value,))))
        if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**53):
            return self.parts.literal(state, json.dumps(value).encode())
        raise NotRegularError("a constant is a number with a point, or has several values")

    def _typed(self, schema: dict[str, Any], name: str, state: int, references: tuple[str, ...]) -> int:
        has = {key: value for key, value in schema.items() if key in _KEYS.get(name, ())}
        if name == "null":
            return self.parts.literal(state, b"null")
        if name == "boolean":
            return self._any_of([partial(self._literal, b"true"), partial(self._literal, b"false")], state)
        if name in ("number", "integer"):
            return self.parts.part(state, self._leaves.of((name, _frozen(has)), partial(_number, has, name)))
        if name == "string":
            return self.parts.part(state, self._leaves.of((name, _frozen(has)), partial(_string, has)))
        if name == "array":
            return self._array(has, state, references)
        if name == "object":
            return self._object(has, state, references)
        raise NotRegularError("it has an unknown type")

    def _any_string(self, state: int) -> int:
        return self.parts.part(state, self._leaves.of(("string", ()), partial(_string, {})))

    def _literal(self, text: bytes, state: int) -> int:
        return self.parts.literal(state, text)

    def _array(self, has: dict[str, Any], state: int, references: tuple[str, ...]) -> int:
        first, items = has.get("prefixItems", []), has.get("items", True)
        least, most = _count(has.get("minItems", 0)), has.get("maxItems")
        if not isinstance(first, list) or isinstance(items, list):
            raise NotRegularError("its items are a list")
        if items is False:
            most = len(first) if most is None else min(_count(most), len(first))
        num_places = max(least, len(first)) if most is None else _count(most)
        if num_places > _MAX_ITEMS:
            raise NotRegularError("an array has many items")
        if num_places < least:
            raise NotRegularError("no array is long enough")
        close = self.parts.state()
        state = self.parts.literal(state, b"[")
        for index in range(num_places):
            if index >= least:
                self.parts.skip(state, close)
            state = self.parts.literal(state, self._comma) if index else state
            state = self.add(first[index] if index < len(first) else items, state, references)
        if num_places >= least:
            self.parts.skip(state, close)
        if most is None:
            begin = self.parts.state()
            self.parts.skip(self.parts.literal(state, self._comma) if num_places else state, begin)
            again = self.add(items, begin, references)
            self.parts.skip(again, close)
            self.parts.skip(self.parts.literal(again, self._comma), begin)
        return self.parts.literal(close, b"]")

    def _object(self, has: dict[str, Any], state: int, references: tuple[str, ...]) -> int:
        properties, required = has.get("properties", {}), list(dict.fromkeys(has.get("required", [])))
        patterns, others = has.get("patternProperties", {}), has.get("additionalProperties", True)
        least, most = _count(has.get("minProperties", 0)), has.get("maxProperties")
        taken = [*properties, *(name for name in required if name not in properties)]
        matchers = {pattern: characters.of_regex(pattern, searches=True, ascii_classes=True) for pattern in patterns}
        items: list[tuple[Callable[[int], int], bool]] = []
        for name in taken:
            matching = [p for p in patterns if _matches(matchers[p], name)]
            if name in properties:
                if matching:
                    raise NotRegularError("a key has two schemas")
                schema = properties[name]
            else:
                schema = patterns[matching[0]] if matching else others
            if schema is False:
                raise NotRegularError("a key cannot have a value")
            key = partial(self._literal, json.dumps(name, ensure_ascii=False).encode())
            items.append((partial(self._pair, key, schema, references=references), name in required))
        num_required = sum(is_required for _, is_required in items)
        bounds = max(0, least - num_required), None if most is None else max(0, _count(most) - num_required)
        if num_required < len(items) and bounds != (0, None):
            raise NotRegularError("it bounds the number of optional keys")
        any_key: list[Callable[[int], int]] = []
        for pattern, schema in patterns.items():
            if schema is not False:
                key = partial(self._pattern_key, pattern, matchers[pattern], tuple(taken))
                any_key.append(partial(self._pair, key, schema, references=references))
        if others is not False:
            if patterns:
                raise NotRegularError("it has patterns of keys, and allows any further keys")
            other_key: Callable[[int], int] = partial(self._other_key, tuple(taken)) if taken else self._any_string
            any_key.append(partial(self._pair, other_key, others, references=references))
        state = self.parts.literal(state, b"{")
        close = self._keys(items, any_key, bounds, state)
        return self.parts.literal(close, b"}")

    def _keys(
        self,
        items: Sequence[tuple[Callable[[int], int], bool]],
        any_key: Sequence[Callable[[int], int]],
        bounds: tuple[int, int | None],
        state: int,
    ) -> int:
        """Add the pairs of an object. `items`: those with names; `any_key`: those that may come after them."""
        first: int | None = state  # the state in which no pair has come yet; None: one has come
        later: int | None = None  # the state after a pair
        for add, is_required in items:
            begin = self.parts.state()
            if first is not None:
                self.parts.skip(first, begin)
            if later is not None:
                self.parts.skip(self.parts.literal(later, self._comma), begin)
            after = self.parts.state()
            self.parts.skip(add(begin), after)
            if is_required:
                first = None
            elif later is not None:
                self.parts.skip(later, after)
            later = after
        close = self.parts.state()
        least, most = bounds
        if any_key and most != 0:
            if max(least, most or 0) > _MAX_ITEMS:
                raise NotRegularError("an object has many keys")
            for index in range(max(1, least) if most is None else most):
                if index >= least:
                    for one in (first, later):
                        if one is not None:
                            self.parts.skip(one, close)
                begin, first, later = self._next_pair(any_key, first, later)
            if most is None:
                assert later is not None
                self.parts.skip(self.parts.literal(later, self._comma), begin)
        elif least > 0:
            raise NotRegularError("no object has enough keys")
        for one in (first, later):
            if one is not None:
                self.parts.skip(one, close)
        return close

    def _next_pair(
        self, any_key: Sequence[Callable[[int], int]], first: int | None, later: int | None
    ) -> tuple[int, None, int]:
        begin = self.parts.state()
        if first is not None:
            self.parts.skip(first, begin)
        if later is not None:
            self.parts.skip(self.parts.literal(later, self._comma), begin)
        return begin, None, self._any_of(any_key, begin)

    def _pair(self, key: Callable[[int], int], schema: Any, state: int, references: tuple[str, ...]) -> int:
        return self.add(schema, self.parts.literal(key(state), self._colon), references)

    def _pattern_key(self, pattern: str, matcher: CharAutomaton, taken: tuple[str, ...], state: int) -> int:
        names = [name for name in taken if _matches(matcher, name)]
        made = partial(_key_without, matcher, tuple(names))
        return self.parts.part(state, self._leaves.of(("key", pattern, tuple(names)), made))

    def _other_key(self, taken: tuple[str, ...], state: int) -> int:
        return self.parts.part(state, self._leaves.of(("key", None, taken), partial(_other_keys, taken)))


def _key_without(matcher: CharAutomaton, names: tuple[str, ...]) -> ByteTable:
    return characters.to_bytes(_without(matcher, names), quoted=True)


def _other_keys(taken: tuple[str, ...]) -> ByteTable:
    """Return the keys of an object that are not these. Here llguidance allows the escapes of all characters, so that a
    key that is written with them can be one of these."""
    quoted = tuple(json.dumps(name, ensure_ascii=False) for name in taken)
    return characters.to_bytes(_without(characters.of_regex(_QUOTED), quoted), quoted=False)


def _without(matcher: CharAutomaton, texts: tuple[str, ...]) -> CharAutomaton:
    if texts:
        others = characters.union([characters.of_text(text) for text in texts])
        matcher = characters.joined(matcher, others, lambda a, b: a and not b)
    if matcher.is_empty:
        raise NotRegularError("no key matches")
    return matcher


def _as_literal(text: Any) -> bytes:
    """Return the bytes of a separator, which llguidance reads as a regex."""
    if text not in (", ", ": ", ",", ":"):
        raise NotRegularError("it has other separators")
    return str(text).encode()


def _has_type(value: Any, name: str) -> bool:
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    kinds: dict[str, Any] = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
    return isinstance(value, kinds.get(name, ()))


def _count(value: Any) -> int:
    if isinstance(value, bool) or value != int(value):
        raise NotRegularError("a count is not a whole number")
    return int(value)


def _frozen(has: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(has.items()))


def _matches(matcher: CharAutomaton, text: str) -> bool:
    state = 0
    for character in text:
        code = ord(character)
        after = next((s for lo, hi, s in matcher.edges[state] if lo <= code <= hi), None)
        if after is None:
            return False
        state = after
    return matcher.accepts[state]


def _strings(values: tuple[str, ...]) -> ByteTable:
    texts = list(dict.fromkeys(values))
    return characters.to_bytes(characters.union([characters.of_text(text) for text in texts]), quoted=True)


def _string(has: dict[str, Any]) -> ByteTable:
    least, most = _count(has.get("minLength", 0)), has.get("maxLength")
    limits = [characters.of_length(least, None if most is None else _count(most))] if least or most is not None else []
    if "pattern" in has:
        limits.append(characters.of_regex(has["pattern"], searches=True, ascii_classes=True))
    if "format" in has:
        if has["format"] not in _FORMATS:
            raise NotRegularError(f"it has the format {has['format']}")
        limits.append(characters.of_regex(_FORMATS[has["format"]]))
    found = limits[0] if limits else characters.of_length(0, None)
    for other in limits[1:]:
        found = characters.joined(found, other, lambda a, b: a and b)
    if found.is_empty:
        raise NotRegularError("no text matches it")
    return characters.to_bytes(found, quoted=True)


def _number(has: dict[str, Any], name: str) -> ByteTable:
    low, high = has.get("minimum"), has.get("maximum")
    above, below = has.get("exclusiveMinimum"), has.get("exclusiveMaximum")
    above, below = low if above is True else above, high if below is True else below
    above, below = (None if one is False else one for one in (above, below))
    # Of two bounds, the narrower one holds.
    is_above = above is not None and (low is None or above >= low)
    is_below = below is not None and (high is None or below <= high)
    low, high = above if is_above else low, below if is_below else high
    if name == "integer":
        low = None if low is None else math.floor(low) + 1 if is_above else math.ceil(low)
        high = None if high is None else math.ceil(high) - 1 if is_below else math.floor(high)
        pattern = numbers.integers(low, high)
    else:
        pattern = numbers.decimals(
            None if low is None else float(low), None if high is None else float(high), not is_above, not is_below
        )
    found = characters.of_regex(pattern, ascii_classes=True)
    if (step := has.get("multipleOf")) is not None:
        if not isinstance(step, int) or not 1 <= step <= 10_000:
            raise NotRegularError("multipleOf is no small whole number")
        found = characters.joined(found, _multiples(step), lambda a, b: a and b)
    if found.is_empty:
        raise NotRegularError("no number matches it")
    return characters.to_bytes(found, quoted=False)


def _multiples(step: int) -> CharAutomaton:
    """Return the automaton of the whole multiples of `step`. State r + 1: the digits so far leave the remainder r."""

    def digits(remainder: int) -> list[tuple[int, int, int]]:
        return [(48 + d, 48 + d, (10 * remainder + d) % step + 2) for d in range(10)]

    edges = [[(45, 45, 1), *digits(0)], digits(0), *(digits(remainder) for remainder in range(step))]
    return CharAutomaton(edges, [False, False, True, *[False] * (step - 1)])
