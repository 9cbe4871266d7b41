"""The method `hybrid` where requests sample: texts have the target's distribution, whichever drafts a round chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.calibration import Chains
from specbatch.draft.method import DraftTrees
from specbatch.draft.shape import DraftShape
from specbatch.draft.suffix import SuffixDraft
from specbatch.engine.engine import Engine
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.kernels.chains import FORECAST, JOB, NETWORK, ROW
from specbatch.types import Request, RngKey, SamplingParams
from tests.coins import target_sequences
from tests.draft.test_sampling_chi_square import ALPHA, p_value
from tests.engine.graphs import Replays
from tests.tiny_models import (
    random_prompts,
    run,
    run_requests,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
    trust_network,
)

KINDS = {"cpu": tiny_engine, "device": tiny_device_engine}
VOCAB, ROWS = 5, 500
SHAPE = DraftShape(4, 1, 5)
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4]
PARAMS = SamplingParams(max_tokens=4, temperature=1.3, top_k=3, seed=11)
TINY: dict[str, Any] = {"vocab": VOCAB, "hidden": 16, "num_pages": 600, "scale": 0.5, "max_batch_size": 100}
Choose = Callable[..., DraftTrees]


def chosen_by(rule: Callable[[Chains, BatchView], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows take the network's chain where `rule` says so: all other chains look hopeless there, and it does
    elsewhere."""
    real = SuffixDraft.choose

    def choose(
        self: SuffixDraft, view: BatchView, table: RequestTable, chains: Chains, known_BCD: torch.Tensor | None = None
    ) -> DraftTrees:
        is_network_BC = chains.sources_BC >= FORECAST - 1
        wanted_BC = is_network_BC == rule(chains, view)[:, None]
        estimates_BCD = torch.where(wanted_BC[:, :, None], chains.estimates_BCD, chains.estimates_BCD * 1e-4)
        return real(self, view, table, chains._replace(estimates_BCD=estimates_BCD), known_BCD)

    monkeypatch.setattr(SuffixDraft, "choose", choose)


def sampled(engine: Engine) -> Counter[tuple[int, ...]]:
    for row in range(ROWS):
        engine.submit(Request(row, PROMPT, PARAMS, RngKey(PARAMS.seed or 0, row, 0)))
    counts: Counter[tuple[int, ...]] = Counter()
    while engine.num_running or engine.num_waiting:
        counts.update(tuple(c.token_ids) for c in engine.step())
    counts.update(tuple(c.token_ids) for c in engine.drain())
    assert counts.total() == ROWS
    return counts


def sampled_p_value(kind: str, nodes: float | None) -> float:
    """Return the p value of whole texts. Many requests have the same prompt, so that they draft from each other."""
    budget = None if nodes is None else VerifyBudget(nodes)
    engine = KINDS[kind]("hybrid", SHAPE, budget=budget, prefill_chunk_tokens=500, **TINY)
    trust_network(engine, 120.0)
    counts = sampled(engine)
    sources = engine.stats.draft_sources.tokens
    of_network = sources.pop("network")[1]
    of_suffix = sum(accepted for _, accepted in sources.values())
    assert min(of_network, of_suffix) > 10, (of_network, of_suffix)
    oracle = tiny_oracle("none", num_layers=3, **TINY)
    return p_value(counts, target_sequences(oracle._target, PROMPT, PARAMS))


@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_requests_among_sampled_ones(graphs: bool) -> None:
    """They have the texts of plain decoding, with drafts of both kinds."""
    prompts = [*random_prompts(5, shared=9, longest=12), [3, 4, 3, 5] * 3] * 2
    greedy, drawn = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.7, seed=1)
    expected = run(tiny_oracle("none", num_pages=256, num_layers=3), prompts, greedy)
    engine = tiny_device_engine("hybrid", SHAPE, num_pages=256, max_batch_size=8)
    if graphs:
        engine.executor.mode, engine.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    trust_network(engine, 200.0)
    rows = [(prompt, params) for prompt in prompts for params in (greedy, drawn)]
    found = run_requests(engine, [Request(i, *row, RngKey(0, i, 0)) for i, row in enumerate(rows)])
    assert [c.token_ids for c in found[::2]] == [c.token_ids for c in expected]
    assert sum(c.speculation.accepted for c in found[::2]) > 10
    sources = engine.stats.draft_sources.tokens
    assert min(sources["network"][1], sources["job"][1]) > 5, sources


def test_chains_that_were_drawn_teach_only_what_was_verified() -> None:
    """A token that the network draws, for a row that takes other drafts, equals the row's next token less often than it
    would be accepted."""
    for right, is_taught in ((0.0, False), (1000.0, True)):
        engine = tiny_engine("hybrid", SHAPE, num_pages=256, max_batch_size=8)
        trust_network(engine, right)
        method: Any = engine.executor.rounds.items[0].method
        sums = method.shared.calibration.sums_2Q.view(2, FORECAST + 1, -1)
        before = sums.clone()
        params = SamplingParams(max_tokens=12, temperature=0.7)
        run(engine, [[3, 4, 3, 5] * 3] * 8, params)
        assert (engine.stats.draft_sources.tokens.get("network", [0, 0])[0] > 0) == is_taught
        assert [bool((sums[:, i] != before[:, i]).any()) for i in (NETWORK, FORECAST)] == [is_taught] * 2
        assert sums[0, [ROW, JOB]].sum() > 0


def by_the_past(chains: Chains, view: BatchView) -> torch.Tensor:
    """By the length of a text, what `suffix` drafts, and how likely the network's first draft can be."""
    odd_B = (view.length_B + chains.tokens_BCD[:, 0, 0]) % 2 == 0
    return odd_B ^ (chains.estimates_BCD[:, -2, 0] > 0.4)


def by_the_draft(chains: Chains, view: BatchView) -> torch.Tensor:
    return chains.tokens_BCD[:, -1, 0] < 2


@pytest.mark.parametrize("nodes", [None, 2.2, 1.4])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_distribution_of_the_target(
    kind: str, nodes: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_by(by_the_past, monkeypatch)
    assert sampled_p_value(kind, nodes) > ALPHA


def test_a_choice_that_reads_the_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_by(by_the_draft, monkeypatch)
    assert sampled_p_value("cpu", None) < ALPHA
