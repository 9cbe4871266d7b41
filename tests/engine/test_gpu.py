"""Both engines on a CUDA device. The oracle's tokens on CPU are the measure, in float64 over the torch twins and in
float32 over the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.draft.corpus import Corpus
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.budget_graphs import MAX_AT_START
from specbatch.engine.executor import GraphMode
from specbatch.engine.node_chooser import RoundCosts, measured_costs
from specbatch.engine.round import Wanted
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.kernels import ops_for
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.draft.test_block import CONFIDENCE
from tests.draft.test_block import TRAITS as BLOCK_TRAITS
from tests.engine.graphs import round_times
from tests.engine.test_edits import MIXED, decided, requests
from tests.engine.test_nonfinite import all_nan, nan_embedding
from tests.tiny_models import (
    FAMILY_TRAITS,
    num_target_layers,
    random_prompts,
    round_of,
    run,
    run_requests,
    tiny_device_engine,
    tiny_oracle,
)

pytestmark = pytest.mark.gpu

CASES = [
    ("none", None),
    ("ngram", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(5, 4, 8)),
    ("eagle", DraftShape(3, 1, 4)),
    ("eagle", DraftShape(5, 4, 8)),
    ("eagle3", DraftShape(7, 10, 60)),
]


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9)]
)
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_cuda_equals_cpu(method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    prompts = random_prompts(5, shared=10)
    cpu = run(tiny_oracle(method, shape, num_pages=256), prompts, params)
    gpu = run(tiny_oracle(method, shape, num_pages=256, device=torch.device("cuda")), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.speculation for c in gpu] == [c.speculation for c in cpu]


CUDA = torch.device("cuda")
DEVICE_CASES = [*CASES, ("draft_model", DraftShape(1, 1, 2)), ("eagle3", DraftShape(1, 1, 2))]
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01)


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), DEVICE_CASES)
def test_device_engine_equals_cpu_in_float64(
    method: str, shape: DraftShape | None, params: SamplingParams, graphs: GraphMode
) -> None:
    """Batches shrink from 8 to 1, so padded graphs are replayed after larger ones."""
    prompts = random_prompts(9, shared=10)
    settings = {"num_pages": 512, "max_batch_size": 8, "eos": (5,)}
    cpu = run(tiny_oracle(method, shape, **settings), prompts, params)
    gpu = run(tiny_device_engine(method, shape, **settings, device=CUDA, graphs=graphs), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.speculation for c in gpu] == [c.speculation for c in cpu]


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), DEVICE_CASES)
def test_kernels_give_the_tokens_of_the_cpu_in_float32(
    method: str, shape: DraftShape | None, params: SamplingParams, graphs: GraphMode
) -> None:
    prompts = random_prompts(9, shared=10)
    settings = {"num_pages": 512, "max_batch_size": 8, "eos": (5,), "dtype": torch.float32}
    cpu = run(tiny_oracle(method, shape, **settings), prompts, params)
    gpu = run(tiny_device_engine(method, shape, **settings, device=CUDA, graphs=graphs), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "family", [name for name, traits in FAMILY_TRAITS.items() if name != "llama" and "delta" not in traits]
)
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_other_families_give_the_tokens_of_the_cpu_in_float32(
    method: str, shape: DraftShape | None, family: str, params: SamplingParams, graphs: GraphMode
) -> None:
    """Windows of 9 tokens, soft caps, sinks, norms with float32 weights, experts, heads that rotate in part, norms
    over all heads; prompts share cached pages."""
    prompts = random_prompts(9, shared=10)
    settings = {"num_pages": 512, "max_batch_size": 8, "eos": (5,), "dtype": torch.float32, "family": family}
    cpu = run(tiny_oracle(method, shape, **settings), prompts, params)
    engine = tiny_device_engine(method, shape, **settings, device=CUDA, graphs=graphs)
    gpu = run(engine, prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert engine.stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["suffix", "hybrid"])
def test_drafts_from_other_rows_on_the_device(
    method: str, params: SamplingParams, graphs: GraphMode, dtype: torch.dtype
) -> None:
    """Rounds have several sizes. Each prompt comes three times, so that drafts of the corpus are right."""
    prompts = random_prompts(6, shared=10) * 3
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "eos": (5,), "dtype": dtype}
    cpu = run(tiny_oracle("none", None, **settings, num_layers=num_target_layers(method)), prompts, params)
    costs = RoundCosts(0.0, 4.0, 1.0, 0.0)
    settings |= {"device": CUDA, "graphs": graphs, "costs": costs, "coupled": True}
    engine = tiny_device_engine(method, DraftShape(15, 1, 16), **settings)
    for _ in range(2):
        gpu = run(engine, prompts, params)
        assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert engine.stats.draft_sources.tokens["job"][1] > 10
    if graphs == "round":
        found = measured_costs(engine.executor, 8, 100, None)
        assert found is not None
        assert found.least > 0


def test_the_kernels_of_a_corpus_give_the_same_words_each_time() -> None:
    """Ranks run the same rounds, and their corpora must not differ by the order in which threads write."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (300, 64), generator=generator).int().to(CUDA)
    lines, starts = torch.arange(300, device=CUDA), torch.full((300,), 12, device=CUDA)
    words = []
    for _ in range(4):
        corpus = Corpus(1024, CUDA, ops_for(CUDA, torch.float32))
        for _ in range(3):
            corpus.add(tokens, lines, starts, torch.full_like(starts, 40), 40, starts[:0])
        words.append(corpus.words_H)
    assert all(torch.equal(one, words[0]) for one in words)
    assert int((words[0] != 0).sum()) > 1000


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("shape", [DraftShape(3, 1, 4), DraftShape(5, 4, 8)], ids=str)
@pytest.mark.parametrize(
    "traits",
    [{"norm_before_residual": True}, {"aux_layers": (0, 1, 3)}, {"aux_layers": (1, 2, 4)}, {"lacks_lm_head": True}],
    ids=str,
)
def test_other_traits_of_an_eagle3_head(traits: dict[str, Any], shape: DraftShape, graphs: GraphMode) -> None:
    """A sampled chain's text depends on what was drafted. Layer 4 of 4: the last one's output."""
    prompts = random_prompts(9, shared=10)
    settings = {"num_pages": 512, "max_batch_size": 8, "num_layers": 4, "dtype": torch.float32, **traits}
    cpu = run(tiny_oracle("eagle3", shape, **settings), prompts, SAMPLED)
    gpu = run(tiny_device_engine("eagle3", shape, **settings, device=CUDA, graphs=graphs), prompts, SAMPLED)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [DraftShape(5, 1, 6), DraftShape(4, 3, 12)], ids=str)
@pytest.mark.parametrize("traits", BLOCK_TRAITS)
def test_block_drafters(traits: str, shape: DraftShape, params: SamplingParams, graphs: GraphMode) -> None:
    """A sampled chain's text depends on what was drafted. With few tokens, random drafts are often right."""
    prompts = random_prompts(9, shared=10, vocab=7)
    settings = {"num_pages": 512, "max_batch_size": 8, "vocab": 7, "dtype": torch.float32, **BLOCK_TRAITS[traits]}
    cpu = run(tiny_device_engine("block", shape, **settings), prompts, params)
    gpu = run(tiny_device_engine("block", shape, **settings, device=CUDA, graphs=graphs), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.speculation for c in gpu] == [c.speculation for c in cpu]


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_schedule_of_trees_and_chains(params: SamplingParams, graphs: GraphMode) -> None:
    """Few requests have trees and more have chains, as in the default on CUDA."""
    prompts, schedule = (
        random_prompts(9, shared=10, vocab=7),
        ByBatch((2, 4, 8), (DraftShape(4, 3, 12), DraftShape(5, 1, 6), DraftShape(2, 1, 3))),
    )
    settings = {"num_pages": 512, "max_batch_size": 8, "vocab": 7, "dtype": torch.float32, **BLOCK_TRAITS["domino"]}
    cpu = run(tiny_device_engine("block", schedule, **settings), prompts, params)
    gpu = run(tiny_device_engine("block", schedule, **settings, device=CUDA, graphs=graphs), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.speculation for c in gpu] == [c.speculation for c in cpu]


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_heads_that_draft_in_parallel(params: SamplingParams, graphs: GraphMode) -> None:
    prompts, shape = random_prompts(9, shared=10, vocab=7), DraftShape(4, 1, 5)
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "vocab": 7, "dtype": torch.float32}
    cpu = run(tiny_device_engine("peagle", shape, **settings), prompts, params)
    gpu = run(tiny_device_engine("peagle", shape, **settings, device=CUDA, graphs=graphs), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.speculation for c in gpu] == [c.speculation for c in cpu]


@pytest.mark.parametrize("traits", CONFIDENCE)
def test_confidence_heads_share_a_budget(traits: str) -> None:
    prompts, shape, budget = random_prompts(9, shared=10, vocab=7), DraftShape(5, 1, 6), VerifyBudget(2.5)
    settings = {"num_pages": 512, "max_batch_size": 8, "vocab": 7, "dtype": torch.float32, **CONFIDENCE[traits]}
    cpu = run(tiny_device_engine("block", shape, **settings, budget=budget), prompts, GREEDY)
    gpu = run(tiny_device_engine("block", shape, **settings, budget=budget, device=CUDA), prompts, GREEDY)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.speculation for c in gpu] == [c.speculation for c in cpu]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(page_size: int) -> None:
    prompts = random_prompts(6, shared=10)
    shape = DraftShape(5, 4, 8)
    cpu = run(tiny_oracle("eagle3", shape, num_pages=256, dtype=torch.float32), prompts, GREEDY)
    settings = {"num_pages": 4096 // page_size, "page_size": page_size, "dtype": torch.float32}
    gpu = run(tiny_device_engine("eagle3", shape, **settings, device=CUDA, graphs="round"), prompts, GREEDY)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]


def test_preemption() -> None:
    prompts = random_prompts(8, seed=1, longest=30)
    shape = DraftShape(3, 1, 4)
    expected = run(tiny_oracle("eagle3", shape, num_pages=256, dtype=torch.float32), prompts, GREEDY)
    engine = tiny_device_engine(
        "eagle3", shape, num_pages=26, prefill_chunk_tokens=7, dtype=torch.float32, device=CUDA, graphs="round"
    )
    assert [c.token_ids for c in run(engine, prompts, GREEDY)] == [c.token_ids for c in expected]
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("nodes", [1.5, None])
@pytest.mark.parametrize("method", ["ngram", "suffix", "hybrid", "eagle"])
def test_a_budget_for_verification(method: str, nodes: float | None, params: SamplingParams) -> None:
    """Rounds that verify some of the nodes are graphs. A drawn chain's text depends on what was drafted."""
    prompts = [*random_prompts(12, shared=10), [5, 6, 7] * 6, [3] * 12]
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "dtype": torch.float32}
    shape, budget = DraftShape(4, 1, 5), VerifyBudget(nodes)
    engine = tiny_device_engine(method, shape, **settings, device=CUDA, graphs="round", budget=budget)
    executor = engine.executor
    with torch.inference_mode():
        executor.capture(params.temperature > 0)
    if nodes is None:
        wanted = Wanted(params.temperature > 0)
        budget.times, num_graphs = round_times([1, 100], [0.1, 6.0]), executor.num_graphs  # nodes cost much
        with torch.inference_mode():
            assert executor.measure(wanted)
            assert executor.measure_sharing(wanted)
            executor.capture_for_budget(wanted)
        assert num_graphs + 4 < executor.num_graphs <= num_graphs + MAX_AT_START
        num_graphs = executor.num_graphs
    gpu = run(engine, prompts, params)
    if params.temperature == 0 or method not in ("eagle", "hybrid"):
        expected = run(tiny_oracle("none", **settings, num_layers=num_target_layers(method)), prompts, params)
        assert [c.token_ids for c in gpu] == [c.token_ids for c in expected]
    drafted, rounds = (sum(getattr(c.speculation, name) for c in gpu) for name in ("drafted", "rounds"))
    assert 0 < drafted <= (1.2 if nodes else 4) * rounds  # times may say that all drafts are worth it
    if nodes is None:
        assert executor.num_graphs == num_graphs, "a graph was captured late in a short job"


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize(("method", "shape"), DEVICE_CASES)
def test_keys_and_values_in_float8(method: str, shape: DraftShape | None, graphs: GraphMode) -> None:
    """In float64, over the twins: the CPU's tokens."""
    prompts = random_prompts(9, shared=10)
    settings = {"num_pages": 512, "max_batch_size": 8, "eos": (5,), "kv_dtype": FP8}
    cpu = run(tiny_device_engine(method, shape, **settings), prompts, GREEDY)
    gpu = run(tiny_device_engine(method, shape, **settings, device=CUDA, graphs=graphs), prompts, GREEDY)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]


@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize(("method", "shape"), DEVICE_CASES)
def test_kernels_over_keys_and_values_in_float8(method: str, shape: DraftShape | None, page_size: int) -> None:
    """In float32, speculative against plain, most prompts of them: a key whose last bit differs may round to float8's
    next value, 2**-4 away, and turn a near tie."""
    prompts = random_prompts(16, shared=10)
    settings = {
        "num_pages": 2048 // page_size,
        "page_size": page_size,
        "max_batch_size": 8,
        "dtype": torch.float32,
        "kv_dtype": FP8,
        "device": CUDA,
        "graphs": "round",
        "num_layers": num_target_layers(method),
    }
    expected = run(tiny_device_engine("none", None, **settings), prompts, GREEDY)
    actual = run(tiny_device_engine(method, shape, **settings), prompts, GREEDY)
    same = sum(a.token_ids == b.token_ids for a, b in zip(actual, expected, strict=True))
    assert same >= 14


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_rules_change_logits_as_on_the_cpu(method: str, shape: DraftShape | None, graphs: GraphMode) -> None:
    """Requests without rules run before and among those with rules: graphs of both kinds are captured and replayed."""
    settings = {"num_pages": 512, "max_batch_size": 8, "eos": (0,)}
    for temperatures in ((0.0,), (0.0, 0.9)):
        gpu = tiny_device_engine(method, shape, **settings, device=CUDA, graphs=graphs)
        run(gpu, random_prompts(9), GREEDY)
        wanted = requests(MIXED, temperatures)
        assert decided(run_requests(gpu, wanted)) == decided(
            run_requests(tiny_oracle(method, shape, **settings), wanted)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("graphs", ["none", "round"])
def test_nothing_waits_for_the_device_with_rules(graphs: GraphMode, dtype: torch.dtype) -> None:
    """And what is drafted has the text of plain decoding, in float32."""
    texts = []
    for method, shape in (("none", None), ("draft_model", DraftShape(5, 4, 8))):
        settings = {"num_pages": 512, "max_batch_size": 8, "dtype": dtype, "device": CUDA}
        engine = tiny_device_engine(method, shape, **settings, graphs=graphs)
        run_requests(engine, requests(MIXED, (0.0, 0.9)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            texts.append([c.token_ids for c in run_requests(engine, requests(MIXED, (0.0, 0.9)))])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert dtype is torch.bfloat16 or texts[0] == texts[1]


@pytest.mark.parametrize(("method", "shape"), [("none", None), *CASES[1:]])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nothing_waits_for_the_device(method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    """Prompts and rounds, eager and as graphs, with torch's own detector of synchronisation set to raise."""
    for graphs in ("none", "round"):
        settings = {"num_pages": 512, "max_batch_size": 8, "dtype": torch.float32, "device": CUDA}
        engine = tiny_device_engine(method, shape, **settings, graphs=graphs)
        run(engine, random_prompts(9), params)  # compiles and captures
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(engine, random_prompts(9, seed=1), params)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_padding_writes_nothing() -> None:
    """A batch of 3 runs in the graph of 4: no slot but those of the three requests' pages changes."""
    engine = tiny_device_engine(
        "eagle3", DraftShape(5, 4, 8), num_pages=128, dtype=torch.float32, device=CUDA, graphs="round"
    )
    run(engine, random_prompts(4), GREEDY)  # fills the caches with something
    caches = [round_of(engine)._cache, round_of(engine).method.net.cache]
    for i, prompt in enumerate(random_prompts(3, seed=1)):
        engine.submit(Request(i, prompt, SamplingParams(max_tokens=100), RngKey(0, i, 0)))
    engine.step()
    torch.cuda.synchronize()
    before = [cache.all_layers.clone() for cache in caches]
    for _ in range(3):
        engine.step()
    torch.cuda.synchronize()
    own = {page for seq in engine._scheduler.running for page in seq.pages}
    assert len(engine._scheduler.running) == 3
    others = [slot for page in range(129) if page not in own for slot in range(page * 4, page * 4 + 4)]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.all_layers[:, :, :, others], old[:, :, :, others])
        assert not torch.equal(cache.all_layers, old)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_logits_that_are_not_finite_fail_their_rows_alone(
    method: str, shape: DraftShape | None, params: SamplingParams, graphs: GraphMode, dtype: torch.dtype
) -> None:
    """In prompts and in what rows write: tokens, ends and counts are the CPU's."""
    prompts = [[token % 50 for token in prompt] for prompt in random_prompts(7, shared=10)]
    prompts = [[*prompt, 60] if i in (1, 4) else prompt for i, prompt in enumerate(prompts)]
    settings = {"num_pages": 512, "max_batch_size": 8, "spoil": nan_embedding(55, 60), "dtype": dtype}
    cpu = run(tiny_oracle(method, shape, **settings), prompts, params)
    gpu = run(tiny_device_engine(method, shape, **settings, device=CUDA, graphs=graphs), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.finish_reason for c in gpu] == [c.finish_reason for c in cpu]
    assert {str(c.finish_reason) for c in gpu} == {"error", "length"}


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_broken_draft_is_rejected(method: str, graphs: GraphMode) -> None:
    prompts = random_prompts(5, shared=10)
    settings = {"num_pages": 512, "max_batch_size": 8, "dtype": torch.float32}
    spoil = {"spoil_draft": all_nan("lm_head.weight")}
    for shape in (DraftShape(3, 1, 4), DraftShape(5, 4, 8)):
        for params in (GREEDY, SAMPLED):
            host = tiny_oracle(method, shape, **settings, **spoil)
            device = tiny_device_engine(method, shape, **settings, **spoil, device=CUDA, graphs=graphs)
            cpu, gpu = run(host, prompts, params), run(device, prompts, params)
            assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
            assert device.stats.broken_drafts == host.stats.broken_drafts


DETERMINISTIC = ["engine.device=cuda", "engine.deterministic=true", "engine.kv_cache_tokens=4096"]


@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("shape", ["3/1/4", "5/4/8"])
@pytest.mark.parametrize("target", ["random:tiny-experts", "random:tiny-experts?skew=1.5", "random:tiny-gpt-oss"])
def test_speculation_with_experts_gives_the_bits_of_plain_decoding(target: str, shape: str, graphs: GraphMode) -> None:
    """In bfloat16 and deterministically, with other batch sizes, and so with other tiles. Log-probabilities and margins
    show what tokens do not."""
    num_steps, topk, num_draft_tokens = shape.split("/")
    drafts = [
        *("speculation.method=draft_model", f"speculation.draft={target}", f"speculation.num_steps={num_steps}"),
        *(f"speculation.topk={topk}", f"speculation.num_draft_tokens={num_draft_tokens}", "engine.max_batch_size=3"),
    ]
    prompts = random_prompts(24, shared=10, vocab=500)
    found = []
    for options in (["speculation.method=none", "engine.max_batch_size=16"], drafts):
        sets = [f"model.target={target}", f"engine.cuda_graphs={graphs}", *DETERMINISTIC, *options]
        engine = build_engine(resolve(load_config(None, sets)))
        completions = run(engine, prompts, SamplingParams(max_tokens=24, logprobs=2))
        found.append([(c.token_ids, c.logprobs, c.margin) for c in completions])
    assert found[0] == found[1]
    assert sum(c.speculation.accepted for c in completions) > 0


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "gpt-oss"])
def test_nothing_waits_for_the_device_with_experts(family: str) -> None:
    """Choices of experts stay there, and so do their counts until the engine is idle."""
    for graphs in ("none", "round"):
        settings = {"num_pages": 512, "max_batch_size": 8, "dtype": torch.float32, "device": CUDA, "family": family}
        engine = tiny_device_engine("draft_model", DraftShape(5, 4, 8), **settings, graphs=graphs)
        run(engine, random_prompts(9), GREEDY)  # compiles and captures
        before = sum(map(sum, engine.stats.experts.load))
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(engine, random_prompts(9, seed=1), GREEDY)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum(map(sum, engine.stats.experts.load)) > before > 0
