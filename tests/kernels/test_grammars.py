"""Automata of grammars on the device: both implementations, and both against llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specbatch.batch import BROKEN, DEAD, FREE, NUM_FIELDS, Field, GrammarBuffers
from specbatch.cache.grammar_table import GrammarTable
from specbatch.engine.constrained.state import GrammarState
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint
from specbatch.grammar.token_automaton import TokenAutomaton
from specbatch.kernels import torch as reference
from specbatch.matcher import GrammarMatcher
from tests.grammar.tiny_tokenizer import END, tiny_tokenizer
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import Ops

pytestmark = [pytest.mark.gpu] if CUDA else []

VOCAB, CPU = 70, torch.device("cpu")  # the model has tokens that the tokenizer does not have
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tru": {"type": "array", "items": {"type": "number", "minimum": -3, "maximum": 10.5}, "maxItems": 2},
        "é": {"enum": ["ab", "true", "tru", True]},
        "ab": {},  # deep values leave the automaton
    },
    "required": ["name", "é"],
    "additionalProperties": False,
}
REGEX = "(name|10|tru)* (ab)?e{1,3}"


def matchers() -> list[GrammarMatcher]:
    compiler = GrammarCompiler(tiny_tokenizer())
    constraints = (
        Constraint("response_format", "json_schema", json.dumps(SCHEMA)),
        Constraint("regex", "regex", REGEX),
    )
    return [compiler.matcher(constraint) for constraint in constraints]


def table(num_masks: int | None = None, eos: tuple[int, ...] = (END,)) -> tuple[GrammarTable, list[TokenAutomaton]]:
    """A line for each automaton, and one without."""
    made, automata = GrammarTable(3, VOCAB, eos, CPU), []
    for line, matcher in enumerate(matchers()):
        assert isinstance(matcher.automaton, TokenAutomaton)
        automata.append(matcher.automaton)
        assert made.acquire(matcher.automaton) is None
        made.states_S[line], made.automata_S[line] = made.start(matcher.automaton, 1)
    if num_masks is not None:
        made.masks_CW, made.owners_C = made.masks_CW[:num_masks], made.owners_C[:num_masks]
    return made, automata


def on_device(buffers: GrammarBuffers) -> GrammarBuffers:
    values = (getattr(buffers, field.name) for field in fields(GrammarBuffers))
    return GrammarBuffers(*(one.clone().to(DEVICE) if isinstance(one, Tensor) else one for one in values))


def walks(num_tokens: int, seed: int) -> Iterator[tuple[int, list[int], GrammarMatcher]]:
    """Random texts by llguidance's masks: the line, the tokens so far, the matcher."""
    rng = np.random.default_rng(seed)
    for line, matcher in enumerate(matchers()):
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            yield line, tokens, matcher
            legal = legal_of(matcher)
            if not len(legal):
                break
            tokens.append(int(rng.choice(legal)))
            assert matcher.advance(tokens[-1])


def legal_of(matcher: GrammarMatcher) -> np.ndarray:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    bits[END] = 0
    return np.flatnonzero(bits)


def forbidden(buffers: GrammarBuffers, ops: Any, states: list[int], lines: list[int]) -> Tensor:
    device = buffers.states_S.device
    logits = torch.zeros(len(states), VOCAB, device=device)
    ints = torch.zeros(3, NUM_FIELDS, dtype=torch.int64, device=device)
    ints[:, Field.STOP :] = -1
    ints[:, Field.STOP + 1] = VOCAB - 1
    ops.forbid_by_states(
        logits,
        torch.tensor(states, dtype=torch.int32, device=device),
        torch.tensor(lines, device=device),
        ints,
        buffers,
    )
    return logits.cpu()


@pytest.mark.parametrize("num_masks", [1, 7, None])
@pytest.mark.parametrize("is_reference", [True, False])
def test_tokens_are_those_of_llguidance(num_masks: int | None, is_reference: bool, ops: Ops) -> None:
    """Rows replace each other's masks where there is room for few. Each batch has all states twice."""
    buffers, automata = table(num_masks)
    kernels: Any = reference if is_reference else ops.raw
    buffers = buffers if is_reference else on_device(buffers)  # type: ignore[assignment]
    states, lines, expected = [FREE, DEAD, BROKEN], [2, 0, 0], [None, None, ()]
    base = [int(state) for state in buffers.states_S]
    for seed in range(3):
        for line, tokens, matcher in walks(12, seed):
            if automata[line].leaves_Q[automata[line].state_after(tokens)]:
                continue
            ends = [END, VOCAB - 1] if matcher.is_complete() else []
            states.append(base[line] - 1 + automata[line].state_after(tokens))
            lines.append(line)
            expected.append(sorted([*legal_of(matcher), *ends]))  # type: ignore[arg-type]
    for _ in range(3):
        found = forbidden(buffers, kernels, states * 2, lines * 2)
        for row, legal in zip(found, expected * 2, strict=True):
            assert torch.nonzero(row == 0)[:, 0].tolist() == list(range(VOCAB) if legal is None else legal)


@pytest.mark.parametrize("eos", [(END,), (VOCAB - 2,), (END, VOCAB - 2), ()])
def test_end_tokens_are_those_of_the_host(eos: tuple[int, ...]) -> None:
    """The model's end-of-sequence tokens may come where a text is complete. The tokenizer's own one may come only if it
    is one of these."""
    buffers, automata = table(eos=eos)
    base = [int(state) for state in buffers.states_S]
    num_ends = 0
    for seed in (1, 2):
        hosts = [GrammarState(matcher, eos, (VOCAB - 1,), VOCAB) for matcher in matchers()]
        for line, tokens, matcher in walks(12, seed):
            state = automata[line].state_after(tokens)
            if automata[line].leaves_Q[state]:
                continue
            hosts[line].follow(tokens)
            bits = np.unpackbits(hosts[line].mask().view(np.uint8), bitorder="little")
            found = torch.nonzero(forbidden(buffers, reference, [base[line] - 1 + state], [line])[0] == 0)[:, 0]
            assert found.tolist() == np.flatnonzero(bits).tolist()
            assert hosts[line].allows(END) == (END in eos and matcher.is_complete())
            assert hosts[line].choose(END, -1) == hosts[line].allows(END)
            num_ends += matcher.is_complete()
    assert num_ends == 3


PARENTS = [[-1, 0, 0, 1, 1, 2, -2], [-1, 0, 1, 0, 2, 3, 5], [-1, -2, -2, -2, -2, -2, -2]]


@pytest.mark.parametrize("kind", ["chain", "chain of some nodes", "tree"])
def test_trees_as_the_reference(kind: str, ops: Ops) -> None:
    buffers, automata = table()
    device_buffers = on_device(buffers)
    num_forced = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tokens = torch.from_numpy(rng.integers(-1, VOCAB, (3, 7)))
        for line, text in ((0, '{"name": "'), (1, "name10")):  # some drafts are legal
            ids = tiny_tokenizer()(text).input_ids[: rng.integers(1, 8)]
            first = rng.integers(0, 7)
            tokens[line, first : first + len(ids)] = torch.tensor(ids)[: 7 - first]
        for line, automaton in enumerate(automata):
            state = int(rng.integers(1, len(automaton))) if seed % 3 else 1
            buffers.states_S[line] = device_buffers.states_S[line] = buffers.start(automaton, state)[0]
        counts = torch.from_numpy(rng.integers(1, 8, 3)) if kind == "chain of some nodes" else None
        parents = torch.tensor(PARENTS) if kind == "tree" else None
        index = torch.tensor([1, 0, 2])
        given = (tokens, index, buffers, counts, parents)
        expected = reference.follow_trees(*given)
        found = ops.raw.follow_trees(
            *(one.to(DEVICE) if isinstance(one, Tensor) else one for one in (tokens, index)),
            device_buffers,
            *(None if one is None else one.to(DEVICE) for one in (counts, parents)),
        )
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.cpu(), other)  # type: ignore[arg-type]
        num_forced += int((expected[0] != tokens).sum())
    assert num_forced > 10


def test_states_advance_as_the_reference(ops: Ops) -> None:
    buffers, automata = table()
    device_buffers = on_device(buffers)
    seen, num_left = set(), 0
    first, texts = automata[0].automaton, automata[0].vocabulary.texts
    leaving = [
        (state, token)
        for state in range(1, len(first))
        for token, text in enumerate(texts)
        if text and automata[0].leaves_Q[first.step(state, text)]
    ]
    for seed in range(60):
        rng = np.random.default_rng(seed)
        index, is_live = torch.tensor([0, 1, 2]), torch.from_numpy(rng.random(3) < 0.8)
        states = torch.tensor(
            [*(buffers.start(automaton, int(rng.integers(1, len(automaton))))[0] for automaton in automata), FREE],
            dtype=torch.int32,
        )
        tokens, ints = torch.from_numpy(rng.integers(0, VOCAB, 3)), torch.zeros(3, NUM_FIELDS, dtype=torch.int64)
        if seed % 4 == 0:
            state, tokens[0] = leaving[int(rng.integers(len(leaving)))]
            states[0] = buffers.start(automata[0], state)[0]
        device_ints = ints.to(DEVICE)
        given: tuple[Tensor, ...] = (index, is_live, states[:, None], tokens[:, None])
        path: tuple[Tensor, ...] = ()
        if seed % 2:  # they are at the end of a path in a tree
            num_path_B = torch.from_numpy(rng.integers(1, 4, 3))
            path_BM = torch.from_numpy(rng.integers(0, 5, (3, 3)))
            states_BN, tokens_BM = torch.zeros(3, 5, dtype=torch.int32), torch.full((3, 3), -1)
            tokens_BM[index, num_path_B - 1] = tokens
            states_BN[index, path_BM[index, num_path_B - 1]] = states
            given, path = (index, is_live, states_BN, tokens_BM), (path_BM, num_path_B)
        reference.advance_states(*given, ints, buffers, *path)
        on_gpu, path = [one.to(DEVICE) for one in given], tuple(one.to(DEVICE) for one in path)
        ops.raw.advance_states(*on_gpu, device_ints, device_buffers, *path)
        assert torch.equal(device_buffers.states_S.cpu(), buffers.states_S)
        assert torch.equal(device_ints.cpu(), ints)
        num_left += int(ints.sum())
        assert not (ints[:, Field.DONE].bool() & ~is_live).any()
        seen |= set(buffers.states_S.tolist())
    assert {FREE, BROKEN} < seen
    assert num_left > 0
    assert DEAD not in seen
