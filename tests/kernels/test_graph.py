"""All operations of a round together: on garbage, and in a CUDA graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specbatch.draft.rng import Draw
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import (
    FILTERS,
    Ops,
    commit,
    filter_tensors,
    make_ops,
)

pytestmark = [pytest.mark.gpu] if CUDA else []


def test_garbage_gives_no_index_out_of_range(triton_ops: Ops) -> None:
    """As in a captured graph's padding rows."""
    logits = torch.full((3, 300), math.nan)
    logits[1] = -math.inf
    logits[2, ::2] = math.inf
    assert triton_ops.draw(logits, torch.full((3,), 0.5, dtype=torch.float64)).lt(300).all()
    for garbage in (math.nan, -math.inf, math.inf):
        scores, ids = torch.full((3, 4, 4), garbage, device=DEVICE), torch.ones((3, 4, 4), device=DEVICE).long()
        candidates, branches = triton_ops.raw.beam_start(scores[:, 0], ids[:, 0], None, 20, 1)
        branches = triton_ops.raw.beam_expand(candidates, branches, scores, ids, None, 1)
        assert bool(((branches.parent_BK >= 0) & (branches.parent_BK < 4)).all())
        assert bool(((branches.index_BK >= 4) & (branches.index_BK < 20)).all())
        assert bool((branches.tokens_BK == 1).all())
        tokens, parents, depths, _ = triton_ops.select_nodes(ids[:, 0, 0], *candidates, 8, 2)
        assert bool((tokens == 1).all())
        assert bool((parents < torch.arange(8)).all())
        assert bool(((depths >= 0) & (depths < 8)).all())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_captured_in_a_graph(kind: str) -> None:
    """All operations one after the other in one CUDA graph (capture refuses what makes the host wait), replayed on
    other inputs."""
    ops = make_ops(kind)

    def inputs(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(12, 9001, generator=generator) * 3
        integers = [torch.randint(-(2**62), 2**62, (12,), generator=generator) for _ in range(4)]
        history = torch.randint(0, 4, (12, 2000), generator=generator).int()
        parents = torch.stack([torch.arange(-1, 3), torch.tensor([-1, 0, 0, 1]), torch.tensor([-1, 0, 0, 2])])
        root = torch.randint(0, 9, (3,), generator=generator)
        return [x.to(DEVICE) for x in (logits, *integers, history, parents, root)]

    filters = [x.to(DEVICE) for x in filter_tensors([FILTERS["all"], FILTERS["greedy"], FILTERS["top_p"]] * 4)]
    lengths = torch.arange(500, 1700, 100, device=DEVICE)
    rows = torch.arange(12, device=DEVICE).flip(0)

    def everything(
        logits: Tensor, seed: Tensor, stream: Tensor, sample: Tensor, position: Tensor, history: Tensor,
        parents: Tensor, root: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        u = ops.raw.uniform(seed, stream, sample, position, Draw.SAMPLE)
        p = ops.raw.distribution(logits, *filters)
        choice = ops.raw.sample(logits, *filters, u).view(3, 4)
        tokens = torch.cat((root[:, None], choice[:, :3]), dim=1)
        scores, ids = ops.raw.draft_topk(logits[:3], 4)
        steps = ops.raw.draft_topk(logits, 4)
        candidates, beam = ops.raw.beam_start(scores, ids, None, 20, 1)
        beam = ops.raw.beam_expand(candidates, beam, steps[0].view(3, 4, 4), steps[1].view(3, 4, 4), None, 1)
        nodes = ops.raw.select_nodes(root, *candidates, 8, 2)
        q, coins = p.view(3, 4, -1)[:, 1:], u.view(3, 4)
        chain = ops.raw.accept_chain(
            choice[:, 1:], q, None, p.view(3, 4, -1), rows[-3:], filters[0][:3], coins[:, :3], coins[:, :3], coins
        )
        found = [u, p, choice, ops.raw.argmax(logits), ops.raw.draw(p, u), scores, ids]
        found += [*candidates, *beam, *nodes, *chain, *commit(ops, tokens, parents, choice)]
        found += ops.raw.ngram_lookup(history, history.flip(1), rows, lengths, lengths // 2, lengths + 4, 2, 4, 5)
        return found

    static = inputs(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        everything(*static)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        aux_hidden_states = everything(*static)
    for seed in (1, 2):
        new = inputs(seed)
        for buffer, value in zip(static, new, strict=True):
            buffer.copy_(value)
        graph.replay()
        for found, expected in zip(aux_hidden_states, everything(*new), strict=True):
            assert torch.equal(found, expected)
