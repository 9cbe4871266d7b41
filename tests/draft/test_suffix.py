"""The methods `suffix` and `hybrid`: lossless drafts from other rows' outputs, from a file, from the row's own text,
and from a network. Where requests sample, drafts of the network are coupled here; `test_hybrid_sampling.py` has the
others."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbatch.batch import Field
from specbatch.cache.prefix_groups import GroupLimits
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.draft.suffix import SharedTexts, SuffixDraft
from specbatch.engine.engine import Engine
from specbatch.engine.node_chooser import RoundCosts
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.kernels import torch as ops
from specbatch.kernels.chains import CORPUS, ROW
from specbatch.types import Completion, SamplingParams
from tests.engine.graphs import Replays, round_times
from tests.engine.test_combinations import decided, requests_of
from tests.grammar.tiny_tokenizer import END
from tests.tiny_models import (
    CPU,
    num_target_layers,
    random_prompts,
    run,
    run_requests,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
    trust_network,
)

METHODS = ["suffix", "hybrid"]
CHAIN = DraftShape(31, 1, 32)
SHAPES: dict[str, DraftShape | Schedule] = {
    "chain": CHAIN,
    "schedule": ByBatch((2, 3, 8), (CHAIN, None, DraftShape(3, 1, 4))),
}
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.5, top_k=8, seed=5)
SCHEDULING = {
    "batch 1": {"max_batch_size": 1, "prefill_chunk_tokens": 3},
    "batch 16": {"max_batch_size": 16},
    "preemption": {"max_batch_size": 4, "num_pages": 24},
}
# By these costs, a round takes as long as it has nodes.
COSTS = RoundCosts(0.0, 4.0, 1.0, 0.0)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some prompts come twice, so that their greedy outputs do."""
    return [*random_prompts(6, shared=9, longest=12), [3, 4, 3, 5] * 3] * 2


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> Callable[[str, bool], list[Completion]]:
    """Return a function that computes the oracle's completions: by the method whose target it has, and whether it
    samples."""

    @cache
    def completions(method: str, sampled: bool) -> list[Completion]:
        oracle = tiny_oracle("none", num_pages=256, num_layers=num_target_layers(method))
        return run(oracle, prompts, SAMPLED if sampled else GREEDY)

    return completions


def texts(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, str(c.finish_reason)) for c in completions]


def shared_by(engine: Engine) -> SharedTexts:
    [shared] = {id(method.shared): method.shared for method in methods_of(engine)}.values()
    return shared


def methods_of(engine: Engine) -> list[SuffixDraft]:
    methods = [round_.method for round_ in engine.executor.rounds.items]
    return [method for method in methods if isinstance(method, SuffixDraft)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheduling", SCHEDULING)
@pytest.mark.parametrize(("method", "shape"), [("suffix", "chain"), ("suffix", "schedule"), ("hybrid", "chain")])
def test_it_is_lossless(
    method: str,
    shape: str,
    scheduling: str,
    sampled: bool,
    prompts: list[list[int]],
    plain: Callable[[str, bool], list[Completion]],
) -> None:
    engine = tiny_engine(method, SHAPES[shape], coupled=True, **{"num_pages": 256, **SCHEDULING[scheduling]})
    if method == "hybrid":
        trust_network(engine, 200.0)
    completions = run(engine, prompts, SAMPLED if sampled else GREEDY)
    assert texts(completions) == texts(plain(method, sampled))
    assert sum(c.speculation.accepted for c in completions) > 2, "hardly a draft was right: this proves little"
    if scheduling == "preemption":
        assert engine.stats.preemptions > 0
    if method == "hybrid":
        sources = engine.stats.draft_sources.tokens
        assert sources["network"][1] > 0
        assert len(sources) > 1


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_padded_chains_have_the_same_texts(
    method: str, params: SamplingParams, prompts: list[list[int]], plain: Callable[[str, bool], list[Completion]]
) -> None:
    """Engines with fixed shapes, as on a GPU, give the same texts."""
    found = run(tiny_device_engine(method, CHAIN, num_pages=256, coupled=True), prompts, params)
    assert texts(found) == texts(plain(method, params is SAMPLED))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_rounds_that_choose_their_size_have_the_same_texts(
    method: str, params: SamplingParams, prompts: list[list[int]], plain: Callable[[str, bool], list[Completion]]
) -> None:
    """Rounds are graphs, and the costs let all sizes come up."""
    schedule = ByBatch((2, 8), (DraftShape(15, 1, 16), DraftShape(7, 1, 8)))
    engine = tiny_device_engine(method, schedule, num_pages=256, max_batch_size=4, costs=COSTS, coupled=True)
    runner: Any = Replays(lambda key: False)
    engine.executor.mode, engine.executor.runner = "round", runner
    for _ in range(3):
        found = run(engine, prompts, params)
        assert texts(found) == texts(plain(method, params is SAMPLED))
    sizes = {key[-3] for key in runner.tried}
    assert None in sizes, "rounds of the size of the schedule"
    assert len(sizes) >= 3, sizes
    sources = engine.stats.draft_sources.tokens
    assert sum(sources[name][1] for name in ("row", "job") if name in sources) > 0


@pytest.mark.parametrize("seed", [pytest.param(i, marks=() if i < 6 else pytest.mark.slow) for i in range(60)])
def test_random_combinations(seed: int) -> None:
    """Grammars on the device and on the host, rules, shared prefixes, preemption, lanes, groups and graphs. Greedy
    requests have the same texts whatever runs with them."""
    rng = random.Random(seed)
    method = METHODS[seed % 2]
    layers = num_target_layers(method)
    count, state = rng.randint(4, 12), rng.getrandbits(32)
    temperatures = [0.0, 0.5, 1.0]
    reference = tiny_oracle("none", num_layers=layers, eos=(END,), num_pages=256)
    expected = run_requests(reference, requests_of(random.Random(state), count, temperatures))
    settings: dict[str, Any] = {"num_pages": rng.choice((64, 128, 512)), "max_batch_size": rng.choice((3, 8))}
    settings |= {"prefill_chunk_tokens": rng.choice((8, 200)), "eos": (END,)}
    if (budget := rng.choice((None, VerifyBudget(rng.uniform(1.2, 4.0)), VerifyBudget(None)))) is not None:
        budget.times = round_times([1, 60], [1.0, 30.0]) if budget.changes else None
        settings["budget"] = budget
    together = rng.choice(("lanes", "groups", "neither"))
    if together == "lanes":
        settings["min_lane"] = rng.choice((1, 2))
    settings["coupled"] = rng.random() < 0.5
    shape = DraftShape(6, 1, 7)
    if rng.random() < 0.3:
        engine = tiny_engine(method, shape, **settings)
    else:
        if together == "groups":
            settings["cascade"] = GroupLimits(2, 64, min_batch=rng.choice((1, 3)))
        engine = tiny_device_engine(method, shape, costs=COSTS, **settings)
        if rng.random() < 0.7:
            engine.executor.mode, engine.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    if method == "hybrid":
        trust_network(engine, rng.choice((100.0, 1000.0)))
    requests = requests_of(random.Random(state), count, temperatures)
    found = run_requests(engine, requests)
    engine.check_integrity()
    is_same = [method == "suffix" or settings["coupled"] or one.params.temperature == 0 for one in requests]
    compared = zip(decided(found), decided(expected), is_same, strict=True)
    assert all(ours == theirs for ours, theirs, same in compared if same), settings


@pytest.mark.wide
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_hybrids_whose_rounds_choose_their_size(sampled: bool, prompts: list[list[int]]) -> None:
    """A round replays what the one before it accepted, whatever the size of either."""
    params = SAMPLED if sampled else GREEDY
    settings: dict[str, Any] = {"family": "qwen3.5", "num_layers": 3, "num_pages": 256}
    expected = run(tiny_engine("none", **settings, prefix_cache=False), prompts, params)
    engine = tiny_device_engine("suffix", DraftShape(7, 1, 8), costs=COSTS, **settings)
    runner: Any = Replays(lambda key: False)
    engine.executor.mode, engine.executor.runner = "round", runner
    for _ in range(2):
        assert texts(run(engine, prompts, params)) == texts(expected)
    assert len({key[-3] for key in runner.tried}) >= 3


def test_a_graph_that_memory_does_not_hold_is_not_chosen(prompts: list[list[int]]) -> None:
    """Rounds of other sizes go on as graphs of the schedule's size."""
    engine = tiny_device_engine("suffix", DraftShape(7, 1, 8), num_pages=256, costs=COSTS)
    runner: Any = Replays(lambda key: key[-3] is not None)
    engine.executor.mode, engine.executor.runner = "round", runner
    run(engine, prompts, GREEDY)
    assert any(key[-3] is not None for key in runner.tried), "none was tried"
    assert all(key[-3] is None for key in runner.outputs)
    assert runner.num_replays > 20


def test_a_second_run_drafts_from_the_first(
    prompts: list[list[int]], plain: Callable[[str, bool], list[Completion]]
) -> None:
    engine = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=1)
    first = run(engine, prompts[:7], GREEDY)
    second = run(engine, prompts[:7], GREEDY)
    assert texts(first) == texts(second) == texts(plain("suffix", False)[:7])
    rounds = [sum(c.speculation.rounds for c in one) for one in (first, second)]
    assert rounds[1] < 0.7 * rounds[0]


def test_sources_are_counted_and_add_up(prompts: list[list[int]]) -> None:
    """Greedy rows come twice, so the second ones draft from the job. With a file of all outputs, they draft from it."""
    engine = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=2)
    completions = run(engine, prompts, GREEDY)
    sources = engine.stats.draft_sources.tokens
    assert sources["job"][1] > 0
    assert set(sources) <= {"row", "job"}
    drafted, accepted = (sum(getattr(c.speculation, name) for c in completions) for name in ("drafted", "accepted"))
    of_device = [sum(column) for column in zip(*sources.values(), strict=True)]
    # The device accepts a few tokens after a stop, which completions do not have.
    assert of_device[0] == drafted
    assert accepted <= of_device[1] <= accepted + 32
    assert engine.stats.draft_sources.tokens == sources, "read twice, counted twice"

    other = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=2)
    shared_by(other).corpus.load([list(c.token_ids) for c in completions])
    again = run(other, prompts, GREEDY)
    assert texts(again) == texts(completions)
    assert other.stats.draft_sources.tokens["corpus"][1] > 50


def test_the_tokens_of_the_last_round_are_added(prompts: list[list[int]]) -> None:
    engine = tiny_engine("suffix", CHAIN, num_pages=256, max_batch_size=1)
    [first] = run(engine, prompts[:1], GREEDY)
    tokens = torch.tensor([first.token_ids], dtype=torch.int32)
    one, length = torch.ones(1, dtype=torch.int64), torch.tensor([len(first.token_ids) - 1])
    drafts, counts, *_ = shared_by(engine).corpus.search(tokens, one - 1, length, length + 1, 0.01, 1)
    assert counts.tolist() == [1]
    assert drafts.tolist() == [[first.token_ids[-1]]]


def test_the_rows_own_text_is_drafted_where_the_corpus_has_nothing() -> None:
    engine = tiny_engine("suffix", CHAIN, num_pages=256)
    run(engine, [[7] * 9], SamplingParams(max_tokens=12, logit_bias={7: 100.0}))
    assert engine.stats.draft_sources.tokens["row"][1] > 8


def drafting(tokens_BL: torch.Tensor) -> tuple[Any, Any]:
    """Return the view and the table of requests with these tokens, of which the last is the root."""
    count, length = tokens_BL.shape
    fields = torch.zeros(count, len(Field), dtype=torch.int64)
    fields[:, Field.LENGTH], fields[:, Field.LIMIT], fields[:, Field.ROOT] = length - 1, 200, tokens_BL[:, -1]
    table = SimpleNamespace(
        tokens_SL=tokens_BL.int(),
        predicted_SL=tokens_BL[:, :0].int(),
        ints_SF=fields,
        drafted_S3=torch.zeros(count, 3, dtype=torch.int64),
    )
    lines = torch.arange(count)
    view = SimpleNamespace(req_idx_B=lines, length_B=fields[:, Field.LENGTH], field=lambda field: fields[:, field])
    return view, table


def test_scores_are_those_of_the_text_that_is_drafted() -> None:
    """Two requests: the drafts of one are from the corpus, those of the other from its own text."""
    shared = SharedTexts(1024, [list(range(100, 140))] * 3, CPU, ops)
    method = SuffixDraft(DraftShape(7, 1, 8), 2, 0.0, shared, ops)
    view, table = drafting(torch.stack((torch.arange(80, 120), torch.arange(40) % 8)))
    found = method.draft(view, table, sampled=False)
    assert found.scores_BN is not None
    assert table.drafted_S3.tolist() == [[7, CORPUS, 1], [7, ROW, 0]]
    assert found.tokens_BN[0].tolist() == list(range(119, 127))
    length_B, limit_B = view.length_B + 1, view.field(Field.LIMIT)
    _, _, of_corpus_BD, _ = shared.corpus.search(table.tokens_SL, view.req_idx_B, length_B, limit_B, 0.0, 7)
    assert found.scores_BN[0, 1:].exp().tolist() == pytest.approx(of_corpus_BD[0].tolist())
    assert found.scores_BN[1, 1:].exp().tolist() == pytest.approx([(12 / (12 + d)) ** 1.4 for d in range(1, 8)])


@pytest.mark.parametrize(("least", "count"), [(0.5, 7), (0.3, 16), (0.0, 31)])
def test_drafts_of_the_rows_own_text_end_where_they_are_unlikely(least: float, count: int) -> None:
    """The last 12 tokens are found: draft d is right with the probability (12 / (12 + d)) ** 1.4."""
    method = SuffixDraft(CHAIN, 2, least, SharedTexts(1024, [], CPU, ops), ops)
    view, table = drafting(torch.arange(10).repeat(1, 5))
    found = method.draft(view, table, sampled=False)
    assert found.num_nodes_B is not None
    assert found.num_nodes_B.tolist() == [count + 1]
    assert table.drafted_S3.tolist() == [[count, ROW, 0]]
    assert found.tokens_BN[0, 1 : 1 + count].tolist() == [i % 10 for i in range(count)]


def test_a_source_that_is_mostly_wrong_is_no_longer_chosen(prompts: list[list[int]]) -> None:
    """Two engines: one has seen that the network is mostly wrong, the other that it is mostly right."""
    drafted = []
    for right in (0.0, 1000.0):
        engine = tiny_engine("hybrid", CHAIN, num_pages=256)
        trust_network(engine, right)
        run(engine, prompts, SamplingParams(max_tokens=8))
        sources = engine.stats.draft_sources.tokens
        drafted.append(sources.get("network", [0, 0])[0])
        assert "row" in sources or "job" in sources
    assert drafted[0] < 0.5 * drafted[1]


def test_drafts_that_are_always_accepted_change_the_output(
    prompts: list[list[int]], plain: Callable[[str, bool], list[Completion]]
) -> None:
    """The comparison with plain decoding sees drafts that are accepted without being right."""
    engine = tiny_engine("suffix", CHAIN, num_pages=256, simulate=8.0)
    assert texts(run(engine, prompts, GREEDY)) != texts(plain("suffix", False))
