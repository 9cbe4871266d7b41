"""Deterministic automata over characters: regexes, their unions and intersections, and the bytes of their texts.

A regex is read by Python's parser. Python and Rust differ in details, so who compiles a regex of llguidance's compares
the result with llguidance (`automaton_check.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_STATES = 16_384  # the most states of an automaton
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
_MAX_REPEAT = 4096
_MAX_WORK = 16_000_000  # steps of an automaton's construction; they take about a second
# Characters of each length of UTF-8, by the first and the last.
_LENGTHS = ((0x0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_ESCAPED = ((0x00, 0x1F), (0x7F, 0x7F))  # characters that JSON texts have as \u00XX
_ASCII_CLASSES = {
    "DIGIT": [(48, 57)],
    "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
}
_SPACES = [(9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
           (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]  # fmt: skip

Range = tuple[int, int]
Edge = tuple[int, int, int]  # first character, last character, next state


class NotRegularError(Exception):
    """An error that says why a grammar has no automaton here."""


class TooLargeError(NotRegularError):
    """The automaton would be too large."""


@dataclass(slots=True)
class CharAutomaton:
    """A deterministic automaton that starts in state 0. Edges of a state are sorted and do not overlap. From every
    state a text can be completed, if any text matches at all."""

    edges: list[list[Edge]]
    accepts: list[bool]

    @property
    def is_empty(self) -> bool:
        return not any(self.accepts)


class _Work:
    """The work for an automaton. Its bound is a number of steps and no time, so that all processes decide alike."""

    def __init__(self) -> None:
        self._left = _MAX_WORK

    def spend(self, num_steps: int) -> None:
        self._left -= num_steps
        if self._left < 0:
            raise NotRegularError("its automaton takes long to make")


class _Nfa:
    def __init__(self) -> None:
        self.edges: list[list[Edge]] = []
        self.empty: list[list[int]] = []
        self._work = _Work()

    def state(self) -> int:
        self.edges.append([])
        self.empty.append([])
        if len(self.edges) > 4 * MAX_STATES:
            raise NotRegularError("it has too many states")
        return len(self.edges) - 1

    def add(self, tree: Any, start: int, flags: int, ascii_classes: bool) -> int:
        """Add the texts of a parsed regex after `start`; return the state after them."""
        self._work.spend(10 * (1 + len(tree)))
        for op, value in tree:
            start = self._one(op, value, start, flags, ascii_classes)
        return start

    def _one(self, op: Any, value: Any, start: int, flags: int, ascii_classes: bool) -> int:
        if op in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            end = self.state()
            self.edges[start] += [(lo, hi, end) for lo, hi in _ranges(op, value, flags, ascii_classes)]
            return end
        if op is codes.BRANCH:
            end = self.state()
            for one in value[1]:
                first = self.state()
                self.empty[start].append(first)
                self.empty[self.add(one, first, flags, ascii_classes)].append(end)
            return end
        if op is codes.SUBPATTERN:
            _, added, removed, tree = value
            if (added | removed) & ~(re.DOTALL | re.UNICODE):
                raise NotRegularError("its regex has flags")
            return self.add(tree, start, (flags | added) & ~removed, ascii_classes)
        if op is codes.MAX_REPEAT:
            least, most, tree = value
            if least > _MAX_REPEAT or (most != codes.MAXREPEAT and most > _MAX_REPEAT):
                raise NotRegularError("its regex has a long repetition")
            for _ in range(least):
                start = self.add(tree, start, flags, ascii_classes)
            if most == codes.MAXREPEAT:
                loop, end = self.state(), self.state()
                self.empty[start].append(loop)
                self.empty[self.add(tree, loop, flags, ascii_classes)].append(loop)
                self.empty[loop].append(end)
                return end
            end = self.state()
            for _ in range(most - least):
                self.empty[start].append(end)
                start = self.add(tree, start, flags, ascii_classes)
            self.empty[start].append(end)
            return end
        raise NotRegularError(f"its regex has {str(op).lower()}")

    def anything(self, start: int) -> int:
        end = self.state()
        self.edges[end].append((0, LAST, end))
        self.empty[start].append(end)
        return end

    def determined(self, start: int, end: int) -> CharAutomaton:
        closures: dict[int, frozenset[int]] = {}

        def closure(states: Iterable[int]) -> frozenset[int]:
            found: set[int] = set()
            for one in states:
                if one not in closures:
                    seen, stack = {one}, [one]
                    while stack:
                        for after in self.empty[stack.pop()]:
                            if after not in seen:
                                seen.add(after)
                                stack.append(after)
                    self._work.spend(len(seen))
                    closures[one] = frozenset(s for s in seen if s == end or self.edges[s])
                found |= closures[one]
                self._work.spend(1 + len(closures[one]))
            return frozenset(found)

        def step(states: frozenset[int]) -> list[tuple[int, int, frozenset[int]]]:
            edges = [edge for one in states for edge in self.edges[one]]
            return [(lo, hi, closure(after)) for lo, hi, after in _split(edges, self._work)]

        return _explored(closure([start]), step, lambda states: end in states)


def _split(edges: Sequence[Edge], work: _Work) -> list[tuple[int, int, frozenset[int]]]:
    """Divide edges at all their bounds."""
    if len(edges) == 1:
        return [(edges[0][0], edges[0][1], frozenset((edges[0][2],)))]
    bounds = sorted({lo for lo, _, _ in edges} | {hi + 1 for _, hi, _ in edges})
    work.spend(len(bounds) * len(edges))
    found = []
    for lo, past in pairwise(bounds):
        if after := frozenset(state for first, last, state in edges if first <= lo <= last):
            found.append((lo, past - 1, after))
    return found


def _explored(
    start: Any, step: Callable[[Any], list[tuple[int, int, Any]]], is_accepting: Callable[[Any], bool]
) -> CharAutomaton:
    """Build the automaton of everything that can be reached, without what leads nowhere."""
    index, order = {start: 0}, [start]
    edges: list[list[Edge]] = []
    for one in order:
        mine: list[Edge] = []
        for lo, hi, after in step(one):
            if after not in index:
                index[after] = len(order)
                order.append(after)
                if len(order) > MAX_STATES:
                    raise NotRegularError("it has too many states")
            state = index[after]
            if mine and mine[-1][2] == state and mine[-1][1] == lo - 1:
                mine[-1] = (mine[-1][0], hi, state)
            else:
                mine.append((lo, hi, state))
        edges.append(mine)
    return _trimmed(edges, [is_accepting(one) for one in order])


def _trimmed(edges: list[list[Edge]], accepts: list[bool]) -> CharAutomaton:
    before: list[list[int]] = [[] for _ in edges]
    for state, mine in enumerate(edges):
        for _, _, after in mine:
            before[after].append(state)
    alive = list(accepts)
    stack = [state for state, accepting in enumerate(accepts) if accepting]
    while stack:
        for state in before[stack.pop()]:
            if not alive[state]:
                alive[state] = True
                stack.append(state)
    if all(alive):
        return CharAutomaton(edges, accepts)
    alive[0] = True
    number = np.cumsum(alive) - 1
    kept = [
        [(lo, hi, int(number[after])) for lo, hi, after in mine if alive[after]]
        for state, mine in enumerate(edges)
        if alive[state]
    ]
    return CharAutomaton(kept, [accepting for state, accepting in enumerate(accepts) if alive[state]])


def _negated(ranges: Iterable[Range]) -> list[Range]:
    found, first = [], 0
    for lo, hi in sorted(ranges):
        if lo > first:
            found.append((first, lo - 1))
        first = max(first, hi + 1)
    return [*found, (first, LAST)] if first <= LAST else found


def _ranges(op: Any, value: Any, flags: int, ascii_classes: bool) -> list[Range]:
    if op is codes.LITERAL:
        return [(value, value)]
    if op is codes.NOT_LITERAL:
        return _negated([(value, value)])
    if op is codes.ANY:
        return [(0, LAST)] if flags & re.DOTALL else _negated([(10, 10)])
    found: list[Range] = []
    is_negated = False
    for one, what in value:
        if one is codes.NEGATE:
            is_negated = True
        elif one is codes.LITERAL:
            found.append((what, what))
        elif one is codes.RANGE:
            found.append(what)
        elif one is codes.CATEGORY:
            found += _category(str(what), ascii_classes)
        else:
            raise NotRegularError(f"its regex has {str(one).lower()}")
    merged: list[Range] = []
    for lo, hi in sorted(found):
        if merged and lo <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return _negated(merged) if is_negated else merged


def _category(name: str, ascii_classes: bool) -> list[Range]:
    kind = name.removeprefix("CATEGORY_")
    bare = kind.removeprefix("NOT_")
    if bare == "SPACE":
        ranges = _SPACES
    elif bare in _ASCII_CLASSES and ascii_classes:
        ranges = _ASCII_CLASSES[bare]
    else:
        raise NotRegularError("its regex has a class of all scripts")
    return ranges if bare == kind else _negated(ranges)


def of_regex(pattern: str, *, searches: bool = False, ascii_classes: bool = False) -> CharAutomaton:
    """Return the automaton of a regex. `searches`: a text matches if a part of it does, as in JSON Schema.
    `ascii_classes`: \\d and \\w are those of ASCII. It raises NotRegularError for what it cannot read."""
    if re.search(r"\\[pPbBAzZGXR]|\[\[|\[:|&&|--|~~|\(\?[a-zA-Z]*x", pattern):
        raise NotRegularError("its regex has a construct of Rust")
    translated = re.sub(
        r"\\x\{([0-9a-fA-F]{1,8})\}|\\(.)", lambda m: f"\\U{int(m[1], 16):08x}" if m[1] else m[0], pattern, flags=re.S
    )
    try:
        tree = parser.parse(translated)
    except (re.error, OverflowError, RecursionError, ValueError) as exc:
        raise NotRegularError(f"its regex cannot be read: {exc}") from exc
    if tree.state.flags & ~(re.UNICODE | re.DOTALL):
        raise NotRegularError("its regex has flags")
    flags, nfa = tree.state.flags & re.DOTALL, _Nfa()
    start, end = nfa.state(), nfa.state()
    items = list(tree)
    options = items[0][1][1] if len(items) == 1 and items[0][0] is codes.BRANCH else [items]
    for option in options:
        one = list(option)
        state = nfa.state()
        nfa.empty[start].append(state)
        is_first, is_last = False, False
        while searches and one and one[0] == (codes.AT, codes.AT_BEGINNING):
            is_first = bool(one.pop(0))
        while searches and one and one[-1] == (codes.AT, codes.AT_END):
            is_last = bool(one.pop())
        if searches and not is_first:
            state = nfa.anything(state)
        state = nfa.add(one, state, flags, ascii_classes)
        if searches and not is_last:
            state = nfa.anything(state)
        nfa.empty[state].append(end)
    return nfa.determined(start, end)


def of_text(text: str) -> CharAutomaton:
    """Return the automaton of one text."""
    count = len(text)
    return CharAutomaton([[(ord(c), ord(c), i + 1)] for i, c in enumerate(text)] + [[]], [False] * count + [True])


def of_length(least: int, most: int | None) -> CharAutomaton:
    """Return the automaton of texts with this number of characters."""
    last = least if most is None else most
    if last > MAX_STATES:
        raise NotRegularError("it has too many states")
    edges = [[(0, LAST, i + 1)] for i in range(last)] + [[(0, LAST, last)] if most is None else []]
    return CharAutomaton(edges, [i >= least for i in range(last + 1)])


def joined(one: CharAutomaton, other: CharAutomaton, accepts: Callable[[bool, bool], bool]) -> CharAutomaton:
    """Return the automaton of texts for which `accepts` is true, given whether each of the two accepts them. It must be
    false for texts that neither accepts."""

    work = _Work()

    def step(pair: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
        edges: list[tuple[int, int, int, int]] = []
        for side, (automaton, state) in enumerate(((one, pair[0]), (other, pair[1]))):
            edges += [(lo, hi, side, after) for lo, hi, after in (automaton.edges[state] if state >= 0 else ())]
        bounds = sorted({edge[0] for edge in edges} | {edge[1] + 1 for edge in edges})
        work.spend(len(bounds) * len(edges))
        found = []
        for lo, past in pairwise(bounds):
            after = [-1, -1]
            for first, last, side, state in edges:
                if first <= lo <= last:
                    after[side] = state
            if after != [-1, -1]:
                found.append((lo, past - 1, (after[0], after[1])))
        return found

    def is_accepting(pair: tuple[int, int]) -> bool:
        return accepts(pair[0] >= 0 and one.accepts[pair[0]], pair[1] >= 0 and other.accepts[pair[1]])

    return _explored((0, 0), step, is_accepting)


def union(automata: Sequence[CharAutomaton]) -> CharAutomaton:
    """Return the automaton of the texts of any of these."""
    while len(automata) > 1:
        pairs = [automata[i : i + 2] for i in range(0, len(automata), 2)]
        automata = [joined(p[0], p[1], lambda a, b: a or b) if len(p) == 2 else p[0] for p in pairs]
    return automata[0]


@dataclass(frozen=True, slots=True)
class ByteTable:
    """A deterministic automaton over bytes, which starts in state 0. No next state: -1."""

    next_QB: NDArray[np.int32]  # (states, 256)
    accepts_Q: NDArray[np.bool_]


_Item = tuple[tuple[Range, ...], int]  # ranges of bytes one after the other, and the state after them


def to_bytes(automaton: CharAutomaton, *, quoted: bool) -> ByteTable:
    """Return the automaton of the same texts in UTF-8. `quoted`: as JSON strings, with their quotes and escapes."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in automaton.edges]  # (first byte, last byte, state)
    known: dict[tuple[_Item, ...], int] = {}

    def state_of(items: tuple[_Item, ...]) -> int:
        if len(items) == 1 and not items[0][0]:
            return items[0][1]
        if items not in known:
            known[items] = len(rows)
            rows.append([])
            if len(rows) > MAX_STATES:
                raise NotRegularError("it has too many states")
            rows[known[items]] = divided(items)
        return known[items]

    def divided(items: Sequence[_Item]) -> list[tuple[int, int, int]]:
        bounds = sorted({item[0][0][0] for item in items} | {item[0][0][1] + 1 for item in items})
        found: list[tuple[int, int, int]] = []
        for lo, past in pairwise(bounds):
            rest = tuple((ranges[1:], after) for ranges, after in items if ranges[0][0] <= lo <= ranges[0][1])
            if rest:
                found.append((lo, past - 1, state_of(rest)))
        return found

    end = -1
    if quoted:
        start, end = len(rows), len(rows) + 1
        rows += [[(0x22, 0x22, 0)], []]
    for state, edges in enumerate(automaton.edges):
        items: list[_Item] = []
        for lo, hi, after in edges:
            items += _quoted(lo, hi, after) if quoted else [(ranges, after) for ranges in _utf8(lo, hi)]
        if quoted and automaton.accepts[state]:
            items.append((((0x22, 0x22),), end))
        rows[state] = divided(items) if items else []
    table = np.full((len(rows), 256), -1, dtype=np.int32)
    for line, row in zip(table, rows, strict=True):
        for first, last, after in row:
            line[first : last + 1] = after
    accepts = np.zeros(len(rows), dtype=np.bool_)
    if not quoted:
        accepts[: len(automaton.accepts)] = automaton.accepts
        return ByteTable(table, accepts)
    accepts[end] = True
    # State 0 is the start, which is before the first quote.
    order = np.arange(len(rows), dtype=np.int32)
    order[0], order[start] = start, 0
    return ByteTable(np.where(table >= 0, order[table], -1).astype(np.int32)[order], accepts[order])


def _quoted(lo: int, hi: int, after: int) -> list[_Item]:
    """Return how JSON strings write these characters."""
    found: list[_Item] = []
    backslash, plain = (0x5C, 0x5C), [(lo, hi)]
    for code, letter in _SHORT_ESCAPES.items():
        if lo <= code <= hi:
            found.append(((backslash, (ord(letter), ord(letter))), after))
    for first, last in _ESCAPED:
        for code in range(max(lo, first), min(hi, last) + 1):
            for digit in {f"{code & 15:x}", f"{code & 15:X}"}:
                text = f"u00{code >> 4:x}{digit}".encode()
                found.append(((backslash, *((byte, byte) for byte in text)), after))
    for first, last in (*_ESCAPED, (0x22, 0x22), (0x5C, 0x5C)):
        plain = [part for one in plain for part in _without(one, first, last)]
    return found + [(ranges, after) for one in plain for ranges in _utf8(*one)]


def _without(one: Range, first: int, last: int) -> list[Range]:
    lo, hi = one
    if hi < first or lo > last:
        return [one]
    return [part for part in ((lo, first - 1), (last + 1, hi)) if part[0] <= part[1]]


def _utf8(lo: int, hi: int) -> list[tuple[Range, ...]]:
    """Return the bytes of the characters from `lo` to `hi`, in UTF-8: ranges of the first byte, the second and so on.
    Surrogates have no bytes."""
    found: list[tuple[Range, ...]] = []
    for part in _without((lo, hi), *SURROGATES):
        for length, (first, last) in enumerate(_LENGTHS, start=1):
            low, high = max(part[0], first), min(part[1], last)
            if low <= high:
                found += _same_length(list(chr(low).encode()), list(chr(high).encode()))
                assert len(chr(low).encode()) == length
    return found


def _same_length(low: list[int], high: list[int]) -> list[tuple[Range, ...]]:
    if len(low) == 1:
        return [((low[0], high[0]),)]
    if low[0] == high[0]:
        return [((low[0], low[0]), *rest) for rest in _same_length(low[1:], high[1:])]
    found: list[tuple[Range, ...]] = []
    count = len(low) - 1
    first, last = low[0], high[0]
    if low[1:] != [0x80] * count:
        found += [((first, first), *rest) for rest in _same_length(low[1:], [0xBF] * count)]
        first += 1
    if high[1:] != [0xBF] * count:
        found += [((last, last), *rest) for rest in _same_length([0x80] * count, high[1:])]
        last -= 1
    if first <= last:
        found.append(((first, last), *[(0x80, 0xBF)] * count))
    return found
