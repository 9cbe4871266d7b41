"""A switch for a method that pays only at times: the gain of the last rounds decides whether the next one uses it."""

from __future__ import annotations

_MEMORY = 0.9  # weight of the old mean when a round is added to it
_TRY_AGAIN = 32  # the method is tried again after this many rounds without it


class RunningChoice:
    """`worth`: the gain of a request and round from which on it pays. It depends on nothing but what was seen, so that
    ranks decide alike."""

    def __init__(self, worth: float) -> None:
        self._worth = worth
        self._mean, self._num_without = 1.0, 0

    def next(self) -> bool:
        """Return whether the next round uses the method."""
        pays = self._mean >= self._worth or self._num_without >= _TRY_AGAIN
        self._num_without = 0 if pays else self._num_without + 1
        return pays

    def saw(self, gain: float, num_requests: int) -> None:
        """Add a round to the mean. `gain`: the sum of the gains of all its requests."""
        if num_requests:
            self._mean += (1 - _MEMORY) * (gain / num_requests - self._mean)
