"""Logits of the decoder against transformers: tiny random models of each family, and real ones where they are there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Dots1Config,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneConfig,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HYV3Config,
    InternLM3Config,
    LlamaConfig,
    MellumConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
)

from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.setup.build import build_decoder
from tests.oracle.spans import Span, batch_of, piecewise_logits

CPU = torch.device("cpu")
MODELS = Path(os.environ.get("SPECBATCH_TEST_MODELS", Path.home() / ".cache" / "specbatch-dev"))
LENGTH, PAGE = 70, 8
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform outputs, so that differences show
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_GPT_OSS = YARN | {"rope_theta": 1500.0, "beta_fast": 8.0, "truncate": False}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
# head_dim and query_pre_attn_scalar are independent of the other sizes, as in Gemma 2 27B.
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "bos_token_id": 2, "eos_token_id": 1}
# Experts of DeepSeek-V3's kind.
GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
NO_EOS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 4.0, 9.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama-llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-head-dim": LlamaConfig(**SIZES, head_dim=20),
    "llama-no-gqa": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=19),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=13, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3-bias-tied": Qwen3Config(**SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1, sliding_window=9),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
    ),
    "qwen2-moe-window": Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
        qkv_bias=False,
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "qwen3-moe-dense-layer": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=8, num_experts_per_tok=8, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3),
    "olmo2": Olmo2Config(**SIZES),
    "olmo2-biases": Olmo2Config(**{**SIZES, "num_key_value_heads": 6}, attention_bias=True, tie_word_embeddings=True),
    "olmo3-window": Olmo3Config(
        **SIZES, sliding_window=9, rope_scaling={k: v for k, v in YARN.items() if k != "rope_theta"}
    ),
    "mellum-window": MellumConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=12,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "flex-olmo": FlexOlmoConfig(**SIZES, num_experts=5, num_experts_per_tok=2, pad_token_id=None),
    "olmoe-norm": OlmoeConfig(
        **{**SIZES, "num_key_value_heads": 6}, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "glm4-moe": Glm4MoeConfig(**SIZES, **GROUPS, head_dim=16, attention_bias=True, use_qk_norm=True),
    "glm4-moe-plain": Glm4MoeConfig(
        **SIZES,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        n_shared_experts=2,
        first_k_dense_replace=2,
        rope_parameters={**YARN, "partial_rotary_factor": 0.25},
        head_dim=16,
    ),
    "dots1-window": Dots1Config(
        **SIZES, **GROUPS, n_shared_experts=2, first_k_dense_replace=1, sliding_window=9, max_window_layers=1
    ),
    "solar-open": SolarOpenConfig(
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, **GROUPS, head_dim=16
    ),
    "hy-v3": HYV3Config(**SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=12),
    "minimax-m2": MiniMaxM2Config(**SIZES, num_local_experts=6, num_experts_per_tok=2, head_dim=12, rotary_dim=4),
    "gpt-oss-window": GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=6, num_experts_per_tok=3, sliding_window=9, rope_parameters=YARN_GPT_OSS
    ),
    "gpt-oss-no-bias": GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_bias=False,
        layer_types=["full_attention"] * 3,
    ),
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma-untied": GemmaConfig(**SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=False),
    "gemma2-window": Gemma2Config(
        **SIZES, **GEMMA, sliding_window=9, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma2-no-caps": Gemma2Config(
        **SIZES, **GEMMA, sliding_window=9, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3-window": Gemma3TextConfig(**SIZES, **GEMMA, sliding_window=9, sliding_window_pattern=2),
    "gemma3-linear": Gemma3TextConfig(
        **SIZES,
        **GEMMA,
        sliding_window=13,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
}

# Families whose traits have no other family. They are `wide`, but for those of `NOT_WIDE`.
WIDE_CONFIGS: dict[str, PreTrainedConfig] = {
    "ministral-window": MinistralConfig(**SIZES, sliding_window=9, layer_types=TYPES, head_dim=8),
    "ministral3": Ministral3Config(**SIZES, head_dim=12, **NO_EOS),
    "ministral3-growth": Ministral3Config(
        **SIZES,
        **NO_EOS,
        head_dim=16,
        rope_parameters={**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4},
    ),
    "seed-oss": SeedOssConfig(**SIZES, head_dim=16, attention_out_bias=True, mlp_bias=True),
    "cwm-window": CwmConfig(**SIZES, head_dim=16, sliding_window=9, bos_token_id=1, eos_token_id=1),
    "arcee": ArceeConfig(**SIZES, bos_token_id=1, eos_token_id=1),
    "arcee-bias": ArceeConfig(**SIZES, attention_bias=True, mlp_bias=True, bos_token_id=1, eos_token_id=1),
    "helium": HeliumConfig(**SIZES, head_dim=8),
    "hunyuan": HunYuanDenseV1Config(**SIZES, head_dim=16),
    "hunyuan-bias": HunYuanDenseV1Config(**SIZES, head_dim=8, attention_bias=True, rope_parameters=YARN),
    "hunyuan-alpha": HunYuanDenseV1Config(
        **SIZES, head_dim=8, rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 100.0, "factor": 1.0}
    ),
    "ernie": Ernie4_5Config(**SIZES, head_dim=16),
    "ernie-bias": Ernie4_5Config(**SIZES, head_dim=8, use_bias=True, tie_word_embeddings=False),
    "smollm3": SmolLM3Config(**SIZES, **NO_EOS, no_rope_layer_interval=2),
    "smollm3-window": SmolLM3Config(
        **SIZES, **NO_EOS, no_rope_layers=[0, 1, 1], layer_types=TYPES, sliding_window=9, use_sliding_window=True
    ),
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=12.0,
        logits_scaling=0.7,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-2,
    ),
    "granite-tied": GraniteConfig(**SIZES, residual_multiplier=0.4, attention_multiplier=0.4, tie_word_embeddings=True),
    "granite-moe": GraniteMoeConfig(
        **SIZES, attention_multiplier=0.4, residual_multiplier=0.3, num_local_experts=6, num_experts_per_tok=3
    ),
    "granite-moe-shared": GraniteMoeSharedConfig(
        **SIZES,
        attention_multiplier=0.4,
        embedding_multiplier=3.0,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
    ),
    "exaone": ExaoneConfig(**SIZES, **NO_EOS, rope_parameters=LLAMA3),
    "internlm3": InternLM3Config(
        **SIZES, **NO_EOS, head_dim=8, rope_parameters={"rope_type": "dynamic", "factor": 6.0, "rope_theta": 500.0}
    ),
    "internlm3-bias": InternLM3Config(**SIZES, **NO_EOS, head_dim=12, attention_bias=True, mlp_bias=True),
    "exaone4-window": Exaone4Config(**SIZES, sliding_window=9, sliding_window_pattern=2),
    "exaone4": Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 3, head_dim=12),
    "phi3": Phi3Config(**SIZES, **NO_EOS),
    "phi3-window": Phi3Config(
        **SIZES,
        **NO_EOS,
        sliding_window=9,
        tie_word_embeddings=True,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=128,
    ),
    "glm": GlmConfig(**SIZES, **NO_EOS, head_dim=16),
    "glm-no-bias": GlmConfig(**SIZES, **NO_EOS, head_dim=8, attention_bias=False, partial_rotary_factor=0.25),
    "glm4": Glm4Config(**SIZES, **NO_EOS, head_dim=16),
    "cohere": CohereConfig(**SIZES, **NO_EOS, logit_scale=0.3),
    "cohere-bias": CohereConfig(**SIZES, **NO_EOS, logit_scale=1.3, attention_bias=True, tie_word_embeddings=False),
    "cohere2-window": Cohere2Config(**SIZES, **NO_EOS, sliding_window=9, sliding_window_pattern=2, logit_scale=0.7),
    "starcoder2": Starcoder2Config(**SIZES, **NO_EOS),
    "starcoder2-window": Starcoder2Config(
        **SIZES, **NO_EOS, sliding_window=9, use_bias=False, hidden_act="gelu", tie_word_embeddings=False
    ),
    "stablelm": StableLmConfig(**SIZES, use_qkv_bias=True),
    "stablelm-parallel": StableLmConfig(**SIZES, use_parallel_residual=True, partial_rotary_factor=0.5),
    "nemotron": NemotronConfig(**SIZES),
    "nemotron-bias": NemotronConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16, hidden_act="gelu"),
    "phi": PhiConfig(**SIZES),
    "phi-tied": PhiConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(
        **{"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "initializer_range": 0.3},
        **NO_EOS,
    ),
    "gpt2-untied": GPT2Config(
        **{"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "initializer_range": 0.3},
        **NO_EOS,
        n_inner=80,
        activation_function="relu",
        tie_word_embeddings=False,
    ),
    "gptj": GPTJConfig(
        **{"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 3, "n_positions": 256, "initializer_range": 0.3},
        **NO_EOS,
        rotary_dim=8,
    ),
    "gpt-neox": GPTNeoXConfig(
        **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}, **NO_EOS, hidden_act="gelu"
    ),
    "gpt-neox-serial": GPTNeoXConfig(
        **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
        **NO_EOS,
        use_parallel_residual=False,
        attention_bias=False,
        rotary_pct=0.5,
        hidden_act="gelu_new",
    ),
}
NOT_WIDE = {"ministral3-growth", "hunyuan-alpha", "granite", "phi3-window", "cohere2-window", "nemotron-bias"}


PIECES = {"whole": [LENGTH], "chunks": [1, 30, 7, 32], "decode": [40] + [1] * 30}


@pytest.mark.parametrize(
    "name",
    [
        *CONFIGS,
        *(name if name in NOT_WIDE else pytest.param(name, marks=pytest.mark.wide) for name in WIDE_CONFIGS),
    ],
)
def test_families(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name] if name in CONFIGS else WIDE_CONFIGS[name]
    torch.manual_seed(1)
    # Of the implementations, only eager applies soft caps to scores.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in (*model.named_parameters(), *model.named_buffers()):
            if (
                "norm" in key or "ln_" in key or key.endswith("bias")
            ):  # as initialised they are ones and zeros, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 97, (LENGTH,)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        checkpoint = open_checkpoint(tmp_path)
        decoder = build_decoder(checkpoint.config, checkpoint.tensors, LENGTH, torch.float32, CPU)
        assert expected.std() > 0.3, "logits too flat to compare"
        for pieces in PIECES.values():
            found = piecewise_logits(decoder, tokens, pieces, torch.float32)
            assert float((found - expected).abs().max()) < 1e-4  # seen: 5e-5 at most, logits up to 15
    if "window" in name:
        full = build_decoder(
            replace(checkpoint.config, sliding_windows=(None,) * 3),
            checkpoint.tensors,
            LENGTH,
            torch.float32,
            CPU,
        )
        with torch.inference_mode():
            assert not torch.allclose(piecewise_logits(full, tokens, [LENGTH], torch.float32), expected, atol=1e-2)


@pytest.mark.parametrize("name", ["granite", pytest.param("cohere2-window", marks=pytest.mark.wide)])
def test_auxiliary_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A draft head reads them, whatever the factor of residuals is."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(WIDE_CONFIGS[name], attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 97, (20,))
    checkpoint = open_checkpoint(tmp_path)
    decoder = build_decoder(checkpoint.config, checkpoint.tensors, 20, torch.float32, CPU)
    layout = batch_of([Span(range(3), 0, 20)], PAGE, CPU)
    with torch.inference_mode():
        states = model(tokens[None], output_hidden_states=True).hidden_states
        hidden, found = decoder.forward(tokens, layout, decoder.new_cache(24, torch.float32), (0, 2))
    for ours, theirs in zip((*found, hidden), (states[0], states[2], states[3]), strict=True):
        torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=1e-4)


PROMPTS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?",
    "def quicksort(values: list[int]) -> list[int]:\n    if len(values) < 2:\n        return values\n    pivot = ",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "ours"),
    [
        ("smollm2-135m-hf", "smollm2-135m-hf"),
        ("smollm2-135m-hf", "smollm2-135m.gguf"),
        ("qwen2.5-coder-0.5b-hf", "qwen2.5-coder-0.5b-hf"),
        ("qwen2.5-coder-0.5b-hf", "qwen2.5-coder-0.5b.gguf"),
    ],
)
def test_real_models(reference: str, ours: str) -> None:
    """float32. The folders hold the GGUFs' values, the Qwen one rounded to bfloat16, so there the GGUF differs more."""
    from specbatch.models.formats.tokenizer import load_tokenizer

    for name in (reference, ours):
        if not (MODELS / name).exists():
            pytest.skip(f"{MODELS / name} is not there (SPECBATCH_TEST_MODELS)")
    model = AutoModelForCausalLM.from_pretrained(MODELS / reference, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(MODELS / reference)
    checkpoint = open_checkpoint(MODELS / ours)
    decoder = build_decoder(checkpoint.config, checkpoint.tensors, 512, torch.float32, CPU)
    for text in PROMPTS:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0]
            found = piecewise_logits(decoder, tokens, [10, len(tokens) - 15, 1, 1, 1, 1, 1], torch.float32)
        difference = (found - expected).abs().max()
        rounded = reference.startswith("qwen") and ours.endswith(".gguf")
        print(f"\n{ours}: max abs diff {float(difference):.2e} over {len(tokens)} tokens")
        assert difference < (1.0 if rounded else 1e-3)
        if not rounded:
            assert torch.equal(found.argmax(-1), expected.argmax(-1))
        else:
            assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
