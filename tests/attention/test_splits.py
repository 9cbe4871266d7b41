"""The workspace of split attention is large enough for every launch: captured graphs hold its address, so it never
grows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specbatch.attention.triton import WORKSPACE_ROWS, num_splits
from specbatch.kernels.triton.parts.attention_tile import tile_for
from specbatch.kernels.triton.workspace import Workspace


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_workspace_holds_every_launch(head_dim: int, itemsize: int) -> None:
    workspace = Workspace(torch.device("cpu"), WORKSPACE_ROWS, head_dim)
    for num_seqs in (1, 2, 3, 4, 7, 8, 16, 18, 31, 33, 64, 132, 256):
        for kv_heads in (1, 2, 3, 8):
            for group in (1, 3, 4, 7, 8):
                for queries in (1, 2, 4, 5, 8, 10, 17, 33, 50, 60, 64, 100, 200, 1000):
                    rows = queries * group
                    splits = num_splits(num_seqs, kv_heads, rows)
                    assert splits in (1, 2, 4, 8, 16)
                    block_m = tile_for(rows, head_dim, itemsize, num_programs=num_seqs * kv_heads).block_m
                    if splits > 1:
                        workspace.reserve(num_seqs * kv_heads * -(-rows // block_m), splits, block_m, head_dim)


def test_splits_as_measured() -> None:
    """Of the heads of half a Llama-3-70B: a chain of 4 nodes has 32 rows."""
    assert [num_splits(num_seqs, 4, 32) for num_seqs in (4, 8, 16, 32, 33, 64)] == [8, 8, 4, 2, 1, 1]
    assert [num_splits(num_seqs, 4, 8, 256) for num_seqs in (1, 4, 16, 32, 64)] == [8, 4, 4, 2, 1]
    assert [num_splits(32, 4, num_rows) for num_rows in (16, 17, 32, 33)] == [4, 2, 2, 4]
    assert [num_splits(num_seqs, 4, 8) for num_seqs in (4, 8, 16, 32, 64, 65)] == [8, 8, 8, 4, 2, 1]
