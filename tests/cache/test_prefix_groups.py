"""Groups of sequences that share pages: the best ones, by trying all, and their table."""

from __future__ import annotations

import random

import pytest
import torch

from specbatch.cache.prefix_groups import Group, GroupLimits, GroupTable, GroupTree


def find(page: int, limits: GroupLimits, pages: list[list[int]]) -> list[Group]:
    """In a tree that has had other sequences, too."""
    tree, rng = GroupTree(page, limits), random.Random(0)
    others = [[*rng.choice(pages), 99] for _ in pages] if pages else []
    numbers = [*range(len(pages)), *range(100, 100 + len(others))]
    rng.shuffle(numbers)
    for number in numbers:
        tree.add(number, (others[number - 100] if number >= 100 else pages[number]))
    for number in range(100, 100 + len(others)):
        tree.remove(number)
    return tree.groups()


def sets_of(groups: list[Group]) -> set[tuple[frozenset[int], int]]:
    return {(frozenset(group.members), group.tokens) for group in groups}


def test_groups_of_a_file() -> None:
    """Page 64: two groups, one of them too small; a sequence alone, one without pages, and one that leaves early."""
    a, b = [1, 2, 3], [7, 8, 9, 10]
    pages = [[*a, 20], [*b, 21], [*a, 22, 23], [30, 31], [], [*b, 24], [*a, 25], [1, 26]]
    assert sets_of(find(64, GroupLimits(3, 128), pages)) == {(frozenset({0, 2, 6}), 192)}
    assert sets_of(find(64, GroupLimits(2, 128), pages)) == {
        (frozenset({0, 2, 6}), 192),
        (frozenset({1, 5}), 256),
    }
    assert find(64, GroupLimits(3, 128), []) == []


def test_nested_groups() -> None:
    """All share 2 pages; two halves share more. The halves are taken where that saves more."""
    short = [[1, 2, 3 + i // 4, 10 + i] for i in range(8)]
    assert sets_of(find(64, GroupLimits(2, 64), short)) == {(frozenset(range(4)), 192), (frozenset(range(4, 8)), 192)}
    uneven = [[1, 2, 3, 10 + i] if i < 3 else [1, 2, 10 + i] for i in range(8)]
    assert sets_of(find(64, GroupLimits(2, 64), uneven)) == {(frozenset(range(8)), 128)}


@pytest.mark.parametrize(("page", "tokens"), [(16, 64), (48, 192), (64, 64), (128, 128), (1, 128)])
def test_whole_units_only(page: int, tokens: int) -> None:
    """Seven pages (128 of one token) and a few more in common."""
    count = 130 if page == 1 else -(-tokens // page) if page > 16 else 7
    pages = [[*range(count), 1000 + i] for i in range(2)]
    assert sets_of(find(page, GroupLimits(2, 1), pages)) == {(frozenset({0, 1}), tokens)}


def saved(pages: list[list[int]], members: list[int], min_sequences: int) -> int:
    """The most that any choice of groups saves: all of the sequences or what one level down is best."""
    best = 0
    shared = 0
    while all(len(pages[m]) > shared and pages[m][shared] == pages[members[0]][shared] for m in members):
        shared += 1
    if len(members) >= min_sequences:
        best = (len(members) - 1) * shared * 64
    children: dict[int, list[int]] = {}
    for m in members:
        if len(pages[m]) > shared:
            children.setdefault(pages[m][shared], []).append(m)
    return max(best, sum(saved(pages, child, min_sequences) for child in children.values() if len(child) > 1))


def test_no_choice_saves_more() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        pages = [[rng.randrange(3) * 10 + depth for depth in range(rng.randint(0, 6))] for _ in range(14)]
        groups = find(64, GroupLimits(2, 64), pages)
        assert sum(group.saved for group in groups) == saved(pages, list(range(14)), 2)
        members = [m for group in groups for m in group.members]
        assert len(set(members)) == len(members)
        for group in groups:
            first = pages[group.members[0]][: group.tokens // 64]
            assert len(first) == group.tokens // 64
            assert all(pages[m][: len(first)] == first for m in group.members)


def test_table() -> None:
    table = GroupTable(6, GroupLimits(), torch.device("cpu"))
    table.write([Group([4, 1], 128), Group([0, 2, 3], 64)], torch.from_numpy)
    groups = table.of_batch(5)
    assert groups is not None
    assert groups.sizes_G[:3].tolist() == [2, 3, 0]
    assert groups.firsts_G[:2].tolist() == [0, 2]
    assert groups.tokens_G[:3].tolist() == [128, 64, 0]
    assert groups.members_B.tolist() == [4, 1, 0, 2, 3]
    assert groups.tokens_B.tolist() == [64, 128, 64, 64, 128]
    table.write([], torch.from_numpy)
    empty = table.of_batch(6)
    assert empty is not None
    assert not any(part.any() for part in empty)


def test_small_batches_read_no_groups() -> None:
    table = GroupTable(6, GroupLimits(min_batch=4), torch.device("cpu"))
    assert table.of_batch(3) is None
    assert table.of_batch(4) is not None
