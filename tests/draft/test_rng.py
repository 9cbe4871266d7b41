"""Philox against its published vectors, and the path from a number in [0, 1) to a token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import chi2
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specbatch.draft.rng import Draw
from specbatch.types import RngKey, SamplingParams
from tests.oracle.rng import philox4x32, uniform
from tests.oracle.sampling import distribution, draw, token_logprob

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    """The vectors of Random123's kat_vectors for philox4x32 with ten rounds."""
    assert philox4x32(counter, key) == expected


def test_every_part_of_the_key_counts() -> None:
    seeds = [0, 1, 1 << 32, (1 << 64) - 1]
    streams = [0, 1, 255, 256, 1 << 32, (1 << 40) + 1]
    keys = [RngKey(seed, stream, sample) for seed in seeds for stream in streams for sample in (0, 1, 127)]
    values = [uniform(k, position, purpose) for k in keys for position in (0, 1, 2, 100_000) for purpose in Draw]
    assert len(set(values)) == len(values), "two draws share their number"
    assert all(0.0 <= value < 1.0 for value in values)
    assert uniform(keys[5], 7, Draw.DRAFT) == uniform(RngKey(0, 1, 127), 7, Draw.DRAFT)


def test_the_largest_number_is_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.oracle.rng.philox4x32", lambda counter, key: (ONES,) * 4)
    assert uniform(RngKey(0, 0, 0), 0, Draw.SAMPLE) == 1.0 - 2.0**-53


@pytest.mark.parametrize("along", ["position", "purpose", "stream", "sample", "seed"])
def test_neighbours_are_independent(along: str) -> None:
    """Pairs of draws that differ in one word fall evenly into 8 x 8 cells (false alarm: 1e-4 each, over keys)."""

    def pair(i: int) -> tuple[float, float]:
        first = RngKey(3, i, 0), 5, Draw.ACCEPT
        second = {
            "position": (RngKey(3, i, 0), 6, Draw.ACCEPT),
            "purpose": (RngKey(3, i, 0), 5, Draw.RESIDUAL),
            "stream": (RngKey(3, i + (1 << 20), 0), 5, Draw.ACCEPT),
            "sample": (RngKey(3, i, 1), 5, Draw.ACCEPT),
            "seed": (RngKey(4, i, 0), 5, Draw.ACCEPT),
        }[along]
        return uniform(*first), uniform(*second)

    count, cells = 6400, [0] * 64
    for i in range(count):
        a, b = pair(i)
        cells[int(a * 8) * 8 + int(b * 8)] += 1
    mean = count / 64
    assert chi2.sf(sum((c - mean) ** 2 / mean for c in cells), 63) > 1e-4


@pytest.mark.parametrize("seed", range(20))
def test_draw_is_the_quantile(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(9, generator=generator, dtype=torch.float64)
    p[[0, 4, 8]] = 0.0  # at both ends and within
    if seed % 2:
        p /= p.sum()
    total, before = float(p.sum()), 0.0
    for token in range(9):
        if p[token] > 0:
            for share in (1e-9, 0.3, 1 - 1e-9):
                assert draw(p, (before + share * float(p[token])) / total) == token
        before += float(p[token])
    assert draw(p, 0.0) == 1
    assert draw(p, 1.0 - 2.0**-53) == 7


def test_draw_never_gives_what_has_no_mass() -> None:
    tiny = torch.tensor([0.0, 1e-300, 0.0, 0.0], dtype=torch.float64)
    assert {draw(tiny, u) for u in (0.0, 0.5, 1.0 - 2.0**-53)} == {1}
    # A sum that rounds so that u * total can reach it.
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64) * 3.0000000000000004
    padded = torch.cat((thirds, torch.zeros(2, dtype=torch.float64)))
    assert draw(padded, 1.0 - 2.0**-53) == 2


WARPERS = [
    (SamplingParams(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    (SamplingParams(temperature=1.0, top_k=5), [TopKLogitsWarper(5)]),
    (SamplingParams(temperature=1.0, top_k=1), [TopKLogitsWarper(1)]),
    (SamplingParams(temperature=1.0, top_k=1000), []),
    (SamplingParams(temperature=1.0, top_p=0.6), [TopPLogitsWarper(0.6)]),
    (SamplingParams(temperature=1.0, top_p=1e-6), [TopPLogitsWarper(1e-6)]),
    (SamplingParams(temperature=1.0, min_p=0.2), [MinPLogitsWarper(0.2)]),
    (SamplingParams(temperature=1.0, min_p=1.0), [MinPLogitsWarper(1.0)]),
    (
        SamplingParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.05),
        [TemperatureLogitsWarper(1.4), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
    ),
    (
        SamplingParams(temperature=0.3, top_k=7, top_p=0.5),
        [TemperatureLogitsWarper(0.3), TopKLogitsWarper(7), TopPLogitsWarper(0.5)],
    ),
]


@pytest.mark.parametrize(("params", "warpers"), WARPERS)
def test_distribution_is_that_of_transformers(params: SamplingParams, warpers: list) -> None:
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(50, generator=generator, dtype=torch.float64) * 2
        scores = logits[None].clone()
        for warper in warpers:
            scores = warper(None, scores)
        expected = torch.softmax(scores, -1)[0]
        found = distribution(logits, params)
        assert torch.equal(found > 0, expected > 0), f"seed {seed}: other tokens are kept"
        assert torch.allclose(found, expected, atol=1e-14, rtol=1e-12)


def test_distribution_of_ties_and_extremes() -> None:
    tied = torch.tensor([1.0, 2.0, 2.0, 2.0, -torch.inf])
    assert distribution(tied, SamplingParams(temperature=1.0, top_k=2)).tolist() == pytest.approx(
        [0, 1 / 3, 1 / 3, 1 / 3, 0]
    )
    assert distribution(tied, SamplingParams(temperature=1.0, top_p=0.3))[1:4].tolist() == pytest.approx([0.5, 0.5, 0])
    cold = distribution(torch.tensor([3.0, 1.0, 2.999]), SamplingParams(temperature=1e-6))
    assert cold.tolist() == [1.0, 0.0, 0.0]
    assert distribution(torch.randn(100_000), SamplingParams(temperature=1.0)).dtype == torch.float64


def test_token_logprob() -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 2.0])
    expected = [x - math.log(sum(math.exp(y) for y in logits.tolist())) for x in logits.tolist()]
    found = token_logprob(logits, 2, 3)
    assert (found.token_id, found.logprob) == (2, pytest.approx(expected[2]))
    assert [i for i, _ in found.top] == [1, 3, 0]
    assert [x for _, x in found.top] == pytest.approx([expected[i] for i in (1, 3, 0)])
    assert token_logprob(logits, 1, 0).top == ()
    assert all(a >= b for (_, a), (_, b) in itertools.pairwise(token_logprob(torch.randn(64), 0, 20).top))


def test_a_tiny_temperature_is_greedy() -> None:
    """Divided by it, logits overflow: no NaN, no last token."""
    p = distribution(torch.tensor([3.0, 1.0, 2.0]), SamplingParams(temperature=1e-310))
    assert p.tolist() == [1.0, 0.0, 0.0]
