"""The automata of grammars in device memory, and the states of running requests in them.

Shape suffixes as in `batch.GrammarBuffers`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from specbatch.batch import BROKEN, DEAD, FREE, GrammarBuffers
from specbatch.matcher import FollowedAutomaton, Vocabulary

MAX_CLASSES = 128  # classes of bytes of an automaton
_MAX_STATES, _MAX_AUTOMATA = 1 << 17, 1024
_MASK_BYTES = 80 << 20  # memory of masks
_TOKEN_BYTES = 16  # the mean length of a token for which there is room
_FIRST = BROKEN + 1  # the first state that belongs to an automaton


@dataclass(slots=True)
class _Place:
    first: int  # the number of its state 1
    size: int
    index: int  # the line of its classes
    num_users: int = 0


class GrammarTable(GrammarBuffers):
    """The buffers. They are made once; captured graphs hold their addresses."""

    def __init__(self, num_lines: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        def zeros(*shape: int, dtype: type[np.generic] = np.int32) -> torch.Tensor:
            if device.type == "cpu":  # NumPy takes no memory for zeros until others replace them: 144 MB, 80 ms.
                return torch.from_numpy(np.zeros(shape, dtype))
            return torch.zeros(*shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, device=device)

        num_words = -(-vocab_size // 32)
        num_masks = min(max(64, _MASK_BYTES // (4 * num_words)), _MAX_STATES)  # at most one for each state
        super().__init__(
            next_QK=zeros(_MAX_STATES, MAX_CLASSES),
            forced_Q=zeros(_MAX_STATES).fill_(-1),
            accepts_Q=zeros(_MAX_STATES, dtype=np.bool_),
            leaves_Q=zeros(_MAX_STATES, dtype=np.bool_),
            classes_GB=zeros(_MAX_AUTOMATA, 256, dtype=np.uint8),
            starts_V=zeros(vocab_size + 1),
            bytes_F=zeros(_TOKEN_BYTES * vocab_size + 1, dtype=np.uint8),
            states_S=zeros(num_lines),
            automata_S=zeros(num_lines),
            masks_CW=zeros(num_masks, num_words),
            owners_C=zeros(num_masks).fill_(-1),
            eos_K=torch.tensor(eos_token_ids or (-2,), device=device),
        )
        self.next_QK[FREE], self.next_QK[DEAD], self.next_QK[BROKEN] = FREE, DEAD, DEAD
        self._vocab_size, self._eos = vocab_size, frozenset(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._places: dict[FollowedAutomaton, _Place] = {}  # those without a user came before the others

    def acquire(self, automaton: FollowedAutomaton) -> str | None:
        """Make room for an automaton that one more request uses. Return the reason if the device cannot follow it."""
        if automaton not in self._places:
            if np.isin(automaton.forced_Q, list(self._eos)).any():
                return "it forces a token that ends an output"
            if automaton.forced_Q.max() >= self._vocab_size:
                return "it forces a token that the model does not have"
            if not self._add(automaton):
                return "the table of grammars is full"
        self._places[automaton].num_users += 1
        return None

    def release(self, automaton: FollowedAutomaton) -> None:
        """A request that used the automaton has ended."""
        self._places[automaton].num_users -= 1

    def start(self, automaton: FollowedAutomaton, state: int) -> tuple[int, int]:
        """Return what `states_S` and `automata_S` have of a request in this state of its automaton."""
        place = self._places[automaton]
        return (place.first + state - 1 if state > 0 else BROKEN), place.index

    def _add(self, automaton: FollowedAutomaton) -> bool:
        """Write an automaton to the table. Return False if there is no room."""
        if not self._has_vocabulary(automaton.vocabulary) or automaton.next_QK.shape[1] > MAX_CLASSES:
            return False
        size = len(automaton) - 1
        while (first := self._free_states(size)) is None or len(self._places) == _MAX_AUTOMATA:
            unused = next((one for one, place in self._places.items() if not place.num_users), None)
            if unused is None:
                return False
            self._remove(unused)
        taken = {place.index for place in self._places.values()}
        place = _Place(first, size, next(index for index in range(_MAX_AUTOMATA) if index not in taken))
        self._places[automaton] = place
        next_QK = np.where(automaton.next_QK[1:] > 0, automaton.next_QK[1:] + (first - 1), DEAD).astype(np.int32)
        states = slice(first, first + size)
        self.next_QK[states, : next_QK.shape[1]].copy_(torch.from_numpy(next_QK))
        self.forced_Q[states].copy_(torch.from_numpy(automaton.forced_Q[1:]))
        self.accepts_Q[states].copy_(torch.from_numpy(automaton.accepts_Q[1:]))
        self.leaves_Q[states].copy_(torch.from_numpy(automaton.leaves_Q[1:]))
        self.classes_GB[place.index].copy_(torch.from_numpy(automaton.classes_B))
        return True

    def _free_states(self, size: int) -> int | None:
        """Return the first of `size` states that no automaton has."""
        first = _FIRST
        for place in sorted(self._places.values(), key=lambda place: place.first):
            if place.first - first >= size:
                return first
            first = place.first + place.size
        return first if _MAX_STATES - first >= size else None

    def _remove(self, automaton: FollowedAutomaton) -> None:
        place = self._places.pop(automaton)
        is_of_it = (self.owners_C >= place.first) & (self.owners_C < place.first + place.size)
        self.owners_C.masked_fill_(is_of_it, -1)

    def _has_vocabulary(self, vocabulary: Vocabulary) -> bool:
        """Write the bytes of all tokens, if they are not there. Return False if others are, or if there is no room."""
        if self._vocabulary is None:
            texts = vocabulary.texts[: self._vocab_size]
            texts = [b"" if token in self._eos else text for token, text in enumerate(texts)]
            starts = np.zeros(self._vocab_size + 1, dtype=np.int32)
            starts[1 : len(texts) + 1] = np.cumsum([len(text) for text in texts])
            starts[len(texts) + 1 :] = starts[len(texts)]
            joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
            if len(joined) >= len(self.bytes_F):
                return False
            self.starts_V.copy_(torch.from_numpy(starts))
            self.bytes_F[: len(joined)].copy_(torch.from_numpy(joined.copy()))
            self.max_token_bytes = max(map(len, texts))
            self._vocabulary = vocabulary
        return self._vocabulary is vocabulary

    @property
    def num_bytes(self) -> int:
        values = (getattr(self, field.name) for field in fields(GrammarBuffers))
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
