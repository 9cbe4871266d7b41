"""Times the parts of an engine's start."""

from __future__ import annotations

import time


class StartClock:
    """Seconds of each part of a start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def passed(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now
