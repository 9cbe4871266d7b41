"""Which rows a worker gets, and what its death means for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from specbatch.results.finished import FinishedRow
from specbatch.rows.sources import RawRow
from specbatch.scaleout.rows import Holding, PoolRows
from tests.scaleout.simulation import finished_row, raw_row


def pool_rows(*credits: int, num_rows: int) -> tuple[PoolRows, list[Holding]]:
    rows = PoolRows()
    holdings = [rows.open(credit) for credit in credits]
    for index in range(num_rows):
        rows.submit(raw_row(index))
    return rows, holdings


def hand_out(rows: PoolRows, holding: Holding, last: bool = False) -> list[int]:
    return [row.index for row in rows.hand_out(holding, last)]


def finish(rows: PoolRows, holding: Holding, *indices: int) -> tuple[list[int], list[int]]:
    first, again = rows.finish(holding, [finished_row(index) for index in indices])
    return indices_of(first), indices_of(again)


def indices_of(rows: list[FinishedRow]) -> list[int]:
    return [row.index for row in rows]


def die(rows: PoolRows, holding: Holding) -> tuple[RawRow, int] | None:
    rows.blame(holding)
    return rows.close(holding)


def suspect(rows: PoolRows, holding: Holding) -> None:
    """Two workers die with the rows of one."""
    die(rows, holding)
    second = rows.open(holding.credit)
    rows.hand_out(second, last=True)
    die(rows, second)


def test_many_rows_fill_each_worker_in_order() -> None:
    rows, (a, b) = pool_rows(3, 5, num_rows=20)
    assert hand_out(rows, a) == [0, 1, 2]
    assert hand_out(rows, b) == [3, 4, 5, 6, 7]
    assert hand_out(rows, a) == []
    assert not rows.has_room


def test_a_worker_gets_many_rows_at_once_as_they_can_begin_alike() -> None:
    rows, (a, b) = pool_rows(6, 6, num_rows=30)
    assert (hand_out(rows, a), hand_out(rows, b)) == ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11])
    finish(rows, a, 0)
    finish(rows, b, 6, 7)
    assert (hand_out(rows, a), hand_out(rows, b)) == ([], [12, 13])
    assert hand_out(rows, a, last=True) == [14]


def test_the_last_rows_are_dealt() -> None:
    """They come the longest first: the sums of their lengths differ by little."""
    rows, workers = pool_rows(300, 300, 300, num_rows=768)
    dealt = [hand_out(rows, worker) for worker in workers]
    assert [len(indices) for indices in dealt] == [256, 256, 256]
    assert sorted(chain(*dealt)) == list(range(768))
    for indices in dealt:
        assert indices == sorted(indices)
        assert abs(sum(indices) / 256 - 383.5) < 9, "a worker has the long ones"
        alone = [i for i in indices if i - 1 not in indices and i + 1 not in indices]
        assert not alone, "rows that begin alike should stay together"


def test_a_few_last_rows_are_dealt_one_by_one() -> None:
    rows, (a, b) = pool_rows(9, 9, num_rows=7)
    dealt = hand_out(rows, a), hand_out(rows, b)
    assert dealt == ([1, 3, 5, 6], [0, 2, 4])


@pytest.mark.parametrize("num_rows", [1, 9, 17, 18, 100])
def test_dealt_rows_stay_in_their_order(num_rows: int) -> None:
    """Whatever a worker has room for: the longest come first."""
    for credit in range(1, num_rows):
        rows, (a, b) = pool_rows(credit, 300, num_rows=num_rows)
        dealt = hand_out(rows, a), hand_out(rows, b)
        assert sorted(chain(*dealt)) == list(range(num_rows))
        for indices in dealt:
            assert indices == sorted(indices), credit


def test_few_rows_go_to_the_worker_with_the_fewest() -> None:
    rows, (a, b, c) = pool_rows(9, 9, 9, num_rows=9)
    of_a, of_b, of_c = (hand_out(rows, holding) for holding in (a, b, c))
    assert [len(of_a), len(of_b), len(of_c)] == [3, 3, 3]
    finish(rows, a, *of_a)
    finish(rows, b, of_b[0])
    for index in range(9, 13):
        rows.submit(raw_row(index))
    assert hand_out(rows, c) == [], "the others have fewer"
    assert len(hand_out(rows, a)) == 3
    assert len(hand_out(rows, b)) == 1
    assert [holding.num_rows for holding in (a, b, c)] == [3, 3, 3]


def test_a_full_worker_leaves_its_share_to_the_others() -> None:
    rows, (a, b) = pool_rows(2, 20, num_rows=12)
    assert len(hand_out(rows, a)) == 2
    assert len(hand_out(rows, b)) == 10


def test_rows_of_a_dead_worker_come_first() -> None:
    rows, (a, b) = pool_rows(3, 9, num_rows=20)
    hand_out(rows, a)
    finish(rows, a, 1)
    assert die(rows, a) is None
    assert hand_out(rows, b) == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_suspect_runs_alone_after_all_others() -> None:
    rows, (a,) = pool_rows(2, num_rows=2)
    hand_out(rows, a)
    suspect(rows, a)
    b = rows.open(4)
    rows.submit(raw_row(9))
    assert rows.has_room, "suspects wait without room"
    assert hand_out(rows, b, last=True) == [9]
    finish(rows, b, 9)
    assert hand_out(rows, b, last=False) == [], "more rows can come"
    assert hand_out(rows, b, last=True) == [0]
    rows.submit(raw_row(10))
    assert hand_out(rows, b, last=True) == [], "nothing else runs with it"
    assert hand_out(rows, rows.open(4), last=True) == [10], "other workers go on"
    assert finish(rows, b, 0) == ([0], [])
    assert hand_out(rows, b, last=True) == [1]


def test_a_death_with_a_suspect_names_it() -> None:
    rows, (a, b) = pool_rows(1, 4, num_rows=1)
    hand_out(rows, a)
    suspect(rows, a)
    hand_out(rows, b, last=True)
    assert die(rows, b) == (raw_row(0), 3)
    assert rows.num_rows == 0


def test_a_lost_node_gives_a_suspect_back() -> None:
    rows, (a, b, c) = pool_rows(1, 4, 4, num_rows=1)
    hand_out(rows, a)
    suspect(rows, a)
    hand_out(rows, b, last=True)
    assert rows.close(b) is None
    assert hand_out(rows, c, last=True) == [0]
    assert c.alone


def test_deaths_of_a_row_that_finished_are_forgotten() -> None:
    """The counts take no memory for finished rows, and a row with the same index can come later."""
    rows, (a, b) = pool_rows(1, 1, num_rows=1)
    for _ in range(3):
        hand_out(rows, a)
        die(rows, a)
        hand_out(rows, b)
        finish(rows, b, 0)
        rows.submit(raw_row(0))
        a = rows.open(1)
    assert hand_out(rows, a, last=False) == [0], "it is no suspect"


def test_an_idle_worker_takes_half_of_the_most_rows() -> None:
    rows, (a, b) = pool_rows(8, 5, num_rows=13)
    assert hand_out(rows, a) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert hand_out(rows, b) == [8, 9, 10, 11, 12]
    a.started = [0, 1]
    c = rows.open(8)
    assert hand_out(rows, c, last=False) == [], "more rows can come"
    assert hand_out(rows, c, last=True) == [7, 6, 5, 4]
    assert a.take_drop() == [7, 6, 5, 4]


def test_rows_that_a_slow_worker_has_begun_are_copied_and_stay() -> None:
    rows, (a,) = pool_rows(8, num_rows=4)
    hand_out(rows, a)
    a.started = [0, 1, 2]
    b = rows.open(4)
    assert hand_out(rows, b, last=True) == [3]
    assert a.take_drop() == [3]
    assert hand_out(rows, b, last=True) == [], "it has rows"
    assert finish(rows, b, 3) == ([3], [])
    assert hand_out(rows, b, last=True) == [], "it goes on with what it has begun"
    a.is_slow = True
    assert hand_out(rows, b, last=True) == [2, 1]
    assert a.take_drop() == []
    assert a.num_rows == 3
    assert finish(rows, a, 2) == ([2], [])
    assert b.take_drop() == [2]
    assert finish(rows, b, 2) == ([], [2])
    assert finish(rows, a, 3) == ([], [3]), "it had begun before it could be dropped"
    assert rows.num_rows == 2


def test_a_fast_worker_gets_more_rows_and_keeps_its_credit() -> None:
    rows, (fast, slow) = pool_rows(4, 4, num_rows=40)
    assert len(rows.hand_out(fast, False)) == 4
    rows.widen(fast, 12)
    rows.widen(fast, 6)
    assert len(rows.hand_out(fast, False)) == 8
    assert len(rows.hand_out(slow, False)) == 4
    assert not rows.has_room
    few, (one, _) = pool_rows(4, 4, num_rows=8)
    assert not few.has_room
    few.widen(one, 5)
    assert few.has_room


def test_the_last_row_of_a_slow_worker_is_copied() -> None:
    """Also if the worker has not answered since it got it."""
    rows, (a,) = pool_rows(8, num_rows=1)
    hand_out(rows, a)
    b = rows.open(4)
    assert hand_out(rows, b, last=True) == [], "it may be about to begin it"
    a.is_slow = True
    assert hand_out(rows, b, last=True) == [0]


def test_no_more_rows_are_taken_than_the_credit() -> None:
    rows, (a,) = pool_rows(20, num_rows=20)
    hand_out(rows, a)
    assert len(hand_out(rows, rows.open(3), last=True)) == 3


def test_a_suspect_that_runs_is_not_copied() -> None:
    rows, (a, b, c) = pool_rows(1, 4, 4, num_rows=1)
    hand_out(rows, a)
    suspect(rows, a)
    hand_out(rows, b, last=True)
    b.started = [0]
    assert hand_out(rows, c, last=True) == []


def test_a_copy_outlives_its_worker() -> None:
    rows, (a,) = pool_rows(4, num_rows=1)
    hand_out(rows, a)
    a.started, a.is_slow = [0], True
    b = rows.open(4)
    assert hand_out(rows, b, last=True) == [0]
    rows.close(a)
    c = rows.open(4)
    assert hand_out(rows, c, last=True) == [], "it still runs, and is copied once at most"
    rows.close(b)
    assert hand_out(rows, c, last=True) == [0], "nobody has it"
    assert finish(rows, c, 0) == ([0], [])


def test_a_row_that_is_given_back_has_one_result() -> None:
    """Its first worker had begun it, and returns it when a third one has it."""
    rows, (a,) = pool_rows(4, num_rows=2)
    hand_out(rows, a)
    b = rows.open(4)
    assert hand_out(rows, b, last=True) == [1]
    rows.close(b)
    c = rows.open(4)
    assert hand_out(rows, c, last=True) == [1]
    assert finish(rows, a, 1) == ([], [1])
    assert finish(rows, c, 1) == ([1], [])
    assert rows.num_rows == 1


def test_a_row_that_never_ran_alone_is_not_the_cause() -> None:
    """The copies of two suspects die with their workers."""
    rows, (a,) = pool_rows(4, num_rows=0)
    for index in range(2):
        rows.submit(raw_row(index), deaths=1)
    hand_out(rows, a)
    a.started, a.is_slow = [0, 1], True
    b = rows.open(4)
    assert hand_out(rows, b, last=True) == [1]
    assert [row.index for row in rows.blame(a)] == [0, 1]
    assert rows.close(a) is None
    assert rows.blame(b) == [], "row 1 has two deaths, none of them alone"
    assert rows.close(b) is None
    c = rows.open(4)
    assert hand_out(rows, c, last=True) == [1]
    assert die(rows, c) == (raw_row(1), 3)


def test_deaths_of_earlier_sessions_count() -> None:
    rows, (a,) = pool_rows(4, num_rows=1)
    rows.submit(raw_row(1), deaths=2)
    assert hand_out(rows, a, last=True) == [0]
    finish(rows, a, 0)
    assert hand_out(rows, a, last=True) == [1]
    assert die(rows, a) == (raw_row(1), 3)


def test_a_late_result_is_not_taken_for_another_row_of_the_same_index() -> None:
    """The Python interface counts the rows of each call from 0."""
    rows, (a,) = pool_rows(9, num_rows=4)
    rows.hand_out(a, last=True)
    b = rows.open(9)
    taken = hand_out(rows, b, last=True)
    assert sorted(taken) == [2, 3]
    finish(rows, a, 0, 1)
    finish(rows, b, *taken)
    assert rows.num_rows == 0
    other = RawRow(taken[0], b'{"prompt": "of the next call"}\n')
    rows.submit(other)
    assert hand_out(rows, a) == [other.index]
    assert finish(rows, a, other.index) == ([], [other.index]), "it is the row of the call before"
    result = replace(finished_row(other.index), digest=other.digest())
    assert indices_of(rows.finish(a, [result])[0]) == [other.index]
