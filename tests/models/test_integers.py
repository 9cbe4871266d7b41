"""Checkpoints with weights in whole numbers: their configurations, their tensors, and their layers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AwqConfig, GPTQConfig

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, ModelError
from specbatch.kernels import ops_for
from specbatch.models.config import expected_tensors
from specbatch.models.decoder import Decoder
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.linears.fp8 import JoinedLinear
from specbatch.models.linears.integer import IntegerLinear, IntegerNumbers, quantise_integers
from specbatch.models.linears.integer_quantization import INT4_ON_LOAD, UniformIntegers
from specbatch.models.linears.layer_quantization import LayerQuantization
from specbatch.models.linears.quantization import chosen, parse_quantization
from specbatch.models.linears.sharded import ModelShard
from specbatch.models.random_weights import random_config
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.model import resolve_quantization, saved_bytes
from specbatch.setup.resolve import resolve
from tests.coins import plain_logits
from tests.fp8_checkpoints import compressed, fp8_checkpoint
from tests.integer_checkpoints import AWQ, FORMATS, GPTQ, integer_checkpoint, packed
from tests.models.test_quantization import LoneRank, rows, texts
from tests.tiny_checkpoint import RAW, random_state, write_checkpoint
from tests.tiny_models import attention_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = {"hidden_size": 160, "intermediate_size": 192, "num_attention_heads": 5, "num_key_value_heads": 5}
DOWN = "model.layers.1.mlp.down_proj"


def loader_of(path: Path, quantization: LayerQuantization | None = None) -> WeightLoader:
    """Return the loader of a model in float32. `quantization` None: that of its files."""
    found = open_checkpoint(path)
    return WeightLoader(found.tensors, torch.float32, CPU, quantization=quantization or found.quantization)


def test_weights_are_those_of_each_format(tmp_path: Path) -> None:
    for name, section in FORMATS.items():
        meant = integer_checkpoint(tmp_path / name, section, **SIZES)
        quantization = open_checkpoint(tmp_path / name).quantization
        assert quantization is not None
        loader = loader_of(tmp_path / name, quantization.dequantised())
        for tensor, weight in meant.items():
            assert torch.equal(loader.tensor(tensor), weight), (name, tensor)
            assert loader.tensor(tensor).is_contiguous(), "kernels read rows"


def test_layers_that_keep_their_weights_compute_the_same(tmp_path: Path) -> None:
    """The reference kernels compute layers, and joined layers too."""
    x, residual = rows(5, 160), rows(5, 480, seed=1)
    for name, section in FORMATS.items():
        meant = integer_checkpoint(tmp_path / name, section, **SIZES, attention_bias=True)
        loader = loader_of(tmp_path / name)
        names = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv"]
        linear = loader.linear(*names, has_bias=True)
        # Each layer has its own order of the inputs here.
        assert isinstance(linear, JoinedLinear if "act-order" in name else IntegerLinear), name
        weight, bias = (torch.cat([meant[f"{one}.{kind}"] for one in names]) for kind in ("weight", "bias"))
        expected = residual + x @ weight.T + bias
        torch.testing.assert_close(linear.with_residual(x, residual), expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(linear(x), expected - residual, rtol=1e-4, atol=1e-3)
        gate, up = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
        gated = loader.gated_linear(gate, up, "silu")
        both = torch.nn.functional.silu(x @ meant[f"{gate}.weight"].T) * (x @ meant[f"{up}.weight"].T)
        torch.testing.assert_close(gated(x), both, rtol=1e-4, atol=1e-3)


def test_logits_are_those_of_the_dequantised_model(tmp_path: Path) -> None:
    meant = integer_checkpoint(tmp_path / "int", FORMATS["packed, zeros, act-order"], **SIZES)
    write_checkpoint(tmp_path / "plain", **SIZES)
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    config, logits = open_checkpoint(tmp_path / "int").config, []
    for folder in ("int", "plain"):
        decoder = Decoder(config, loader_of(tmp_path / folder), attention_of(config), 128)
        with torch.inference_mode():
            logits.append(plain_logits(decoder, list(range(3, 40))))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-3)


def test_layers_with_the_same_order_of_inputs_are_one() -> None:
    """Groups with the inputs 1, 0, 1, 0 and so on."""
    from specbatch.models.linears.integer import joined_integers

    weights = [quantise_integers(rows(8, 64, seed=seed), 4, 32) for seed in (0, 1)]
    mixed = [IntegerNumbers(w.numbers_OI, w.scales_OG, None, 4, 32, torch.arange(64) % 2) for w in weights]
    orders = [one.order("a layer") for one in mixed]
    joined = joined_integers(mixed, orders)
    assert joined is not None
    x = rows(3, 64)
    linear = IntegerLinear(joined, orders[0], None, ops_for(CPU, torch.float32))
    torch.testing.assert_close(linear(x), x @ torch.cat([one.dequantised() for one in mixed]).T)
    assert joined_integers([mixed[0], weights[1]], [orders[0], None]) is None
    uneven = IntegerNumbers(weights[0].numbers_OI, weights[0].scales_OG, None, 4, 32, (torch.arange(64) > 40).long())
    with pytest.raises(ModelError, match="a layer has groups of unequal sizes"):
        uneven.order("a layer")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({**GPTQ, "bits": 3}, "3 bits"),
        ({**GPTQ, "group_size": 48}, "groups of 48 inputs"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, "'+:.*up_proj'"),
        ({**GPTQ, "odd": 1}, "'odd'"),
        ({**GPTQ, "sym": "yes"}, "sym must be true or false"),
        ({**AWQ, "version": "gemv"}, "'gemv'"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**AWQ, "backend": "llm-awq"}, "'llm-awq'"),
        ({**AWQ, "desc_act": True}, "desc_act"),
        ({**AWQ, "odd": 1}, "'odd'"),
        (packed(num_bits=2), "2 bits"),
        (packed(type="float"), "'float'"),
        (packed(strategy="tensor"), "'tensor'"),
        (packed(odd=1), "'odd'"),
        (packed(actorder="odd"), "'odd'"),
        ({**packed(), "odd": 1}, "'odd'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    ],
)
def test_refusals_name_the_culprit(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_quantization({"quantization_config": section})
    assert words in caught.value.message


def test_configurations_of_transformers_are_read() -> None:
    for config in (GPTQConfig(bits=4, group_size=64), AwqConfig(bits=4, group_size=64)):
        found = parse_quantization({"quantization_config": json.loads(config.to_json_string(use_diff=False))})
        assert isinstance(found, UniformIntegers)
        assert (found.bits, found.group) == (4, 64)


def test_layers_that_are_left_out() -> None:
    for section in (
        {**GPTQ, "dynamic": {"-:.*layers\\.0\\..*": {}}},
        {**AWQ, "modules_to_not_convert": ["model.layers.0"]},
        {**packed(), "ignore": ["lm_head", "re:.*layers\\.0\\..*"]},
    ):
        found = parse_quantization({"quantization_config": section})
        assert found is not None
        assert not found.covers("model.layers.0.mlp.up_proj")
        assert found.covers("model.layers.1.mlp.up_proj")
        assert not found.covers("lm_head")


def test_parts_of_names_that_awq_leaves_out(tmp_path: Path) -> None:
    """Files say whether "gate" names `gate_proj`, too."""
    for part, is_left_out in (("self_attn", True), ("layers.0", True), ("gate", True), ("gate", False)):
        integer_checkpoint(tmp_path, AWQ, **SIZES)
        stored, plain = load_file(tmp_path / "model.safetensors"), random_state({**RAW, **SIZES})
        names = [name for name in plain if name.endswith("_proj.weight") and part in name and is_left_out]
        for name in names:
            for kind in ("qweight", "qzeros", "scales"):
                del stored[name.replace("weight", kind)]
            stored[name] = plain[name]
        save_file(stored, tmp_path / "model.safetensors")
        section = {**AWQ, "modules_to_not_convert": [part, "visual"]}
        (tmp_path / "config.json").write_text(json.dumps({**RAW, **SIZES, "quantization_config": section}))
        found = open_checkpoint(tmp_path).quantization
        assert found is not None
        layers = [name.removesuffix(".weight") for name in plain if name.endswith("_proj.weight")]
        assert [layer for layer in layers if not found.covers(layer)] == [n.removesuffix(".weight") for n in names]


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    integer_checkpoint(tmp_path, GPTQ, **SIZES)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    changes: dict[str, dict[str, Tensor | None]] = {
        "missing: " + f"{DOWN}.qzeros": {f"{DOWN}.qzeros": None},
        "wrong shape": {f"{DOWN}.scales": torch.ones(3, 160)},
        f"{DOWN}.qweight is int64, not int32": {f"{DOWN}.qweight": state[f"{DOWN}.qweight"].long()},
        "unknown: lm_head.qweight": {"lm_head.qweight": torch.zeros(2, dtype=torch.int32)},
        f"unknown: {DOWN}.bias": {f"{DOWN}.bias": torch.ones(160)},
    }
    for words, change in changes.items():
        save_file({name: one for name, one in {**state, **change}.items() if one is not None}, file)
        with pytest.raises(ModelError) as caught:
            open_checkpoint(tmp_path)
        assert words in caught.value.message, words
    save_file({**state, f"{DOWN}.bias": torch.zeros(160)}, file)
    open_checkpoint(tmp_path)  # some writers give each layer a bias
    broken: dict[str, Tensor] = {
        "scales that are no numbers": state[f"{DOWN}.scales"] * torch.nan,
        "groups without a scale": state[f"{DOWN}.g_idx"] + 1,
    }
    for words, one in broken.items():
        save_file({**state, f"{DOWN}.{'scales' if 'no numbers' in words else 'g_idx'}": one}, file)
        with pytest.raises(ModelError, match=words):
            loader_of(tmp_path).tensor(f"{DOWN}.weight")


def test_speculation_changes_nothing(tmp_path: Path) -> None:
    integer_checkpoint(tmp_path, FORMATS["packed, zeros, act-order"], **SIZES)
    plain = texts(tmp_path, "speculation.method=none")
    assert plain == texts(tmp_path, "speculation.method=ngram", "engine.max_batch_size=1")
    for draft in (tmp_path, write_checkpoint(tmp_path / "other")):  # the other one's drafts are rejected
        assert plain == texts(tmp_path, "speculation.method=draft_model", f"speculation.draft={draft}")
    assert plain == texts(tmp_path, "model.quantization=none")
    assert len({tuple(text) for text in plain}) == 3


def test_quantised_while_loading(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SIZES)
    run = resolve(load_config(None, [f"model.target={tmp_path}", "engine.device=cpu", "model.quantization=int4"]))
    assert run.quantization == INT4_ON_LOAD.dequantised()
    assert "int4 (while loading: weights with a scale for 128 inputs, inputs as they are; dequantised" in str(run.notes)
    plain, rounded = (texts(tmp_path, f"model.quantization={name}") for name in ("none", "int4"))
    assert plain != rounded
    weight = rows(6, 200)
    for bits in (4, 8):
        scales = quantise_integers(weight, bits, 128).scales_OG.repeat_interleave(128, 1)[:, :200]
        error = (quantise_integers(weight, bits, 128).dequantised() - weight).abs()
        assert bool((error <= scales * 0.5001).all())
    assert torch.equal(quantise_integers(torch.zeros(2, 32), 4, 32).dequantised(), torch.zeros(2, 32))


def resolved(
    path: Path, device: torch.device, *options: str, dtype: torch.dtype = torch.bfloat16, available: int = 0
) -> tuple[Any, str]:
    """Return the quantization and the notes of a run. `available`: the bytes of free memory."""
    notes: list[str] = []
    config = load_config(None, [f"model.target={path}", *options])
    found = resolve_quantization(config, open_checkpoint(path), device, dtype, notes, available=available)
    return found, " ".join(notes)


def test_what_stays_quantised(tmp_path: Path) -> None:
    """On CUDA, in 16 bits and without `deterministic`, if it is asked for or memory is short."""
    path, ordered = tmp_path / "plain", tmp_path / "ordered"
    integer_checkpoint(path, GPTQ, **SIZES)
    integer_checkpoint(ordered, FORMATS["packed, zeros, act-order"], **SIZES)
    found, notes = resolved(path, CUDA)
    assert found.is_kept
    assert "int4 (gptq: weights with a scale for 32 inputs, inputs as they are); 14 of 15 linear layers" in notes
    num_values = sum(map(math.prod, expected_tensors(open_checkpoint(path).config).values()))
    assert resolved(path, CUDA, available=num_values * 4 - 2)[0].is_kept
    assert not resolved(path, CUDA, available=num_values * 4)[0].is_kept, "half of the memory is enough"
    assert resolved(path, CUDA, "engine.tensor_parallel=2", available=num_values * 2 - 2)[0].is_kept
    assert not resolved(path, CUDA, "engine.tensor_parallel=2", available=num_values * 2)[0].is_kept
    assert resolved(path, CUDA, "model.quantization=int4", available=1 << 40)[0].is_kept
    for device, options, dtype in (
        (CPU, (), torch.bfloat16),
        (CUDA, ("engine.deterministic=true",), torch.bfloat16),
        (CUDA, ("model.quantization=none",), torch.bfloat16),
        (CUDA, (), torch.float32),
    ):
        found, notes = resolved(path, device, *options, dtype=dtype)
        assert not found.is_kept
        assert "dequantised while loading" in notes
    with pytest.raises(ConfigError, match="act-order"):
        resolved(ordered, CUDA, "engine.tensor_parallel=2")
    assert resolved(path, CUDA, "engine.tensor_parallel=2")[0].is_kept
    integer_checkpoint(path, {**GPTQ, "group_size": 128}, **SIZES)
    with pytest.raises(ConfigError, match="o_proj has 160 inputs, and 96 of them is no multiple of 128"):
        resolved(path, CUDA, "engine.tensor_parallel=2")
    with pytest.raises(ConfigError, match=r"model\.quantization: fp8 is not for a checkpoint whose weights are"):
        resolved(path, CPU, "model.quantization=fp8")
    fp8 = fp8_checkpoint(tmp_path / "fp8", compressed())
    with pytest.raises(ConfigError, match=r"model\.quantization: int4 is not for a checkpoint whose weights are"):
        resolved(fp8, CPU, "model.quantization=int4")


def test_bytes_that_are_saved() -> None:
    """Llama-3-8B saves three quarters of 16 bits for each weight of its layers, less a scale for each 128 inputs."""
    config, bf16 = random_config("random:llama-3-8b"), torch.bfloat16
    layer = 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
    assert saved_bytes(INT4_ON_LOAD, config, CUDA, bf16) == 32 * (layer * 3 // 2 - layer // 128 * 2)
    assert saved_bytes(chosen("none", INT4_ON_LOAD), config, CUDA, bf16) == 0
    assert saved_bytes(INT4_ON_LOAD, config, CPU, bf16) == 0
    moe = random_config("random:qwen3-30b-a3b")
    assert saved_bytes(INT4_ON_LOAD, moe, CUDA, bf16) == 48 * 4096 * 2048 * 2 * 9 // 8 * 3 // 2 - (
        48 * 4096 * 2048 * 2 * 9 // 8 // 128 * 2
    ), "experts are not quantised"


def test_a_rank_has_a_part(tmp_path: Path) -> None:
    x = rows(3, 192)
    for name in ("gptq v2, zeros", "packed, 8 bits, outputs", "awq"):
        meant = integer_checkpoint(
            tmp_path / name, FORMATS[name], **{**SIZES, "num_attention_heads": 10, "head_dim": 16}
        )
        found = open_checkpoint(tmp_path / name)
        parts = [
            WeightLoader(
                found.tensors, torch.float32, CPU, shard=ModelShard.of(found.config, LoneRank(rank)),
                quantization=found.quantization,
            )
            for rank in range(2)
        ]  # fmt: skip
        up, down = "model.layers.1.mlp.up_proj", DOWN
        of_up = torch.cat([part.linear(up)(x[:, :160]) for part in parts], dim=1)
        torch.testing.assert_close(of_up, x[:, :160] @ meant[f"{up}.weight"].T, rtol=1e-4, atol=1e-3)
        of_down = sum(part.linear(down)(half) for part, half in zip(parts, x.chunk(2, dim=1), strict=True))
        torch.testing.assert_close(of_down, x @ meant[f"{down}.weight"].T, rtol=1e-4, atol=1e-3)


def test_experts_are_dequantised() -> None:
    found = parse_quantization({"quantization_config": GPTQ})
    assert isinstance(found, UniformIntegers)
    assert found.covers("model.layers.0.mlp.experts.0.up_proj")
    assert not found.keeps("model.layers.0.mlp.experts.0.up_proj")


def test_words_of_compressed_tensors() -> None:
    """That package packs numbers as our tests do."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from tests.integer_checkpoints import pack_words

    for bits in (4, 8):
        numbers = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (6, 50), dtype=torch.int8)
        offset = numbers.int() + (1 << (bits - 1))
        assert torch.equal(helpers.pack_to_int32(numbers, bits), pack_words(offset, bits))
        assert torch.equal(helpers.pack_to_int32(numbers, bits, packed_dim=0), pack_words(offset.T, bits).T)


def test_families_whose_rows_are_reordered_are_refused(tmp_path: Path) -> None:
    """The packed rows of queries and keys would stay in the order of the file."""
    integer_checkpoint(tmp_path, GPTQ, **SIZES, model_type="cohere", tie_word_embeddings=False)
    with pytest.raises(ModelError, match="belongs to a weight whose rows are divided or reordered"):
        open_checkpoint(tmp_path)


def test_a_family_without_gates(tmp_path: Path) -> None:
    sizes = {**SIZES, "model_type": "nemotron", "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    integer_checkpoint(tmp_path, GPTQ, **sizes)
    found = open_checkpoint(tmp_path)
    assert found.quantization is not None
    kept, plain = (
        plain_logits(
            Decoder(
                found.config,
                WeightLoader(found.tensors, torch.float32, CPU, quantization=quantization),
                attention_of(found.config, CPU),
                64,
            ),
            list(range(3, 20)),
        )
        for quantization in (found.quantization, found.quantization.dequantised())
    )
    torch.testing.assert_close(kept, plain, rtol=1e-4, atol=1e-3)
