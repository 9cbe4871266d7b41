"""Results of rows, as a runner returns them."""

from __future__ import annotations

from typing import Any

from specbatch.job.runner import Finished


def finished(index: int, digest: int, line: dict[str, Any]) -> Finished:
    """One row with this result line."""
    done = Finished()
    done.add(index, digest, line)
    return done
