"""A model that ranks share computes what the whole one does, on every path of the engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch

from specbatch.batch import NO_TOKEN
from specbatch.draft.shape import DraftShape
from specbatch.kernels import ops_for
from specbatch.models.blocks.config import LatticeConfig
from specbatch.models.config import MoeConfig
from specbatch.models.linears.linear import Linear
from specbatch.models.linears.sharded import GatheredLinear, ModelShard, VocabShare, local_config, part_of
from specbatch.models.weight_loader import WeightLoader
from specbatch.parallel.group import Group
from specbatch.parallel.shares import even_shares
from specbatch.types import Completion, SamplingParams
from tests.coins import plain_logits
from tests.parallel.threads import ThreadGroup, on_ranks
from tests.tiny_models import (
    BLOCK_SIZE,
    CPU,
    RandomTensors,
    random_prompts,
    run,
    tiny_config,
    tiny_decoder,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "uneven": {"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 47, "tie_word_embeddings": True},
    "fewer kv heads than ranks": {"num_heads": 6, "num_kv_heads": 1},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "sinks": {"attention_sinks": True, "num_heads": 6, "num_kv_heads": 2},
    "norms of heads": {"qk_norm": True, "vocab": 60},
    "experts": {"moe": MoeConfig(5, 2, 11, norm_topk_prob=True, layers=(True, False), shared_size=7)},
    "experts of a sigmoid router, a shared one of another name": {
        "moe": MoeConfig(
            *(6, 2, 10),
            norm_topk_prob=True,
            layers=(False, True),
            shared_size=80,  # more than the MLP of the other layer has
            shared_gate=False,
            shared_name="shared_mlp",
            scoring="sigmoid",
            scale=1.5,
            router_bias=True,
            wide_router=True,
            correction_bias="gate.extra",
        )
    },
    "experts with biases": {
        "activation": "clamped_swiglu",
        "moe": MoeConfig(4, 2, 8, norm_topk_prob=True, layers=(True, True), router_bias=True, expert_bias=True),
    },
    "experts of other names": {
        "moe": MoeConfig(
            4, 2, 8, norm_topk_prob=False, layers=(True, True), block="moe", projections=("w1", "w3", "w2")
        )
    },
}
CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(3, 3, 8)
GREEDY = SamplingParams(max_tokens=10)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, top_k=30, top_p=0.95, seed=5, logprobs=2)
PROMPTS = random_prompts(3, shared=17) + random_prompts(2, seed=1) + [[5, 6, 7, 8, 9] * 4]
ENGINES = {"CPU": tiny_engine, "fixed shapes": tiny_device_engine}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_the_whole_model(model: str, size: int) -> None:
    config = tiny_config(**MODELS[model])
    tokens = list(range(1, 40))
    expected = plain_logits(tiny_decoder(config, torch.float64), tokens)
    results = on_ranks(size, lambda group: plain_logits(tiny_decoder(config, torch.float64, group=group), tokens))
    assert all(torch.equal(result, results[0]) for result in results), "ranks disagree"
    torch.testing.assert_close(results[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith("experts")])
def test_logits_with_whole_experts_are_those_of_the_whole_model(model: str, size: int) -> None:
    config = tiny_config(**{**MODELS[model], "num_heads": 4, "num_kv_heads": 2})
    tokens = list(range(1, 40))
    expected = plain_logits(tiny_decoder(config, torch.float64), tokens)

    def logits(group: Group) -> torch.Tensor:
        return plain_logits(tiny_decoder(config, torch.float64, group=group, division="experts"), tokens)

    results = on_ranks(size, logits)
    assert all(torch.equal(result, results[0]) for result in results), "ranks disagree"
    torch.testing.assert_close(results[0], expected, rtol=0, atol=1e-12)


def test_each_rank_holds_a_part() -> None:
    """All parts together are the model, but for what each rank needs whole."""
    config = tiny_config(num_heads=4, num_kv_heads=2)
    shapes = {"q_proj": (32, 32), "o_proj": (32, 32), "down_proj": (32, 48), "lm_head": (61, 32)}
    for name, shape in shapes.items():
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        shards = [ModelShard.of(config, ThreadGroup(rank, 2, None)) for rank in range(2)]  # type: ignore[arg-type]
        parts = [part_of(f"model.{name}.weight", whole, shard) for shard in shards]
        dim = 1 if name in ("o_proj", "down_proj") else 0
        assert torch.equal(torch.cat(parts, dim), whole)
        assert all(part.untyped_storage().nbytes() < whole.untyped_storage().nbytes() for part in parts)


def test_each_rank_holds_a_part_of_a_draft_head() -> None:
    """Its vocabulary is whole on each rank, and all of it where its heads do not divide."""
    config = tiny_config(1, num_heads=4, num_kv_heads=2)
    groups = [ThreadGroup(rank, 2, None) for rank in range(2)]  # type: ignore[arg-type]
    shards = [ModelShard.of_head(config, group) for group in groups]
    whole = torch.arange(32 * 96).view(32, 96)
    parts = [part_of("fc.weight", whole, shard) for shard in shards if shard is not None]
    assert torch.equal(torch.cat(parts, 1), whole)
    first, second = (part_of("fc.bias", torch.ones(32), shard) for shard in shards if shard is not None)
    assert (first.sum(), second.sum()) == (32, 0), "it is added once"
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert all(part_of(name, whole, shard) is whole for shard in shards if shard is not None)
    assert all(shard is not None and shard.config.num_kv_heads == 1 for shard in shards)
    assert ModelShard.of_head(config, None) is None
    assert ModelShard.of_head(config, ThreadGroup(0, 5, None)) is None  # type: ignore[arg-type]


def outputs(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, str(c.finish_reason)) for c in completions]


@pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(SAMPLED, id="sampled")]
)
@pytest.mark.parametrize(
    ("method", "shape", "kind"),
    [
        ("none", None, "CPU"),
        ("ngram", CHAIN, "CPU"),
        ("draft_model", TREE, "fixed shapes"),
        ("eagle", CHAIN, "fixed shapes"),
        ("eagle3", TREE, "CPU"),
    ],
)
def test_texts_and_rounds_are_those_of_one_process(
    method: str, shape: DraftShape | None, kind: str, params: SamplingParams
) -> None:
    """In float64, where no sum in another order moves a token."""
    alone = run(tiny_oracle(method, shape, num_pages=256), PROMPTS, params)

    def work(group: Group) -> list[Completion]:
        return run(ENGINES[kind](method, shape, num_pages=256, group=group), PROMPTS, params)

    for completions in on_ranks(2, work):
        assert outputs(completions) == outputs(alone)
        assert [c.speculation for c in completions] == [c.speculation for c in alone]


@pytest.mark.parametrize("kind", [pytest.param("CPU", marks=pytest.mark.wide), "fixed shapes"])
@pytest.mark.parametrize("method", ["suffix", pytest.param("hybrid", marks=pytest.mark.wide)])
def test_the_corpora_of_ranks_are_the_same(method: str, kind: str) -> None:
    """Each rank drafts from its own corpus, and all verify the same drafts."""
    alone = run(ENGINES[kind](method, CHAIN, num_pages=256), PROMPTS * 2, SAMPLED)

    def work(group: Group) -> list[Completion]:
        return run(ENGINES[kind](method, CHAIN, num_pages=256, group=group), PROMPTS * 2, SAMPLED)

    for completions in on_ranks(2, work):
        assert outputs(completions) == outputs(alone)
        assert [c.speculation for c in completions] == [c.speculation for c in alone]


@pytest.mark.parametrize("kind", ENGINES)
def test_experts_of_ranks_answer_as_one_process(kind: str) -> None:
    """The sum with the residual, and the norm after it, are those of an MLP."""
    settings: dict[str, Any] = {"num_pages": 256, "family": "qwen3-moe", "num_layers": 3}
    alone = ENGINES[kind]("eagle", TREE, **settings)
    expected = run(alone, PROMPTS, SAMPLED)

    def work(group: Group) -> tuple[list[Completion], Any]:
        engine = ENGINES[kind]("eagle", TREE, group=group, **settings)
        return run(engine, PROMPTS, SAMPLED), engine.stats.experts

    for completions, experts in on_ranks(2, work):
        assert outputs(completions) == outputs(expected)
        assert experts == alone.stats.experts


@pytest.mark.parametrize(
    "family", ["gpt-neox", *(pytest.param(name, marks=pytest.mark.wide) for name in ("pre-norms", "cohere2"))]
)
def test_families_on_ranks(family: str) -> None:
    """Biases that are added once, MLPs without a gate, layers whose attention and MLP are added to one residual."""
    settings: dict[str, Any] = {"num_pages": 256, "family": family, "num_layers": 3}
    expected = run(ENGINES["CPU"]("eagle3", TREE, **settings), PROMPTS, SAMPLED)

    def work(group: Group) -> list[Completion]:
        return run(ENGINES["CPU"]("eagle3", TREE, group=group, **settings), PROMPTS, SAMPLED)

    for completions in on_ranks(2, work):
        assert outputs(completions) == outputs(expected)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("method", ["block", "peagle"])
def test_drafters_of_blocks_on_ranks(method: str, kind: str) -> None:
    """Each rank has all of a block drafter, and a part of a P-EAGLE head."""
    settings: dict[str, Any] = {"num_pages": 256, "vocab": 7}
    if method == "block":
        settings["head"] = LatticeConfig(8, 2, 2, 16, 3, 6, 1e-4, 8.0, BLOCK_SIZE)
    else:
        settings |= {"decoder": tiny_config(2, vocab=7), "input_norms": "each"}
    prompts = random_prompts(5, shared=6, vocab=7)
    expected = run(ENGINES[kind](method, CHAIN, **settings), prompts, SAMPLED)
    assert sum(c.speculation.accepted for c in expected) > 2

    def work(group: Group) -> list[Completion]:
        return run(ENGINES[kind](method, CHAIN, group=group, **settings), prompts, SAMPLED)

    for completions in on_ranks(2, work):
        assert outputs(completions) == outputs(expected)
        assert [c.speculation for c in completions] == [c.speculation for c in expected]


def test_more_ranks_than_an_expert_has_features() -> None:
    moe = MoeConfig(4, 2, 16, norm_topk_prob=False, layers=(True, True), shared_size=3)
    with pytest.raises(ValueError, match="an expert has 3 inner features"):
        local_config(tiny_config(moe=moe), 0, 4)
    with pytest.raises(ValueError, match="a layer has 4 experts"):
        local_config(tiny_config(num_heads=8, num_kv_heads=8, moe=replace(moe, shared_size=8)), 0, 5, "experts")
    assert local_config(tiny_config(moe=moe), 0, 4, "requests").num_heads == 4


@cache
def plain_samples() -> list[Completion]:
    return run(tiny_oracle(), PROMPTS, SAMPLED)


@pytest.mark.parametrize(
    "settings",
    [{"num_pages": 24}, {"prefill_chunk_tokens": 3, "prefix_cache": False}, {"max_batch_size": 1, "page_size": 1}],
    ids=["preempted", "small chunks", "alone"],
)
def test_scheduling_changes_nothing(settings: dict[str, Any]) -> None:
    alone = plain_samples()

    def work(group: Group) -> tuple[list[Completion], int]:
        engine = tiny_engine("draft_model", TREE, group=group, **{"num_pages": 256, **settings})
        return run(engine, PROMPTS, SAMPLED), engine.stats.preemptions

    for completions, preemptions in on_ranks(2, work):
        assert outputs(completions) == outputs(alone)
        assert (preemptions > 0) == (settings.get("num_pages") == 24)


def test_speculation_equals_plain_bit_for_bit_in_float32() -> None:
    """A sum over three ranks has one order, wherever a token lies in the batch."""

    def work(group: Group) -> list[list[Any]]:
        made = [
            tiny_engine(method, shape, num_layers=2, dtype=torch.float32, num_pages=256, group=group)
            for method, shape in (("none", None), ("draft_model", TREE))
        ]
        return [[(c.token_ids, c.logprobs) for c in run(engine, PROMPTS, SAMPLED)] for engine in made]

    for plain, speculative in on_ranks(3, work):
        assert plain == speculative


def test_the_embedding_of_a_token_is_exact() -> None:
    config = tiny_config(vocab=60)
    weights = RandomTensors({"model.embed_tokens.weight": (60, 32)}, 0)

    def work(group: Group) -> torch.Tensor:
        loader = WeightLoader(weights, torch.float32, CPU, shard=ModelShard.of(config, group))
        return loader.embedding(loader.tensor("model.embed_tokens.weight"))(torch.arange(60))

    for rows in on_ranks(4, work):
        assert torch.equal(rows, weights.load("model.embed_tokens.weight").float())


@pytest.mark.parametrize(
    ("method", "shape", "size", "settings"),
    [("none", None, 3, {}), ("draft_model", TREE, 2, {}), ("draft_model", CHAIN, 2, {"simulate": 2.5})],
    ids=["plain", "tree", "simulated"],
)
def test_greedy_rounds_exchange_best_tokens(
    method: str, shape: DraftShape | None, size: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no logits, but for the first token of each prompt. Margins are those of one process, too."""
    make = tiny_device_engine if settings else tiny_engine
    alone = run(make(method, shape, num_pages=256, **settings), PROMPTS, GREEDY)
    gathered: list[int] = []
    whole = GatheredLinear.__call__

    def counted(head: GatheredLinear, x_TI: torch.Tensor) -> torch.Tensor:
        gathered.append(len(x_TI))
        return whole(head, x_TI)

    monkeypatch.setattr(GatheredLinear, "__call__", counted)

    def work(group: Group) -> list[Completion]:
        return run(make(method, shape, num_pages=256, group=group, **settings), PROMPTS, GREEDY)

    for completions in on_ranks(size, work):
        assert outputs(completions) == outputs(alone)
        assert [c.speculation for c in completions] == [c.speculation for c in alone]
        for found, expected in zip(completions, alone, strict=True):
            assert found.margin.value == pytest.approx(expected.margin.value, abs=1e-6)
    assert sum(gathered) == size * len(PROMPTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("vocab", "size"), [(61, 2), (60, 3), (5, 4)])
def test_the_best_token_of_parts(vocab: int, size: int, dtype: torch.dtype) -> None:
    """Exactly that of the whole, with its margin: equal logits, parts that are masked, rows that are not finite."""
    generator = torch.Generator().manual_seed(vocab)
    logits_TV = torch.randint(-4, 5, (400, vocab), generator=generator).to(dtype) / 3
    values = torch.tensor([-torch.inf, torch.inf, torch.nan, torch.finfo(dtype).min], dtype=torch.float64)
    for row in range(100, 400):  # a stretch of each has a value that means something
        start = int(torch.randint(vocab, (1,), generator=generator))
        end = int(torch.randint(start, vocab, (1,), generator=generator)) + 1
        logits_TV[row, start:end] = values[(-1 if row < 160 else 0) if row < 300 else row % 4]
    logits_TV[-1] = -torch.inf
    ops = ops_for(CPU, torch.float32)
    expected = ops.argmax_and_margin(logits_TV, NO_TOKEN)

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        own = even_shares(vocab, size)[group.rank]
        part = cast(Linear, lambda x_T: logits_TV[:, own.start : own.stop])
        return GatheredLinear(part, group, VocabShare(own, -(-vocab // size)), vocab).best(
            torch.arange(400), ops_for(CPU, torch.float32)
        )

    for token_T, margin_T in on_ranks(size, work):
        assert torch.equal(token_T, expected[0])
        assert torch.equal(margin_T, expected[1])


@pytest.mark.parametrize(
    "wanted",
    [{"temperature": 0.8, "seed": 5}, {"logprobs": 2}, {"allowed_token_ids": (3, 4, 5, 50)}],
    ids=["sampled", "with log-probabilities", "with rules"],
)
def test_rounds_that_need_all_logits(wanted: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=10, **wanted)
    alone = run(tiny_oracle("draft_model", CHAIN, num_pages=256), PROMPTS, params)

    def work(group: Group) -> list[Completion]:
        return run(tiny_engine("draft_model", CHAIN, num_pages=256, group=group), PROMPTS, params)

    for completions in on_ranks(2, work):
        assert outputs(completions) == outputs(alone)
        assert all((c.logprobs is None) == ("logprobs" not in wanted) for c in completions)


def test_few_logits_are_gathered_on_a_gpu() -> None:
    """A tensor of the device "meta" has a size, as one of a GPU, and no numbers."""

    def work(group: Group) -> list[bool]:
        head = GatheredLinear(cast(Linear, None), group, VocabShare(range(64128), 64128), 128256)
        sizes = ((1, "meta"), (256, "meta"), (1, "cpu"))
        return [head.exchanges_best(torch.empty((rows, 8), device=device)) for rows, device in sizes]

    assert on_ranks(2, work) == [[False, True, True]] * 2
