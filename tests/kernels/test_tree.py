"""The nodes of draft trees, torch and Triton alike, against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specbatch.batch import Candidates
from specbatch.draft.shape import DraftShape
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import (
    Ops,
    random_logits,
)
from tests.oracle.tree import select_nodes

pytestmark = [pytest.mark.gpu] if CUDA else []


@pytest.mark.parametrize("k", [1, 3, 10, 16])
def test_draft_topk(ops: Ops, k: int) -> None:
    logits = random_logits(6, 40, k, ties=True)
    logits[1, (k + 1) // 2 :] = -torch.inf  # fewer candidates than k
    scores, ids = ops.draft_topk(logits, k)
    for b in range(6):
        order = sorted(range(40), key=lambda i: (-float(logits[b, i]), i))[:k]
        assert ids[b].tolist() == order
        assert torch.allclose(scores[b], torch.log_softmax(logits[b], 0)[order])


def draft(ops: Ops, shape: DraftShape, batch: int, seed: int) -> Candidates:
    """Candidates of a tree whose scores often tie."""
    generator = torch.Generator().manual_seed(seed)
    k = shape.topk

    def step_of(*rows: int) -> tuple[Tensor, Tensor]:
        scores = -torch.randint(1, 5, (batch, *rows, k), generator=generator).float() / 2
        scores[::2, ..., 0] = -0.0625  # deep trees among the broad ones
        tokens = torch.rand(batch, *rows, 50, generator=generator).argsort(dim=-1)[..., :k]
        return scores.sort(dim=-1, descending=True).values.to(DEVICE), tokens.to(DEVICE)

    candidates, branches = ops.raw.beam_start(*step_of(), None, shape.num_candidates, 1)
    for step in range(1, shape.num_steps):
        branches = ops.raw.beam_expand(candidates, branches, *step_of(k), None, step)
    return candidates


def mask_bits(mask_NW: Tensor, num_nodes: int) -> Tensor:
    nodes = torch.arange(num_nodes)
    return (mask_NW[:, nodes >> 5] >> (nodes & 31) & 1).bool()


SHAPES = [DraftShape(7, 10, 60), DraftShape(5, 4, 8), DraftShape(2, 2, 2), DraftShape(6, 8, 64), DraftShape(4, 1, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_select_nodes(ops: Ops, shape: DraftShape) -> None:
    batch = 3 if ops.is_slow else 6
    candidates = draft(ops, shape, batch, shape.topk)
    root = torch.arange(batch)
    tokens, parents, depths, mask = ops.select_nodes(root, *candidates, shape.num_draft_tokens, shape.num_steps)
    tree = select_nodes(root, *(x.cpu() for x in candidates), shape.num_draft_tokens)
    assert torch.equal(tokens, tree.tokens_BN)
    assert torch.equal(parents, tree.parents_BN)
    assert mask.dtype == torch.int32
    assert mask.shape[2] == math.ceil(shape.num_draft_tokens / 32)
    for b in range(batch):
        assert depths[b].tolist() == tree.depths(b)
        assert torch.equal(mask_bits(mask[b], shape.num_draft_tokens), tree.mask(b))
    assert depths.max() == min(shape.num_steps, shape.num_draft_tokens - 1)
