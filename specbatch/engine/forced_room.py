"""Whether plain decoding drafts what grammars force, where shapes are fixed.

A round with room for forced tokens has more nodes, and its trees are made of tokens that the host has to read first. So
it pays only where grammars force much: names of fields do, free text in strings does not.
"""

from __future__ import annotations

from specbatch.draft.method import DraftMethod

_WORTH = 0.25  # forced tokens of a request and round
_MEMORY = 0.9  # of the mean: of what it was before a round
_LOOK_AGAIN = 32  # after this many rounds without room, one has it


class ForcedRoom:
    """Decides by the rounds before. It depends on nothing but what was drafted: ranks decide alike."""

    def __init__(self) -> None:
        self._mean, self._num_without = 1.0, 0

    def method(self, method: DraftMethod, batch_size: int) -> DraftMethod:
        """`method`, with room or without. `batch_size`: padding included."""
        has_room = self._mean >= _WORTH or self._num_without >= _LOOK_AGAIN
        self._num_without = 0 if has_room else self._num_without + 1
        return method.with_room(batch_size) if has_room else method

    def saw(self, num_forced: int, num_requests: int) -> None:
        """What a round with room has put into it."""
        if num_requests:
            self._mean += (1 - _MEMORY) * (num_forced / num_requests - self._mean)
