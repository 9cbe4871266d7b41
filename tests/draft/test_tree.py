"""Draft shapes, the choice of nodes to verify, masks, and n-gram drafts, each against a brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.draft.ngram import HostNgramDraft, NgramIndex
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence
from specbatch.errors import ConfigError
from specbatch.types import Request, RngKey, SamplingParams
from tests.oracle.ngram import NgramIndex as OracleIndex
from tests.oracle.ngram import NgramProposer
from tests.oracle.tree import DraftTree, select_nodes


@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (5, 1, 6), (1, 4, 2), (1, 4, 5), (3, 2, 11), (3, 2, 2), (7, 10, 60), (2, 8, 73)]
)
def test_legal_shapes(shape: tuple[int, int, int]) -> None:
    DraftShape(*shape).check()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((0, 1, 1), ["num_steps", "at least 1", "0"]),
        ((3, 0, 4), ["topk", "at least 1", "0"]),
        ((-1, 2, 4), ["num_steps", "-1"]),
        ((3, 1, 3), ["num_draft_tokens", "num_steps + 1 = 4", "got 3"]),
        ((3, 1, 5), ["num_draft_tokens", "num_steps + 1 = 4", "got 5"]),
        ((1, 4, 6), ["num_draft_tokens", "between 2 and 5", "got 6"]),
        ((3, 2, 12), ["num_draft_tokens", "between 2 and 11", "num_steps 3", "topk 2", "got 12"]),
        ((3, 2, 1), ["num_draft_tokens", "between 2 and 11", "got 1"]),
    ],
)
def test_illegal_shapes_name_the_range(shape: tuple[int, int, int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        DraftShape(*shape).check()
    for word in words:
        assert word in error.value.message


def test_the_upper_end_is_what_drafting_makes() -> None:
    """topk candidates at the first step, topk for each of topk branches later."""
    for steps in range(1, 5):
        for topk in range(2, 5):
            assert DraftShape(steps, topk, 2).num_candidates == topk + sum(topk * topk for _ in range(steps - 1))


@st.composite
def candidates(draw: st.DrawFn) -> tuple[list[float], list[int], int]:
    """A tree of scored candidates, scores falling from parent to child (ties included), and how many to keep."""
    size = draw(st.integers(1, 20))
    scores: list[float] = []
    parents: list[int] = []
    for i in range(size):
        parent = draw(st.integers(-1, i - 1))
        above = 0.0 if parent < 0 else scores[parent]
        scores.append(above - draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])))
        parents.append(parent)
    return scores, parents, draw(st.integers(1, size))


@given(candidates())
@settings(max_examples=150, deadline=None)
def test_select_nodes(case: tuple[list[float], list[int], int]) -> None:
    scores, parents, keep = case
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:keep]
    expected = sorted(ranked)
    tokens = [100 + i for i in range(len(scores))]
    # A second row with the same numbers in another tree must not disturb the first.
    other = [-1] * len(scores)
    tree = select_nodes(
        torch.tensor([7, 8]),
        torch.tensor([tokens, tokens]),
        torch.tensor([scores, [-float(i) for i in range(len(scores))]]),
        torch.tensor([parents, other]),
        keep + 1,
    )
    assert tree.num_nodes == [keep + 1] * 2
    assert not tree.is_chain
    assert tree.tokens_BN.tolist() == [[7, *(100 + i for i in expected)], [8, *(100 + i for i in range(keep))]]
    node_of = {candidate: node for node, candidate in enumerate(expected, start=1)} | {-1: 0}
    assert all(parents[i] in node_of for i in expected), "the parent of a kept candidate was dropped"
    assert tree.parents_BN[0].tolist() == [-1, *(node_of[parents[i]] for i in expected)]
    assert tree.parents_BN[1].tolist() == [-1] + [0] * keep

    ancestors: list[set[int]] = [{0}]
    for parent in tree.parents_BN[0, 1:].tolist():
        ancestors.append(ancestors[parent] | {len(ancestors)})
    mask = tree.mask(0)
    assert mask is not None
    assert [set(torch.nonzero(row)[:, 0].tolist()) for row in mask] == ancestors
    assert tree.depths(0) == [len(a) - 1 for a in ancestors]


def test_chains() -> None:
    tree = DraftTree.chain([[5, 6, 7], [8], [9, 1]])
    assert tree.tokens_BN.tolist() == [[5, 6, 7], [8, 0, 0], [9, 1, 0]]
    assert tree.num_nodes == [3, 1, 2]
    assert [tree.depths(b) for b in range(3)] == [[0, 1, 2], [0], [0, 1]]
    assert [tree.mask(b) for b in range(3)] == [None] * 3


def brute_force(tokens: list[int], low: int, high: int) -> tuple[int, int] | None:
    """The length of the longest suffix that occurs earlier, and the token after its latest earlier occurrence."""
    for size in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                return size, end
    return None


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(1, 5), max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_ngram_index(tokens: list[int], pieces: list[int], low: int, extra: int) -> None:
    """However the text grows, the index finds what a search of the whole text finds."""
    index, oracle = NgramIndex(low, low + extra), OracleIndex(low, low + extra)
    length = 1
    for piece in [0, *pieces, len(tokens)]:
        length = min(len(tokens), length + piece)
        expected = brute_force(tokens[:length], low, low + extra)
        index.update(tokens[:length])
        oracle.update(tokens[:length])
        assert index.find(tokens[:length]) == expected
        assert oracle.find(tokens[:length]) == (None if expected is None else expected[1])


def propose(tokens: list[int], num_draft_tokens: int, low: int, high: int, room: int = 100) -> list[int]:
    proposer = NgramProposer(num_draft_tokens, low, high)
    seq = Sequence(Request(0, tokens[:1], SamplingParams(), RngKey(0, 0, 0)), tokens, len(tokens) + room)
    proposer.start(seq)
    tree = proposer.propose([seq])
    assert tree.is_chain
    assert tree.draft_probs == [None]
    assert tree.tokens_BN[0, 0] == tokens[-1]
    drafts: list[int] = tree.tokens_BN[0, 1 : tree.num_nodes[0]].tolist()
    seq.draft_state = None
    method = HostNgramDraft(DraftShape(num_draft_tokens - 1, 1, num_draft_tokens), low, high)
    trees = method.host_draft([seq])
    assert trees.tokens_BN[0, 1 : trees.num_nodes_B[0]].tolist() == drafts
    return drafts


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 9, 2], [3, 4, 9]),
        ([1, 2, 3, 2, 4, 2], [4, 2, 4]),  # the latest occurrence, continued over the drafts
        ([5, 1, 2, 7, 6, 2, 8, 1, 2], [7, 6, 2]),  # the longest suffix before the latest
        ([3, 3], [3, 3, 3]),  # a pattern is repeated to full length
        ([1, 2, 1, 2, 1], [2, 1, 2]),
        ([1, 2, 3], []),
        ([4], []),
    ],
)
def test_ngram_drafts(tokens: list[int], expected: list[int]) -> None:
    assert propose(tokens, 4, 1, 3) == expected


def test_ngram_drafts_end_with_the_request() -> None:
    assert propose([3, 3, 3], 8, 1, 3, room=2) == [3, 3]
    assert propose([1, 2, 1, 2, 9, 2], 4, 2, 3) == [], "a match shorter than min_match"
