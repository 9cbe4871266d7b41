"""The steps of drafting a tree, torch and Triton alike, against plain Python."""

from __future__ import annotations

import random

import pytest

from specbatch.batch import Beam
from tests.kernels.batches import CUDA
from tests.kernels.operations import Ops
from tests.kernels.test_steps import on_device

pytestmark = [pytest.mark.gpu] if CUDA else []


@pytest.mark.parametrize(("k", "num_steps"), [(1, 1), (3, 4), (4, 5), (10, 7)])
@pytest.mark.parametrize("mapped", [False, True])
def test_beam(ops: Ops, k: int, num_steps: int, mapped: bool) -> None:
    batch, vocab = 3, 40
    rng = random.Random(k)
    target_ids = on_device(rng.sample(range(100), vocab)) if mapped else None
    num_candidates = k + (num_steps - 1) * k * k
    words = -(-k * max(num_steps - 1, 1) // 32)

    def step_of(rows: int) -> tuple[list, list]:
        scores = [[[-rng.randrange(1, 6) / 2 for _ in range(k)] for _ in range(rows)] for _ in range(batch)]
        return scores, [[rng.sample(range(vocab), k) for _ in range(rows)] for _ in range(batch)]

    def name(token: int) -> int:
        return token if target_ids is None else int(target_ids[token])

    scores, ids = step_of(1)
    candidates, beam = ops.raw.beam_start(
        on_device([s[0] for s in scores]), on_device([i[0] for i in ids]), target_ids, num_candidates, words
    )
    # Of each sequence (token, score, parent); and its branches, as indices of these, with what they see.
    nodes = [[(name(t), s, -1) for t, s in zip(ids[b][0], scores[b][0], strict=True)] for b in range(batch)]
    branches = [[(i, {i}) for i in range(k)] for _ in range(batch)]
    for step in range(1, num_steps):
        check_beam(beam, nodes, branches)
        scores, ids = step_of(k)
        beam = ops.raw.beam_expand(candidates, beam, on_device(scores), on_device(ids), target_ids, step)
        for b in range(batch):
            first = len(nodes[b])
            for i, (index, _) in enumerate(branches[b]):
                total = nodes[b][index][1]
                nodes[b] += [(name(t), total + s, index) for t, s in zip(ids[b][i], scores[b][i], strict=True)]
            best = sorted(range(first, len(nodes[b])), key=lambda index: (-nodes[b][index][1], index))[:k]
            assert beam.parent_BK[b].tolist() == [(index - first) // k for index in best]
            branches[b] = [
                (index, branches[b][(index - first) // k][1] | {step * k + j}) for j, index in enumerate(best)
            ]
    check_beam(beam, nodes, branches)
    tokens, scores, parents = (x.tolist() for x in candidates)
    assert [list(zip(*rows, strict=True)) for rows in zip(tokens, scores, parents, strict=True)] == nodes


def check_beam(beam: Beam, nodes: list[list[tuple]], branches: list[list[tuple[int, set[int]]]]) -> None:
    for b, branch in enumerate(branches):
        assert beam.index_BK[b].tolist() == [index for index, _ in branch]
        assert beam.tokens_BK[b].tolist() == [nodes[b][index][0] for index, _ in branch]
        assert beam.scores_BK[b].tolist() == [nodes[b][index][1] for index, _ in branch]
        for words, (_, seen) in zip(beam.seen_BKW[b].tolist(), branch, strict=True):
            bits = {32 * w + i for w, word in enumerate(words) for i in range(32) if word >> i & 1}
            assert bits == {bit for bit in seen if bit < 32 * len(words)}
