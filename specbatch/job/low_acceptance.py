"""Says once that drafts are hardly ever right, and why that may be. Such a job is slower than plain decoding, and
nothing else shows that a head is read otherwise than it was trained."""

from __future__ import annotations

from collections.abc import Callable

from specbatch.types import SpeculationCounts

_ROUNDS = 200
_LENGTH = 1.2


class LowAcceptance:
    """`causes`: the likely ones; None: nothing is said. `say` is given the warning."""

    def __init__(self, causes: str | None, say: Callable[[str], None]) -> None:
        self._causes = causes
        self._say = say

    def look(self, counts: SpeculationCounts) -> None:
        """At the counts of all requests that finished in this process."""
        if self._causes is None or not (proposed := counts.proposed_at) or proposed[0] < _ROUNDS:
            return
        length = 1 + counts.accepted / proposed[0]  # rounds without drafts are none of the drafts' making
        if length < _LENGTH:
            self._say(
                f"warning: the acceptance length is {length:.2f} after {proposed[0]:,} rounds: hardly any draft is "
                f"right, and speculation.method none would be faster. Likely causes: {self._causes}"
            )
            self._causes = None
