"""Chains that share a budget of nodes: the text is that of plain decoding, and samples have the right distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from specbatch.batch import Field, Output
from specbatch.cache.prefix_groups import GroupLimits
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.chain import ChainDraft, drawn_chain
from specbatch.draft.method import DraftTrees
from specbatch.draft.rng import Draw
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.engine.budget_graphs import BudgetGraphs, RoundSize, steps
from specbatch.engine.executor import RoundBatch
from specbatch.engine.logprobs import num_top_of
from specbatch.engine.node_chooser import costs_of
from specbatch.engine.round import Round, RoundKey, Wanted
from specbatch.engine.round_graphs import RoundGraphs
from specbatch.engine.verify_budget import SharedTimes, TimeCurve, VerifyBudget
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import constraint_of
from specbatch.kernels import torch as ops
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.coins import target_sequences
from tests.draft.test_sampling_chi_square import ALPHA, p_value
from tests.engine.graphs import Replays, round_times
from tests.grammar.tiny_tokenizer import tiny_tokenizer
from tests.kernels.test_steps import packed
from tests.tiny_models import (
    num_target_layers,
    random_prompts,
    run,
    run_requests,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
    trust_network,
)

CHAIN = DraftShape(4, 1, 5)
METHODS = ["ngram", "suffix", "hybrid", "draft_model", "eagle", "eagle3"]
KINDS = {"cpu": tiny_engine, "device": tiny_device_engine}
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_k=30, seed=5)
FORCED = SamplingParams(max_tokens=24, choice=("10-10-10-10-10-10-10-10", "10-10-10-10-10-true"))
SCHEDULING = {"batch": {"max_batch_size": 8}, "preemption": {"max_batch_size": 4, "num_pages": 24}}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    repeated = [[5, 6, 7, 8, 9] * 4, [3] * 12, [4, 3] * 6]  # N-gram drafts come from these.
    return random_prompts(5, shared=9, longest=12) + repeated


def texts(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, str(c.finish_reason)) for c in completions]


def plain(method: str, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    return run(tiny_engine("none", num_pages=256, num_layers=num_target_layers(method)), prompts, params)


@pytest.mark.parametrize("scheduling", SCHEDULING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_of_plain_decoding(
    method: str, kind: str, scheduling: str, prompts: list[list[int]]
) -> None:
    settings: dict[str, Any] = {"num_pages": 256, **SCHEDULING[scheduling]}
    engine = KINDS[kind](method, CHAIN, budget=VerifyBudget(2.5), **settings)
    unshared = KINDS[kind](method, CHAIN, **settings)
    if method == "hybrid":
        trust_network(engine, 400.0)
        trust_network(unshared, 400.0)
    completions = run(engine, prompts, GREEDY)
    assert texts(completions) == texts(plain(method, prompts, GREEDY))
    counts = [c.speculation for c in completions]
    assert sum(c.accepted for c in counts) > 1, "too few drafts were right to prove anything"
    assert sum(c.drafted for c in counts) <= 1.5 * sum(c.rounds for c in counts) + 4 * len(prompts)
    if scheduling == "preemption":
        assert engine.stats.preemptions > 0
    else:
        assert engine.stats.cached_prompt_tokens > 0
    whole = run(unshared, prompts, GREEDY)
    assert sum(c.speculation.drafted for c in whole) > sum(c.drafted for c in counts)


@pytest.mark.parametrize("family", ["qwen3.5", "gemma2", "gpt-oss", "qwen3-moe"])
def test_other_families(family: str, prompts: list[list[int]]) -> None:
    """Models with states, sliding windows, sinks or experts compute packed nodes."""
    settings: dict[str, Any] = {"family": family, "num_layers": 2 if family == "qwen3-moe" else 4, "num_pages": 256}
    expected = run(tiny_engine("none", **settings), prompts, GREEDY)
    engine = tiny_device_engine("ngram", CHAIN, budget=VerifyBudget(1.5), max_batch_size=8, **settings)
    found = run(engine, prompts, GREEDY)
    assert texts(found) == texts(expected)
    assert sum(c.speculation.accepted for c in found) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_other_rows_share_a_budget(kind: str, prompts: list[list[int]]) -> None:
    """Texts that are generated again are drafted from the corpus, and the likely drafts are verified."""
    engine = KINDS[kind]("suffix", DraftShape(7, 1, 8), budget=VerifyBudget(4), num_pages=256, max_batch_size=8)
    first = run(engine, prompts, GREEDY)
    before = engine.stats.draft_sources.tokens["job"]
    found = run(engine, prompts, GREEDY)
    assert texts(found) == texts(plain("suffix", prompts, GREEDY))
    sources = engine.stats.draft_sources.tokens
    counts = [c.speculation for c in (*first, *found)]
    assert sum(c.drafted for c in counts) == sum(drafted for drafted, _ in sources.values())
    drafted, accepted = (now - then for now, then in zip(sources["job"], before, strict=True))
    assert accepted > 0.5 * drafted, "drafts that are hardly ever right were verified"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_prefixes_that_are_read_once(method: str) -> None:
    """Attention reads the prefix of a group once, also where its requests have different numbers of nodes."""
    prompts = random_prompts(8, shared=80, longest=12)
    settings: dict[str, Any] = {"num_pages": 600, "prefill_chunk_tokens": 200, "max_batch_size": 8}
    groups = {"cascade": GroupLimits(2, 64)}
    engine = tiny_device_engine(method, CHAIN, budget=VerifyBudget(1.5), **settings, **groups)
    found = run(engine, prompts, GREEDY)
    assert texts(found) == texts(run(tiny_engine("none", **settings), prompts, GREEDY))
    assert engine.executor.groups
    assert sum(c.speculation.accepted for c in found) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ngram", "suffix", "hybrid"])
def test_sampled_texts_are_those_of_plain_decoding(method: str, kind: str, prompts: list[list[int]]) -> None:
    engine = KINDS[kind](method, CHAIN, budget=VerifyBudget(1.5), num_pages=256, max_batch_size=8, coupled=True)
    completions = run(engine, prompts, SAMPLED)
    assert texts(completions) == texts(plain(method, prompts, SAMPLED))
    assert sum(c.speculation.accepted for c in completions) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_log_probabilities(method: str, kind: str, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=16, logprobs=2)
    found = run(KINDS[kind](method, CHAIN, budget=VerifyBudget(2), num_pages=256, max_batch_size=8), prompts, params)
    expected = plain(method, prompts, params)
    assert texts(found) == texts(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rules_for_tokens(kind: str, prompts: list[list[int]]) -> None:
    """Rounds with rules for tokens verify all nodes."""
    params = SamplingParams(max_tokens=16, frequency_penalty=0.5, min_tokens=8)
    engine = KINDS[kind]("eagle", CHAIN, budget=VerifyBudget(1.5), num_pages=256, max_batch_size=8)
    assert texts(run(engine, prompts, params)) == texts(plain("eagle", prompts, params))


VOCAB, ROWS = 5, 500
PARAMS = SamplingParams(max_tokens=3, temperature=1.3, top_p=0.97, seed=11)
TINY: dict[str, Any] = {"vocab": VOCAB, "hidden": 16, "num_pages": 600, "scale": 0.5, "max_batch_size": 100}


def sampled_p_value(kind: str, method: str, nodes: float) -> float:
    """Return the p value of whole outputs. Many requests have the same prompt, and their chains share a budget."""
    engine = KINDS[kind](method, DraftShape(2, 1, 3), budget=VerifyBudget(nodes), prefill_chunk_tokens=500, **TINY)
    prompt = [1, 2, 3, 4, 1, 2, 3, 4]
    for row in range(ROWS):
        engine.submit(Request(row, prompt, PARAMS, RngKey(11, row, 0)))
    counts: Counter[tuple[int, ...]] = Counter()
    while engine.num_running or engine.num_waiting:
        counts.update(tuple(c.token_ids) for c in engine.step())
    counts.update(tuple(c.token_ids) for c in engine.drain())
    assert counts.total() == ROWS
    oracle = tiny_oracle(method, DraftShape(2, 1, 3), **TINY)
    return p_value(counts, target_sequences(oracle._target, prompt, PARAMS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "nodes"), [("draft_model", 1.6), ("eagle", 2.2), ("eagle", 1.3)])
def test_drawn_chains_have_the_distribution_of_the_target(kind: str, method: str, nodes: float) -> None:
    assert sampled_p_value(kind, method, nodes) > ALPHA


def test_a_rule_that_reads_the_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores must not be the drawn token's own probability. Unlikely drafts would be cut, and the others would come too
    often."""
    real = ChainDraft.draft

    def draft(self: ChainDraft, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        trees = real(self, view, table, sampled)
        assert trees.probs_BDW is not None
        drawn = trees.probs_BDW.gather(2, trees.tokens_BN[:, 1:, None])[:, :, 0].log().cumsum(1).float()
        scores = torch.cat((torch.zeros_like(drawn[:, :1]), drawn), dim=1)
        return DraftTrees(trees.tokens_BN, probs_BDW=trees.probs_BDW, scores_BN=scores)

    monkeypatch.setattr(ChainDraft, "draft", draft)
    assert sampled_p_value("cpu", "draft_model", 1.6) < ALPHA


def test_a_cut_does_not_depend_on_a_draft_of_an_earlier_round() -> None:
    """Two requests, A and B, share three verified drafts in each of two rounds. Scores read earlier tokens only. In the
    first round the second draft of A decides whether a draft of B is verified, with which B advances. If the first
    draft of A is rejected, the second round has a draft at the position of that second one, and verifies it only if B
    has advanced. If it were the same draft again, its token would decide whether it is verified. The target and the
    drafts have two tokens, each with probability 1/2, except that the first draft of a text is mostly 0."""
    pairs, steps = 2000, 3
    stream_B = torch.arange(2 * pairs)
    zeros_B, is_b_B = torch.zeros_like(stream_B), stream_B % 2 == 1
    length_B, first_B = zeros_B + 7, zeros_B - 1
    texts_BL = torch.full((2 * pairs, 16), -1)
    p_BNV = torch.full((2 * pairs, steps + 1, 2), 0.5, dtype=torch.float64)
    sampling = (torch.ones(2 * pairs), zeros_B, torch.ones(2 * pairs), torch.zeros(2 * pairs))
    for turn in range(2):
        rng = (zeros_B, stream_B, zeros_B)
        view: Any = SimpleNamespace(length_B=length_B, rng=rng, sampling=sampling, field=lambda _: zeros_B)

        def logits(step: int, before_B: torch.Tensor, turn: int = turn) -> torch.Tensor:
            is_first = turn == step == 0
            return torch.tensor([2.0 if is_first else 0.0, 0.0]).expand(len(before_B), 2)

        trees = drawn_chain(ops, view, steps, logits, None, sampled=True, coupled=False, scored=True)
        assert trees.probs_BDW is not None
        drafts_BD = trees.tokens_BN[:, 1:]
        scores_BN = torch.zeros(2 * pairs, steps + 1)
        scores_BN[:, 3] = torch.where(drafts_BD[:, 1] == 0, 0.0, -9.0)
        scores_BN[is_b_B] = torch.where(length_B == 8, 1.0, -1.0)[is_b_B, None]  # B has not advanced by two tokens
        counts_B = torch.cat([ops.share_budget(two, zeros_B[:2], 2 + 3) for two in scores_BN.split(2)])
        position_BN = length_B[:, None] + torch.arange(1, steps + 2)
        accept_BN, residual_BN, sample_BN = (
            ops.uniform(*(x[:, None] for x in rng), position_BN, draw)
            for draw in (Draw.ACCEPT, Draw.RESIDUAL, Draw.SAMPLE)
        )
        num_path_B, next_B, _ = ops.accept_chain(
            drafts_BD, trees.probs_BDW, None, p_BNV, counts_B - 1, sampling[0],
            accept_BN[:, :-1], residual_BN[:, :-1], sample_BN,
        )  # fmt: skip
        tokens_BN = torch.cat((drafts_BD, drafts_BD[:, :1]), dim=1).scatter(1, num_path_B[:, None] - 1, next_B[:, None])
        is_new_BN = torch.arange(steps + 1) < num_path_B[:, None]
        texts_BL.scatter_(1, position_BN, torch.where(is_new_BN, tokens_BN, texts_BL.gather(1, position_BN)))
        length_B, first_B = length_B + num_path_B, num_path_B if turn == 0 else first_B
    # The first draft of A was rejected: the second round made its second token, at position 9.
    second = texts_BL[~is_b_B & (first_B == 1), 9]
    assert len(second) > 500
    assert binomtest(int(second.sum()), len(second)).pvalue > ALPHA


def outputs(probabilities: list[list[float]], *, verified: int = 3, accepted: int = 1) -> np.ndarray:
    """Make the output of a round whose requests have drafts of these probabilities. `verified`, `accepted`: the numbers
    of drafts of each request."""
    rows = [[1 + accepted, verified, verified, 0, *packed([0.0, *map(math.log, row)]), 0, 0] for row in probabilities]
    return np.array(rows, dtype=np.int32)


def expected(budget: VerifyBudget, num_drafts: float) -> float:
    return float(budget.tokens(np.array(num_drafts)))


def test_expected_tokens_follow_the_rounds() -> None:
    budget = VerifyBudget(None)
    assert 1.0 < expected(budget, 1.0) < expected(budget, 2.0), "something is expected before anything is known"
    unknown = outputs([[0.5]] * 8)
    unknown[:, Output.LIKELY : Output.TOKENS] = 0
    assert not budget.record(unknown)
    # Each request has a draft of 0.95 that is accepted, two of 0.4 that are not, and one of 0.1 that is not verified.
    changes = [budget.record(outputs([[0.95, 0.4, 0.4, 0.1]] * 4)) for _ in range(400)]
    assert sum(changes) == budget.version == 50
    assert expected(budget, 0.0) == 1.0
    assert expected(budget, 1.0) == pytest.approx(2.0, abs=0.03), "the most probable draft comes first"
    assert expected(budget, 3.0) == pytest.approx(expected(budget, 1.0) + 0.1, abs=0.1)
    assert expected(budget, 4.0) - expected(budget, 3.0) == pytest.approx(0.1, abs=0.03), "its own probability"
    assert expected(budget, 9.0) == expected(budget, 4.0), "there are no more drafts"
    for _ in range(400):
        budget.record(outputs([[0.95, 0.95]] * 64, verified=2, accepted=2))
    assert expected(budget, 2.0) == pytest.approx(3.0, abs=0.05)


def test_a_range_that_nobody_verifies_has_its_probability_again() -> None:
    budget = VerifyBudget(None)
    for _ in range(100):
        budget.record(outputs([[0.65, 0.65]] * 8, verified=2, accepted=0))
    assert expected(budget, 2.0) < 1.1
    for _ in range(400):
        budget.record(outputs([[0.65, 0.65]] * 8, verified=0, accepted=0))
    assert expected(budget, 2.0) == pytest.approx(2.3, abs=0.1)


def test_a_round_of_more_requests_than_are_remembered() -> None:
    budget = VerifyBudget(None)
    for i in range(20):
        budget.record(outputs([[0.9] * (i % 2)] * 5000, verified=0, accepted=0))
    assert 1.5 < expected(budget, 1.0) == expected(budget, 9.0) < 2.0, "the last round has a draft of each request"


def test_many_drafts_and_ended_requests() -> None:
    budget = VerifyBudget(None)
    output = outputs([[0.99] * 40, [0.99] * 40], verified=40, accepted=40)
    output[1, Output.NUM_NEW] = 0
    budget.record(output)
    assert expected(budget, 31.0) > 30, "a number of drafts has five bits"


def test_a_fixed_budget() -> None:
    assert VerifyBudget(2.0).num_verified(3, 6) == 6
    assert VerifyBudget(2.0).num_verified(3, 2) is None
    assert VerifyBudget(None).num_verified(64, 6) is None, "the graphs decide"


def test_times_of_rounds() -> None:
    whole = TimeCurve.of_points([(384, 9.0), (6, 4.0), (48, 3.9)])
    assert whole.of(6) == whole.of(48) == 4.0, "more nodes take no less time"
    assert whole.of(216) == pytest.approx(6.5)
    assert whole.at(np.array([6.0, 216.0])).tolist() == [whole.of(6), whole.of(216)]
    shared = whole.with_sharing([(64, 4.5), (128, 4.6), (192, 7.0), (320, 6.9)])
    assert shared.of(128) == 4.6
    assert shared.of(160) == pytest.approx(5.8), "a step"
    assert shared.of(320) == 7.0
    assert shared.of(8) == pytest.approx(4.0 + 4.5 - whole.of(64)), "sharing takes as much longer as with 64 nodes"
    assert whole.with_sharing([(64, 5.0), (128, 6.0)]).of(384) == pytest.approx(9.0 + 6.0 - whole.of(128))


def test_times_of_rounds_that_share_depend_on_their_size() -> None:
    whole = TimeCurve([8, 384], [4.0, 4.0])
    times = SharedTimes.of_points([(64, 64, 6.0), (8, 8, 4.5), (64, 128, 7.0)], whole)
    sizes, nodes = np.array([4.0, 8.0, 36.0, 64.0, 64.0]), np.array([8.0, 8.0, 64.0, 64.0, 128.0])
    assert times.at(sizes, nodes).tolist() == [4.5, 4.5, 5.25, 6.0, 7.0]
    three = SharedTimes.of_points([(64, 64, 6.0), (8, 8, 4.5), (64, 128, 7.0), (128, 128, 9.0)], whole)
    assert three.at(sizes, nodes).tolist() == times.at(sizes, nodes).tolist()
    assert three.at(np.array([96.0, 128.0, 500.0]), np.full(3, 128.0)).tolist() == [8.0, 9.0, 9.0]
    assert SharedTimes.of_points([], whole).at(sizes, nodes).tolist() == [4.0] * 5, "none was measured"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_was_not_drafted_is_not_likely(method: str) -> None:
    """Texts do not repeat, so there are hardly any drafts."""
    budget = VerifyBudget(None, round_times([1, 100], [1.0, 1.0]))
    engine = tiny_device_engine(method, CHAIN, budget=budget, num_pages=256, max_batch_size=8)
    found = run(engine, random_prompts(8, longest=4), SamplingParams(max_tokens=3, temperature=2.0, seed=5))
    assert sum(c.speculation.drafted for c in found) < 4
    assert expected(budget, 4.0) < 1.5


def test_rounds_report_how_probable_drafts_are(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The most probable drafts are verified, and the others are reported, too."""
    budget = VerifyBudget(None, round_times([1, 100], [1.0, 30.0]))
    engine = tiny_device_engine("draft_model", CHAIN, budget=budget, num_pages=256, max_batch_size=8)
    reported, verified = [], []
    real = VerifyBudget.record

    def record(self: VerifyBudget, output_BZ: np.ndarray) -> bool:
        live = output_BZ[output_BZ[:, Output.NUM_NEW] > 0]
        counts = live[:, Output.LIKELY + 1] >> 25 & 31  # drafts above the last bound
        assert (live[:, Output.LIKELY] >> 30 == 1).all()
        reported.extend(counts.tolist())
        verified.extend(live[:, Output.NUM_DRAFTED].tolist())
        return real(self, output_BZ)

    monkeypatch.setattr(VerifyBudget, "record", record)
    params = SamplingParams(max_tokens=48)
    assert texts(run(engine, prompts, params)) == texts(plain("draft_model", prompts, params))
    assert budget.cached_tokens > 0
    assert budget.version > 1
    assert 0 < sum(verified) < sum(reported), "nodes cost much"


def test_nodes_of_a_grammar_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round reports no probabilities of a chain that a grammar has made longer than its drafts."""
    matcher = GrammarCompiler(tiny_tokenizer(), max_levels=1).matcher(constraint_of(FORCED))
    engine = tiny_engine("draft_model", CHAIN, budget=VerifyBudget(None, round_times([1, 100], [1.0, 1.0])))
    lines = list[list[int]]()
    monkeypatch.setattr(VerifyBudget, "record", lambda self, output_BZ: lines.extend(output_BZ.tolist()))
    run_requests(engine, [Request(0, [1, 2, 3], FORCED, RngKey(0, 0, 0), matcher=matcher)])
    grown = [line for line in lines if line[Output.DEPTH] > CHAIN.num_steps]
    assert grown
    assert all(line[Output.LIKELY] == 0 for line in grown)


class EagerRunner:
    """A substitute for a `GraphRunner`: a replay runs the function again."""

    seconds = 0.0

    def __init__(self) -> None:
        self.functions: dict[tuple[Any, ...], Callable[[], Any]] = {}

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self.functions

    def __len__(self) -> int:
        return len(self.functions)

    def capture(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any:
        self.functions[key] = function
        return function()

    def replay(self, key: tuple[Any, ...]) -> Any:
        return self.functions[key]()


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, logprobs=2)], ids=["greedy", "log-probabilities"])
@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_rounds_take_graphs_of_larger_batches(
    method: str, params: SamplingParams, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end one after the other, and shared budgets have graphs of the largest batch alone. Lines without a
    request are padding."""
    budget = VerifyBudget(None)
    engine = tiny_device_engine(method, CHAIN, budget=budget, num_pages=256, max_batch_size=8)
    executor, runner, taken = engine.executor, EagerRunner(), set[tuple[bool, int]]()
    monkeypatch.setattr(executor, "runner", runner)
    wanted = Wanted(num_top=num_top_of([params.logprobs]))
    budget.times = round_times([1, 100], [0.1, 6.0])
    monkeypatch.setattr(BudgetGraphs, "at_start", lambda *_: [RoundSize(8, 16), RoundSize(8, 9)])
    with torch.inference_mode():
        executor.capture(False, num_top=wanted.num_top)
        num_whole = len(runner)
        executor.capture_for_budget(wanted)
    captured = set(runner.functions)
    assert len(captured) == num_whole + 2
    real, real_run, real_begin, rounds = runner.replay, executor.run, Round.begin, list[RoundBatch]()
    state = executor.rounds.items[0].state

    def run_batch(batch: RoundBatch) -> Any:
        rounds.append(batch)
        return real_run(batch)

    def begin(self: Round, req_idx_B: torch.Tensor, *args: Any, **options: Any) -> Any:
        if self.state is state:  # The others are rounds of plain decoding.
            running = [seq.req_idx for seq in rounds[-1].sequences if seq is not None]
            assert [line for line in req_idx_B.tolist() if line != state.padding] == running
        return real_begin(self, req_idx_B, *args, **options)

    monkeypatch.setattr(executor, "run", run_batch)
    monkeypatch.setattr(Round, "begin", begin)

    def replay(key: tuple[Any, ...]) -> Any:
        if (num_verified := RoundKey(*key[1:]).num_verified) is not None:
            taken.add((engine.num_running <= 4, num_verified))
        return real(key)

    monkeypatch.setattr(runner, "replay", replay)
    limits = [replace(params, max_tokens=count) for count in (4, 4, 4, 4, 16, 16, 24, 24)]
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        engine.submit(Request(i, prompt, limit, RngKey(0, i, 0)))
    found: dict[int, Completion] = {}
    while len(found) < len(prompts):
        found |= {one.request_id: one for one in engine.step()}
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        (expected,) = plain(method, [prompt], limit)
        assert found[i].token_ids == expected.token_ids
        if expected.logprobs is not None:
            pairs = zip(found[i].logprobs or [], expected.logprobs, strict=True)
            assert all(ours.logprob == pytest.approx(theirs.logprob, abs=1e-5) for ours, theirs in pairs)
    assert set(runner.functions) == captured, "nothing is captured late"
    assert {few for few, _ in taken} == {False, True}, taken


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "hybrid"])
def test_draft_extend_of_the_verified_nodes_is_that_of_all(
    method: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features and the network's cache are the same as with all nodes of all chains."""
    real, widths = Round.extend, set()

    def extend(self: Round, view: BatchView, trees: DraftTrees, verified: Any) -> None:
        assert self.method.net is not None
        cache, features = self.method.net.cache.all_layers, self.state.features_SE
        before = cache.clone()
        found = []
        for one in (replace(trees, num_verified_B=None), trees):
            cache.copy_(before)
            real(self, view, one, verified)
            found.append((features[view.req_idx_B].clone(), cache.clone()))
        is_live_B = view.field(Field.DONE) == 0
        assert torch.allclose(found[0][0][is_live_B], found[1][0][is_live_B])
        slots = slice(0, cache.shape[-2] - 1)  # The last slot is spare.
        assert torch.allclose(found[0][1][..., slots, :], found[1][1][..., slots, :])
        widths.add((trees.num_verified or 0) < trees.tokens_BN.numel())

    monkeypatch.setattr(Round, "extend", extend)
    engine = tiny_device_engine(method, CHAIN, budget=VerifyBudget(2.5), num_pages=256, max_batch_size=8)
    found = run(engine, prompts, GREEDY)
    assert sum(c.speculation.accepted for c in found) > 0
    assert widths == {True}


@pytest.mark.parametrize("method", ["suffix", "hybrid"])
def test_another_kind_of_rows_captures_what_it_needs_at_once(
    method: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has captured greedy rounds alone. Sampled rounds need new graphs in any case, so they do not capture
    whole chains, but graphs of fewer nodes."""
    budget = VerifyBudget(None, round_times([1, 100], [0.1, 60.0]))
    engine = tiny_device_engine(method, CHAIN, budget=budget, num_pages=256, max_batch_size=8, coupled=True)
    executor, runner = engine.executor, EagerRunner()
    monkeypatch.setattr(executor, "runner", runner)
    with torch.inference_mode():
        executor.capture(False)
    assert texts(run(engine, prompts, GREEDY)) == texts(plain(method, prompts, GREEDY))
    before = set(runner.functions)
    assert texts(run(engine, prompts, SAMPLED)) == texts(plain(method, prompts, SAMPLED))
    late = [RoundKey(*key[1:]) for key in runner.functions if key not in before]
    assert late
    assert all(key.num_verified is not None for key in late if key.wanted.sampled and key.size > 2)


@pytest.mark.parametrize("fits", [True, False], ids=["memory", "no memory"])
def test_a_round_takes_the_graph_that_is_captured_for_it(
    fits: bool, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has captured whole chains. Then each round loses more time without a graph of fewer nodes than its
    capture takes. Without memory for it, rounds verify whole chains."""
    budget = VerifyBudget(None, round_times([1, 100], [100.0, 60000.0]))
    engine = tiny_device_engine("ngram", CHAIN, budget=budget, num_pages=256, max_batch_size=8)
    runner: Any = Replays(lambda key: not fits and RoundKey(*key[1:]).num_verified is not None)
    replayed, taken_after, real = list[Any](), dict[Any, int](), Replays.capture

    def capture(self: Replays, key: Any, function: Callable[[], Any]) -> Any:
        taken_after[key] = len(replayed)
        return real(self, key, function)

    def replay(key: Any) -> Any:
        replayed.append(key)
        return Replays.replay(runner, key)

    engine.executor.mode, engine.executor.runner = "round", runner
    with torch.inference_mode():
        engine.executor.capture(False)
    monkeypatch.setattr(Replays, "capture", capture)
    monkeypatch.setattr(runner, "replay", replay)
    assert texts(run(engine, prompts, GREEDY)) == texts(plain("ngram", prompts, GREEDY))
    assert taken_after
    assert all(RoundKey(*key[1:]).num_verified is not None for key in taken_after)
    if fits:
        assert all(replayed[place] == key for key, place in taken_after.items())
    else:
        assert replayed
        assert not {*replayed} & {*taken_after}
        assert len(runner.tried) == len({*runner.tried}), "no capture is tried again"


def test_rounds_of_the_largest_batch_and_of_an_eighth_of_it_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of up to 24 requests have longer chains than others. Each kind of chains has a largest batch, and no
    batch of the shorter ones is smaller than 32."""
    schedule: Schedule = ByBatch((24, 40), (DraftShape(8, 1, 9), CHAIN))
    engine = tiny_device_engine("ngram", schedule, budget=VerifyBudget(None), num_pages=256, max_batch_size=40)
    executor, runner = engine.executor, cast(Any, Replays(lambda key: False))
    executor.mode, executor.runner = "round", runner
    monkeypatch.setattr(RoundGraphs, "milliseconds", lambda self, key: float(1000 * key.size + (key.num_verified or 0)))
    with torch.inference_mode():
        executor.capture(False)
        timed = executor.measure_sharing(Wanted())
    assert all(ms == 1000 * size + nodes for size, nodes, ms in timed)
    long, short = ([*steps(4, 9)[::4], *steps(24, 9)], [*steps(32, 5)[::4], *steps(40, 5)])
    assert [(size, nodes) for size, nodes, _ in timed] == long + short


@pytest.mark.parametrize("params", [replace(GREEDY, frequency_penalty=0.5), GREEDY], ids=["rules", "none"])
def test_rounds_that_cannot_share_choose_their_size(params: SamplingParams, prompts: list[list[int]]) -> None:
    """An engine has a budget and costs. Rounds with rules for tokens choose the number of nodes of every request, and
    other rounds share the budget."""
    times = round_times([1, 100], [1.0, 60.0])
    settings: dict[str, Any] = {"num_pages": 256, "max_batch_size": 8, "budget": VerifyBudget(None, times)}
    costs = costs_of(times, SimpleNamespace(sizes=(1, 2, 4, 5), num_nodes=5), 8)  # type: ignore[arg-type]
    engine = tiny_device_engine("suffix", CHAIN, costs=costs, **settings)
    runner: Any = Replays(lambda key: False)
    engine.executor.mode, engine.executor.runner = "round", runner
    for _ in range(2):
        assert texts(run(engine, prompts, params)) == texts(plain("suffix", prompts, params))
    keys = [RoundKey(*key[1:]) for key in runner.tried]
    has_rules = params is not GREEDY
    assert any(key.num_nodes is not None for key in keys) == has_rules
    assert any(key.num_verified is not None for key in keys) != has_rules


def test_the_start_times_sharing_of_two_batch_sizes(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It times all steps of the largest batch, and each fourth one of an eighth of it, and captures their graphs."""
    budget = VerifyBudget(None, round_times([1, 100], [1.0, 1.0]))
    engine = tiny_device_engine("ngram", CHAIN, budget=budget, num_pages=512, max_batch_size=16)
    executor, runner, wanted = engine.executor, Replays(lambda key: False), Wanted(False)
    executor.mode, executor.runner = "round", cast(Any, runner)
    monkeypatch.setattr(executor, "_milliseconds", lambda key: float(key.num_verified))
    with torch.inference_mode():
        executor.capture(False)
        measured = executor.measure_sharing(wanted)
        executor.capture_for_budget(wanted)
    assert measured == [(2, 2, 2.0), (2, 6, 6.0)] + [(16, n, float(n)) for _, n in steps(16, 5)]
    keys = {(key.size, key.num_verified) for key in (RoundKey(*one[1:]) for one in runner.tried)}
    assert {(size, nodes) for size, nodes, _ in measured} <= keys
    assert texts(run(engine, prompts, GREEDY)) == texts(plain("ngram", prompts, GREEDY))


def test_costs_follow_from_the_times_of_a_budget() -> None:
    method: Any = SimpleNamespace(sizes=(1, 2, 4, 8), num_nodes=8)
    costs = costs_of(round_times([8, 64, 512], [5.0, 6.0, 13.0], 0.001), method, 64)
    assert costs is not None
    assert costs.of(64, 0) == pytest.approx(6000.0)
    assert costs.of(512, 0) == pytest.approx(13000.0)
    assert costs.of(8, 0) == pytest.approx(6000.0), "it reads all weights"
    assert costs.of(64, 1000) == pytest.approx(7000.0)
    assert costs_of(round_times([1], [1.0]), SimpleNamespace(sizes=()), 1) is None  # type: ignore[arg-type]
