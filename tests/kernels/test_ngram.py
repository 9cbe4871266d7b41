"""N-gram drafts, torch and Triton alike, against the oracle."""

from __future__ import annotations

import random

import pytest
import torch

from specbatch.kernels import torch as reference
from specbatch.types import RngKey, SamplingParams
from tests.kernels.batches import CUDA
from tests.kernels.operations import (
    Ops,
    sequence,
)
from tests.oracle.ngram import NgramProposer

pytestmark = [pytest.mark.gpu] if CUDA else []


def histories(seed: int) -> tuple[list[list[int]], list[int]]:
    """Token lists of two to four words, so that matches of every length abound, and their limits."""
    rng = random.Random(seed)
    texts = [[rng.randrange(rng.choice([2, 3, 4])) for _ in range(rng.randrange(1, 40))] for _ in range(60)]
    texts += [[1], [1, 1], [1, 2], [1, 2, 1], [5, 6, 7, 5, 6, 7], [3] * 40]
    return texts, [len(t) + rng.choice([0, 1, 3, 50]) for t in texts]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 4), (3, 8)])
def test_ngram_lookup(ops: Ops, sizes: tuple[int, int]) -> None:
    texts, limits = histories(sizes[1])
    order = random.Random(1).sample(range(len(texts)), len(texts))
    tokens = torch.full((len(texts), 40), 1, dtype=torch.int32)  # what lies after a text must not be seen
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = torch.tensor(text)
    table = torch.tensor([[0, len(t), limit] for t, limit in zip(texts, limits, strict=True)])
    drafts, counts = ops.ngram_lookup(tokens, torch.tensor(order), table[:, 1], table[:, 2], *sizes, 6)
    sequences = []
    proposer = NgramProposer(7, *sizes)
    for slot in order:
        seq = sequence(SamplingParams(), RngKey(0, 0, 0), 1, limits[slot])
        seq.tokens = list(texts[slot])
        proposer.start(seq)
        sequences.append(seq)
    tree = proposer.propose(sequences)
    assert set(tree.num_nodes) >= {1, 2, 4, 7}
    for b, n in enumerate(tree.num_nodes):
        assert counts[b] == n - 1
        assert drafts[b].tolist() == tree.tokens_BN[b, 1:n].tolist() + [0] * (7 - n)


def test_large_ngram_lookup(triton_ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 6, (9, 3000), generator=generator).int()
    lengths = torch.tensor([1, 2, 1023, 1024, 1025, 2048, 2049, 2999, 3000])
    args = (tokens, torch.tensor([8, 3, 4, 0, 1, 2, 5, 6, 7]), lengths, lengths + 3, 2, 9, 5)
    for found, expected in zip(triton_ops.ngram_lookup(*args), reference.ngram_lookup(*args), strict=True):
        assert torch.equal(found, expected)
