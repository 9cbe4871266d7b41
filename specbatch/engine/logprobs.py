"""Log-probabilities on their way from a round to the completions that want them.

Shape suffixes: B requests, M longest path, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.logprobs import TokenLogprobs

MAX_TOP_LOGPROBS = 20
_NUMS_TOP = (0, 1, 5, MAX_TOP_LOGPROBS)


def num_top_of(wanted: Iterable[int | None]) -> int | None:
    """Return how many of the most likely tokens a round finds, for requests that want these numbers. It is one of a few
    numbers, so that there are few graphs. None: no request wants log-probabilities."""
    most = max((number for number in wanted if number is not None), default=None)
    return None if most is None else next(number for number in _NUMS_TOP if number >= most)


class Logprobs(NamedTuple):
    """The log-probabilities of the tokens of a report, from the target's raw logits."""

    # (B, M, 1 + K) float32 or float64: the values of each token, then those of the most likely tokens at its position
    values_BMK: Tensor
    top_ids_BMK: Tensor  # int64

    def words(self) -> tuple[Tensor, Tensor]:
        """Return two parts (B, X) int32, which `LogprobLayout` reads."""
        return self.values_BMK.view(torch.int32).flatten(1), self.top_ids_BMK.int().flatten(1)


class LogprobLayout(NamedTuple):
    """The layout of the words that hold a report's log-probabilities."""

    num_top: int  # K
    value_bytes: int

    @classmethod
    def of(cls, logprobs: Logprobs) -> LogprobLayout:
        return cls(logprobs.top_ids_BMK.shape[2], logprobs.values_BMK.element_size())

    def read(self, words_BX: NDArray[np.int32]) -> ReadLogprobs:
        k, words_of_value = self.num_top, self.value_bytes // 4
        rows, num_words = words_BX.shape
        num_tokens = num_words // (words_of_value * (1 + k) + k)
        first_id = num_words - num_tokens * k
        values, ids = words_BX[:, :first_id].view(f"f{self.value_bytes}"), words_BX[:, first_id:]
        return ReadLogprobs(values.reshape(rows, num_tokens, 1 + k), ids.reshape(rows, num_tokens, k))


def with_logprobs(output_BZ: Tensor, logprobs: Logprobs | None) -> Tensor:
    """The int32 words of a report with those of its log-probabilities after them: one copy to the host takes it half
    the time of three."""
    return output_BZ if logprobs is None else torch.cat((output_BZ, *logprobs.words()), dim=1)


class ReadLogprobs(NamedTuple):
    """`Logprobs` on the host."""

    values_BMK: NDArray[Any]
    top_ids_BMK: NDArray[Any]

    def records(self, num_top: int) -> list[bytes]:
        """Return the records of the M tokens of each row, with `num_top` of the likely tokens; a request collects them.
        A round makes no object for each token, which the garbage collector would walk."""
        k = min(num_top, self.top_ids_BMK.shape[2])  # fewer if the vocabulary has fewer
        found = np.empty(self.values_BMK.shape[:2], dtype=_record(k))
        found["values"] = self.values_BMK[:, :, : 1 + k]
        found["top_ids"] = self.top_ids_BMK[:, :, :k]
        rows: list[bytes] = found.view(f"V{found.shape[1] * found.itemsize}")[:, 0].tolist()
        return rows


def read_records(token_ids: list[int], records: bytes | bytearray) -> TokenLogprobs:
    """The log-probabilities of these tokens, each of which has a record."""
    size = len(records) // max(len(token_ids), 1)
    empty = _record(0)
    found = np.frombuffer(records, dtype=_record((size - empty.itemsize) // _BYTES_OF_TOP) if size else empty)
    return TokenLogprobs(token_ids, found["values"], found["top_ids"])


_BYTES_OF_TOP = 12  # bytes of a record for each likely token


def _record(num_top: int) -> np.dtype[Any]:
    """Return the data type of one token's record. A float32 value is the same number as a float64."""
    return np.dtype([("values", np.float64, (1 + num_top,)), ("top_ids", np.int32, (num_top,))])
