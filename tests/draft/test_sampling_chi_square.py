"""Sampled output with the real, keyed noise: counts of whole outputs against exact probabilities, by chi-square.

Each test rejects a correct engine with probability ALPHA = 1e-4 over random seeds (the 6 fast ones together: 6e-4). The
seeds are fixed, so a test that passes once passes always, until the code changes.
"""

from __future__ import annotations

from collections import Counter

import pytest
from scipy.stats import chi2

from specbatch.draft.shape import DraftShape
from specbatch.types import Request, RngKey, SamplingParams
from tests.coins import target_sequences
from tests.draft.test_sampling_exact import broken_accept, broken_residual
from tests.marks import slow_on_cpu
from tests.oracle import verify as verify_module
from tests.oracle.engine import OracleEngine
from tests.tiny_models import tiny_oracle

ALPHA = 1e-4
CHAIN, TREE = DraftShape(2, 1, 3), DraftShape(2, 3, 6)
CASES = {
    "none": ("none", None, None),
    "ngram": ("ngram", CHAIN, None),
    "draft_model-chain": ("draft_model", CHAIN, None),
    "draft_model-tree": ("draft_model", TREE, None),
    "eagle-chain": ("eagle", CHAIN, None),
    "eagle-tree": ("eagle", TREE, None),
    "eagle3-chain": ("eagle3", CHAIN, None),
    "eagle3-chain-reduced": ("eagle3", CHAIN, 3),
}
PARAMS = SamplingParams(max_tokens=3, temperature=1.3, top_p=0.97, seed=11)
VOCAB, ROWS = 5, 500


def sample(engine: OracleEngine, prompt: list[int], params: SamplingParams, rows: int) -> Counter[tuple[int, ...]]:
    for row in range(rows):
        engine.submit(Request(row, prompt, params, RngKey(params.seed or 0, row, 0)))
    counts: Counter[tuple[int, ...]] = Counter()
    while engine.num_running or engine.num_waiting:
        counts.update(tuple(c.token_ids) for c in engine.step())
    assert counts.total() == rows
    return counts


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square; outputs that are expected fewer than 5 times are pooled. 0 if there is an output that the
    target cannot give."""
    rows = counts.total()
    if not set(counts) <= set(expected):
        return 0.0
    rare = [tokens for tokens, p in expected.items() if p * rows < 5]
    cells = [(counts[tokens], p * rows) for tokens, p in expected.items() if p * rows >= 5]
    if rare:
        cells.append((sum(counts[t] for t in rare), sum(expected[t] for t in rare) * rows))
    assert len(cells) > 8, "hardly anything to compare"
    statistic = sum((observed - mean) ** 2 / mean for observed, mean in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def run_case(case: str, rows: int, params: SamplingParams) -> tuple[float, OracleEngine]:
    method, shape, draft_vocab = CASES[case]
    engine = tiny_oracle(
        method,
        shape,
        vocab=VOCAB,
        draft_vocab=draft_vocab,
        hidden=16,
        num_pages=600,
        max_batch_size=100,
        prefill_chunk_tokens=500,
        scale=0.5,
    )
    prompt = [1, 2, 3, 4, 1, 2, 3, 4]
    counts = sample(engine, prompt, params, rows)
    return p_value(counts, target_sequences(engine._target, prompt, params)), engine


# The exact tests have trees of eagle, and whole vocabularies of eagle3.
SLOW = ("eagle-tree", "eagle3-chain")


@pytest.mark.parametrize("case", [slow_on_cpu(case) if case in SLOW else case for case in CASES])
def test_counts_fit_the_target(case: str) -> None:
    p, engine = run_case(case, ROWS, PARAMS)
    assert p > ALPHA
    if case != "none":
        counts = engine.stats.speculation
        assert 0 < counts.accepted < counts.drafted


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_counts_fit_the_target(case: str) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.3, top_k=4, min_p=0.01, seed=1)
    assert run_case(case, 8000, params)[0] > ALPHA


@pytest.mark.parametrize("rule", [broken_residual, broken_accept])
def test_a_broken_rule_is_noticed(rule: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_accept_chain", rule)
    assert run_case("eagle-chain", ROWS, PARAMS)[0] < 1e-9


def test_noise_that_is_used_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting by the number that drew the draft correlates the two."""
    real = verify_module.uniform
    monkeypatch.setattr(
        verify_module,
        "uniform",
        lambda rng, position, purpose: real(rng, position, type(purpose)(1) if purpose == 2 else purpose),
    )
    assert run_case("draft_model-chain", ROWS, PARAMS)[0] < 1e-9
