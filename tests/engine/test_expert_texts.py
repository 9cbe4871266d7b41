"""Greedy texts of families with experts, and of some that share their traits, equal those of transformers: float32 on a
CPU, with each draft method."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    FlexOlmoConfig,
    Glm4MoeConfig,
    HYV3Config,
    MellumConfig,
    MiniMaxM2Config,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import SamplingParams
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import random_prompts, run

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 7,  # EAGLE-3 needs them
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LOCAL: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


FAMILIES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, **LOCAL, sliding_window=None),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=24, decoder_sparse_step=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=12, norm_topk_prob=True, mlp_only_layers=[0]),
    "olmoe": OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2),
    "flex_olmo": FlexOlmoConfig(**SIZES, num_experts=6, num_experts_per_tok=2),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(**SIZES, sliding_window=9),
    "mellum": MellumConfig(
        **SIZES, **EXPERTS, head_dim=12, sliding_window=9, layer_types=["full_attention", *["sliding_attention"] * 6]
    ),
    "glm4_moe": Glm4MoeConfig(**SIZES, **ROUTED, head_dim=16, use_qk_norm=True),
    "dots1": Dots1Config(**SIZES, **ROUTED, n_shared_experts=2, sliding_window=None),
    "solar_open": SolarOpenConfig(**without(SIZES | ROUTED, "intermediate_size", "first_k_dense_replace"), head_dim=12),
    "hy_v3": HYV3Config(**SIZES, **EXPERTS, head_dim=12),
    "minimax_m2": MiniMaxM2Config(**SIZES, **LOCAL, head_dim=16, rotary_dim=8),
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "ngram": {"method": "ngram", "num_draft_tokens": 4},
    "draft-chain": {"method": "draft_model", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "draft-tree": {"method": "draft_model", "num_steps": 3, "topk": 3, "num_draft_tokens": 8},
    "eagle3-chain": {"method": "eagle3", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "eagle3-tree": {"method": "eagle3", "num_steps": 4, "topk": 4, "num_draft_tokens": 12},
}
PROMPTS = [*random_prompts(10, vocab=264, longest=30), *random_prompts(4, vocab=264, shared=17), [5, 6, 7, 8, 9] * 4]
LENGTH = 8
NUM_ANSWERS = 20  # tokens that a text can have, so that some drafts of random models are right


@functools.cache
def folder_of(family: str) -> tuple[tempfile.TemporaryDirectory, PreTrainedModel]:
    """Save a random model, and a dense one to draft for it. The object keeps its folder."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in key or key.endswith("bias"):  # as initialised they are ones and zeros
                tensor.add_(torch.randn_like(tensor) * 0.3)
        model.get_output_embeddings().weight[NUM_ANSWERS:] = 0.0
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)
    byte_tokenizer(264, (0,)).save_pretrained(folder.name)
    weights = write_checkpoint(Path(folder.name) / "draft") / "model.safetensors"
    state = load_file(weights)
    state["lm_head.weight"][NUM_ANSWERS:] = 0.0
    save_file(state, weights)
    return folder, model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_transformers(family: str, method: str) -> None:
    folder, model = folder_of(family)
    options = dict(METHODS[method])
    if options["method"] in ("draft_model", "eagle3"):
        options["draft"] = "random:eagle3" if options["method"] == "eagle3" else str(Path(folder.name) / "draft")
    config = Config(
        ModelSection(folder.name, "float32"),
        SpeculationSection(**options),
        engine=EngineSection(device="cpu", kv_cache_tokens=4096, max_batch_size=7),
    )
    engine = build_engine(resolve(config))
    texts = [text.token_ids for text in run(engine, PROMPTS, SamplingParams(max_tokens=LENGTH, ignore_eos=True))]
    assert len({tuple(text) for text in texts}) > len(texts) // 2
    if options["method"] not in ("none", "eagle3"):
        assert engine.stats.speculation.accepted > 0
    rows = [torch.tensor(prompt + text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    with torch.inference_mode():  # a causal model computes logits that do not depend on the padding after them
        logits = model(pad_sequence(rows, batch_first=True)).logits
    for i, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert text == logits[i, len(prompt) - 1 : len(rows[i]) - 1].argmax(-1).tolist()
