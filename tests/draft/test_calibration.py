"""The calibration of estimates: it learns how often drafts of each source are right."""

from __future__ import annotations

import pytest
import torch

from specbatch.draft.calibration import NUM_TEXTS, Calibration, Chains
from specbatch.kernels import torch as ops
from tests.tiny_models import CPU


def chains_of(*requests: list[tuple[int, list[int], list[float]]]) -> Chains:
    """Make chains. Each chain of a request: its source, its tokens, and the estimate of each."""
    return Chains(
        torch.tensor([[tokens for _, tokens, _ in request] for request in requests]),
        torch.tensor([[estimates for _, _, estimates in request] for request in requests], dtype=torch.float32),
        torch.tensor([[source for source, _, _ in request] for request in requests]),
    )


def learn(
    calibration: Calibration,
    chains: Chains,
    new: list[list[int]],
    counts: list[int],
    times: int = 1,
    chosen: int = NUM_TEXTS,
) -> None:
    """Learn from rounds that commit the first `counts` of `new`. `chosen`: the index of the chosen chains; NUM_TEXTS:
    those of a network."""
    for _ in range(times):
        chosen_B = torch.full((len(counts),), chosen)
        calibration.learn(calibration.judge(chains)[1], chosen_B, torch.tensor(new), torch.tensor(counts))


def found(calibration: Calibration, chains: Chains) -> list[list[list[float]]]:
    probabilities: list[list[list[float]]] = calibration.judge(chains)[0].tolist()
    return probabilities


def test_at_first_estimates_are_taken_as_they_are() -> None:
    chains = chains_of([(0, [3, 4, 0], [0.5, 0.4, 0.0]), (1, [5, 6, 7], [0.9, 0.8, 0.7])])
    [[first, second]] = found(Calibration(2, 0, CPU, ops), chains)
    assert first == pytest.approx([0.5, 0.2, 0.0])
    assert second == pytest.approx([0.9, 0.72, 0.504])


def test_an_estimate_falls_to_what_is_seen() -> None:
    """Drafts of source 0 that are estimated at 0.8 are right in one of four cases, those of source 1 in all."""
    calibration = Calibration(2, 0, CPU, ops)
    chains = chains_of(*([(0, [3], [0.8]), (1, [7 if i % 4 else 3], [0.8])] for i in range(64)))
    new = [[7 if i % 4 else 3] for i in range(64)]
    # Where both have the same token, they count as drafts that agree.
    learn(calibration, chains, new, [1] * 64, times=60)
    alone = found(calibration, chains_of([(0, [1], [0.8]), (1, [2], [0.8])]))[0]
    assert alone[0] == pytest.approx([0.0], abs=0.05)
    assert alone[1] == pytest.approx([0.995], abs=0.02)
    same = found(calibration, chains_of([(0, [1], [0.8]), (1, [1], [0.8])]))[0]
    assert same[0] == same[1]
    assert same[0] == pytest.approx([0.995], abs=0.02)


def test_other_estimates_of_a_source_stay() -> None:
    calibration = Calibration(1, 0, CPU, ops)
    learn(calibration, chains_of([(0, [3], [0.8])]), [[4]], [1], times=100)
    [[low], [high]] = found(calibration, chains_of([(0, [3], [0.2])], [(0, [3], [0.8])]))
    assert low == pytest.approx([0.2])
    assert high[0] < 0.3


def test_what_is_not_known_is_not_learnt() -> None:
    """Drafts after a wrong one, drafts past the committed tokens, and those of requests that were done."""
    calibration = Calibration(1, 0, CPU, ops)
    chains = chains_of([(0, [3, 4, 5], [0.7, 0.2, 0.5])])
    learn(calibration, chains, [[9, 4, 5]], [3], times=200)  # the first was wrong
    learn(calibration, chains, [[3, 4, 5]], [1], times=200)  # the first was right
    learn(calibration, chains, [[3, 4, 5]], [0], times=200)
    [[probabilities]] = found(calibration, chains_of([(0, [3, 4, 5], [0.7, 0.2, 0.5])]))
    assert probabilities[1] / probabilities[0] == pytest.approx(0.2)
    assert probabilities[2] / probabilities[1] == pytest.approx(0.5)
    assert 0.4 < probabilities[0] < 0.65


def test_the_source_that_was_not_chosen_is_learnt_too() -> None:
    """A round whose committed tokens are those of the second chain, and not of the first."""
    calibration = Calibration(2, 0, CPU, ops)
    chains = chains_of([(0, [3, 4], [0.8, 0.8]), (1, [5, 6], [0.2, 0.2])])
    learn(calibration, chains, [[5, 6]], [2], times=200)
    [[first, second]] = found(calibration, chains)
    assert first[0] < 0.2
    assert second[1] > 0.4


def test_old_drafts_are_forgotten() -> None:
    calibration = Calibration(1, 0, CPU, ops)
    chains = chains_of(*([(0, [3], [0.5])],) * 32)
    learn(calibration, chains, [[4]] * 32, [1] * 32, times=500)
    assert found(calibration, chains)[0][0][0] < 0.02
    learn(calibration, chains, [[3]] * 32, [1] * 32, times=200)
    assert found(calibration, chains)[0][0][0] > 0.9


def test_sums_do_not_depend_on_the_order_of_requests() -> None:
    """So ranks that share a target have the same sums, though atomic additions come in any order."""
    torch.manual_seed(0)
    tokens, estimates = torch.randint(0, 3, (50, 2, 6)), torch.rand(50, 2, 6)
    sources, new, counts = torch.randint(0, 3, (50, 2)), torch.randint(0, 3, (50, 6)), torch.randint(0, 7, (50,))
    order, sums = torch.randperm(50), []
    for lines in (torch.arange(50), order):
        calibration = Calibration(3, 0, CPU, ops)
        chains = Chains(tokens[lines], estimates[lines], sources[lines])
        calibration.learn(calibration.judge(chains)[1], lines % 3, new[lines], counts[lines])
        sums.append(torch.cat((calibration.sums_2Q, calibration.chosen_2Q)))
    assert torch.equal(sums[0], sums[1])
    assert sums[0][1].sum() > 10


def test_a_chosen_chain_whose_estimate_was_too_high_is_corrected() -> None:
    """Drafts of source 0 are right as often as is expected, but hardly in chains that are chosen."""
    calibration = Calibration(2, 1, CPU, ops)
    chains = chains_of([(0, [3, 4], [0.5, 0.5]), (1, [5, 6], [0.5, 0.5])])
    [[first, second]] = found(calibration, chains)
    assert first == pytest.approx([0.3, 0.15]), "a text that is chosen is not trusted at first"
    assert second == pytest.approx([0.5, 0.25])
    for _ in range(200):
        learn(calibration, chains, [[3, 4]], [2], times=5)
        learn(calibration, chains, [[7, 7]], [1], times=3)
        learn(calibration, chains, [[7, 7]], [1], times=2, chosen=0)
    [[first, second]] = found(calibration, chains)
    assert first[0] < 0.15
    assert second[0] < 0.1, "it was never right"
    learn(calibration, chains_of(*([(0, [3], [0.5])],) * 8), [[3], [7]] * 4, [1] * 8, times=600, chosen=0)
    assert found(calibration, chains)[0][0][0] == pytest.approx(0.5, abs=0.05)
