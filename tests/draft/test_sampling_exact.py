"""Sampled speculation is exact: its output has the target's own distribution, by enumeration (no Monte Carlo).

The code under test decides every cell of the coins' unit cube; the sum of the cells' volumes for each output must be
the product of the target's probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specbatch.draft.rng import Draw
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence
from specbatch.types import Request, RngKey, SamplingParams
from tests.coins import (
    Coins,
    enumerate_outcomes,
    install,
    largest_difference,
    reference_distribution,
    target_sequences,
)
from tests.engine.test_nonfinite import all_nan
from tests.oracle import verify as verify_module
from tests.oracle.engine import OracleEngine
from tests.oracle.tree import DraftTree
from tests.oracle.verify import Accepted, verify
from tests.tiny_models import run, tiny_oracle

Tokens = tuple[int, ...]
PARAMS = {
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=0.7, top_k=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "all": SamplingParams(temperature=0.9, top_k=3, top_p=0.9, min_p=0.1),
}
PROMPT = 3  # tokens; none of them matters to `verify`


class RandomModel:
    """Logits as a function of the generated prefix."""

    def __init__(self, vocab: int, seed: int, spread: float = 1.5) -> None:
        self.vocab, self._seed, self._spread = vocab, seed, spread

    def logits(self, prefix: Tokens) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, prefix)) & 0xFFFFFFFF)
        return torch.randn(self.vocab, generator=generator, dtype=torch.float64) * self._spread

    def p(self, prefix: Tokens, params: SamplingParams) -> list[float]:
        return reference_distribution(self.logits(prefix).tolist(), params)

    def q_of(self, params: SamplingParams) -> Callable[[Tokens], Tensor]:
        return lambda prefix: torch.tensor(self.p(prefix, params), dtype=torch.float64)

    def sequences(self, length: int, params: SamplingParams) -> dict[Tokens, float]:
        return self.continuations({(): 1.0}, length, params)

    def continuations(self, measured: dict[Tokens, float], length: int, params: SamplingParams) -> dict[Tokens, float]:
        """Outputs of different lengths, each continued by plain sampling up to `length` tokens."""
        result: dict[Tokens, float] = {}
        for prefix, mass in measured.items():
            parts = {prefix[:length]: mass}
            while parts:
                key, m = parts.popitem()
                if len(key) == length:
                    result[key] = result.get(key, 0.0) + m
                else:
                    parts |= {(*key, t): m * p for t, p in enumerate(self.p(key, params)) if p > 0.0}
        return result


def new_sequence(params: SamplingParams) -> Sequence:
    request = Request(0, [1] * PROMPT, params, RngKey(0, 0, 0))
    return Sequence(request, [1] * (PROMPT + 1), 1000, num_computed_tokens=PROMPT)


def chain_outcomes(target: RandomModel, q_of: Callable[[Tokens], Tensor], steps: int, params: SamplingParams) -> dict:
    """Emitted tokens of one round of chain drafting, with their measure."""

    def one(coins: Coins) -> Tokens:
        with pytest.MonkeyPatch.context() as patch:
            install(patch, coins)
            seq = new_sequence(params)
            drafts: Tokens = ()
            probs = []
            for step in range(steps):
                q = q_of(drafts)
                probs.append(q)
                u = coins.uniform(seq.request.rng, PROMPT + 1 + step, Draw.DRAFT)
                drafts = (*drafts, 0 if q.isnan().any() else coins.draw(q, u))
            tree = DraftTree.chain([[1, *drafts]], [torch.stack(probs)])
            logits = torch.stack([target.logits(drafts[:i]) for i in range(steps + 1)])
            [accepted] = verify([seq], tree, logits)
        num = len(accepted.path) - 1
        assert accepted.path == list(range(num + 1))
        return (*drafts[:num], accepted.next_token)

    return enumerate_outcomes(one)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("vocab", [3, 5])
def test_chain(vocab: int, params: SamplingParams) -> None:
    steps = 2 if vocab == 5 else 3
    for seed in range(3):
        target, draft = RandomModel(vocab, seed), RandomModel(vocab, 100 + seed)
        outcomes = chain_outcomes(target, draft.q_of(params), steps, params)
        assert sum(outcomes.values()) == pytest.approx(1.0, abs=1e-12)
        assert {len(tokens) for tokens in outcomes} == set(range(1, steps + 2)), "not every branch was taken"
        found = target.continuations(outcomes, steps + 1, params)
        assert largest_difference(found, target.sequences(steps + 1, params)) < 1e-12


@pytest.mark.parametrize("case", ["equal", "disjoint", "one-hot", "subset"])
def test_chain_with_special_drafts(case: str) -> None:
    """The same distribution; nothing in common; certainty; a reduced draft vocabulary."""
    params = SamplingParams(temperature=1.0)
    target = RandomModel(4, 0)
    masked = SamplingParams(temperature=1.0, top_k=2)

    def q_of(prefix: Tokens) -> Tensor:
        p = torch.tensor(target.p(prefix, masked if case == "disjoint" else params), dtype=torch.float64)
        if case == "equal":
            return p
        if case == "disjoint":
            return (p == 0).double() / 2
        if case == "one-hot":
            return torch.eye(4, dtype=torch.float64)[2]
        return torch.tensor([0.0, 0.3, 0.0, 0.7], dtype=torch.float64)

    used = masked if case == "disjoint" else params
    outcomes = chain_outcomes(target, q_of, 2, used)
    lengths = {len(tokens) for tokens, mass in outcomes.items() if mass > 1e-13}
    if case in ("equal", "disjoint"):
        assert lengths == ({3} if case == "equal" else {1})
    found = target.continuations(outcomes, 3, used)
    assert largest_difference(found, target.sequences(3, used)) < 1e-12


@pytest.mark.parametrize("first", [False, True])
def test_chain_with_drafts_that_are_nan(first: bool) -> None:
    """From the first draft on, or after some first drafts: these are rejected, and the target draws alone."""
    params = SamplingParams(temperature=1.3, top_p=0.95)
    target, draft = RandomModel(4, 0), RandomModel(4, 100)

    def q_of(prefix: Tokens) -> Tensor:
        if first or (prefix and prefix[0] % 2 == 0):
            return torch.full((4,), torch.nan, dtype=torch.float64)
        return draft.q_of(params)(prefix)

    outcomes = chain_outcomes(target, q_of, 2, params)
    assert sum(outcomes.values()) == pytest.approx(1.0, abs=1e-12)
    assert {len(tokens) for tokens in outcomes} == ({1} if first else {1, 2, 3})
    found = target.continuations(outcomes, 3, params)
    assert largest_difference(found, target.sequences(3, params)) < 1e-12


def random_tree(vocab: int, num_nodes: int, seed: int) -> tuple[DraftTree, list[Tokens]]:
    """Any topology, siblings with different tokens; returns the tokens on the way to each node as well."""
    generator = torch.Generator().manual_seed(seed)
    paths: list[Tokens] = [()]
    parents = [-1]
    while len(paths) < num_nodes:
        parent = int(torch.randint(len(paths), (1,), generator=generator))
        path = (*paths[parent], int(torch.randint(vocab, (1,), generator=generator)))
        if path not in paths:
            paths.append(path)
            parents.append(parent)
    tokens = torch.tensor([[1, *(p[-1] for p in paths[1:])]])
    return DraftTree(tokens, torch.tensor([parents]), [num_nodes], False, [None]), paths


def tree_outcomes(target: RandomModel, tree: DraftTree, paths: list[Tokens], params: SamplingParams) -> dict:
    logits = torch.stack([target.logits(path) for path in paths])

    def one(coins: Coins) -> Tokens:
        with pytest.MonkeyPatch.context() as patch:
            install(patch, coins)
            [accepted] = verify([new_sequence(params)], tree, logits)
        for parent, child in zip(accepted.path, accepted.path[1:], strict=False):
            assert tree.parents_BN[0, child] == parent, "the accepted nodes are no path"
        return (*paths[accepted.path[-1]], accepted.next_token)

    return enumerate_outcomes(one)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_tree(params: SamplingParams) -> None:
    lengths: set[int] = set()
    for seed in range(6):
        target = RandomModel(4, seed)
        tree, paths = random_tree(4, 4 + seed, seed)
        outcomes = tree_outcomes(target, tree, paths, params)
        depth = max(map(len, paths)) + 1
        found = target.continuations(outcomes, depth, params)
        assert largest_difference(found, target.sequences(depth, params)) < 1e-12
        lengths |= {len(tokens) for tokens in outcomes}
    assert {1, 2, 3} <= lengths, "not every depth was accepted"


def test_a_batch_of_different_sequences() -> None:
    """Rows of a batch keep to their own logits, coins and drafts: greedy, tree-less and p/q rows side by side."""
    target, draft = RandomModel(3, 0), RandomModel(3, 9)
    params = SamplingParams(temperature=1.0)

    def one(coins: Coins) -> tuple[Tokens, Tokens]:
        with pytest.MonkeyPatch.context() as patch:
            install(patch, coins)
            first, second, greedy = new_sequence(params), new_sequence(params), new_sequence(SamplingParams())
            second.request.rng = RngKey(0, 1, 0)
            q = torch.tensor(draft.p((), params), dtype=torch.float64)
            x = coins.draw(q, coins.uniform(first.request.rng, PROMPT + 1, Draw.DRAFT))
            best = int(target.logits((7,)).argmax())
            tree = DraftTree.chain([[1, x], [1], [1, best]], [q[None], None, None])
            rows = [(), (x,), (5,), (7,), (7, best)]
            accepted = verify([first, second, greedy], tree, torch.stack([target.logits(r) for r in rows]))
        assert accepted[2] == Accepted([0, 1], int(target.logits((7, best)).argmax()))
        kept = (x,)[: len(accepted[0].path) - 1]
        return (*kept, accepted[0].next_token), (accepted[1].next_token,)

    joint = enumerate_outcomes(one)
    for index, (prefix, length) in enumerate([((), 2), ((5,), 1)]):
        marginal: dict[Tokens, float] = {}
        for outcome, mass in joint.items():
            marginal[outcome[index]] = marginal.get(outcome[index], 0.0) + mass
        if index == 0:
            found, expected = target.continuations(marginal, length, params), target.sequences(length, params)
        else:
            found, expected = marginal, {(t,): p for t, p in enumerate(target.p(prefix, params))}
        assert largest_difference(found, expected) < 1e-12


def broken_residual(seq: Sequence, tokens: list[int], logits_NV: Tensor, draft_probs: Tensor) -> Accepted:
    """Draws from the target's distribution where the residual is due."""
    kept = verify_module_accept(seq, tokens, logits_NV, draft_probs)
    if len(kept.path) == len(tokens):
        return kept
    u = verify_module.uniform(seq.request.rng, seq.num_computed_tokens + len(kept.path), Draw.SAMPLE)
    p = verify_module.distribution(logits_NV[len(kept.path) - 1], seq.request.params)
    return Accepted(kept.path, verify_module.draw(p, u))


def broken_accept(seq: Sequence, tokens: list[int], logits_NV: Tensor, draft_probs: Tensor) -> Accepted:
    """Accepts every draft."""
    position = seq.num_computed_tokens + len(tokens)
    return Accepted(list(range(len(tokens))), verify_module.sample_token(logits_NV[-1], seq, position))


verify_module_accept = verify_module._accept_chain


@pytest.mark.parametrize("rule", [broken_residual, broken_accept])
def test_a_broken_rule_is_noticed(rule: Callable[..., Accepted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_accept_chain", rule)
    params = SamplingParams(temperature=1.0)
    target, draft = RandomModel(3, 0), RandomModel(3, 100)
    outcomes = chain_outcomes(target, draft.q_of(params), 2, params)
    found = target.continuations(outcomes, 3, params)
    assert largest_difference(found, target.sequences(3, params)) > 1e-2


ENGINES = {
    "none": ("none", None, None),
    "ngram": ("ngram", DraftShape(2, 1, 3), None),
    "draft_model-chain": ("draft_model", DraftShape(2, 1, 3), None),
    "draft_model-tree": ("draft_model", DraftShape(2, 2, 5), None),
    "eagle-chain": ("eagle", DraftShape(2, 1, 3), None),
    "eagle-tree": ("eagle", DraftShape(2, 2, 5), None),
    "eagle3-chain": ("eagle3", DraftShape(2, 1, 3), None),
    "eagle3-tree": ("eagle3", DraftShape(2, 2, 4), None),
    "eagle3-reduced": ("eagle3", DraftShape(2, 1, 3), 2),
}


def engine_outcomes(
    engine: OracleEngine, prompt: list[int], params: SamplingParams, bad_words: tuple[Tokens, ...] = ()
) -> tuple[dict[Tokens, float], set[int]]:
    """Outputs with their measure, and the numbers of drafts that rounds accepted."""
    accepted: set[int] = set()

    def one(coins: Coins) -> Tokens:
        with pytest.MonkeyPatch.context() as patch:
            install(patch, coins)
            [completion] = run(engine, [prompt], params, check=False, bad_words=bad_words)
        accepted.update(a for a, count in enumerate(completion.speculation.histogram) if count)
        return tuple(completion.token_ids)

    return enumerate_outcomes(one), accepted


def check_engine(
    case: str, params: SamplingParams, vocab: int, eos: tuple[int, ...], bad_words: tuple[Tokens, ...] = ()
) -> None:
    method, shape, draft_vocab = ENGINES[case]
    engine = tiny_oracle(
        method, shape, vocab=vocab, draft_vocab=draft_vocab, hidden=16, prefix_cache=False, eos=eos, scale=0.6
    )
    prompt = [1, 2, 1, 2, 1] if method == "ngram" else [1, 2, 1]
    outcomes, accepted = engine_outcomes(engine, prompt, params, bad_words)
    expected = target_sequences(engine._target, prompt, params, eos, bad_words)
    assert len(expected) > 3, "hardly anything to draw"
    assert sum(outcomes.values()) == pytest.approx(1.0, abs=1e-12)
    assert largest_difference(outcomes, expected) < 1e-12
    if method != "none":
        assert {0, 1} <= accepted, f"not every branch was taken: {accepted}"


@pytest.mark.parametrize("case", ENGINES)
def test_engine(case: str) -> None:
    """All coins of whole requests: prefill, drafting, acceptance, residual, bonus, next rounds, the cut at the end."""
    if case in ("draft_model-chain", "eagle3-chain", "eagle3-reduced"):  # they have the most coins
        check_engine(case, SamplingParams(max_tokens=3, temperature=1.5, top_p=0.9, min_p=0.05), 3, eos=())
    else:
        check_engine(case, SamplingParams(max_tokens=3, temperature=2.0, top_p=0.97, min_p=0.03), 4, eos=())


SLOW_WITH_RULES = ["draft_model-tree", "eagle3-tree", "eagle3-reduced"]


@pytest.mark.parametrize(
    "case", ["ngram", "draft_model-chain", *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW_WITH_RULES)]
)
def test_engine_with_rules(case: str) -> None:
    """The rules change from node to node of a path; drafts follow none of them."""
    params = SamplingParams(
        max_tokens=3, temperature=2.5, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.9,
        logit_bias={0: 1.0}, min_tokens=1,
    )  # fmt: skip
    check_engine(case, params, 3, eos=(2,), bad_words=((0, 0), (0, 1, 1)))


@pytest.mark.parametrize("case", ["draft_model-chain", "eagle-chain", "eagle3-reduced"])
def test_engine_with_a_draft_that_is_nan(case: str) -> None:
    """Whole requests: the texts have the target's own distribution, in particular the tokens that a reduced draft
    vocabulary lacks."""
    method, shape, draft_vocab = ENGINES[case]
    params = SamplingParams(max_tokens=3, temperature=2.0, top_p=0.97)
    engine = tiny_oracle(
        method, shape, vocab=4, draft_vocab=draft_vocab, hidden=16, prefix_cache=False, scale=0.6,
        spoil_draft=all_nan("fc.weight" if method == "eagle" else "lm_head.weight"),
    )  # fmt: skip
    outcomes, accepted = engine_outcomes(engine, [1, 2, 1], params)
    assert accepted == {0}
    assert engine.stats.broken_drafts == engine.stats.speculation.drafted > 0
    assert largest_difference(outcomes, target_sequences(engine._target, [1, 2, 1], params)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("eos", [(), (2,)])
@pytest.mark.parametrize("case", ENGINES)
def test_engine_more(case: str, eos: tuple[int, ...]) -> None:
    check_engine(case, SamplingParams(max_tokens=3, temperature=2.0, top_k=3), 5, eos)
    check_engine(case, SamplingParams(max_tokens=3, temperature=2.0), 4, eos)
