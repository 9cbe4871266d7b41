"""The list of a batch's long sequences, in plain torch.

Shape suffixes: B sequences, K listed sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def long_sequences(starts_B: Tensor, query_starts: Tensor, min_tokens: int, count: int) -> tuple[Tensor, Tensor]:
    """List the first `count` sequences of at least `min_tokens` tokens, new ones included. Return the index of each
    sequence in the list, (B,) int32, -1 if it is not listed; and the list, (K,) int32, -1 after its end."""
    lengths_B = starts_B + query_starts[1:] - query_starts[:-1]
    index_B = torch.where(lengths_B >= min_tokens, (lengths_B >= min_tokens).cumsum(0) - 1, -1)
    index_B = torch.where(index_B < count, index_B, -1)
    listed_K = torch.full((count + 1,), -1, dtype=torch.int32, device=starts_B.device)
    numbers_B = torch.arange(len(starts_B), dtype=torch.int32, device=starts_B.device)
    listed_K[torch.where(index_B < 0, count, index_B)] = numbers_B
    return index_B.int(), listed_K[:count]
