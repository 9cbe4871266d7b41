"""GGUF files written with the `gguf` package against the transformers models that they were made from."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from specbatch.errors import ModelError
from specbatch.models.config import expected_tensors
from specbatch.models.families.registry import parse_hf_config
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.gguf import GgufFile
from specbatch.models.formats.gguf_config import gguf_model_config
from specbatch.setup.build import build_decoder
from tests.oracle.spans import piecewise_logits

# Row lengths of 256 and more: blocks of the K types hold 256 elements.
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MODELS = Path(os.environ.get("SPECBATCH_TEST_MODELS", Path.home() / ".cache" / "specbatch-dev"))
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, config: PreTrainedConfig | None = None) -> str:
    """Return the name in a file. `config`: that of a model with norms before and after attention and MLP."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return top.get(name, name.replace("lm_head", "output"))
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    names = NAMES if config is None or config.model_type not in ("gemma2", "gemma3_text") else NAMES | SANDWICH
    return f"blk.{layer}.{names[module]}.{kind}"


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """As the converters of llama-architecture models do (Hugging Face order -> interleaved RoPE)."""
    shape = (num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return array.reshape(shape).swapaxes(1, 2).reshape(array.shape)


# Of each K type: where blocks have factors, and values that make numbers of up to 0.1.
FACTORS = {
    Q.Q4_K: {0: 1e-4, 2: 7.5e-4},
    Q.Q5_K: {0: 5e-5, 2: 7.5e-4},
    Q.Q6_K: {208: 2.5e-5},
}


def random_blocks(kind: Q, shape: tuple[int, int], factor: float | None = None, seed: int = 0) -> np.ndarray:
    """Return the bytes of a matrix. `shape`: its rows, and the blocks of a row. `factor`: that of all blocks."""
    rng, num_bytes = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (*shape, num_bytes), dtype=np.uint8)
    for position, usual in FACTORS.get(kind, {0: factor or 0.0}).items():
        factors = np.full((*shape, 1), factor) if factor else usual * rng.uniform(0.5, 1, (*shape, 1))
        blocks[..., position : position + 2] = factors.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(
    path: Path,
    config: PreTrainedConfig,
    state: dict[str, torch.Tensor],
    kind: Q = Q.F32,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    architecture: str | None = None,
    kinds: Mapping[str, Q] | None = None,
) -> None:
    """`kinds`: types of matrices by a part of their names, in place of `kind`. Those of K types are random, because
    `gguf` does not quantise to these."""
    architecture = architecture or config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention") or config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_token_list(["<s>", "</s>", "<|im_end|>", *[f"t{i}" for i in range(37)]])
    writer.add_token_types([3, 3, 3] + [1] * 37)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in (metadata or {}).items():
        writer.add_key_value(
            key,
            value,
            {
                str: gguf.GGUFValueType.STRING,
                int: gguf.GGUFValueType.UINT32,
                float: gguf.GGUFValueType.FLOAT32,
                bool: gguf.GGUFValueType.BOOL,
            }[type(value)],
        )
    for name, tensor in state.items():
        array = tensor.detach().float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = permute(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            array = permute(array, config.num_key_value_heads)
        array = np.ascontiguousarray(array)
        own = next((other for part, other in (kinds or {}).items() if part in name), kind)
        if array.ndim == 1 or own == Q.F32:
            writer.add_tensor(gguf_name(name, config), array)
        elif own == Q.F16:
            writer.add_tensor(gguf_name(name), array.astype(np.float16))
        elif own in FACTORS:
            blocks = random_blocks(own, (array.shape[0], array.shape[1] // 256), seed=len(writer.tensors[0]))
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=own)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, own), raw_dtype=own)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def state_of(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():  # norms and biases of a fresh model are constants, which hide mix-ups
        if tensor.ndim == 1:
            state[name] = torch.rand_like(tensor)
    return state


CONFIGS = [
    LlamaConfig(**SIZES),
    LlamaConfig(**SIZES, tie_word_embeddings=True),
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
]
IDS = ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3"]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_every_architecture_equals_the_model(config: PreTrainedConfig, tmp_path: Path) -> None:
    state, path = state_of(config), tmp_path / "m.gguf"
    write(path, config, state)
    checkpoint = open_checkpoint(path)
    theirs = parse_hf_config({**config.to_dict(), "bos_token_id": 0, "eos_token_id": 1, "dtype": "float32"})
    assert checkpoint.config == theirs
    assert set(expected_tensors(checkpoint.config)) == set(state)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.tensors.load(name), tensor), name
    assert checkpoint.description == "GGUF F32"
    checkpoint.tensors.close()


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Q.F16, 1e-3), (Q.BF16, 8e-3), (Q.Q8_0, 0.01), (Q.Q5_1, 0.05), (Q.Q5_0, 0.08), (Q.Q4_1, 0.08), (Q.Q4_0, 0.15)],
    ids=lambda value: getattr(value, "name", None),
)
def test_quantised_types(kind: Q, tolerance: float, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    state, path = state_of(config), tmp_path / "m.gguf"
    write(path, config, state, kind)
    checkpoint = open_checkpoint(path)
    for name, tensor in state.items():
        loaded = checkpoint.tensors.load(name)
        assert loaded.dtype == torch.float32
        # Close to the original: the layout is right. (Exactly what `gguf` dequantises: the test of the K types.)
        assert (loaded - tensor).abs().max() <= tolerance * tensor.abs().max(), name
    assert kind.name in checkpoint.description


def test_k_quants_and_headers_equal_the_gguf_package(tmp_path: Path) -> None:
    """Random blocks with sane scales, read by both readers."""
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("test.floats", [1.5, 2.5])
    writer.add_array("test.strings", ["a", "β", ""])
    writer.add_bool("test.flag", True)
    writer.add_int64("test.negative", -3)
    for kind in (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0):
        writer.add_tensor(kind.name, random_blocks(kind, (1000, 3), 0.01), raw_dtype=kind)  # more than one chunk
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {"test.floats", "test.strings", "test.flag", "test.negative"} <= set(fields)
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert ours.tensors[tensor.name].shape == expected.shape
        assert np.isfinite(expected).all()
        assert np.array_equal(ours.load(tensor.name).numpy(), expected), tensor.name


def test_rope_metadata(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, rope_theta=500000.0)
    state, path = state_of(config), tmp_path / "m.gguf"
    divisors = np.linspace(1, 8, 32, dtype=np.float32)
    write(path, config, state, extra={"rope_freqs.weight": divisors})
    rope = open_checkpoint(path).config.rope
    assert rope.theta == 500000.0
    assert rope.frequency_divisors == tuple(divisors.tolist())
    write(path, config, state, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    rope = open_checkpoint(path).config.rope
    assert (rope.scaling, rope.factor) == ("linear", 4.0)
    write(path, config, state, metadata={"llama.rope.scale_linear": 2.0})
    rope = open_checkpoint(path).config.rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)
    yarn: dict[str, Any] = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    write(path, config, state, metadata=yarn)
    theirs = {**config.to_dict(), "rope_parameters": None, "rope_theta": 500000.0}
    theirs["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert open_checkpoint(path).config.rope == parse_hf_config(theirs).rope
    write(path, config, state, metadata={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(ModelError, match="longrope"):
        open_checkpoint(path)


GEMMA: dict[str, Any] = {**SIZES, "head_dim": 32}
# Model, keys of its file besides those of all models.
GEMMAS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "gemma": (GemmaConfig(**GEMMA), {}),
    "gemma2": (
        Gemma2Config(**GEMMA, sliding_window=9, query_pre_attn_scalar=32),
        {"attention.sliding_window": 9, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma2-27b": (
        Gemma2Config(**{**GEMMA, "num_hidden_layers": 46}, sliding_window=9, query_pre_attn_scalar=64),
        {"attention.sliding_window": 9, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (Gemma3TextConfig(**GEMMA, sliding_window=9, query_pre_attn_scalar=32), {"attention.sliding_window": 9}),
    "gemma3-linear": (
        Gemma3TextConfig(
            **{**GEMMA, "num_hidden_layers": 7},
            sliding_window=9,
            query_pre_attn_scalar=32,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        {"attention.sliding_window": 9, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
}


@pytest.mark.parametrize("name", GEMMAS)
def test_gemma(name: str, tmp_path: Path) -> None:
    """Names are those of the `gguf` package. Converters add 1 to the weights of norms."""
    config, keys = GEMMAS[name]
    architecture = name.partition("-")[0]
    state = state_of(config)
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture], config.num_hidden_layers
    )
    stored = {names.get_name(key, (".weight",)): key for key in state}
    assert set(stored) == {gguf_name(key, config) for key in state}
    shifted = {key: tensor + 1 if key.endswith("norm.weight") else tensor for key, tensor in state.items()}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    write(tmp_path / "m.gguf", config, shifted, metadata=metadata, architecture=architecture)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    theirs = parse_hf_config({**config.to_dict(), "bos_token_id": 0, "eos_token_id": 1, "dtype": "float32"})
    assert checkpoint.config == dataclasses.replace(theirs, norm_offset=0.0, wide_norms=True)
    for key, tensor in shifted.items():
        assert torch.equal(checkpoint.tensors.load(key), tensor), key


def test_norms_of_a_gemma_stay_in_float32(tmp_path: Path) -> None:
    """Logits in bfloat16 have the bits of those of the folder."""
    config, keys = GEMMAS["gemma3"]
    state = state_of(config)
    shifted = {key: tensor + 1 if key.endswith("norm.weight") else tensor for key, tensor in state.items()}
    metadata = {f"gemma3.{key}": value for key, value in keys.items()}
    write(tmp_path / "m.gguf", config, shifted, metadata=metadata, architecture="gemma3")
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(tmp_path / "folder")
    logits = []
    for name in ("m.gguf", "folder"):
        checkpoint = open_checkpoint(tmp_path / name)
        decoder = build_decoder(checkpoint.config, checkpoint.tensors, 20, torch.bfloat16, torch.device("cpu"))
        with torch.inference_mode():
            logits.append(piecewise_logits(decoder, list(range(20)), [20], torch.bfloat16))
    assert torch.equal(*logits)


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    state, path = state_of(config), tmp_path / "m.gguf"

    def ids(**metadata: Any) -> tuple[int, ...]:
        write(path, config, state, metadata={f"tokenizer.{k.replace('__', '.')}": v for k, v in metadata.items()})
        return open_checkpoint(path).config.eos_token_ids

    assert ids() == (1,)
    assert ids(ggml__eot_token_id=2) == (1, 2)
    assert ids(chat_template="{{ '<|im_start|>' }} <|im_end|>") == (1, 2)
    assert ids(chat_template="[INST] t3 [/INST]") == (1,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "bloom"}, ("bloom", "qwen3")),
        ({"extra": {"blk.0.mystery.weight": np.zeros(4, np.float32)}}, ("blk.0.mystery.weight", "unknown")),
        ({"extra": {"odd": np.zeros(4, np.int32)}}, ("odd", "I32", "Q4_K")),
        ({"metadata": {"llama.expert_count": 8}}, ("llama.expert_used_count",)),
        ({"metadata": {"split.count": 3}}, ("split", "merge")),
        ({"metadata": {"llama.rope.dimension_count": 16}}, ("rope.dimension_count",)),
    ],
)
def test_refusals(options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    write(tmp_path / "m.gguf", config, state_of(config), **options)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    text = f"{caught.value.message} {caught.value.hint}"
    assert all(word in text for word in words), text


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    state = state_of(config)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.norm.weight"] = torch.ones(128)
    write(tmp_path / "m.gguf", config, state)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight.*model\.norm\.weight is \[128\]"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("tensor", "kind", "words"),
    [
        (
            "blk.0.ffn_down.weight",
            Q.Q4_K,
            "Q4_K leaves 33,792 bytes between its end and 'blk.0.attn_norm.weight'",
        ),
        ("blk.0.ffn_down.weight", Q.Q8_0, "overlap"),
        ("blk.0.attn_norm.weight", Q.F16, "'blk.0.attn_norm.weight' of type F16 leaves 512 bytes"),
    ],
)
def test_a_wrong_type_is_a_model_error(tensor: str, kind: Q, words: str, tmp_path: Path) -> None:
    config, path = LlamaConfig(**SIZES), tmp_path / "m.gguf"
    write(path, config, state_of(config), Q.Q4_K, kinds={"down_proj": Q.Q6_K})
    content = bytearray(path.read_bytes())
    at = content.index(tensor.encode()) + len(tensor)
    at += 4 + 8 * content[at]  # the number of dimensions, and these
    content[at] = kind
    path.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(words)):
        open_checkpoint(path)


def test_truncation_anywhere_is_a_model_error(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    whole, cut = tmp_path / "m.gguf", tmp_path / "cut.gguf"
    write(whole, config, state_of(config), Q.Q8_0)
    content = whole.read_bytes()
    header = content.index(b"blk.0")  # past the metadata
    for size in [0, 3, 7, 20, 24, *range(30, header + 2000, 97), len(content) // 2, len(content) - 1000]:
        cut.write_bytes(content[:size])
        with pytest.raises(ModelError) as caught:
            open_checkpoint(cut)
        assert "cut.gguf" in caught.value.message, size
    cut.write_bytes(b"PK\x03\x04" + content[4:])
    with pytest.raises(ModelError, match="not a GGUF"):
        open_checkpoint(cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_real_models_equal_their_converted_directories(name: str) -> None:
    """The directories were converted by other code; theirs are rounded to the dtype that they are stored in."""
    if not (MODELS / f"{name}.gguf").exists() or not (MODELS / f"{name}-hf").exists():
        pytest.skip(f"no {name} under {MODELS}")
    ours, theirs = open_checkpoint(MODELS / f"{name}.gguf"), open_checkpoint(MODELS / f"{name}-hf")
    # The directories of models with an output matrix use it as the embedding as well (they are tied).
    skipped = set() if ours.config.tie_word_embeddings else {"model.embed_tokens.weight"}
    assert dataclasses.replace(ours.config, tie_word_embeddings=True) == theirs.config
    for tensor in expected_tensors(ours.config).keys() - skipped:
        reference = theirs.tensors.load("model.embed_tokens.weight" if tensor == "lm_head.weight" else tensor)
        assert torch.equal(ours.tensors.load(tensor).to(reference.dtype), reference), tensor


def test_config_needs_no_tensor_data(tmp_path: Path) -> None:
    """Opening must not read weights: the data section may be garbage."""
    config = LlamaConfig(**SIZES)
    path = tmp_path / "m.gguf"
    write(path, config, state_of(config))
    file = GgufFile(path)
    start = min(tensor.start for tensor in file.tensors.values())
    file.close()
    content = path.read_bytes()
    path.write_bytes(content[:start] + b"\xff" * (len(content) - start))
    assert gguf_model_config(GgufFile(path)).hidden_size == 256
    open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.causal", False),
        ("llama.attn_logit_softcapping", 30.0),
        ("llama.logit_scale", 0.5),
        ("llama.attention.sliding_window_pattern", 2),
        ("general.type", "adapter"),
    ],
)
def test_metadata_that_changes_what_is_computed_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    neutral = {"llama.attention.causal": True, "llama.logit_scale": 1.0, "general.type": "model"}
    state = state_of(config)
    write(tmp_path / "fine.gguf", config, state, metadata=neutral)
    open_checkpoint(tmp_path / "fine.gguf")
    write(tmp_path / "model.gguf", config, state, metadata={key: value})
    with pytest.raises(ModelError, match=key.removeprefix("llama.")):
        open_checkpoint(tmp_path / "model.gguf")
