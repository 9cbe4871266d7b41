"""Which nodes need a mask: by hand, and against the masks of all nodes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from specbatch.batch import NO_TOKEN
from specbatch.cache.rule_table import RuleTable
from specbatch.engine.constrained.check import find_forced, refused_nodes
from specbatch.engine.constrained.mask_table import NodeMasks, WantedMasks
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.constrained.tree import GrammarTree
from specbatch.engine.transfers import Transfers
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint, constraint_of
from specbatch.grammar.reasoning import AfterReasoning
from specbatch.types import SamplingParams
from tests.engine.test_constrained import GRAMMARS
from tests.grammar.tiny_tokenizer import END, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCAB = len(TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER, 2)
PATTERNS = ("(na|name|nam_)+[0-9]{2}", "[a-z]*", "true|trua", "a", '"name": (1|10)?', "(name: [0-9]{2}_true_){1,3}")
CONSTRAINTS = [Constraint("regex", "regex", pattern) for pattern in PATTERNS]
CONSTRAINTS += [one for name in GRAMMARS if (one := constraint_of(SamplingParams(**GRAMMARS[name]))) is not None]


def ids(*texts: str) -> list[int]:
    return [TOKENIZER.convert_tokens_to_ids(text) for text in texts]


def state_of(constraint: Constraint, stops: tuple[int, ...] = (), reasoning: bool = False) -> GrammarState:
    matcher: Any = COMPILER.matcher(constraint)
    if reasoning:
        matcher = AfterReasoning(matcher, ids("<")[0], (ids("1")[0],), VOCAB)
    return GrammarState(matcher, (END,), stops, VOCAB)


def tokens_of(mask_W: np.ndarray, vocab: int = VOCAB) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:vocab]).tolist())


def written(state: GrammarState, rng: random.Random, most: int) -> list[int]:
    """Tokens that may come in turn, and do not end the text: the masks' own, or others that the grammar takes."""
    tokens: list[int] = []
    while len(tokens) < most:
        legal = [token for token in range(VOCAB) if state.allows(token) and not state.is_end(token)]
        if not legal:
            break
        tokens.append(rng.choice(legal))
        state.enter(tokens[-1])
    state.back(len(tokens))
    return tokens


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_state_takes_the_tokens_of_its_mask(seed: int, reasoning: bool) -> None:
    """Also where a text is forced: there the grammar takes more tokens than the mask has."""
    rng, num_forced, num_odd = random.Random(seed), 0, 0
    for constraint in CONSTRAINTS:
        state = state_of(constraint, stops=(ids("a")[0],) if seed % 2 else (), reasoning=reasoning)
        if reasoning:
            # Two tokens may come where the answer's first one is forced: that needs the mask.
            assert state.only_token() < 0
            assert tokens_of(state.mask()) >= {t for t in range(VOCAB) if state.takes(t, state.only_token())}
            for token in rng.choice((ids("<", "b", "1"), written(state, rng, 1))):
                state.enter(token)
        for _ in range(25):
            mask, only = tokens_of(state.mask()), state.only_token()
            assert {token for token in range(VOCAB) if state.takes(token, only)} == mask
            num_forced += only >= 0
            num_odd += len(mask) < sum(state.allows(token) for token in range(VOCAB))
            for token in range(VOCAB):
                ahead = state.num_ahead
                assert state.choose(token, only) == (token in mask)
                if state.num_ahead > ahead:
                    state.follow([])
            if not (tokens := written(state, rng, 1)):
                break
            state.enter(tokens[0])
    assert num_forced > 3
    assert num_odd > 1


def random_tree(state: GrammarState, rng: random.Random) -> GrammarTree:
    """Of tokens that may come; a few end the request."""
    tree = GrammarTree.of([1], None)
    depths = [0]
    for _ in range(rng.randrange(7)):
        parent = rng.randrange(len(tree.tokens))
        if parent and state.is_end(tree.tokens[parent]):
            continue
        path = path_of(tree, parent)
        for token in path:
            state.enter(token)
        siblings = {tree.tokens[i] for i in range(len(tree.tokens)) if tree.parents[i] == parent}
        legal = [token for token in range(VOCAB) if state.allows(token) and token not in siblings]
        state.back(len(path))
        if legal:
            tree.add(rng.choice(legal), parent, 1)
            depths.append(depths[parent] + 1)
    return tree


def path_of(tree: GrammarTree, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path, node = [tree.tokens[node], *path], tree.parents[node]
    return path


def masks_of(state: GrammarState, tree: GrammarTree) -> dict[int, np.ndarray]:
    """Of the nodes that go on."""
    masks = {}
    for node, token in enumerate(tree.tokens):
        if not node or not state.is_end(token):
            path = path_of(tree, node)
            for one in path:
                state.enter(one)
            masks[node] = state.mask()
            state.back(len(path))
    return masks


@pytest.mark.parametrize("in_advance", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_nodes_that_need_a_mask(seed: int, in_advance: bool) -> None:
    """A node does where some token that may be chosen leads to it, and its own choice is not in the mask. All that is
    looked up in advance changes nothing. And what is written are the masks of these nodes."""
    rng = random.Random(seed)
    transfers = Transfers(torch.device("cpu"))
    rules = RuleTable(2, VOCAB, torch.float32, torch.device("cpu"))
    rules.add_node_masks(9)
    assert rules.node_masks_SNW is not None
    table = NodeMasks(rules, transfers)
    num_refused, num_ahead = 0, 0
    for constraint in CONSTRAINTS * 3:
        state = state_of(constraint, stops=tuple(ids("e")) if seed % 3 == 0 else ())
        state.follow(written(state, rng, rng.randrange(6)))
        tree = random_tree(state, rng)
        masks = masks_of(state, tree)
        choices = [rng.choice([NO_TOKEN, rng.randrange(VOCAB), *tree.tokens, *tree.tokens]) for _ in tree.tokens]
        for node, mask in masks.items():
            if rng.random() < 0.6 and (legal := tokens_of(mask)):
                drafts = legal & {t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent == node}
                choices[node] = rng.choice(sorted(drafts or legal))
        takes = {node: choices[node] in tokens_of(mask) for node, mask in masks.items()}
        reached = {0}
        for node in list(masks)[1:]:
            parent = tree.parents[node]
            if parent in reached and (not takes[parent] or choices[parent] == tree.tokens[node]):
                reached.add(node)
        expected = [node for node in masks if node in reached and not takes[node]]
        if in_advance:
            find_forced(state, tree)
            assert all(tree.forced[node] is not None for node in masks)
        found = refused_nodes(state, tree, choices)
        assert sorted(found) == expected
        num_refused, num_ahead = num_refused + len(found), num_ahead + state.num_ahead

        table.write([WantedMasks(1, state, tree, found)])
        for node in range(9):
            wanted = masks[node][: state.num_words] if node in expected else np.int32(-1)
            assert (rules.node_masks_SNW[1, node, : state.num_words].numpy() == wanted).all()
        assert (rules.node_masks_SNW[0] == -1).all()
        table.clear()
        assert (rules.node_masks_SNW == -1).all()
    assert num_refused > 3
    assert num_ahead > 1


def test_a_choice_that_was_not_committed_is_taken_back() -> None:
    """A launch after the check can fail. Then the round runs again, in another batch perhaps, and chooses anew."""
    a, b, na = ids("a", "b", "na")
    state = state_of(Constraint("regex", "regex", "(a|ba|na)*y"))
    other = state_of(Constraint("regex", "regex", "(a|ba|na)*y"))
    state.follow([a])
    assert state.choose(b, state.only_token())
    state.follow([a])
    assert state.num_ahead == 0
    assert state.choose(na, state.only_token())
    assert state.choose(b, state.only_token())
    state.follow([1, a, na, a], 1)
    other.follow([a, na, a])
    assert (state.mask() == other.mask()).all()
    assert not state.choose(ids("1")[0], state.only_token())
    assert not state.choose(NO_TOKEN, state.only_token())
    assert state.num_ahead == 0
