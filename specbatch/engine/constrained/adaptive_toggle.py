"""Whether to do what pays at times only, by what it gained in the last rounds."""

from __future__ import annotations

_MEMORY = 0.9  # of the mean: of what it was before a round
_TRY_AGAIN = 32  # after this many rounds without


class RunningChoice:
    """`worth`: the gain of a request and round from which on it pays. It depends on nothing but what was seen, so that
    ranks decide alike."""

    def __init__(self, worth: float) -> None:
        self._worth = worth
        self._mean, self._num_without = 1.0, 0

    def next(self) -> bool:
        """Of the next round."""
        pays = self._mean >= self._worth or self._num_without >= _TRY_AGAIN
        self._num_without = 0 if pays else self._num_without + 1
        return pays

    def saw(self, gain: float, num_requests: int) -> None:
        """What all requests of a round have gained by it."""
        if num_requests:
            self._mean += (1 - _MEMORY) * (gain / num_requests - self._mean)
