"""All positions of a trace, row after row, and how many drafts each accepts from a chain.

Shape suffixes: R rows, P positions of all rows, S draft steps, T tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.tune.errors import TuningError
from specbatch.tune.trace import Trace

# Behind the last token of a continuation: no draft is equal to it, not even one that was not made (-1).
PAST_END = -2


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Row r's positions are [first_R[r], first_R[r] + num_outputs_R[r])."""

    num_outputs_R: NDArray[np.int64]
    first_R: NDArray[np.int64]

    @staticmethod
    def of(trace: Trace) -> Positions:
        """Raises TuningError where no row has a round to replay: one whose continuation is longer than a token."""
        sizes_R = np.array([row.num_output for row in trace.rows], dtype=np.int64)
        if not (sizes_R > 1).any():
            raise TuningError(
                f"none of the {len(trace.rows)} traced rows has a continuation of two tokens: nothing to learn from",
                hint="trace more rows, or raise sampling.max_tokens",
            )
        return Positions(sizes_R, np.concatenate(([0], np.cumsum(sizes_R)[:-1])))

    @property
    def count(self) -> int:
        """P."""
        return int(self.num_outputs_R.sum())

    @property
    def num_committed_R(self) -> NDArray[np.int64]:
        """Tokens that rounds commit: all but the first, which the prefill drew."""
        return np.maximum(self.num_outputs_R - 1, 0)

    @property
    def last_R(self) -> NDArray[np.int64]:
        """The position at which a row has ended."""
        return self.first_R + self.num_committed_R


def true_tokens(trace: Trace, positions: Positions, depth: int) -> NDArray[np.int32]:
    """(P, S) the tokens behind each root; PAST_END behind the row's last."""
    true_PS = np.full((positions.count, depth), PAST_END, dtype=np.int32)
    for row, first in zip(trace.rows, positions.first_R.tolist(), strict=True):
        text = row.tokens[row.num_prompt :]
        for step in range(min(depth, len(text) - 1)):
            true_PS[first : first + len(text) - 1 - step, step] = text[step + 1 :]
    return true_PS


def leading(right_PS: NDArray[np.bool_]) -> NDArray[np.int16]:
    """(P,) how many drafts are right before the first wrong one."""
    wrong_PS = ~right_PS
    first = wrong_PS.argmax(axis=1)
    return np.where(wrong_PS.any(axis=1), first, right_PS.shape[1]).astype(np.int16)


def stacked(trace: Trace, name: str, num_columns: int) -> NDArray[np.generic] | None:
    """(P, num_columns) the arrays `name` of all rows; -1 for a row without one, as one that ended with its first token
    may be. None where no row has one."""
    parts = [getattr(row, name) for row in trace.rows]
    dtype = next((part.dtype for part in parts if part is not None), None)
    if dtype is None:
        return None
    return np.concatenate(
        [
            np.full((row.num_output, num_columns), -1, dtype) if part is None else part
            for row, part in zip(trace.rows, parts, strict=True)
        ]
    )
