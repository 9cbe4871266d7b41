"""Log-probabilities on their way from a round to the completions that want them.

Shape suffixes: B requests, M longest path, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specbatch.engine.transfers import Download, Transfers

MAX_TOP_LOGPROBS = 20
_NUMS_TOP = (0, 1, 5, MAX_TOP_LOGPROBS)


def num_top_of(wanted: Iterable[int | None]) -> int | None:
    """How many of the most likely tokens a round finds for requests that want these numbers: one of a few, so that
    there are few graphs. None: no request wants log-probabilities."""
    most = max((number for number in wanted if number is not None), default=None)
    return None if most is None else next(number for number in _NUMS_TOP if number >= most)


class Logprobs(NamedTuple):
    """Of the tokens of a report, by the target's raw logits."""

    values_BMK: Tensor  # (B, M, 1 + K) float32: of each token, and of the most likely ones at its position
    top_ids_BMK: Tensor  # int64


@dataclass(frozen=True, slots=True)
class LogprobDownload:
    """A copy under way."""

    values: Download
    top_ids: Download | None

    @classmethod
    def start(cls, logprobs: Logprobs | None, transfers: Transfers) -> LogprobDownload | None:
        if logprobs is None:
            return None
        has_top = logprobs.top_ids_BMK.shape[2] > 0
        values = transfers.download(logprobs.values_BMK)
        return cls(values, transfers.download(logprobs.top_ids_BMK) if has_top else None)

    def wait(self) -> ReadLogprobs:
        return ReadLogprobs(self.values.wait(), None if self.top_ids is None else self.top_ids.wait())


class ReadLogprobs(NamedTuple):
    """As `Logprobs`, on the host. Without top ids if K is 0."""

    values_BMK: np.ndarray
    top_ids_BMK: np.ndarray | None

    def of(self, rows: Seq[int], num_top: int) -> tuple[list[list[float]], list[list[int]]]:
        """Of each of these rows, with `num_top` of the most likely tokens for each of its M: values and ids, as
        `TokenLogprobs` has them. All at once, because numpy takes about as long for one row as for many."""
        values: list[list[float]] = self.values_BMK[rows, :, : 1 + num_top].reshape(len(rows), -1).tolist()
        if not num_top or self.top_ids_BMK is None:
            return values, [[]] * len(rows)
        return values, self.top_ids_BMK[rows, :, :num_top].reshape(len(rows), -1).tolist()
