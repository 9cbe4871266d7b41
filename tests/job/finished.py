"""Results of rows, as a runner returns them."""

from __future__ import annotations

from typing import Any

from specbatch.results.finished import Finished
from specbatch.types import NO_MARGIN, Margin


def finished(index: int, digest: int, line: dict[str, Any], margin: Margin = NO_MARGIN) -> Finished:
    """One row with this result line."""
    done = Finished()
    done.add(index, digest, line, margin=margin)
    return done
