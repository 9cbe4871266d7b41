"""Tree masks for FlashInfer, torch and Triton alike, against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import Ops

pytestmark = [pytest.mark.gpu] if CUDA else []


def naive_mask(words: list[list[int]], mask_start: int, start: int, num_queries: int) -> list[int]:
    """The bits of one sequence, one after the other."""
    bits = []
    for query in range(num_queries):
        for key in range(start + num_queries):
            j = key - mask_start
            inside = 0 <= j < 32 * len(words[query])
            bits.append(int(j < 0 or (inside and (words[query][j // 32] >> (j % 32)) & 1)))
    return bits


def unpacked(mask_BZ: Tensor, row: int, count: int) -> list[int]:
    return np.unpackbits(mask_BZ[row].cpu().numpy(), bitorder="little")[:count].tolist()


MASKS = [(1, 1, [0, 7, 64], 0), (4, 1, [0, 13, 50], 0), (8, 2, [3, 31, 40], 3), (60, 2, [0, 5, 90], 0)]


@pytest.mark.parametrize(("num_queries", "num_words", "starts", "draft_kv_offset"), MASKS)
def test_mask_bits(ops: Ops, num_queries: int, num_words: int, starts: list[int], draft_kv_offset: int) -> None:
    """`draft_kv_offset`: new tokens lie this many slots after the mask's start, as in later steps of a draft tree."""
    generator = torch.Generator().manual_seed(num_queries)
    low, high = -(2**31), 2**31
    words = torch.randint(low, high, (len(starts) * num_queries, num_words), generator=generator, dtype=torch.int64)
    mask_starts = [start - draft_kv_offset for start in starts]
    max_keys = max(starts) + num_queries + 9
    mask = ops.raw.tree_mask_bits(
        words.int().to(DEVICE),
        torch.tensor(mask_starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        num_queries,
        max_keys,
    )
    assert mask.dtype == torch.uint8
    assert mask.shape == (len(starts), -(-num_queries * max_keys // 8))
    for b, (start, mask_start) in enumerate(zip(starts, mask_starts, strict=True)):
        own = words.view(len(starts), num_queries, -1)[b].tolist()
        expected = naive_mask(own, mask_start, start, num_queries)
        assert unpacked(mask, b, len(expected)) == expected
