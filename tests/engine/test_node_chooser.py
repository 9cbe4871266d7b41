"""Rounds choose how many nodes they verify, by what the last rounds accepted."""

from __future__ import annotations

import numpy as np
import pytest

from specbatch.engine.node_chooser import NodeChooser, RoundCosts

SIZES = (1, 2, 4, 8, 16)
# A small model on an H100: 256 requests of 1,000 cached tokens.
COSTS = RoundCosts(1000.0, 1000.0, 0.7, 0.012)
BATCH, CACHED = 256, 256_000


def rounds(chooser: NodeChooser, accepted: list[int], count: int) -> list[int]:
    """Run rounds whose drafts are right up to these numbers, and return their sizes."""
    sizes = []
    for _ in range(count):
        size = chooser.choose(SIZES, BATCH, CACHED)
        chooser.saw(np.array([1 + min(right, size - 1) for right in accepted], np.int32), size)
        sizes.append(size)
    return sizes


def test_long_right_drafts_make_wide_rounds() -> None:
    assert set(rounds(NodeChooser(COSTS, 16), [15] * BATCH, 40)[3:]) == {16}


def test_wrong_drafts_make_plain_rounds_and_are_tried_again() -> None:
    sizes = rounds(NodeChooser(COSTS, 16), [0] * BATCH, 400)
    assert set(sizes[3:40]) == {1}
    assert 1 <= sum(size > 1 for size in sizes[3:]) <= 10, "a few rounds look whether drafts are right by now"


@pytest.mark.parametrize(("accepted", "size"), [([1] * 128 + [0] * 128, 2), ([3] * 256, 4), ([7] * 200 + [0] * 56, 8)])
def test_the_size_is_what_pays(accepted: list[int], size: int) -> None:
    sizes = rounds(NodeChooser(COSTS, 16), accepted, 60)
    assert sizes[-10:] == [size] * 10
    assert sizes.count(size) > 50


def test_a_larger_batch_has_fewer_nodes() -> None:
    """Where half of the drafts are right at each position, a few requests verify more nodes than many."""
    found = []
    for batch in (4, 4096):
        chooser = NodeChooser(COSTS, 16)
        for _ in range(50):
            chooser.saw(np.array([1 + k for k in range(8) for _ in range(2 ** (8 - k))], np.int32), 16)
        found.append(chooser.choose(SIZES, batch, batch * 1000))
    assert found[0] > found[1] > 1


def test_requests_that_are_done_do_not_count() -> None:
    one, other = NodeChooser(COSTS, 4), NodeChooser(COSTS, 4)
    one.saw(np.array([3, 0, 0], np.int32), 4)
    other.saw(np.array([3], np.int32), 4)
    assert one.expected(4) == other.expected(4)


def test_a_small_gain_changes_nothing() -> None:
    """Rounds keep their size while another one is hardly better."""
    chooser = NodeChooser(RoundCosts(0.0, 1000.0, 0.0, 0.0), 4)
    chooser.saw(np.array([1] * 1000, np.int32), 4)  # the first draft is right in 0.6% of the cases
    flat = RoundCosts(0.0, 1000.0, 0.0, 0.0)
    assert chooser.expected(2) < 1.03
    chooser._costs = RoundCosts(0.0, 1.0, 1.0, 0.0)
    assert chooser.choose((1, 2), 1, 0) == 1
    chooser._costs = flat
    assert chooser.choose((1, 2), 1, 0) == 1
