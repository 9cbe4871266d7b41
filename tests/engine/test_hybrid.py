"""Hybrids (Qwen3.5, Qwen3-Next): texts of small random models are those of transformers, with each kind of draft, and
the same for all sizes of chunks and batches, with states from checkpoints, and after preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig, Qwen3NextConfig

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.draft.host import HostDraftMethod, HostSequence, HostTrees
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.models.blocks.config import MarkovConfig
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.tiny_models import random_prompts, run_requests, tiny_device_engine, tiny_engine
from tests.tiny_models import run as run_all

VOCAB, NUM_TOKENS = 288, 24  # more than a page
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "eos_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3.5": Qwen3_5TextConfig(**SIZES),
    "qwen3-next": Qwen3NextConfig(
        **{**SIZES, "full_attention_interval": 3},
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
        mlp_only_layers=[1],
    ),
}
SHARED = random_prompts(1, seed=7, vocab=VOCAB, shared=70, longest=1)[0]
PROMPTS = [
    *random_prompts(3, vocab=VOCAB, longest=30, shared=20),
    [5, 6, 7, 8, 9] * 12,
    [3] * 25,
    [11],
    [4, 7],
    *(SHARED[:60] + tail for tail in ([1, 2, 3], [9], [1, 2, 3, 4, 5] * 4)),
    random_prompts(1, seed=3, vocab=VOCAB, shared=299, longest=1)[0],
]
PLAIN: dict[str, Any] = {"method": "none"}
NGRAM: dict[str, Any] = {"method": "ngram", "num_steps": 3}


class KnownDraft(HostDraftMethod):
    """Drafts the known continuations of prompts, of which some tokens are wrong: paths of all lengths are accepted."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], num_steps: int) -> None:
        super().__init__(DraftShape(num_steps, 1, num_steps + 1))
        self._texts = texts

    def host_draft(self, sequences: Sequence[HostSequence]) -> HostTrees:
        return HostTrees.chains([self._draft(seq.tokens) for seq in sequences])

    def _draft(self, tokens: list[int]) -> list[int]:
        prompt, text = next(item for item in self._texts.items() if tuple(tokens[: len(item[0])]) == item[0])
        done = len(tokens) - len(prompt)
        count = (len(tokens) + len(prompt)) % self.num_nodes  # 0: no draft
        drafts = text[done : done + count]
        wrong = (3 * done + len(prompt)) % (self.max_path + 1)
        return [token if i != wrong else (token + 1) % VOCAB for i, token in enumerate(drafts)]


SPECULATION = {"plain": PLAIN, "ngram": NGRAM, "draft-model": {"method": "draft_model", "num_steps": 3}}


def write_model(config: PreTrainedConfig, path: Path, seed: int = 0) -> Path:
    """Write a random model. Norms are not 1 and biases not 0, which would hide mistakes."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    byte_tokenizer(VOCAB, (0,)).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["qwen3.5", pytest.param("qwen3-next", marks=pytest.mark.wide)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(CONFIGS[request.param], tmp_path_factory.mktemp("hybrid") / request.param)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    config = LlamaConfig(**{key: SIZES[key] for key in keys}, num_hidden_layers=1, eos_token_id=0)
    return write_model(config, tmp_path_factory.mktemp("draft"))


@cache
def expected_texts(path: Path) -> list[list[int]]:
    """Return the tokens of transformers' greedy generation, the one that ends a text included."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    texts = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=0
            )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def make_engine(path: Path, speculation: dict[str, Any], **settings: Any) -> Engine:
    engine = {"device": "cpu", "kv_cache_tokens": 4096, "max_batch_size": 4, "page_size": 16, **settings}
    config = Config(
        model=ModelSection(target=str(path), dtype="float32"),
        speculation=SpeculationSection(**speculation),
        engine=EngineSection(**engine),
    )
    return build_engine(resolve(config))


def run(engine: Engine, prompts: list[list[int]] = PROMPTS, first: int = 0) -> list[Completion]:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    wanted = [Request(first + i, prompt, params, RngKey(0, i, 0)) for i, prompt in enumerate(prompts)]
    return run_requests(engine, wanted)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("case", SPECULATION)
def test_texts_are_those_of_transformers(model: Path, draft: Path, case: str) -> None:
    speculation = SPECULATION[case]
    if case == "draft-model":
        speculation = {**speculation, "draft": str(draft)}
    engine = make_engine(model, speculation)
    assert tokens_of(run(engine)) == expected_texts(model)
    assert engine.stats.cached_prompt_tokens > 0


@pytest.mark.wide
@pytest.mark.parametrize("num_steps", [1, 3, 7])
@pytest.mark.parametrize("settings", [{}, {"kv_cache_tokens": 128, "max_batch_size": 8, "prefill_chunk_tokens": 24}])
def test_drafts_of_which_some_are_wrong(model: Path, num_steps: int, settings: dict[str, Any]) -> None:
    """Each round replays the accepted nodes of the last one: from none of its drafts to all."""
    engine = make_engine(model, {"method": "ngram", "num_steps": 7}, **settings)
    count = len(PROMPTS) - 1
    prompts, texts = PROMPTS[:count], expected_texts(model)[:count]
    texts_by_prompt = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
    engine.set_methods(ByBatch.always(KnownDraft(texts_by_prompt, num_steps)), "none")
    completions = run(engine, prompts * 2)
    assert tokens_of(completions) == texts * 2
    counts = [completion.speculation for completion in completions]
    accepted, drafted = sum(c.accepted for c in counts), sum(c.drafted for c in counts)
    assert 0.2 * drafted < accepted < 0.9 * drafted
    assert bool(settings) == (engine.stats.preemptions > 0)


@pytest.mark.wide
@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_chunks_of_any_size(model: Path, chunk: int) -> None:
    count = len(PROMPTS) - (chunk < 16)  # The last prompt is long.
    engine = make_engine(model, NGRAM, prefill_chunk_tokens=chunk)
    assert tokens_of(run(engine, PROMPTS[:count])) == expected_texts(model)[:count]


@pytest.mark.parametrize("size", [1, 11])
def test_batches_of_any_size(model: Path, size: int) -> None:
    engine = make_engine(model, PLAIN, max_batch_size=size, prefix_cache=size > 1)
    assert tokens_of(run(engine)) == expected_texts(model)
    assert (engine.stats.cached_prompt_tokens > 0) == (size > 1)


@pytest.mark.wide
def test_preempted_requests_compute_their_states_again(model: Path) -> None:
    engine = make_engine(model, NGRAM, kv_cache_tokens=208, max_batch_size=8)
    prompts, texts = PROMPTS[:-1] * 2, expected_texts(model)[:-1] * 2
    assert tokens_of(run(engine, prompts)) == texts
    assert engine.stats.preemptions > 0


def test_checkpoints_are_used_and_overwritten(model: Path) -> None:
    """There are more prefixes than checkpoints. Pages are taken from the cache only up to a checkpoint."""
    engine = make_engine(model, PLAIN, max_batch_size=2)
    prompts = [[*SHARED[:n], n] for n in range(17, 70, 7)]
    alone = tokens_of(run(make_engine(model, PLAIN, prefix_cache=False), prompts))
    for repeat in range(2):
        assert tokens_of(run(engine, prompts, first=100 * repeat)) == alone
    assert engine.stats.cached_prompt_tokens > 200


DEVICE_PROMPTS = [*random_prompts(4, shared=17), [5, 6, 7, 8, 9] * 4, [3] * 12, [4]]
DEVICE_CASES: dict[str, tuple[str, DraftShape | None, dict[str, Any]]] = {
    "plain": ("none", None, {}),
    "ngram": ("ngram", DraftShape(3, 1, 4), {}),
    "suffix": ("suffix", DraftShape(7, 1, 8), {}),
    "eagle": ("eagle", DraftShape(2, 1, 3), {}),
    "block": ("block", DraftShape(3, 1, 4), {"head": MarkovConfig(4)}),
    "peagle": ("peagle", DraftShape(3, 1, 4), {}),
    "padded prompts": ("ngram", DraftShape(3, 1, 4), {"graph_tokens": 64}),
    "short chunks": ("ngram", DraftShape(1, 1, 2), {"prefill_chunk_tokens": 3}),
    "preempted": ("ngram", DraftShape(3, 1, 4), {"num_pages": 22}),
    "one checkpoint": ("none", None, {"num_checkpoints": 1}),
    "no checkpoint": ("none", None, {"num_checkpoints": 0}),
}


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.wide)])
@pytest.mark.parametrize("case", DEVICE_CASES)
def test_the_engine_of_a_gpu(case: str, sampled: bool) -> None:
    """Engines with fixed shapes and the reference kernels give the texts of a CPU's plain decoding, in float64."""
    method, shape, settings = DEVICE_CASES[case]
    if sampled and method in ("eagle", "block", "peagle"):
        pytest.skip("chains draw other numbers from the same distribution")
    params = SamplingParams(max_tokens=24, temperature=0.8 if sampled else 0.0, ignore_eos=True)
    plain = tiny_engine("none", family="qwen3.5", num_pages=256, num_layers=3, prefix_cache=False)
    engine = tiny_device_engine(
        method, shape, family="qwen3.5", num_layers=3, **{"num_pages": 256, "page_size": 4, **settings}
    )
    expected, found = run_all(plain, DEVICE_PROMPTS, params), run_all(engine, DEVICE_PROMPTS, params)
    assert tokens_of(found) == tokens_of(expected)
    assert (engine.stats.cached_prompt_tokens > 0) == (case != "no checkpoint")
    assert (engine.stats.preemptions > 0) == (case == "preempted")


def test_prompts_do_not_wait_for_pages_without_a_state() -> None:
    """All eight begin alike. Without a checkpoint there is nothing to wait for, and one chunk computes them all."""
    prompts = [[*range(3, 12), 20 + i] for i in range(8)]
    chunks = {}
    for num_checkpoints in (0, 1):
        engine = tiny_engine(
            "none", family="qwen3.5", num_layers=3, num_pages=256, max_batch_size=8, prefill_chunk_tokens=512,
            num_checkpoints=num_checkpoints,
        )  # fmt: skip
        for i, prompt in enumerate(prompts):
            engine.submit(Request(i, prompt, SamplingParams(max_tokens=2), RngKey(0, i, 0)))
        chunks[num_checkpoints] = 0
        while engine.stats.prompt_tokens < 80:
            engine.step()
            chunks[num_checkpoints] += 1
    assert chunks == {0: 1, 1: 2}
