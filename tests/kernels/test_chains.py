"""Chains of several sources side by side: torch and Triton alike, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from specbatch.kernels.chains import CORPUS, FORECAST, JOB, NETWORK, OF_NETWORK, ROW, UNKNOWN
from specbatch.kernels.corpus import match_estimates
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import Ops

pytestmark = [pytest.mark.gpu] if CUDA else []
BATCH, MATCHED, VOCAB = 20, 12, 9


def steps_of(probabilities: list[float]) -> list[float]:
    return [p / q if p else 0.0 for q, p in zip([1.0, *probabilities], probabilities, strict=False)]


@pytest.mark.parametrize("network", ["none", "likely", "drawn", "drawn, fewer tokens"])
@pytest.mark.parametrize(("drafts", "steps"), [(31, 3), (7, 3), (3, 3), (1, 1)])
def test_chains_are_put_side_by_side(ops: Ops, drafts: int, steps: int, network: str) -> None:
    torch.manual_seed(drafts)
    index, is_drawn = torch.arange(drafts), network.startswith("drawn")
    row, shared = torch.randint(0, 99, (2, BATCH, drafts))
    num_row, num_shared = torch.randint(0, drafts + 1, (2, BATCH))
    matched = torch.randint(1, MATCHED + 1, (BATCH,)) * (num_row > 0)
    table = match_estimates(MATCHED, drafts + 2, torch.device("cpu"))  # The table is of longer chains.
    probabilities = torch.rand(BATCH, drafts).cumprod(dim=1) * (index < num_shared[:, None])
    is_loaded = torch.rand(BATCH) < 0.5
    args = [row, num_row, matched, table, shared, probabilities, is_loaded]
    nodes = torch.randint(0, 99, (BATCH, steps + 1))
    scores = torch.cat((torch.zeros(BATCH, 1), (0.1 + 0.9 * torch.rand(BATCH, steps)).log().cumsum(dim=1)), dim=1)
    scores[:2, 1:] = -math.inf  # The logits were not finite.
    fields = torch.stack((torch.arange(BATCH), torch.arange(BATCH) + torch.randint(0, steps + 4, (BATCH,))), dim=1)
    likely, ids = torch.randint(0, VOCAB, (BATCH,)), 50 + torch.randperm(VOCAB)
    if network != "none":
        args += [nodes, scores, fields[:, 0], fields[:, 1]]
    if is_drawn:
        args += [likely, *([ids] if network == "drawn, fewer tokens" else [])]
    tokens, estimates, sources, known = ops.raw.join_chains(*(x.to(DEVICE) for x in args))
    assert (known is not None) == is_drawn
    assert (tokens.dtype, estimates.dtype, sources.dtype) == (torch.int64, torch.float32, torch.int64)
    num_full = 0
    for b in range(BATCH):
        of_row = [float(p) * (d < int(num_row[b])) for d, p in enumerate(table[matched[b], :drafts])]
        chains = [(row[b].tolist(), steps_of(of_row), ROW)]
        of_shared = (shared[b].tolist(), steps_of(probabilities[b].tolist()), CORPUS if is_loaded[b] else JOB)
        chains.append(of_shared)
        if network != "none":
            room, padded = int(fields[b, 1] - fields[b, 0]) - 1, [0.0] * (drafts - steps)
            num_full += room >= steps
            line = steps_of([math.exp(s) * (d < room) for d, s in enumerate(scores[b, 1:].tolist())])
            of_network = nodes[b, 1:].tolist() + [0] * (drafts - steps)
            if is_drawn:
                forecast = [line[0] * (d < room) for d in range(steps)]
                chains.append((of_network, forecast + padded, FORECAST))
            chains.append((of_network, line + padded, NETWORK))
        assert tokens[b].tolist() == [chain[0] for chain in chains]
        assert sources[b].tolist() == [chain[2] for chain in chains]
        for found, expected in zip(estimates[b].tolist(), (chain[1] for chain in chains), strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
            assert [p > 0 for p in found] == [p > 0 for p in expected]
        if known is not None:
            first = int(ids[likely[b]]) if network == "drawn, fewer tokens" else int(likely[b])
            hidden = [[first, *[UNKNOWN] * (drafts - 1)], [OF_NETWORK] * drafts]
            assert known[b].tolist() == [*(chain[0] for chain in chains[:2]), *hidden]
    assert network == "none" or 0 < num_full < BATCH
