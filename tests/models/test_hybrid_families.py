"""Configurations of hybrids: each key is applied or refused by name. Checkpoints with a part for images, with experts,
in FP8 and with tensors of other arrangements load as the text model that they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from specbatch.batch import StateSpans
from specbatch.cache.states import StateCache
from specbatch.errors import ModelError
from specbatch.models.decoder import Decoder
from specbatch.models.families.registry import check_family_keys, parse_hf_config
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.mtp_files import has_mtp, open_mtp
from specbatch.setup.build import build_decoder
from tests.engine.test_mtp import mtp_tensors
from tests.oracle.spans import Span, batch_of

CPU, LENGTH = torch.device("cpu"), 90
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "eos_token_id": 1,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
TYPES = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
ROPE = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": Qwen3_5TextConfig(**SIZES, intermediate_size=80),
    "dense-types": Qwen3_5TextConfig(
        **{**SIZES, "linear_conv_kernel_dim": 2, "linear_num_value_heads": 2},
        intermediate_size=80,
        layer_types=TYPES,
        rope_parameters=ROPE,
        tie_word_embeddings=True,
    ),
    "experts": Qwen3_5MoeTextConfig(**SIZES, **EXPERTS),
    "next": Qwen3NextConfig(**SIZES, **EXPERTS, intermediate_size=80, decoder_sparse_step=2, norm_topk_prob=False),
}
RAW = {"model_type": "qwen3_5_text", "intermediate_size": 80, "rms_norm_eps": 1e-6, **SIZES}


def logits_of(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Compute a prompt in two pieces, and the rest token by token as rounds."""
    config, page = decoder.config, 8
    assert config.delta is not None
    cache = decoder.new_cache(-(-len(tokens) // page) * page + page, torch.float32)
    cache.states = StateCache(config.delta.state_sizes(1), 1, 0, torch.float32, CPU)
    out, start = [], 0
    for size in (30, len(tokens) - 40, *[1] * 10):
        layout = batch_of([Span(range(-(-len(tokens) // page)), start, size)], page, CPU)
        object.__setattr__(layout, "states", StateSpans(torch.tensor([0]), is_prompt=size > 1))
        hidden, _ = decoder.forward(torch.tensor(tokens[start : start + size]), layout, cache)
        out.append(decoder.logits(hidden))
        start += size
    return torch.cat(out)


def check_equal(model: Any, path: Path) -> None:
    tokens = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
        checkpoint = open_checkpoint(path)
        assert not checkpoint.ignored
        found = logits_of(build_decoder(checkpoint.config, checkpoint.tensors, LENGTH, torch.float32, CPU), tokens)
    assert expected.std() > 0.3, "logits too flat to compare"
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def vary_norms(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    vary_norms(model)
    model.save_pretrained(tmp_path)
    check_equal(model, tmp_path)


def test_the_text_part_of_a_model_with_images(tmp_path: Path) -> None:
    """Its layer for multi-token prediction is outside of the text part's names."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    text = {**SIZES, "intermediate_size": 80, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
    torch.manual_seed(1)
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    model = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    vary_norms(model)
    model.save_pretrained(tmp_path)
    check_equal(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.text_of == "qwen3_5"
    assert not has_mtp(checkpoint)
    file = tmp_path / "model.safetensors"
    own = {name.replace("model.language_model.", "model."): tensor for name, tensor in load_file(file).items()}
    save_file(own, tmp_path / "text.safetensors")
    (tmp_path / "text").mkdir()
    (tmp_path / "text.safetensors").rename(tmp_path / "text" / "model.safetensors")
    save_file(load_file(file) | mtp_tensors(tmp_path / "text", copies=False), file, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert has_mtp(checkpoint)
    assert open_mtp(checkpoint).config.kind == "mtp"


def parse_and_check(raw: dict[str, Any]) -> None:
    parse_hf_config(raw)
    check_family_keys(raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias true"),
        ({"attn_output_gate": False}, "attn_output_gate false"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16'"),
        ({"layer_types": ["full_attention"] * 4}, "all layers have full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must be a list of 4"),
        ({"layer_types": TYPES[:2]}, "layer_types must be a list of 4"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"sliding_window": 9}, "sliding_window 9"),
        ({"num_experts": 4}, "num_experts 4"),
        ({"rope_parameters": {"rope_type": "abc"}}, "rope type 'abc'"),
    ],
)
def test_keys_that_change_what_is_computed_are_refused(changes: dict[str, Any], words: str) -> None:
    raw = json.loads(json.dumps({**RAW, **changes}))
    parse_hf_config(json.loads(json.dumps(RAW)))
    with pytest.raises(ModelError) as caught:
        parse_and_check(raw)
    assert words in caught.value.message


def test_keys_of_published_files_are_known() -> None:
    raw = RAW | {
        **{"attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4, "dtype": "bfloat16"},
        **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "attention_dropout": 0.0},
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "mrope_interleaved": True},
    }
    config = parse_hf_config(raw)
    assert check_family_keys(raw) == ()
    assert config.delta is not None
    assert config.delta.layers == (True, True, True, False)
    assert config.num_mtp_layers == 1
    assert config.rope.rotary_dim(config.head_dim) == 8


def in_fp8(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Quantise linear layers as the published files do: in blocks of 128 x 128, without the gates of the delta rule.
    Return the tensors, and the same as float32 numbers."""
    stored, floats = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        floats[name], stored[name] = tensor.float(), tensor
        module = name.removesuffix(".weight").rpartition(".")[2]
        if tensor.ndim != 2 or (not module.startswith(("in_proj_qkv", "in_proj_z")) and not module.endswith("_proj")):
            continue
        blocks = [-(-size // 128) for size in tensor.shape]
        scale = 0.002 + 0.001 * torch.rand(*blocks, generator=generator)
        whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor.float() / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        floats[name] = stored[name].float() * whole
    return stored, floats


def test_published_files_in_fp8(tmp_path: Path) -> None:
    """Queries and gates of attention share a tensor, and so do queries, keys and values of the delta rule: their scales
    are divided with them."""
    sizes = {
        **{**SIZES, "hidden_size": 128, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 4},
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**sizes, intermediate_size=256)).eval()
    vary_norms(model)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state |= mtp_tensors(tmp_path, copies=False)
    stored, floats = in_fp8(state)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    skipped = [f"model.language_model.layers.{i}.linear_attn.in_proj_{x}" for i in range(4) for x in "ab"]
    raw["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", *skipped],
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.covers("model.layers.0.linear_attn.in_proj_v")
    assert not checkpoint.quantization.covers("model.layers.0.linear_attn.in_proj_b")
    model.load_state_dict({name: tensor for name, tensor in floats.items() if not name.startswith("mtp.")}, strict=True)
    tokens = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = checkpoint.quantization.dequantised()
    decoders = [
        build_decoder(checkpoint.config, checkpoint.tensors, LENGTH, torch.float32, CPU, quantization=quantization)
        for quantization in (plain, checkpoint.quantization)
    ]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        exact, rounded = (logits_of(decoder, tokens) for decoder in decoders)
    torch.testing.assert_close(exact, expected, atol=2e-3, rtol=2e-3)  # the weights alone are rounded
    assert not torch.equal(rounded, exact)
    alike = torch.nn.functional.cosine_similarity(rounded, expected, dim=-1)
    assert alike.mean() > 0.9  # inputs are rounded, too
    head = open_mtp(checkpoint)
    name = "mtp.layers.0.self_attn.k_proj.weight"
    torch.testing.assert_close(
        head.tensors.load(name.replace("mtp.layers.0.", "model.layers.0.")).float(), floats[name], atol=1e-2, rtol=1e-2
    )


def test_whole_numbers_outside_mlps_are_refused(tmp_path: Path) -> None:
    """The files join layers that are read apart, and packed weights are not divided."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 64}
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**sizes))
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="does not match its configuration") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint is not None
    assert "of a hybrid, only MLPs may be whole numbers" in caught.value.hint
