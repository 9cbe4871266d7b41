"""Masks of several places of a text, computed in one call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from specbatch.cache.rule_table import RuleTable
from specbatch.engine.constrained.mask_table import NodeMasks, WantedMasks
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.constrained.tree import GrammarTree, grow
from specbatch.engine.transfers import Transfers
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint
from specbatch.grammar.matcher import Matcher
from specbatch.grammar.reasoning import AfterReasoning
from specbatch.matcher import GrammarMatcher, Walk
from specbatch.models.formats.tokenizer import byte_tokenizer
from tests.grammar.tiny_tokenizer import END, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCAB = len(TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER, 3)
BEGIN, DONE = (TOKENIZER.convert_tokens_to_ids(token) for token in "<1")
# Places where a text is complete, one where it ends, forced texts, and free ones.
PATTERNS = ("(na|name|nam_)+[0-9]{2}", "[a-z]*", "true|trua", "a", '"name": (1|10)?')


def legal(matcher: GrammarMatcher) -> list[int]:
    return [token for token in range(VOCAB) if matcher.allows(token)]


def longest(matcher: GrammarMatcher, rng: random.Random) -> list[int]:
    """Tokens that may come in turn."""
    tokens: list[int] = []
    while len(tokens) < 6 and (found := [token for token in legal(matcher) if token != END]):
        tokens.append(rng.choice(found))
        matcher.advance(tokens[-1])
    matcher.back(len(tokens))
    return tokens


@pytest.mark.parametrize("thinking", [None, "marked", "begun", "channel"])
@pytest.mark.parametrize("seed", range(4))
def test_masks_of_a_walk_are_those_of_its_places(seed: int, thinking: str | None) -> None:
    rng = random.Random(seed)
    matchers: list[GrammarMatcher] = [COMPILER.matcher(Constraint("regex", "regex", one)) for one in PATTERNS]
    if thinking is not None:
        begin = BEGIN if thinking == "marked" else None
        end = (DONE, 7, 8) if thinking == "channel" else (DONE,)
        matchers = [AfterReasoning(one, begin, end, VOCAB) for one in matchers]
    walks, expected, num_lines = [], {}, 0
    for matcher in matchers:
        tokens = longest(matcher, rng)
        if thinking is not None:
            tokens = [*[BEGIN][: thinking == "marked"], 5, 6, DONE]
            if thinking == "channel":  # the first ones do not end it, and another token comes before the last one
                tokens += [7, DONE, 8, 7, DONE, 7, 9, 8]
            for token in tokens:
                assert matcher.advance(token)
            rest = longest(matcher, rng)
            matcher.back(len(tokens))
            tokens += rest
        walks.append(Walk(matcher, tokens, num_lines + 1))  # a line between is not of this call
        for i in range(len(tokens) + 1):
            assert not i or matcher.advance(tokens[i - 1])
            expected[walks[-1].line + i] = (matcher.mask(), matcher.is_complete())
        matcher.back(len(tokens))
        num_lines += len(tokens) + 2
    for extra in (0, 1, -1):  # words
        words = matchers[0].num_words + extra
        masks_KW = np.full((num_lines, words), 77, dtype=np.int32)
        is_complete_K = matchers[0].write_masks(rng.sample(walks, len(walks)), masks_KW)
        for line, mask_W in enumerate(masks_KW):
            if line not in expected:
                assert (mask_W == 77).all()
                continue
            known = min(words, matchers[0].num_words)
            assert (mask_W[:known] == expected[line][0][:known]).all()
            assert (mask_W[known:] == 0).all()
            assert is_complete_K[line] == expected[line][1]
    assert any(is_complete for _, is_complete in expected.values())


def test_forced_tokens_are_asked_for_once() -> None:
    """The first is sure. Each of the others may come, and its mask is computed."""
    state = GrammarState(COMPILER.matcher(Constraint("regex", "regex", '"name": (1|10)')), (END,), (), VOCAB)
    tree = grow(state, [0, BEGIN], None, max_nodes=4, max_depth=9)
    assert len(tree.tokens) == 4
    assert tree.forced[0] == tree.tokens[1]
    assert tree.forced[1:] == [None] * 3
    sure = grow(state, [0, BEGIN], None, max_nodes=4, max_depth=9, all_sure=True)
    assert sure.tokens == tree.tokens
    assert sure.forced == [*tree.tokens[1:], None]
    assert state.enter_all(tree.tokens[1:]) == 3


def test_words_past_the_tokenizers_are_cleared() -> None:
    """A table of a larger vocabulary, which another request has used."""
    state = GrammarState(COMPILER.matcher(Constraint("regex", "regex", "[a-z]*")), (END,), (), VOCAB + 100)
    rules = RuleTable(2, VOCAB + 100, torch.float32, torch.device("cpu"))
    rules.add_node_masks(2)
    assert rules.node_masks_SNW is not None
    masks = NodeMasks(rules, Transfers(torch.device("cpu")))
    assert masks.write([WantedMasks(1, state, GrammarTree.of([0], None), [0])]) == 1
    assert state.num_words < rules.node_masks_SNW.shape[2]
    assert (rules.node_masks_SNW[1, 0, state.num_words :] == 0).all()
    assert torch.equal(rules.node_masks_SNW[1, 0, : state.num_words], torch.from_numpy(state.mask()))
    assert (rules.node_masks_SNW[1, 1] == -1).all()


def test_a_walk_to_a_text_that_the_tokenizer_has_as_a_mark() -> None:
    """The library forces it, and then refuses it: nothing may come."""
    tokenizer = byte_tokenizer(300, [0])
    tokenizer.add_tokens(["<think>"])
    compiler = GrammarCompiler(tokenizer, 2)
    matchers = [compiler.matcher(Constraint("regex", "regex", "[ab]<think>c")) for _ in range(3)]
    tokens = tokenizer.encode("a", add_special_tokens=False)
    masks_KW = np.empty((6, matchers[0].num_words), dtype=np.int32)
    matchers[0].write_masks([Walk(one, tokens, 2 * i) for i, one in enumerate(matchers)], masks_KW)
    assert masks_KW[0::2].any(1).all()
    assert not masks_KW[1::2].any()


@pytest.mark.parametrize("pattern", ["[a-z]*", "(a|b|na)+", "[a-z]{0,6}"])
def test_masks_of_texts_that_may_end_anywhere_are_computed_once(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library says only that a text may end: each place is looked at, but its mask is there already."""
    written: list[int] = []

    def slowly(self: Matcher, walk: Walk, *args: Any) -> None:
        written.append(args[-1])
        original(self, walk, *args)

    original = Matcher._write_slowly
    monkeypatch.setattr(Matcher, "_write_slowly", slowly)
    matcher = COMPILER.matcher(Constraint("regex", "regex", pattern))
    tokens = [TOKENIZER.convert_tokens_to_ids(text) for text in ("a", "na", "a")]
    masks_KW = np.full((len(tokens) + 1, matcher.num_words), 77, dtype=np.int32)
    is_complete_K = matcher.write_masks([Walk(matcher, tokens, 0)], masks_KW)
    assert written == [len(tokens) + 1]
    for i, mask_W in enumerate(masks_KW):
        assert not i or matcher.advance(tokens[i - 1])
        assert (mask_W == matcher.mask()).all()
        assert is_complete_K[i] == matcher.is_complete()


def test_forced_tokens_that_may_not_come() -> None:
    """Those that the model lacks, those after one that ends the request, and marks that the library refuses."""
    name = Constraint("regex", "regex", '"name": (1|10)')
    tokens = GrammarState(COMPILER.matcher(name), (END,), (), VOCAB).forced(9)
    assert len(tokens) == 4
    assert GrammarState(COMPILER.matcher(name), (END,), (), tokens[2]).forced(9) == tokens[:2]
    stopped = grow(GrammarState(COMPILER.matcher(name), (END,), (tokens[1],), VOCAB), [BEGIN], None, 9, 9)
    assert stopped.tokens == [BEGIN, *tokens[:2]]
    tokenizer = byte_tokenizer(300, [0])
    tokenizer.add_tokens(["<think>"])
    a, x, y = tokenizer.encode("axy", add_special_tokens=False)
    matcher = GrammarCompiler(tokenizer, 2).matcher(Constraint("regex", "regex", "[ab]xy<think>c"))
    assert matcher.advance(a)
    assert matcher.forced_tokens(9) == [x, y]


@pytest.mark.parametrize("pattern", ["(na|name|nam_)+[0-9]{2}", "[a-z]*"])
def test_a_walk_of_a_matcher_with_an_error(pattern: str) -> None:
    """It begins again: what came before the error goes on."""
    matcher, other = (COMPILER.matcher(Constraint("regex", "regex", pattern)) for _ in range(2))
    tokens = [TOKENIZER.convert_tokens_to_ids(text) for text in ("na", "name")]
    assert matcher.advance(tokens[0])
    assert other.advance(tokens[0])
    matcher._matcher.consume_token(BEGIN)
    assert matcher._matcher.is_error()
    masks_KW = np.full((3, matcher.num_words), 77, dtype=np.int32)
    is_complete_K = matcher.write_masks([Walk(matcher, tokens, 0)], masks_KW)
    for i, mask_W in enumerate(masks_KW):
        assert not i or other.advance(tokens[i - 1])
        assert (mask_W == other.mask()).all()
        assert is_complete_K[i] == other.is_complete()
