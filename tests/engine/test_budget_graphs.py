"""The graphs for a budget that changes: which of them a round takes, and when they are captured. The times were
measured on an H200."""

from __future__ import annotations

import numpy as np
import pytest

from specbatch.engine.budget_graphs import MAX_AT_START, BudgetGraphs, RoundSize, steps, timed_rounds
from specbatch.engine.verify_budget import RoundTimes, SharedTimes, TimeCurve, VerifyBudget
from specbatch.graphs.runner import ladder
from tests.engine.test_verify_budget import outputs

NODES = 6  # Each chain has 6 nodes.
# Models with 135M and 8B parameters.
SMALL = TimeCurve([1, 128, 256, 512, 1024, 1536, 2048, 12288], [0.8, 0.81, 0.83, 0.925, 1.05, 1.32, 1.58, 7.4])
LARGE = TimeCurve([1, 64, 128, 256, 512, 1024, 2048, 12288], [4.1, 4.55, 5.2, 7.3, 12.0, 22.7, 44.1, 258.1])
# Rounds of 64 rows, with 8B and `hybrid`: their times rise in steps.
STEPS = TimeCurve([64, 128, 144, 176, 192, 256, 264, 320, 384], [6.65, 6.75, 7.0, 7.47, 8.28, 8.31, 9.03, 9.6, 10.8])
TIMES = {
    "small": RoundTimes(SMALL, SharedTimes([1], [SMALL]), 0.0),
    "large": RoundTimes(LARGE, SharedTimes([1], [LARGE]), 0.0),
}


def budget_of(times: RoundTimes, drafts: list[float], accepted: int = 0) -> VerifyBudget:
    """Make a budget after 8 rounds of 64 requests with drafts of these probabilities. `accepted`: how many drafts of
    each request were verified and accepted."""
    budget = VerifyBudget(None, times)
    for _ in range(8):
        budget.record(outputs([drafts] * 64, verified=accepted, accepted=accepted))
    return budget


def milliseconds(times: RoundTimes, one: RoundSize) -> float:
    if one.nodes == one.size * NODES:
        return times.whole.of(one.nodes)
    (found,) = times.shared.at(np.array([one.size]), np.array([one.nodes]))
    return float(found)


def rate(graphs: BudgetGraphs, one: RoundSize, count: int) -> float:
    """Return the expected tokens in a millisecond for each of `count` requests."""
    (tokens,) = graphs._budget.tokens(np.array([(one.nodes - one.size) / count]))
    return float(tokens) / milliseconds(graphs._times, one)


def test_a_round_takes_the_graph_with_most_tokens_for_its_time() -> None:
    likely, unlikely = [0.9, 0.8, 0.7], [0.9, 0.1, 0.01]
    for drafts, nodes in ((likely, 256), (unlikely, 128), ([0.1], 128)):
        graphs = BudgetGraphs(budget_of(RoundTimes(LARGE, SharedTimes([64], [STEPS]), 0.0), drafts), NODES)
        for one in steps(64, NODES):
            graphs.add(one)
        assert graphs.choose(64, 64).taken == (64, nodes), "128, 176 and 256 nodes are before a step"


def test_steps_of_small_batches() -> None:
    """Steps do not repeat a number of nodes, nor include that of whole chains."""
    assert steps(1, 3) == [(1, 1), (1, 2)]
    assert steps(3, 2) == [(3, 3), (3, 4), (3, 5)]
    assert steps(64, 1) == []


def test_a_graph_of_a_larger_batch_has_padding() -> None:
    graphs = BudgetGraphs(budget_of(TIMES["large"], [0.95, 0.5, 0.01]), NODES)
    assert graphs.choose(320, 300).taken == (320, 1920), "whole chains are always allowed"
    graphs.add(RoundSize(512, 768))
    graphs.add(RoundSize(256, 512))
    assert graphs.choose(320, 300).taken == (512, 768), "the other 212 requests are padding"
    assert graphs.choose(256, 256).taken == (256, 512)


def test_whole_chains_are_verified_where_sharing_does_not_pay() -> None:
    whole, shared = TimeCurve([1, 1000], [1.0, 1.1]), TimeCurve([1, 1000], [1.3, 1.4])
    times = RoundTimes(whole, SharedTimes([64], [shared]), 0.0)
    graphs = BudgetGraphs(budget_of(times, [0.5, 0.2]), NODES)
    graphs.add(RoundSize(64, 128))
    assert graphs.choose(64, 64).taken == (64, 384)


def test_a_small_batch_shares_where_a_large_one_takes_longer() -> None:
    """Here a round of 512 requests takes 0.4 ms longer than one of 85 with the same number of nodes. Rounds of 64
    requests that share a budget do not take this time."""
    whole = TimeCurve([1, 384, 512, 768, 3072], [0.68, 0.79, 0.85, 0.93, 1.75])
    large = whole.with_sharing([(512, 1.25), (1024, 1.4), (1536, 1.6)])
    small = whole.with_sharing([(64, 0.7), (128, 0.71), (192, 0.73)])
    for sizes, curves, nodes in (([64, 512], [small, large], 192), ([512], [large], 384)):
        graphs = BudgetGraphs(budget_of(RoundTimes(whole, SharedTimes(sizes, curves), 0.0), [0.5, 0.2]), NODES)
        graphs.add(RoundSize(64, 192))
        assert graphs.choose(64, 64).taken == (64, nodes)


def test_cached_tokens_make_drafts_worth_more() -> None:
    budget = budget_of(RoundTimes(LARGE, SharedTimes([1], [LARGE]), 0.001), [0.6, 0.3, 0.2])
    graphs = BudgetGraphs(budget, NODES)
    few = graphs.choose(256, 256).best
    budget.cached_tokens, budget.version = 400.0, budget.version + 1
    assert graphs.choose(256, 256).best.nodes > few.nodes


@pytest.mark.parametrize("largest", [64, 128, 256, 512])
@pytest.mark.parametrize("name", TIMES)
def test_the_start_leaves_little_to_gain(name: str, largest: int) -> None:
    """Graphs that were timed are used, too: among them are all of the largest batch, of which most rounds are. Rounds
    of smaller batches lose less than 12% of their rate, on average."""
    lost = []
    for drafts in ([0.9, 0.2, 0.05], [0.9, 0.8, 0.3], [0.6, 0.4, 0.2], [0.3], [0.95] * 5):
        graphs = BudgetGraphs(budget_of(TIMES[name], drafts), NODES)
        chosen = graphs.at_start(ladder(largest))
        assert len(chosen) <= MAX_AT_START
        assert {*steps(largest, NODES)} <= {*timed_rounds(ladder(largest), NODES)} <= {*chosen}
        assert len(chosen) == len({*chosen})
        for one in chosen:
            graphs.add(one)
        choice = graphs.choose(largest, largest)
        assert choice.taken == choice.best
        for count in ladder(largest):
            choice = graphs.choose(count, count)
            lost.append(1 - rate(graphs, choice.taken, count) / rate(graphs, choice.best, count))
    assert np.mean(lost) < 0.12


def test_a_graph_of_a_smaller_batch_takes_the_place_of_none() -> None:
    """A graph of 8 requests is timed at the start. It has no room for 16, of which graphs are captured, too."""
    curve = TimeCurve([1, 1000], [0.1, 100.0])
    graphs = BudgetGraphs(budget_of(RoundTimes(curve, SharedTimes([1], [curve]), 0.0), [0.5]), num_nodes=2)
    assert RoundSize(8, 8) in timed_rounds(ladder(64), 2)
    assert {*steps(16, 2)} <= {*graphs.at_start(ladder(64))}


def test_a_short_job_captures_nothing() -> None:
    """A job of 130 rounds of the largest batch, whose requests then end eight at a time."""
    for times in TIMES.values():
        graphs = BudgetGraphs(budget_of(times, [0.7, 0.3, 0.1]), NODES)
        for one in graphs.at_start(ladder(512)):
            graphs.add(one)
        for count in [512] * 130 + list(range(511, 0, -8)):
            size = next(size for size in ladder(512) if size >= count)
            assert not graphs.choose(size, count).is_due


def test_a_graph_is_captured_when_rounds_have_lost_as_much_time() -> None:
    times = TIMES["large"]
    graphs = BudgetGraphs(budget_of(times, [0.7, 0.2]), NODES)
    best, whole = graphs.choose(256, 256).best, RoundSize(256, 256 * NODES)
    assert best.nodes < whole.nodes
    each = milliseconds(times, best) * (rate(graphs, best, 256) / rate(graphs, whole, 256) - 1)
    rounds = 2  # The look-up above counts as one.
    while not graphs.choose(256, 256).is_due:
        rounds += 1
    assert 100 < rounds * each <= 100 + each
    graphs.add(best)
    assert graphs.choose(256, 256).taken == best
    assert not any(graphs.choose(256, 256).is_due for _ in range(100))


def test_a_choice_changes_when_the_expected_tokens_do() -> None:
    budget = budget_of(TIMES["large"], [0.95, 0.95, 0.95])
    graphs = BudgetGraphs(budget, NODES)
    many = graphs.choose(256, 256).best
    while not budget.record(outputs([[0.05]] * 2048, verified=0, accepted=0)):
        assert graphs.choose(256, 256).best == many
    assert graphs.choose(256, 256).best.nodes < many.nodes
