"""The automaton of a grammar together with a tokenizer: what the device needs to follow a text token by token.

Where the grammar forces the next bytes, only the first token of their usual tokenization may come, as in llguidance.
It depends there on the last token, too; here it depends on the state alone, because a state is all that the device has.
Within a character it is the token that comes after the fewest tokens since the character's beginning.

Shape suffixes: Q states, V tokens, L bytes of a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.grammar.automaton import DEAD, START, Automaton
from specbatch.grammar.characters import NotRegularError

_MAX_TOKEN = 255  # A token with more bytes may not come.
_MAX_CHARACTER = 4  # bytes of a character in UTF-8
_NUM_WALKS, _MAX_WALK = 6, 200  # random texts of a check, and their bytes
Beginnings = dict[int, Any]  # the beginnings of texts: what comes after each first byte, of the same type


class TokenBytes:
    """The bytes of a vocabulary. Tokens that are no text have none."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: llguidance's."""
        count = tokenizer.vocab_size
        texts = [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(count)]
        texts = [text if len(text) <= _MAX_TOKEN else b"" for text in texts]
        self.lengths_V = np.array([len(text) for text in texts], dtype=np.uint8)
        width = int(self.lengths_V.max(initial=1))
        padded = b"".join(text.ljust(width, b"\0") for text in texts)
        self.bytes_LV = np.ascontiguousarray(np.frombuffer(padded, dtype=np.uint8).reshape(count, width).T)
        self.texts = texts
        self._beginnings: dict[frozenset[int], Beginnings] = {}
        self._short = {text: i for i, text in reversed(list(enumerate(texts))) if 1 <= len(text) <= _MAX_CHARACTER}

    def fewest(self, text: bytes) -> list[int] | None:
        """Return the fewest tokens with the bytes of a part of a character; None: there are none."""
        if not text:
            return []
        ways = []
        for size in range(len(text), 0, -1):
            if text[:size] in self._short and (rest := self.fewest(text[size:])) is not None:
                ways.append([self._short[text[:size]], *rest])
        return min(ways, key=len, default=None)

    def beginnings(self, last: frozenset[int]) -> Beginnings:
        """Return the beginnings of tokens, without the whole tokens, that end with one of these bytes, and maybe others
        whose last byte is one of these."""
        if not last:
            return {}
        if last not in self._beginnings:
            pattern = re.compile(b"[" + b"".join(re.escape(bytes((byte,))) for byte in sorted(last)) + b"]")
            root: Beginnings = {}
            for text in self.texts:
                for found in pattern.finditer(text, 0, len(text) - 1) if len(text) > 1 else ():
                    node = root
                    for byte in text[: found.end()]:
                        node = node.setdefault(byte, {})
            self._beginnings[last] = root
        return self._beginnings[last]


@dataclass(frozen=True, slots=True, eq=False)
class TokenAutomaton:
    """An automaton whose texts are written in tokens. `forced_Q`: the only token that may come after a state; -1: all
    tokens may come whose bytes the automaton has. `leaves_Q`: states after which the automaton does not have all tokens
    that may come."""

    automaton: Automaton
    forced_Q: NDArray[np.int32]
    leaves_Q: NDArray[np.bool_]
    vocabulary: TokenBytes

    def __len__(self) -> int:
        return len(self.automaton)

    @property
    def next_QK(self) -> NDArray[np.int32]:
        return self.automaton.next_QK

    @property
    def classes_B(self) -> NDArray[np.uint8]:
        return self.automaton.classes_B

    @property
    def accepts_Q(self) -> NDArray[np.bool_]:
        return self.automaton.accepts_Q

    def state_after(self, tokens: Sequence[int]) -> int:
        """Return the state after these tokens."""
        state, texts = START, self.vocabulary.texts
        for token in tokens:
            text = texts[token] if token < len(texts) else b""
            state = self.automaton.step(state, text) if text else DEAD
        return state


def with_tokens(automaton: Automaton, compiled: Any, vocabulary: TokenBytes) -> TokenAutomaton:
    """Find the forced tokens of an automaton. `compiled`: llguidance's matcher of the same grammar, at its start."""
    is_forced_Q = automaton.forced_bytes_Q >= 0
    forced_Q = np.full(len(automaton), -1, dtype=np.int32)
    if not is_forced_Q.any():
        return TokenAutomaton(automaton, forced_Q, _leaves(automaton, forced_Q, vocabulary), vocabulary)
    children = _wanted_children(automaton, is_forced_Q)
    matcher = compiled.deep_copy()
    # (state, the bytes since the last whole character on the way to it); state -1: go back by this number of tokens
    stack: list[tuple[int, bytes | int]] = [(START, b"")]
    while stack:
        state, text = stack.pop()
        if isinstance(text, int):
            matcher.rollback(text)
            continue
        is_whole = _is_whole(text)
        following = [(after, (b"" if is_whole else text) + bytes((byte,))) for after, byte in children.get(state, ())]
        if (way := vocabulary.fewest(text)) is None:
            stack += [] if is_whole else following
            continue  # No token is forced there.
        if way and matcher.try_consume_tokens(way) != len(way):
            raise NotRegularError("llguidance refuses a text of it")
        if is_forced_Q[state] and forced_Q[state] < 0:
            tokens, after = matcher.compute_ff_tokens(), state
            num_legal = matcher.validate_tokens(tokens)
            if tokens and not num_legal:
                raise NotRegularError("it forces a text that the vocabulary has as a special token, or not at all")
            # After whole characters the usual tokens of the forced text follow each other.
            for token in tokens[: num_legal if is_whole else min(num_legal, 1)]:
                before, after = after, automaton.step(after, vocabulary.texts[token])
                if after == DEAD:  # The forced text goes on outside of the automaton.
                    break
                if forced_Q[before] < 0:
                    forced_Q[before] = token
        if is_whole:
            stack.append((-1, len(way)))
        else:  # Longer texts of the same character can have other tokens.
            matcher.rollback(len(way))
        stack += following
    return TokenAutomaton(automaton, forced_Q, _leaves(automaton, forced_Q, vocabulary), vocabulary)


def _is_whole(text: bytes) -> bool:
    """Return whether the bytes are a whole character in UTF-8, given that they are the beginning of one, or none."""
    return not text or len(text) >= (1 if text[0] < 0xC0 else 2 if text[0] < 0xE0 else 3 if text[0] < 0xF0 else 4)


def _leaves(automaton: Automaton, forced_Q: NDArray[np.int32], vocabulary: TokenBytes) -> NDArray[np.bool_]:
    """Find the states after which a token may come that the automaton does not have: its exit, and those from which a
    token leads there and further."""
    leaves_Q = np.zeros(len(automaton), dtype=np.bool_)
    if automaton.exit == DEAD:
        return leaves_Q
    leads_to_exit_K = (automaton.next_QK == automaton.exit).any(axis=0)
    last = frozenset(np.flatnonzero(leads_to_exit_K[automaton.classes_B]).tolist())
    states = np.arange(len(automaton))
    # (the states that are left, the states after a text, the next bytes of such texts)
    stack = [(states, states, vocabulary.beginnings(last))]
    while stack:
        origins, reached, following = stack.pop()
        for byte, more in following.items():
            after = automaton.next_QK[reached, automaton.classes_B[byte]]
            if byte in last:
                leaves_Q[origins[after == automaton.exit]] = True
            is_inside = (after != DEAD) & (after != automaton.exit)
            if more and is_inside.any():
                stack.append((origins[is_inside], after[is_inside], more))
    leaves_Q &= forced_Q < 0
    leaves_Q[automaton.exit] = True
    return leaves_Q


def _wanted_children(automaton: Automaton, is_wanted_Q: NDArray[np.bool_]) -> dict[int, list[tuple[int, int]]]:
    """Return the shortest ways to the wanted states, as a tree: the next states of each, with a byte that leads there.
    States are numbered by their distance from the start."""
    count = len(automaton)
    class_of_byte = automaton.classes_B.astype(np.int64)
    byte_K = np.zeros(automaton.next_QK.shape[1], dtype=np.int64)
    byte_K[class_of_byte[::-1]] = np.arange(255, -1, -1)
    parent_Q = np.full(count, -1, dtype=np.int64)
    by_Q = np.zeros(count, dtype=np.int64)
    after = automaton.next_QK[::-1].ravel()  # The way from the lowest state is written last.
    states = np.repeat(np.arange(count - 1, -1, -1), automaton.next_QK.shape[1])
    parent_Q[after], by_Q[after] = states, np.tile(byte_K, count)
    children: dict[int, list[tuple[int, int]]] = {}
    seen = np.zeros(count, dtype=np.bool_)
    for state in np.flatnonzero(is_wanted_Q).tolist():
        while state != START and not seen[state]:
            seen[state] = True
            parent = int(parent_Q[state])
            children.setdefault(parent, []).append((state, int(by_Q[state])))
            state = parent
    return children


def check(automaton: Automaton, matcher: Any) -> None:
    """Compare an automaton with llguidance: each state but its exit at the end of a shortest text that leads there, and
    the states along some random texts. `matcher`: that of the same grammar, at its start, with a tokenizer whose tokens
    are bytes. It raises NotRegularError where they differ."""
    leads_on_QB = automaton.next_QK[:, automaton.classes_B] != DEAD
    children = _wanted_children(automaton, np.arange(len(automaton)) > DEAD)
    one, stack = matcher.deep_copy(), [(START, -1)]  # (state, the byte that leads to it); state -1: go back
    while stack:
        state, byte = stack.pop()
        if state < 0:
            one.rollback(1)
            continue
        if byte >= 0:
            if one.try_consume_tokens([byte]) != 1:
                raise NotRegularError("llguidance refuses a text of it")
            stack.append((-1, 0))
        if state == automaton.exit:
            continue
        _compare(one, leads_on_QB[state], bool(automaton.accepts_Q[state]))
        stack += children.get(state, ())
    rng = np.random.default_rng(len(automaton))
    for _ in range(_NUM_WALKS):
        one, state = matcher.deep_copy(), START
        for _ in range(_MAX_WALK):
            legal = np.flatnonzero(leads_on_QB[state])
            if not len(legal):
                break
            byte = int(legal[rng.integers(len(legal))])
            if one.try_consume_tokens([byte]) != 1:
                raise NotRegularError("llguidance refuses a text of it")
            state = automaton.step(state, bytes((byte,)))
            if state == automaton.exit:
                break
            _compare(one, leads_on_QB[state], bool(automaton.accepts_Q[state]))


def _compare(matcher: Any, leads_on_B: NDArray[np.bool_], accepts: bool) -> None:
    theirs = np.zeros(256, dtype=np.bool_)
    if not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        theirs = np.unpackbits(mask, count=256, bitorder="little").astype(np.bool_)
    if (leads_on_B != theirs).any() or bool(matcher.is_accepting()) != accepts:
        raise NotRegularError("llguidance reads it in another way")
