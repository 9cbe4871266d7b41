"""Random numbers, sampling and draws, torch and Triton alike, against the oracle; and Triton's against the reference on
rows of many blocks. Without a GPU, in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.draft.rng import Draw
from specbatch.kernels import torch as reference
from specbatch.types import RngKey, SamplingParams
from tests.kernels.batches import CUDA
from tests.kernels.operations import (
    FILTERS,
    Ops,
    filter_tensors,
    noise_tensors,
    random_logits,
)
from tests.marks import slow_on_cpu
from tests.oracle import sampling
from tests.oracle.rng import uniform

pytestmark = [pytest.mark.gpu] if CUDA else []


def host_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), logits_V.shape[0]).double()
    return sampling.distribution(logits_V, params)


def test_argmax(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-1.0, -1.0, -2.0, -1.0], [0.0, -0.0, -3.0, -math.inf]])
    assert ops.argmax(logits).tolist() == [1, 0, 0]


@pytest.mark.parametrize("vocab", [1, 4, 50, 768, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax_and_margin(ops: Ops, vocab: int, dtype: torch.dtype) -> None:
    """Against a sort, with ties, masked tokens (-inf and the lowest number), and rows that are not finite."""
    logits = random_logits(12, vocab, 5, ties=False)
    logits[1, vocab // 3] = logits[1, vocab // 2] = 100.0
    logits[2] = -math.inf
    logits[2, vocab // 2] = -7.0
    logits[3] = torch.finfo(dtype).min
    logits[3, 0] = 1.0
    logits[4, -1], logits[5, 0], logits[6] = math.nan, math.inf, -math.inf
    logits = logits.to(dtype)
    ids, margins = ops.argmax_and_margin(logits, NO_TOKEN)
    assert ids.tolist() == ops.argmax(logits, NO_TOKEN).tolist()
    expected = [math.inf] * len(logits)
    for row, values in enumerate(logits.float().sort(descending=True).values.tolist()):
        if row < 4 or row > 6:
            assert logits[row, ids[row]] == values[0]
            if row not in (2, 3) and vocab > 1:
                expected[row] = float(torch.tensor(values[0]) - torch.tensor(values[1]))
    assert margins.dtype == torch.float32
    assert margins.tolist() == expected
    assert ids[4:7].tolist() == [NO_TOKEN] * 3
    assert margins[1] == (0.0 if vocab > 1 else math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_argmax_at_the_edges_of_groups(ops: Ops, dtype: torch.dtype) -> None:
    """The largest value and the second one at all sides of an edge, and a NaN of either sign there."""
    edges = [0, 127, 128, 255, 256, 2048, 4095, 4098]
    rows = []
    for first, second in itertools.product(edges, repeat=2):
        logits = torch.full((4099,), -3.0)
        logits[second], logits[first] = 5.0, 7.0
        rows.append(logits)
    found, margins = ops.argmax_and_margin(torch.stack(rows).to(dtype), NO_TOKEN)
    assert found.tolist() == [first for first in edges for _ in edges]
    expected = [10.0 if first == second else 2.0 for first, second in itertools.product(edges, repeat=2)]
    assert margins.tolist() == expected
    ties = torch.stack([(row > 0).float() for row in rows])
    assert ops.argmax(ties.to(dtype)).tolist() == [min(pair) for pair in itertools.product(edges, repeat=2)]
    broken = torch.stack(rows[:: len(edges) + 1])
    for row, edge in enumerate(edges):
        broken[row, edge] = math.copysign(math.nan, row % 2 - 0.5)
    assert ops.argmax(broken.to(dtype), NO_TOKEN).tolist() == [NO_TOKEN] * len(edges)


def noise_cases() -> tuple[list[RngKey], list[int]]:
    rng = random.Random(0)
    words = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    words += [rng.getrandbits(64) for _ in range(60)]
    keys = [RngKey(rng.choice(words), rng.choice(words), rng.randrange(100)) for _ in range(200)]
    return keys, [rng.choice([0, 1, rng.randrange(2**17), 2**32 - 1]) for _ in keys]


@pytest.mark.parametrize("purpose", Draw)
def test_uniform(ops: Ops, purpose: Draw) -> None:
    keys, positions = noise_cases()
    found = ops.uniform(*noise_tensors(keys, positions), purpose)
    assert found.dtype == torch.float64
    assert found.tolist() == [uniform(k, p, purpose) for k, p in zip(keys, positions, strict=True)]


def test_uniform_broadcasts(ops: Ops) -> None:
    seed, stream, sample, position = noise_tensors([RngKey(5, 6, 0), RngKey(7, 2**40, 1)], [10, 20])
    found = ops.uniform(seed[:, None], stream[:, None], sample[:, None], position[:, None] + torch.arange(3), 2)
    assert found.shape == (2, 3)
    assert found[1, 2] == uniform(RngKey(7, 2**40, 1), 22, Draw.ACCEPT)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_distribution_and_sample(ops: Ops, ties: bool) -> None:
    params = list(FILTERS.values()) * (1 if ops.is_slow else 8)
    logits = random_logits(len(params), 50, 1, ties)
    rows = [host_distribution(row, p) for row, p in zip(logits, params, strict=True)]
    found, expected = ops.distribution(logits, *filter_tensors(params)), torch.stack(rows)
    assert found.dtype == (torch.float64 if ops.is_exact else torch.float32)
    if ops.is_exact:
        assert torch.equal(found, expected)
    assert torch.equal(found > 0, expected.float() > 0)
    assert torch.allclose(found.float(), expected.float(), rtol=2e-5, atol=0)
    for u in [0.0, 0.5, 1 - 2.0**-53] if ops.is_slow else [0.0, 0.1, 0.5, 0.9, 1 - 2.0**-53]:
        tokens = ops.sample(logits, *filter_tensors(params), torch.full((len(params),), u, dtype=torch.float64))
        assert tokens.tolist() == [sampling.draw(p, u) for p in rows]


def test_draw_at_every_boundary(ops: Ops) -> None:
    """Just below each boundary of the cumulative sum and on it: token i gets exactly [cdf[i - 1], cdf[i])."""
    p = torch.tensor([0.0, 0.25, 0.0, 0.125, 0.5, 0.125, 0.0])
    edges = [0.0, 0.25, 0.375, 0.875, 1.0]
    for token, low, high in zip([1, 3, 4, 5], edges, edges[1:], strict=False):
        for u in (low, (low + high) / 2, math.nextafter(high, 0.0)):
            # A total of 3 makes the products inexact; the last boundary must not be left.
            for scale in (1.0, 2.0**-40):
                assert ops.draw(p[None] * scale, torch.tensor([u], dtype=torch.float64)).item() == token
    inexact = torch.tensor([[0.1, 0.7, 0.0]], dtype=torch.float32)
    assert ops.draw(inexact, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 1


@pytest.mark.parametrize("name", [n for n in FILTERS if n != "greedy"])
def test_sample_realises_the_distribution(ops: Ops, name: str) -> None:
    """Every token is drawn over its whole interval of uniforms, and nothing else is: at both ends and in the middle."""
    rows, uniforms, expected = [], [], []
    for seed in range(2 if ops.is_slow else 20):
        logits = random_logits(1, 8 if ops.is_slow else 24, seed, ties=seed % 2 == 0)[0]
        cdf = [0.0, *host_distribution(logits, FILTERS[name]).cumsum(0).tolist()]
        for token, (low, high) in enumerate(itertools.pairwise(cdf)):
            margin = 0.0 if ops.is_exact and low == 0.0 else 1e-6
            if high - low > 4e-6:
                for u in (low + margin, (low + high) / 2, high - max(margin, 1e-15)):
                    rows.append(logits)
                    uniforms.append(u)
                    expected.append(token)
    assert len(set(expected)) > 1 or name in ("top_k 1", "tiny top_p", "cold")
    filters = filter_tensors([FILTERS[name]] * len(rows))
    assert ops.sample(torch.stack(rows), *filters, torch.tensor(uniforms, dtype=torch.float64)).tolist() == expected


# Pairs p, q in eighths, for which p / q is a multiple of 1/4 and quantiles of p and of the residual are such of 1/8. So
# uniforms in the middles of the quarters and of the eighths measure exactly.
# Triton against the reference: rows of many blocks, other types, rows that lie apart.


def large_logits(dtype: torch.dtype, ties: bool = False) -> Tensor:
    """(4, 9001), rows apart, in three blocks, which the kernels round up to four: noise, equal logits, -inf but for a
    few, and a peak with zeros."""
    logits = random_logits(4, 9008, 3, ties)
    logits[1] = -0.5
    logits[2, :] = -math.inf
    logits[2, [5, 4095, 4096, 9000]] = torch.tensor([1.0, 2.0, 2.0, -3.0])
    logits[3] = torch.tensor([0.0, -0.0]).repeat(4504)
    logits[3, 8999] = 1.5
    return logits.to(dtype)[:, :9001]


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_argmax_and_topk(triton_ops: Ops, dtype: torch.dtype) -> None:
    logits = large_logits(dtype)
    assert torch.equal(triton_ops.argmax(logits), reference.argmax(logits.double()))
    for k in (1, 10):
        scores, ids = triton_ops.draft_topk(logits, k)
        expected_scores, expected_ids = reference.draft_topk(logits.float(), k)
        assert torch.equal(ids, expected_ids)
        assert torch.allclose(scores, expected_scores, atol=1e-5)


LARGE = [(name, torch.float32) for name in FILTERS] + [("plain", torch.bfloat16)]
# Of another type only what is loaded differs, whatever the filters.
LARGE += [slow_on_cpu(name, torch.bfloat16) for name in FILTERS if name != "plain"]


@pytest.mark.parametrize(("name", "dtype"), LARGE, ids=str)
def test_large_distribution_sample_and_draw(triton_ops: Ops, name: str, dtype: torch.dtype) -> None:
    logits = large_logits(dtype)
    filters = filter_tensors([FILTERS[name]] * len(logits))
    found, expected = triton_ops.distribution(logits, *filters), reference.distribution(logits, *filters).float()
    assert torch.equal(found > 1e-30, expected > 1e-30)
    assert torch.allclose(found, expected, rtol=1e-4, atol=0)
    for u in (0.123, 1 - 2.0**-53):
        uniforms = torch.full((len(logits),), u, dtype=torch.float64)
        tokens = triton_ops.sample(logits, *filters, uniforms)
        assert torch.equal(tokens, triton_ops.draw(found, uniforms))
        # The same token, or its neighbour if the uniform is at their boundary.
        cdf = expected.double().cumsum(1)
        high = cdf.gather(1, tokens[:, None])[:, 0]
        low = high - expected.gather(1, tokens[:, None])[:, 0]
        assert bool(((low - 1e-6 <= u) & (u <= high + 1e-6)).all())
        assert bool((expected.gather(1, tokens[:, None]) > 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample_at_the_edges_of_groups(triton_ops: Ops, dtype: torch.dtype) -> None:
    """Equal tokens at all sides of an edge. Top-p keeps the first of them, and top-k keeps all."""
    edges = [0, 127, 128, 255, 256, 2048, 4095, 4098]
    logits = torch.full((4099,), -math.inf)
    logits[edges] = 3.0
    for params, kept in (({}, 8), ({"top_k": 3}, 8), ({"top_p": 0.3125, "top_k": 1}, 3)):
        filters = filter_tensors([SamplingParams(temperature=0.5, **params)] * kept)
        uniforms = (torch.arange(kept, dtype=torch.float64) + 0.5) / kept
        rows = logits.to(dtype).expand(kept, -1)
        assert triton_ops.sample(rows, *filters, uniforms).tolist() == edges[:kept]
        found = triton_ops.distribution(rows[:1], *(values[:1] for values in filters))[0]
        assert found.nonzero()[:, 0].tolist() == edges[:kept]
        assert torch.equal(found[edges[:kept]], torch.full((kept,), 1 / kept))


def test_a_row_does_not_depend_on_the_others(triton_ops: Ops) -> None:
    logits = random_logits(4, 700, 2, ties=True)
    filters = filter_tensors([FILTERS[name] for name in ("all", "plain", "top_p", "greedy")])
    uniforms = torch.tensor([0.3, 0.6, 0.9, 0.1], dtype=torch.float64)
    tokens, found = triton_ops.sample(logits, *filters, uniforms), triton_ops.distribution(logits, *filters)
    for i in range(len(logits)):
        row = slice(i, i + 1)
        alone = [values[row] for values in filters]
        assert torch.equal(triton_ops.sample(logits[row], *alone, uniforms[row]), tokens[row])
        assert torch.equal(triton_ops.distribution(logits[row], *alone), found[row])


@pytest.mark.parametrize("seed", range(4))
def test_large_filters_of_any_strength(triton_ops: Ops, seed: int) -> None:
    """What is kept, on random combinations of filters."""
    rng = random.Random(seed)
    logits = large_logits(torch.float32, ties=seed % 2 == 0)
    params = [
        SamplingParams(
            temperature=2.0 ** rng.randrange(-3, 4),
            top_k=rng.choice([0, 1, 2, 50, 1000, 8999, 9000, 9001, 20000]),
            top_p=rng.choice([1.0, 1 - 2.0**-12, 0.9375, 0.5, 2.0**-10]),
            min_p=rng.choice([0.0, 0.0, 2.0**-10, 0.5, 1.0]),
        )
        for _ in logits
    ]
    found = triton_ops.distribution(logits, *filter_tensors(params))
    expected = reference.distribution(logits, *filter_tensors(params)).float()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert ((found > 0) != (expected > 0)).sum() <= 2, "more than a rounding at the end of top-p"
