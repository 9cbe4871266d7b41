"""ModelConfig against transformers: rope frequencies bit for bit, tensor names and shapes of real model classes."""

from __future__ import annotations

import math
from dataclasses import fields
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
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specbatch.errors import ModelError
from specbatch.models.config import expected_tensors
from specbatch.models.config_keys import unknown_keys
from specbatch.models.families.registry import FAMILIES, check_family_keys, parse_hf_config
from specbatch.models.rope import RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = {"model_type": "llama", **SIZES}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.25,
        },
    ],
    ids=["linear", "llama3", "yarn", "yarn-mscale", "yarn-attention-factor"],
)
def test_rope_equals_transformers_bit_for_bit(rope: dict[str, Any], head_dim: int) -> None:
    theirs = LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters=dict(rope))
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    parsed = parse_hf_config({**LLAMA, "head_dim": head_dim, "rope_parameters": rope}).rope
    actual, factor = parsed.inverse_frequencies(head_dim)
    assert actual.dtype == torch.float32
    assert actual.shape == (head_dim // 2,)
    assert torch.equal(actual, expected)
    assert factor == expected_factor


def test_default_rope_equals_the_model_buffer() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_theta=100000.0))
    actual, factor = RopeConfig(theta=100000.0).inverse_frequencies(8)
    assert torch.equal(actual, model.model.rotary_emb.inv_freq)
    assert factor == 1.0


def test_frequency_divisors_divide() -> None:
    plain, _ = RopeConfig(theta=10000.0).inverse_frequencies(8)
    divided, _ = RopeConfig(theta=10000.0, frequency_divisors=(1.0, 2.0, 4.0, 8.0)).inverse_frequencies(8)
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_old_and_new_rope_keys_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_hf_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = parse_hf_config({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5
    assert old.rope.original_max_position == 64


@pytest.mark.parametrize(
    "theirs",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SIZES, head_dim=16),
        MistralConfig(**SIZES, sliding_window=7),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=16),
        Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    ],
    ids=["llama", "llama-tied-biases", "llama-head-dim", "mistral", "qwen2", "qwen3", "qwen3-bias"],
)
def test_expected_tensors_are_those_of_the_model(theirs: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(theirs)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = parse_hf_config(theirs.to_dict())
    if ours.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert expected_tensors(ours) == shapes


def test_a_head_has_the_epsilon_of_the_file() -> None:
    """The target's is another number if its residuals are divided by a factor."""
    config = parse_hf_config(GraniteConfig(**SIZES, residual_multiplier=0.5, rms_norm_eps=1e-5).to_dict())
    assert config.rms_norm_eps == pytest.approx(4e-5)
    assert config.as_head().rms_norm_eps == pytest.approx(1e-5)


def test_missing_optional_keys() -> None:
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    config = parse_hf_config(bare)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 8, 2048)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.rms_norm_eps == 1e-6
    # Qwen3's heads do not follow from the hidden size.
    assert parse_hf_config({**bare, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    ("max_position", "scaling", "length"),
    [
        # Qwen3-8B with the block that its card gives; Qwen2.5-7B-Instruct with its own.
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        # max_position_embeddings holds the factor already: it is not applied twice.
        (131072, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (131072, {"type": "yarn", "original_max_position_embeddings": 32768}, 131072),
        (100000, {"type": "yarn", "original_max_position_embeddings": 49 * 7}, 100000),
        (16384, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        # Without an original length it is taken for that.
        (32768, {"type": "yarn", "factor": 4.0}, 131072),
        (4096, {"type": "linear", "factor": 4.0}, 16384),
        (4096, {"type": "linear", "factor": 2.5}, 10240),
        (131072, LLAMA3 | {"original_max_position_embeddings": 8192}, 131072),
        (40960, {"rope_type": "default"}, 40960),
        (40960, None, 40960),
    ],
)
def test_scaling_sets_the_longest_sequence(max_position: int, scaling: dict[str, Any] | None, length: int) -> None:
    raw = {**LLAMA, "max_position_embeddings": max_position, "rope_scaling": scaling}
    assert parse_hf_config(raw).max_position_embeddings == length


def test_the_original_length_may_be_at_the_top_level() -> None:
    raw = {**LLAMA, "max_position_embeddings": 40960, "original_max_position_embeddings": 32768}
    assert parse_hf_config({**raw, "rope_scaling": {"type": "yarn", "factor": 4.0}}).max_position_embeddings == 131072


def test_the_longest_sequence_of_gemma_3_includes_the_scaling() -> None:
    """The published 4B has 131,072 positions, and a factor of 8 that is part of them. vLLM reads it so, too."""
    raw = {**SIZES, "model_type": "gemma3_text", "max_position_embeddings": 131072}
    linear = parse_hf_config({**raw, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert linear.max_position_embeddings == 131072
    assert linear.rope.stretching() is None  # no note that says otherwise
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32768}
    assert parse_hf_config({**raw, "rope_scaling": yarn}).max_position_embeddings == 262144


def test_null_is_the_default() -> None:
    keys = ("attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "quantization_config")
    assert parse_hf_config({**LLAMA, **dict.fromkeys(keys)}) == parse_hf_config(LLAMA)


def test_sliding_windows() -> None:
    def windows(**keys: Any) -> tuple[int | None, ...]:
        return parse_hf_config({**SIZES, **keys}).sliding_windows

    assert windows(model_type="llama", sliding_window=9) == (None, None, None)
    assert windows(model_type="mistral", sliding_window=9) == (9, 9, 9)
    assert windows(model_type="mistral", sliding_window=None) == (None, None, None)
    assert windows(model_type="mistral") == (4096, 4096, 4096)  # transformers' default
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert windows(model_type="mistral", sliding_window=9, layer_types=kinds) == (None, 9, None)
    assert windows(model_type="mistral", sliding_window=None, layer_types=["full_attention"] * 3) == (None, None, None)
    assert windows(model_type="mistral", sliding_window=None, use_sliding_window=False) == (None, None, None)
    assert windows(model_type="qwen2", sliding_window=9, use_sliding_window=False) == (None, None, None)
    assert windows(model_type="qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1) == (None, 9, 9)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(model_type="qwen3", sliding_window=9, use_sliding_window=True, layer_types=kinds) == (9, None, 9)


def test_generation_config_replaces_the_end_of_sequence_ids() -> None:
    def ids(**files: Any) -> tuple[int, ...]:
        return parse_hf_config({**LLAMA, "eos_token_id": 5}, files).eos_token_ids

    assert ids() == ids(eos_token_id=None) == ids(eos_token_id=-1) == (5,)
    assert ids(eos_token_id=7) == (7,)
    assert ids(eos_token_id=[7, 5, 7]) == (7, 5)
    assert parse_hf_config({**LLAMA, "eos_token_id": None}).eos_token_ids == ()


CLASSES: tuple[type[PreTrainedConfig], ...] = (
    *(LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, GemmaConfig, Gemma2Config, Gemma3TextConfig),
    *(MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig, OlmoeConfig, Glm4MoeConfig, Dots1Config, SolarOpenConfig),
    *(HYV3Config, MiniMaxM2Config, Olmo2Config, Olmo3Config, FlexOlmoConfig, MellumConfig, GptOssConfig),
    *(MinistralConfig, Ministral3Config, SeedOssConfig, CwmConfig, ArceeConfig, HeliumConfig, HunYuanDenseV1Config),
    *(Ernie4_5Config, SmolLM3Config, GraniteConfig, Exaone4Config, Phi3Config, GlmConfig, Glm4Config, CohereConfig),
    *(Cohere2Config, Starcoder2Config, StableLmConfig, NemotronConfig, PhiConfig, GPTNeoXConfig),
    *(GPT2Config, GPTJConfig, GraniteMoeConfig, GraniteMoeSharedConfig, ExaoneConfig, InternLM3Config),
)


def test_every_key_of_transformers_is_known() -> None:
    """A key that a later version of transformers adds to its classes needs a decision."""
    for theirs in CLASSES:
        keys = {field.name for field in fields(theirs)} | theirs(**SIZES).to_dict().keys()
        family = FAMILIES[theirs.model_type]
        values = dict.fromkeys(keys - {"rope_parameters"}, "a value")
        assert not unknown_keys(values, family.keys, family.neutral)
        assert check_family_keys(theirs(**SIZES).to_dict()) == ()


@pytest.mark.parametrize("theirs", CLASSES, ids=lambda theirs: theirs.model_type)
def test_keys_that_are_not_there_have_the_defaults_of_transformers(theirs: type[PreTrainedConfig]) -> None:
    keys = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    experts = "moe_intermediate_size", "num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts"
    known = {field.name for field in fields(theirs)}
    num_heads = 20 if theirs is HeliumConfig else 32  # a multiple of the default number of key-value heads
    sizes = dict(zip(keys, (64, 8 * num_heads, 48, 3, num_heads), strict=True)) | {
        key: 4 for key in experts if key in known
    }
    sizes |= {"shared_expert_intermediate_size": 8} if theirs is Qwen2MoeConfig else {}
    sizes |= {"rotary_dim": 4} if theirs is GPTJConfig else {}  # the default is more than these heads have
    ours = parse_hf_config({"model_type": theirs.model_type, **sizes})
    assert ours == parse_hf_config(theirs(**sizes).to_dict())


def test_unknown_keys_are_those_that_neither_change_nothing_nor_are_applied() -> None:
    rope = {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3, "mrope_section": [1, 2]}}
    extra = {"auto_map": {"AutoModel": "own.Model"}, "alpha": 0.5, "beta": None, "gamma": [], "sliding_window": 9}
    found = check_family_keys({**LLAMA, **rope, **extra})
    assert found == ("auto_map", "alpha", "sliding_window", "rope_scaling.beta_fast", "rope_scaling.mrope_section")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloom"}, ("bloom", "qwen3")),
        ({"model_type": None}, ("None", "qwen3")),
        ({"hidden_act": "gelu"}, ("gelu", "silu")),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, ("mrope", "yarn")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ("low_freq_factor",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"hidden_size": "32"}, ("hidden_size", "'32'")),
        ({"hidden_size": True}, ("hidden_size", "True")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "from 1 to 1000")),
        ({"vocab_size": 10**30}, ("vocab_size", "2147483647")),
        ({"max_position_embeddings": 10**12}, ("max_position_embeddings", "2147483647")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 9e5}, "max_position_embeddings": 9999}, ("stretched", "999")),
        ({"tie_word_embeddings": "false"}, ("tie_word_embeddings", "true or false")),
        ({"attention_bias": 1}, ("attention_bias", "true or false")),
        ({"eos_token_id": [1, [2]]}, ("eos_token_id", "[2]")),
        ({"eos_token_id": -2}, ("eos_token_id", "-2")),
        ({"model_type": "mistral", "sliding_window": -1}, ("sliding_window", "-1")),
        ({"model_type": "mistral", "sliding_window": "4096"}, ("sliding_window", "'4096'")),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "1"}, ("max_window_layers", "'1'")),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": 3}, ("layer_types", "not 3")),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": [[], 1, 2]}, ("layer type [] ",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads",)),
        ({"vocab_size": None}, ("vocab_size",)),
        ({"head_dim": 7}, ("head_dim 7",)),
        ({"rms_norm_eps": [1]}, ("rms_norm_eps", "[1]")),
        ({"rms_norm_eps": -1}, ("rms_norm_eps", "above 0")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps", "above 0")),
        ({"rms_norm_eps": math.nan}, ("rms_norm_eps", "finite")),
        ({"rms_norm_eps": 10**400}, ("rms_norm_eps", "finite")),
        ({"rope_theta": -5}, ("rope_theta", "-5", "above 1")),
        ({"rope_theta": 0}, ("rope_theta", "above 1")),
        ({"rope_theta": math.inf}, ("rope_theta", "finite")),
        ({"rope_theta": "10000"}, ("rope_theta", "'10000'")),
        ({"rope_scaling": "linear"}, ("rope_scaling", "'linear'")),
        ({"rope_scaling": 0}, ("rope_scaling", "not 0")),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ("factor is 0", "from 1")),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, ("factor", "finite")),
        ({"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": -5}}, ("rope_theta", "-5")),
        ({"rope_scaling": {"type": "yarn", "factor": -4}}, ("factor is -4",)),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 256}}, ("factor is 0.5",)),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0}}, ("original_max", "0")),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 0}}, ("beta_slow",)),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}}, ("beta_slow", "beta_fast")),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": -1}}, ("attention_factor", "above 0")),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": "1"}}, ("attention_factor", "'1'")),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": -1}}, ("mscale",)),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": "no"}}, ("truncate", "'no'")),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, ("low_freq_factor", "below high_freq_factor")),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, ("low_freq_factor", "above 0")),
        ({"rope_scaling": LLAMA3 | {"factor": 0.0}}, ("factor is 0",)),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("full_attention",)),
    ],
)
def test_refusals_name_the_culprit(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        parse_hf_config({**LLAMA, **change})
    text = f"{caught.value.message} {caught.value.hint}"
    assert all(word in text for word in words), text


GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**LLAMA, "model_type": "gpt_neox", "rope_theta": 500.0}, ("rope_theta is 500.0", "rotary_emb_base")),
        ({**LLAMA, "model_type": "gpt_neox", "partial_rotary_factor": 0.5}, ("partial_rotary_factor", "rotary_pct")),
        ({**LLAMA, "model_type": "gpt_neox", "rotary_pct": 1, "partial_rotary_factor": 0.5}, ("0.5", "rotary_pct")),
        ({**GPT2_SIZES, "model_type": "gptj", "rotary_dim": 4, "rope_theta": 500.0}, ("rope_theta 500.0", "gptj")),
        (
            {**GPT2_SIZES, "model_type": "gptj", "rotary_dim": 4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ("rope_scaling",),
        ),
        ({**GPT2_SIZES, "model_type": "gpt2", "hidden_act": "relu"}, ("hidden_act 'relu'", "gpt2")),
        ({**GPT2_SIZES, "model_type": "gpt2", "hidden_size": 64}, ("n_embd is 32", "hidden_size is 64")),
        (
            {**LLAMA, "model_type": "exaone", "rms_norm_eps": 1e-5, "layer_norm_epsilon": 1e-3},
            ("layer_norm_epsilon is 0.001", "rms_norm_eps is 1e-05"),
        ),
    ],
)
def test_names_that_a_class_of_transformers_does_not_read(raw: dict[str, Any], words: tuple[str, ...]) -> None:
    """Such a value is an error if it is not that of the name which the class reads, or of its default."""

    def read() -> None:
        parse_hf_config(raw)
        check_family_keys(raw)

    with pytest.raises(ModelError) as caught:
        read()
    assert all(word in caught.value.message for word in words), caught.value.message


def test_the_original_length_of_a_layer_type() -> None:
    """Outside of the parameters of a layer type, transformers does not read it."""
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    ropes = {"full_attention": scaling, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    raw = {**LLAMA, "model_type": "olmo3", "rope_parameters": ropes, "original_max_position_embeddings": 32}
    assert parse_hf_config(raw).rope.original_max_position == SIZES["max_position_embeddings"]


def test_long_rows_of_layers_with_a_window() -> None:
    long: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    ropes = {
        "full_attention": {"rope_theta": 1e4},
        "sliding_attention": long | {"original_max_position_embeddings": 32},
    }
    config = parse_hf_config({**LLAMA, "model_type": "olmo3", "rope_parameters": ropes})
    found = [config.for_rows(length).window_rope for length in (32, 33)]
    assert [rope and rope.frequency_divisors for rope in found] == [(1.0,) * 4, (2.0,) * 4]


WINDOW = {"use_sliding_window": True, "sliding_window": 9}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": None}, ("num_experts",)),
        ({"num_experts_per_tok": None}, ("num_experts_per_tok",)),
        ({"num_experts_per_tok": 9}, ("num_experts_per_tok 9", "num_experts 8")),
        ({"moe_intermediate_size": None}, ("moe_intermediate_size",)),
        ({"mlp_only_layers": "0"}, ("mlp_only_layers",)),
        ({"mlp_only_layers": [-1]}, ("mlp_only_layers",)),
        ({"norm_topk_prob": 1}, ("norm_topk_prob",)),
        ({"n_routed_experts": 8}, ("n_routed_experts",)),
        # transformers' class does not read the types of layers, and all have the window.
        (WINDOW | {"layer_types": ["full_attention"] * 3}, ("layer_types", "sliding_window", "qwen3_moe")),
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, ("layer_types", "qwen3_moe")),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": 9, "num_experts": None}
            | {
                "moe_intermediate_size": None,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
            ("layer_types", "sliding_window", "mixtral"),
        ),
    ],
)
def test_experts_that_cannot_be(change: dict[str, object], words: tuple[str, ...]) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    raw = {**LLAMA, "model_type": "qwen3_moe", **experts}
    assert parse_hf_config(raw).moe is not None
    with pytest.raises(ModelError) as caught:
        parse_hf_config({**raw, **change})
    assert all(word in caught.value.message for word in words), caught.value.message


GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
OTHER = {"n_routed_experts": None, "moe_intermediate_size": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_group": 3}, ("n_group 3", "8 experts")),
        ({"n_group": 8}, ("n_group 8", "8 experts")),
        ({"n_group": 2, "topk_group": 3}, ("topk_group 3", "n_group 2")),
        ({"n_group": 4, "num_experts_per_tok": 3}, ("num_experts_per_tok 3", "topk_group 1")),
        ({"routed_scaling_factor": 0}, ("routed_scaling_factor",)),
        ({"n_shared_experts": -1}, ("n_shared_experts",)),
        ({"first_k_dense_replace": 1.5}, ("first_k_dense_replace",)),
        ({"num_nextn_predict_layers": -1}, ("num_nextn_predict_layers",)),
        ({"partial_rotary_factor": 0}, ("partial_rotary_factor",)),
        ({"partial_rotary_factor": 1.5}, ("partial_rotary_factor",)),
        ({"partial_rotary_factor": 0.375}, ("3 dimensions of a head rotate",)),
        ({"scoring_func": "softmax"}, ("scoring_func", "softmax")),
        ({"topk_method": "greedy"}, ("topk_method", "greedy")),
        ({"num_experts": 8}, ("num_experts 8",)),
        (
            OTHER | {"model_type": "minimax_m2", "num_local_experts": 8, "attn_type_list": [1, 0, 1]},
            ("attn_type_list",),
        ),
        (
            OTHER
            | {"model_type": "hy_v3", "num_experts": 8, "moe_intermediate_size": 24, "mlp_layer_types": ["sparse"] * 2},
            ("mlp_layer_types", "3"),
        ),
        (
            OTHER
            | {"model_type": "hy_v3", "num_experts": 8, "moe_intermediate_size": 24, "mlp_layer_types": ["moe"] * 3},
            ("mlp_layer_types", "moe"),
        ),
        (
            OTHER
            | {"model_type": "hy_v3", "num_experts": 8, "moe_intermediate_size": 24, "mlp_layer_types": [["moe"]] * 3},
            ("mlp_layer_types", "moe"),
        ),
        (OTHER | {"model_type": "minimax_m2", "num_local_experts": 8, "attn_type_list": 1}, ("attn_type_list", "1")),
        (OTHER | {"model_type": "olmoe", "num_experts": 8, "clip_qkv": 8.0}, ("clip_qkv 8.0", "olmoe")),
        (OTHER | {"model_type": "olmoe", "num_experts": 8, "clip_qkv": 0.0}, ("clip_qkv 0.0", "olmoe")),
        ({"model_type": "dots1", "use_sliding_window": False}, ("use_sliding_window", "4096")),
        ({"model_type": "llama"}, ("n_routed_experts",)),
    ],
)
def test_routers_that_cannot_be(change: dict[str, object], words: tuple[str, ...]) -> None:
    assert parse_hf_config({**LLAMA, **GLM}).moe is not None
    raw = {**LLAMA, **GLM, **change}
    with pytest.raises(ModelError) as caught:
        check_family_keys(raw if parse_hf_config(raw) else {})
    assert all(word in caught.value.message for word in words), caught.value.message


def test_numbers_of_layers_that_predict_further_tokens() -> None:
    def number(**changes: object) -> int:
        return parse_hf_config({**LLAMA, **GLM, **changes}).num_mtp_layers

    assert number() == 1
    assert number(num_nextn_predict_layers=0) == 0
    assert number(num_mtp_layers=2) == 2
    minimax = OTHER | {"model_type": "minimax_m2", "num_local_experts": 8}
    assert (number(**minimax), number(**minimax, num_mtp_modules=3)) == (0, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("n_group", 2), ("topk_group", 2)),
        *(("routed_scaling_factor", 2.5), ("n_shared_experts", 1), ("num_shared_experts", 1)),
        *(("moe_num_shared_experts", 1), ("first_k_dense_replace", 1), ("moe_layer_freq", 2), ("clip_qkv", 3.0)),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_traits_of_routers_that_a_family_does_not_have(family: str, key: str, value: object) -> None:
    """They are errors, and their neutral values are not named as unknown."""
    raw = {**LLAMA, "model_type": family}
    if family == "mixtral":
        raw |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    elif family != "llama":
        raw |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24} | (
            {"shared_expert_intermediate_size": 24} if family == "qwen2_moe" else {}
        )
    if family == "olmoe":
        del raw["moe_intermediate_size"]
    neutral = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 0, "moe_layer_freq": 1}
    assert check_family_keys({**raw, **neutral, "scoring_func": "softmax", "topk_method": "greedy"}) == ()
    with pytest.raises(ModelError, match=f"{key} .* is not supported"):
        check_family_keys({**raw, key: value})
