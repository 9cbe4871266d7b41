"""Probabilities and buckets of chains, and counts of right drafts: torch and Triton alike, against plain loops."""

from __future__ import annotations

import pytest
import torch

from specbatch.kernels.corpus import ESTIMATE_UNIT
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import Ops

pytestmark = [pytest.mark.gpu] if CUDA else []
EDGES, PLACES, NUM_SOURCES, MOST = [0.2, 0.6, 0.9], [1, 2, 4], 3, 0.99
NUM_BUCKETS = NUM_SOURCES * 2 * 4 * 4


@pytest.mark.parametrize(("chains", "drafts", "least"), [(2, 31, 0.0), (4, 7, 0.3), (4, 3, 0.0), (2, 1, 0.3)])
@pytest.mark.parametrize(("is_drawn", "price"), [(False, 0.0), (True, 0.0), (True, 0.375)])
def test_the_best_chain_is_chosen(
    ops: Ops, chains: int, drafts: int, least: float, is_drawn: bool, price: float
) -> None:
    torch.manual_seed(drafts)
    batch = 24
    tokens, sources = torch.randint(0, 99, (batch, chains, drafts)), torch.randint(0, NUM_SOURCES, (batch, chains))
    lengths = torch.randint(0, drafts + 1, (batch, chains, 1)) * (torch.arange(batch) > 0)[:, None, None]
    # Their sums are exact. Chains of a request can have the same sum.
    probabilities = torch.randint(0, 9, (batch, chains, drafts)).sort(dim=2, descending=True).values / 8
    probabilities *= torch.arange(drafts) < lengths
    root = torch.arange(2 * batch)[::2]
    found, scores, num_nodes, chosen, is_given = ops.raw.choose_chain(
        *(x.to(DEVICE) for x in (root, tokens, probabilities, sources, torch.tensor([price]))), least, is_drawn
    )
    assert (is_given is not None) == is_drawn
    for b in range(batch):
        kept = [[p for p in line if p >= least and p > 0] for line in probabilities[b].tolist()]
        compared = kept[: chains - is_drawn]
        worth = [sum(max(p - price, 0.0) + p / 1024 for p in line) for line in compared]
        best = max(range(len(compared)), key=lambda c: (worth[c], -c))
        if is_given is not None:
            assert bool(is_given[b]) == (best < chains - 2)
            best = best if is_given[b] else chains - 1
        count = len(kept[best])
        assert found[b].tolist() == [int(root[b]), *tokens[b, best].tolist()]
        assert scores[b, : 1 + count].exp().tolist() == pytest.approx([1.0, *kept[best]])
        assert scores[b, 1 + count :].isneginf().all()
        assert (int(num_nodes[b]), chosen[b].tolist()) == (count + 1, [count, int(sources[b, best]), best])


def test_the_price_is_the_best_draft_that_was_left(ops: Ops) -> None:
    torch.manual_seed(0)
    probabilities = torch.rand(24, 7) * (torch.arange(7) < torch.randint(0, 8, (24, 1)))
    scores = torch.nn.functional.pad(probabilities.log(), (1, 0))
    verified, new = torch.randint(3, 8, (24,)), torch.randint(0, 3, (24,))
    left = [p for b in range(24) if new[b] for p in probabilities[b, verified[b] :].tolist()]
    found = ops.raw.largest_left(*(x.to(DEVICE) for x in (scores, verified, new)))
    assert found.tolist() == pytest.approx([max(left)])
    found = ops.raw.largest_left(*(x.to(DEVICE) for x in (scores, torch.full_like(verified, 7), new)))
    assert found.tolist() == [0.0]


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize(("chains", "drafts"), [(2, 31), (3, 7), (3, 1)])
def test_chains_are_judged_and_counted(ops: Ops, chains: int, drafts: int, is_drawn: bool) -> None:
    torch.manual_seed(drafts)
    batch, columns = 9, max(1, drafts - 2)
    tokens = torch.randint(0, 2, (batch, chains, drafts))
    tokens[:4] = tokens[:4, :1]  # Chains agree for a while.
    tokens[:4, 1, drafts // 2 :] += 1
    lengths = torch.randint(0, drafts + 1, (batch, chains, 1))
    estimates = torch.rand(batch, chains, drafts) * (torch.arange(drafts) < lengths)
    sources, factors = torch.randint(0, NUM_SOURCES, (batch, chains)), 0.5 + torch.rand(NUM_BUCKETS)
    new, num_new = tokens[:, 0, :columns].clone(), torch.randint(0, columns + 1, (batch,))
    new[5:, -1] += 1
    probabilities, buckets = ops.judge_chains(
        tokens, estimates, sources, factors, torch.tensor(EDGES), torch.tensor(PLACES), MOST
    )
    num_drawn = torch.randint(0, drafts + 1, (batch,))
    chosen, num_texts = torch.randint(0, chains, (batch,)), 2
    sums = ops.count_right(
        tokens, estimates, buckets, factors, chosen, new, num_new, torch.zeros(2, NUM_BUCKETS, 2, dtype=torch.int64),
        num_texts, num_drawn if is_drawn else None,
    )  # fmt: skip
    expected_sums, num_agreeing = torch.zeros_like(sums), 0
    for b in range(batch):
        for c in range(chains):
            product, is_right = 1.0, True
            for d in range(int(lengths[b, c])):
                agrees = any(
                    int(lengths[b, o]) > d and tokens[b, o, : d + 1].equal(tokens[b, c, : d + 1])
                    for o in range(chains)
                    if o != c
                )
                num_agreeing += agrees
                first = sum(float(estimates[b, c, 0]) > edge for edge in EDGES)
                place = sum(d + 1 > last for last in PLACES)
                bucket = ((2 * int(sources[b, c]) + agrees) * 4 + first) * 4 + place
                assert buckets[b, c, d] == bucket
                product *= min(MOST, float(estimates[b, c, d]) * float(factors[bucket]))
                assert float(probabilities[b, c, d]) == pytest.approx(product, rel=1e-5)
                counts = not is_drawn or c < chains - 2 or d < int(num_drawn[b])
                if is_right and counts and d < min(int(num_new[b]), columns):
                    is_right = bool(tokens[b, c, d] == new[b, d])
                    expected_sums[0, bucket, 0] += int(estimates[b, c, d] * ESTIMATE_UNIT)
                    expected_sums[0, bucket, 1] += is_right
                    if c == chosen[b] and c < num_texts:
                        expected_sums[1, bucket, 0] += int(estimates[b, c, d] * factors[bucket] * ESTIMATE_UNIT)
                        expected_sums[1, bucket, 1] += is_right
                else:
                    is_right = False
            assert not probabilities[b, c, int(lengths[b, c]) :].any()
    assert torch.equal(sums, expected_sums)
    assert num_agreeing > 0
    assert 0 < sums[1, :, 1].sum() < sums[0, :, 1].sum() < (sums[0, :, 0] > 0).sum() * batch
