"""Checkpoints of states in the prefix index: a request takes pages only up to one, and lines are neither lost nor used
twice."""

from __future__ import annotations

import random

import pytest

from specbatch.cache.pages import PagePool
from specbatch.cache.prefix import PrefixIndex

TOKENS = list(range(1, 30))


def make(num_checkpoints: int = 2, num_pages: int = 16) -> tuple[PagePool, PrefixIndex]:
    pool = PagePool(num_pages, 4)
    return pool, PrefixIndex(pool, checkpoints=range(100, 100 + num_checkpoints))


def add(pool: PagePool, index: PrefixIndex, tokens: list[int]) -> list[int]:
    pages = pool.allocate(len(tokens) // 4)
    index.insert(tokens, pages, len(tokens))
    return pages


def test_pages_are_taken_up_to_a_checkpoint() -> None:
    pool, index = make()
    pages = add(pool, index, TOKENS)
    assert index.num_known(TOKENS, 28) == 28
    assert index.match(TOKENS, 28) == []
    line = index.take_checkpoint()
    assert line is not None
    index.add_checkpoint(TOKENS, 12, line)
    assert index.num_cached(TOKENS, 28) == 12
    assert (found := index.match(TOKENS, 28)) == pages[:3]
    assert index.checkpoint_of(found) == line
    assert index.match(TOKENS, 11) == []
    other = [*TOKENS[:12], 99, 98, 97, 96]
    assert index.match(other, 16) == pages[:3]
    index.check_integrity()


def test_a_state_after_tokens_that_the_index_does_not_have_is_not_kept() -> None:
    """The index has a shorter text, whose state is another one."""
    pool, index = make(1)
    add(pool, index, TOKENS[:12])
    line = index.take_checkpoint()
    assert line is not None
    index.add_checkpoint(TOKENS, 16, line)
    assert index.num_cached(TOKENS, 28) == 0
    index.check_integrity()
    assert index.take_checkpoint() == line, "it is free again"
    index.return_checkpoint(line)
    index.check_integrity()


def test_the_one_that_was_not_used_for_the_longest_time_is_overwritten() -> None:
    pool, index = make()
    add(pool, index, TOKENS)
    lines = [index.take_checkpoint(), index.take_checkpoint()]
    assert index.take_checkpoint() is None, "both wait for their states"
    for line, num_tokens in zip(lines, (8, 16), strict=True):
        assert line is not None
        index.add_checkpoint(TOKENS, num_tokens, line)
    index.match(TOKENS, 8)
    assert index.take_checkpoint() == lines[1]
    assert index.num_cached(TOKENS, 28) == 8
    index.return_checkpoint(lines[1] or 0)
    index.check_integrity()


@pytest.mark.parametrize("how", ["evicted", "forgotten", "below"])
def test_lines_of_pages_that_are_gone_are_free(how: str) -> None:
    pool, index = make(1)
    pages = add(pool, index, TOKENS)
    line = index.take_checkpoint()
    assert line is not None
    index.add_checkpoint(TOKENS, 28, line)
    if how == "evicted":
        pool.release(pages)
        assert index.evict(1) == 1
    elif how == "forgotten":
        index.forget(TOKENS, pages, 24)
    else:  # the page that a failed request shares with others stays, and its state does not
        other = pool.allocate(7)
        index.forget(TOKENS, other, 8)
        assert index.num_known(TOKENS, 28) == 28
    assert index.take_checkpoint() == line
    index.return_checkpoint(line)
    index.check_integrity()


def test_any_order_of_operations() -> None:
    """A request inserts its pages, and adds a checkpoint or not; others match, are evicted, or fail."""
    rng = random.Random(0)
    pool, index = make(3, 40)
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(2000):
        tokens = [rng.randrange(2) for _ in range(4 * rng.randrange(1, 5))]
        if rng.random() < 0.5:
            found = index.match(tokens, len(tokens))
            assert len(found) * 4 <= index.num_known(tokens, len(tokens))
            assert (index.checkpoint_of(found) is None) == (not found)
            missing = len(tokens) // 4 - len(found)
            if pool.num_free < missing:
                index.evict(missing)
            if pool.num_free < missing:
                pool.release(found)
                continue
            pages = found + pool.allocate(missing)
            index.insert(tokens, pages, len(tokens), len(found) * 4)
            line = index.take_checkpoint() if rng.random() < 0.6 else None
            if line is not None:
                index.add_checkpoint(tokens, 4 * rng.randrange(1, len(pages) + 1), line)
            held.append((tokens, pages))
        elif held:
            tokens, pages = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.2:
                index.forget(tokens, pages, 0)
            pool.release(pages)
        index.check_integrity()
        pool.check_integrity([*(pages for _, pages in held), index.pages()])
