"""The automaton of a grammar: deterministic, over the bytes of a text.

It is made of parts that are deterministic, such as the automaton of a string, and of steps between them that read no
byte. Only where such steps leave a choice, states are joined. So the time is that of copying the parts.

Shape suffixes: Q states, M states that are joined, B bytes, K classes of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.grammar.characters import MAX_STATES, ByteTable, NotRegularError, TooLargeError

DEAD, START = 0, 1  # states: no text goes on from the first one; a text begins in the second
MAX_CLASSES = 128  # the most classes of bytes


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton. Bytes of a class lead to the same states."""

    next_QK: NDArray[np.int32]
    classes_B: NDArray[np.uint8]
    accepts_Q: NDArray[np.bool_]
    exit: int = DEAD  # the state from which texts go on in ways that the automaton does not have; DEAD: there is none

    def __len__(self) -> int:
        return len(self.next_QK)

    def step(self, state: int, text: bytes) -> int:
        """Return the state after these bytes."""
        for byte in text:
            state = int(self.next_QK[state, self.classes_B[byte]])
        return state

    @property
    def forced_bytes_Q(self) -> NDArray[np.int32]:
        """The only byte that may come after each state, where the text may not end; -1: there are others, or none."""
        next_QB = self.next_QK[:, self.classes_B]
        is_one = ((next_QB != DEAD).sum(axis=1) == 1) & ~self.accepts_Q
        found: NDArray[np.int32] = np.where(is_one, (next_QB != DEAD).argmax(axis=1), -1).astype(np.int32)
        return found


class AutomatonBuilder:
    """A builder of an automaton from parts. States are numbers; `end` is the state in which a text may end. A text that
    comes to `exit` leaves the automaton: whatever follows is not known."""

    def __init__(self) -> None:
        self._next_QB = np.full((1024, 256), -1, dtype=np.int32)
        self._count = 0
        self._empty: dict[int, list[int]] = {}  # steps that read no byte
        self.end, self.exit = self.state(), self.state()

    def state(self) -> int:
        """Add a state."""
        return self._add(np.full((1, 256), -1, dtype=np.int32))

    def _add(self, next_QB: NDArray[np.int32]) -> int:
        first, self._count = self._count, self._count + len(next_QB)
        if self._count > MAX_STATES:
            raise TooLargeError("it has too many states")
        if self._count > len(self._next_QB):
            more = np.full((max(self._count, 2 * len(self._next_QB)), 256), -1, dtype=np.int32)
            more[:first] = self._next_QB[:first]
            self._next_QB = more
        self._next_QB[first : self._count] = next_QB
        return first

    def skip(self, state: int, after: int) -> None:
        """Add a step that reads no byte."""
        self._empty.setdefault(state, []).append(after)

    def literal(self, state: int, text: bytes) -> int:
        """Add these bytes after a state; return the state after them."""
        if not text:
            return state
        next_QB = np.full((len(text) + 1, 256), -1, dtype=np.int32)
        index = np.arange(len(text))
        next_QB[index, np.frombuffer(text, dtype=np.uint8)] = index + 1 + self._count
        first = self._add(next_QB)
        self.skip(state, first)
        return first + len(text)

    def part(self, state: int, part: ByteTable) -> int:
        """Add the texts of an automaton after a state; return the state after them."""
        first = self._add(np.where(part.next_QB >= 0, part.next_QB + self._count, -1).astype(np.int32))
        self.skip(state, first)
        after = self.state()
        for accepting in np.flatnonzero(part.accepts_Q):
            self.skip(first + int(accepting), after)
        return after

    def build(self, start: int) -> Automaton:
        """Return the deterministic automaton."""
        next_QB = self._next_QB[: self._count]
        leads_on: NDArray[np.bool_] = np.asarray((next_QB >= 0).any(axis=1))
        leads_on[[self.end, self.exit]] = True
        sets: dict[frozenset[int], int] = {}  # sets of several states, and their numbers
        members: list[frozenset[int]] = []

        def number_of(states: frozenset[int]) -> int:
            if self.exit in states:
                return self.exit
            if len(states) < 2:
                return next(iter(states), -1)
            if states not in sets:
                sets[states] = self._count + len(members)
                members.append(states)
                if len(members) > MAX_STATES:
                    raise TooLargeError("it has too many states")
            return sets[states]

        def states_of(number: int) -> frozenset[int]:
            return frozenset((number,)) if number < self._count else members[number - self._count]

        closures = {state: self._closure(state, leads_on) for state in {*self._empty, start}}
        number_Q = np.arange(self._count, dtype=np.int32)
        for state, closure in closures.items():
            number_Q[state] = number_of(closure)
        next_QB = np.where(next_QB >= 0, number_Q[next_QB], -1).astype(np.int32)
        added: list[NDArray[np.int32]] = []
        while len(added) < len(members):
            after_MB = next_QB[sorted(members[len(added)])]
            row = after_MB.max(axis=0)
            lowest = np.where(after_MB >= 0, after_MB, np.iinfo(np.int32).max).min(axis=0)
            for byte in np.flatnonzero((row >= 0) & (lowest != row)):
                after = (states_of(int(one)) for one in set(after_MB[:, byte].tolist()) if one >= 0)
                row[byte] = number_of(frozenset().union(*after))
            added.append(row)
        if added:
            next_QB = np.concatenate([next_QB, np.stack(added)])
        accepts = np.zeros(len(next_QB), dtype=np.bool_)
        accepts[self.end] = True
        accepts[[sets[one] for one in members if self.end in one]] = True
        return _compact(next_QB, accepts, int(number_Q[start]), self.exit)

    def _closure(self, state: int, leads_on: NDArray[np.bool_]) -> frozenset[int]:
        seen, stack = {state}, [state]
        while stack:
            for after in self._empty.get(stack.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        return frozenset(one for one in seen if leads_on[one])


def _compact(next_QB: NDArray[np.int32], accepts_Q: NDArray[np.bool_], start: int, exit_: int) -> Automaton:
    """Keep the states that can be reached, in the order of their distance from the start."""
    if start < 0:
        raise NotRegularError("no text matches it")
    order, seen = [np.array([start])], np.zeros(len(next_QB), dtype=np.bool_)
    seen[start] = True
    while len(order[-1]):
        after = np.unique(next_QB[order[-1]])
        after = after[after >= 0]
        after = after[~seen[after]]
        seen[after] = True
        order.append(after)
    kept = np.concatenate(order)
    number_Q = np.zeros(len(next_QB) + 1, dtype=np.int32)  # the last one: no next state
    number_Q[kept] = np.arange(START, START + len(kept))
    number_Q[-1] = DEAD
    table = np.zeros((START + len(kept), 256), dtype=np.int32)
    table[START:] = number_Q[next_QB[kept]]
    classes, first = _classes(table)
    if len(first) > MAX_CLASSES:
        raise TooLargeError(f"it has more than {MAX_CLASSES} classes of bytes")
    accepts_Q = np.concatenate(([False], accepts_Q[kept]))
    return Automaton(np.ascontiguousarray(table[:, first]), classes, accepts_Q, int(number_Q[exit_]))


def _classes(table_QB: NDArray[np.int32]) -> tuple[NDArray[np.uint8], list[int]]:
    """Return the class of each byte, and a byte of each class. The first class leads nowhere, if there is one."""
    first: dict[bytes, int] = {}
    columns = np.ascontiguousarray(table_QB.T)
    found = [first.setdefault(column.tobytes(), len(first)) for column in columns]
    return np.array(found, dtype=np.uint8), [found.index(i) for i in range(len(first))]


def choices(texts: Iterable[bytes]) -> Automaton:
    """Return the automaton of a list of texts."""
    builder = AutomatonBuilder()
    start = builder.state()
    for text in texts:
        builder.skip(builder.literal(start, text), builder.end)
    return builder.build(start)
