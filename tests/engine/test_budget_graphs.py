"""The graphs for a budget that changes: which a round takes, and when they are captured. The times are those of an
H200."""

from __future__ import annotations

import numpy as np
import pytest

from specbatch.engine.budget_graphs import MAX_AT_START, BudgetGraphs, RoundSize
from specbatch.engine.verify_budget import RoundTimes
from specbatch.graphs.runner import ladder

NODES = 6  # the nodes of a chain
SMALL = ([1, 128, 256, 512, 1024, 1536, 2048, 12288], [0.8, 0.81, 0.83, 0.925, 1.05, 1.32, 1.58, 7.4])  # 135M
LARGE = ([1, 64, 128, 256, 512, 1024, 2048, 12288], [4.1, 4.55, 5.2, 7.3, 12.0, 22.7, 44.1, 258.1])  # 8B
TIMES = {"small": RoundTimes(*SMALL, 0.0, 0.0002), "large": RoundTimes(*LARGE, 0.0, 0.0002)}


def started(times: RoundTimes, largest: int) -> BudgetGraphs:
    graphs = BudgetGraphs(times, NODES)
    for one in graphs.at_start(ladder(largest)):
        graphs.add(one)
    return graphs


def milliseconds(times: RoundTimes, one: RoundSize) -> float:
    return times.of(one.size, one.nodes, shares=one.nodes < one.size * NODES)


def test_a_round_takes_the_cheapest_graph_with_room() -> None:
    graphs = BudgetGraphs(TIMES["large"], NODES)
    assert graphs.cheapest(320, 300, 400.0) == (320, 1920), "whole chains are there in any case"
    graphs.add(RoundSize(512, 768))
    graphs.add(RoundSize(512, 1024))
    graphs.add(RoundSize(256, 512))
    assert graphs.cheapest(320, 300, 400.0) == (512, 768), "212 of the nodes are of padding"
    assert graphs.cheapest(320, 300, 600.0) == (512, 768), "most of the likely nodes are enough"
    assert graphs.cheapest(320, 300, 720.0) == (512, 1024)
    assert graphs.cheapest(320, 300, 1200.0) == (320, 1920)
    assert graphs.cheapest(320, 300, float("inf")) == (320, 1920)
    assert graphs.cheapest(256, 256, 300.0) == (256, 512)
    assert graphs.cheapest(256, 250, 0.0) == (256, 512), "each request has its root verified"


def test_whole_chains_are_verified_where_sharing_does_not_pay() -> None:
    times = RoundTimes([1, 1000], [1.0, 1.1], 0.0, ms_of_sharing=0.001)
    graphs = BudgetGraphs(times, NODES)
    graphs.add(RoundSize(64, 128))
    assert graphs.cheapest(64, 64, 100.0) == (64, 384)
    assert graphs.at_start(ladder(64)) == []


@pytest.mark.parametrize("largest", [64, 128, 256, 512])
@pytest.mark.parametrize("name", TIMES)
def test_the_start_leaves_little_to_gain(name: str, largest: int) -> None:
    """The largest batch, which most rounds are of, takes at most 4% longer than with all graphs, if it wants up to two
    nodes for each request; all sizes 12% on average."""
    times = TIMES[name]
    graphs = started(times, largest)
    assert len(graphs.at_start(ladder(largest))) <= MAX_AT_START

    def lost(count: int, nodes: float) -> float:
        size = next(size for size in ladder(largest) if size >= count)
        asked = size, count, nodes * count
        return milliseconds(times, graphs.cheapest(*asked)) / milliseconds(times, graphs.best(*asked))

    assert max(lost(largest, nodes) for nodes in np.arange(1, 2.01, 0.1)) <= 1.04
    assert np.mean([lost(count, nodes) for count in ladder(largest) for nodes in (1.2, 1.6, 2.0, 2.5)]) < 1.12


def test_a_short_job_captures_nothing() -> None:
    """130 rounds, in which the likely nodes rise, and then the last requests end."""
    for times in TIMES.values():
        graphs = started(times, 512)
        counts = [512] * 130 + list(range(511, 0, -8))
        for i, count in enumerate(counts):
            size = next(size for size in ladder(512) if size >= count)
            assert graphs.due(size, count, count * min(2.5, 1.2 + i / 100)) is None


def test_a_graph_is_captured_when_rounds_have_lost_as_much_time() -> None:
    times = TIMES["large"]
    graphs = BudgetGraphs(times, NODES)
    best = graphs.best(256, 256, 384.0)
    assert best == (256, 384)
    each = milliseconds(times, RoundSize(256, 256 * NODES)) - milliseconds(times, best)
    rounds = 1
    while graphs.due(256, 256, 384.0) is None:
        rounds += 1
    assert 100 < rounds * each <= 100 + each
    graphs.add(best)
    assert graphs.cheapest(256, 256, 384.0) == best
    assert all(graphs.due(256, 256, 384.0) is None for _ in range(100))


@pytest.mark.parametrize("likely", [0.0, 1.7, 4.0, float("inf")])
def test_the_best_round_has_room_for_the_likely_nodes(likely: float) -> None:
    graphs = BudgetGraphs(TIMES["small"], NODES)
    size, nodes = graphs.best(64, 50, 50 * likely)
    assert size == 64
    assert min(50 + 40 * max(0.0, likely - 1), 50 * NODES) + 14 <= nodes <= 64 * NODES
