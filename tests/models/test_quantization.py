"""Checkpoints in FP8: their configurations, their tensors, and the arithmetic of their layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, ModelError
from specbatch.kernels import ops_for
from specbatch.kernels.quantised import E4M3_MAX
from specbatch.kernels.torch.fp8 import quantise
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.fp8 import Fp8GatedLinear, Fp8Linear, Fp8Weight, quantise_weight
from specbatch.models.linears.linear import Residual
from specbatch.models.linears.packed import PackedLinear
from specbatch.models.linears.quantization import ON_LOAD, Quantization, chosen, parse_quantization
from specbatch.models.linears.scaled import ScaledGatedLinear, ScaledLinear
from specbatch.models.linears.sharded import ModelShard
from specbatch.models.random_weights import random_config
from specbatch.models.weight_loader import WeightLoader
from specbatch.parallel.group import Group
from specbatch.setup.build import build_engine
from specbatch.setup.cache import CacheRequest
from specbatch.setup.memory import CachedModel, Rows
from specbatch.setup.model import resolve_quantization, saved_bytes
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.fp8_checkpoints import BLOCKS, FORMATS, INPUTS, MODELOPT, WEIGHTS, compressed, fp8_checkpoint
from tests.tiny_checkpoint import RAW, write_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (compressed(), ("channel", "token")),
        (compressed(weights={**WEIGHTS, "strategy": "tensor"}), ("tensor", "token")),
        (compressed(input_activations={**INPUTS, "strategy": "tensor", "dynamic": False}), ("channel", "static")),
        (compressed(input_activations=None), ("channel", "none")),
        (BLOCKS, ("block", "block")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("tensor", "static")),
        ({"quant_method": "modelopt", **MODELOPT["quantization"]}, ("tensor", "static")),
    ],
)
def test_configurations(section: dict[str, Any], expected: tuple[str, str]) -> None:
    found = parse_quantization({"quantization_config": section})
    assert found is not None
    assert (found.weights, found.inputs) == expected
    assert found.covers("model.layers.3.mlp.up_proj")
    assert not found.covers("lm_head")
    assert not found.covers("model.embed_tokens")


def test_the_old_key_of_compressed_tensors(tmp_path: Path) -> None:
    old = {key: value for key, value in compressed(kv_cache_scheme=WEIGHTS).items() if key != "quant_method"}
    new = compressed(kv_cache_scheme=WEIGHTS)
    assert parse_quantization({"compression_config": old}) == parse_quantization({"quantization_config": new})
    path = fp8_checkpoint(tmp_path, new)
    raw = json.loads((path / "config.json").read_text())
    kv_scales = open_checkpoint(path).kv_scales
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": None, "compression_config": old}))
    found = open_checkpoint(path)
    assert found.quantization is not None
    assert found.kv_scales == kv_scales != ()
    with pytest.raises(ModelError, match=r"config\.json: compression_config: format 'int-quantized' is not supported"):
        parse_quantization({"compression_config": old | {"format": "int-quantized"}})
    with pytest.raises(ModelError, match="quantization_config and compression_config"):
        parse_quantization({"compression_config": old, "quantization_config": new})


def test_a_file_of_modelopt() -> None:
    found = parse_quantization({}, MODELOPT)
    assert found is not None
    assert (found.method, found.weights, found.inputs) == ("modelopt", "tensor", "static")
    assert parse_quantization({}) is None


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("model.layers.0.mlp.up_proj", False),
        ("re:.*layers\\.0\\..*", False),
        ("model.layers.0*", False),
        ("model.layers.0.mlp", False),
        ("up_proj", False),
        ("model.layers.1.mlp.up_proj", True),
        ("re:layers", True),
    ],
)
def test_layers_that_are_left_out(pattern: str, covered: bool) -> None:
    found = parse_quantization({"quantization_config": compressed(ignore=[pattern])})
    assert found is not None
    assert found.covers("model.layers.0.mlp.up_proj") == covered
    assert found.covers("lm_head"), "a linear layer like the others"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "hqq"}, "'hqq'"),
        ("awq", "'awq'"),
        (compressed(format="pack-quantized"), "input_activations of format 'pack-quantized'"),
        (compressed(weights={**WEIGHTS, "num_bits": 4}), "4 bits"),
        (compressed(weights={**WEIGHTS, "type": "int"}), "'int'"),
        (compressed(weights={**WEIGHTS, "strategy": "group"}), "'group'"),
        (compressed(weights=None), "weights"),
        (compressed(output_activations=INPUTS), "output_activations"),
        (compressed(targets=["re:.*q_proj"]), "targets"),
        (compressed(config_groups={}), "0 config_groups"),
        (compressed(sparsity_config={"format": "dense"}), "sparsity_config"),
        (compressed(ignore="lm_head"), "list of names"),
        (compressed(ignore=["re:("]), "regular expression"),
        ({**BLOCKS, "weight_block_size": [128, 64]}, "64 inputs"),
        ({**BLOCKS, "weight_block_size": 128}, "128"),
        ({**BLOCKS, "activation_scheme": "static"}, "static"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "'odd'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ],
)
def test_refusals_name_the_culprit(section: Any, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_quantization({"quantization_config": section})
    assert words in f"{caught.value.message} {caught.value.hint}"


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("inputs", ["token", "static", "block"])
def test_a_layer_is_the_product_of_rounded_numbers(inputs: Any) -> None:
    """By the definition, in float64: each input and weight is a number of E4M3 times its scale."""
    x, weight = rows(5, 200), quantise_weight(rows(24, 200, seed=1))
    scale_OG = weight.scale if inputs != "block" else rows(24, 2, seed=2).abs() * 0.01
    layer = Fp8Weight(weight.values_OI, scale_OG, inputs, 0.01 if inputs == "static" else None)
    bias = rows(1, 24, seed=3)[0]
    found = Fp8Linear(layer, bias, PackedLinear)(x)

    def rounded(values: Tensor, scale: Tensor) -> Tensor:
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()

    if inputs == "block":
        parts = [rounded(part, part.abs().amax(1, keepdim=True) / 448) for part in (x[:, :128], x[:, 128:])]
        expected_x = torch.cat(parts, 1)
        w = weight.values_OI.double() * torch.cat((scale_OG[:, :1].expand(-1, 128), scale_OG[:, 1:].expand(-1, 72)), 1)
    else:
        scale = torch.tensor(0.01) if inputs == "static" else x.abs().amax(1, keepdim=True) / 448
        expected_x, w = rounded(x, scale), weight.values_OI.double() * weight.scale.double()
    torch.testing.assert_close(found.double(), expected_x @ w.T + bias.double(), rtol=1e-5, atol=1e-4)


def test_rows_do_not_depend_on_each_other() -> None:
    """With one scale for the batch, the large row would change the others."""
    layer = Fp8Linear(quantise_weight(rows(48, 96)), None, PackedLinear)
    x = rows(40, 96, seed=1)
    x[7] *= 1000
    together = layer(x)
    assert all(torch.equal(layer(x[i : i + 1]), together[i : i + 1]) for i in range(40))


@pytest.mark.parametrize("inputs", ["token", "static", "block"])
def test_layers_of_a_gpu_compute_the_same(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reference kernels. Inputs are quantised in norms and activations there."""
    ops = ops_for(CPU, torch.float32)
    scale = rows(200, 2, seed=2).abs() * 0.01 if inputs == "block" else quantise_weight(rows(200, 200)).scale
    values = quantise_weight(rows(200, 200, seed=1)).values_OI
    weight = Fp8Weight(values, scale, inputs, 0.01 if inputs == "static" else None)
    bias, norm, x, residual = (
        rows(1, 200, seed=3)[0],
        RMSNorm(rows(1, 200, seed=4)[0], 1e-5),
        rows(7, 200),
        rows(7, 200),
    )
    cpu, gpu = Fp8Linear(weight, bias, PackedLinear), ScaledLinear(weight, bias, ops, torch.float32)
    for expected, found in (
        (cpu(x), gpu(x)),
        (cpu.with_norm(x, norm), gpu.with_norm(x, norm)),
        (cpu.with_residual(x, residual), gpu.with_residual(x, residual)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    half = replace(weight, values_OI=values[:100], scale=scale[:100])
    other = replace(weight, values_OI=values[100:], scale=scale[100:])
    narrow = replace(weight, values_OI=values[:, :100].contiguous(), scale=scale[:, :1])
    gated_cpu = Fp8GatedLinear(Fp8Linear(half, None, PackedLinear), Fp8Linear(other, None, PackedLinear), "silu")
    gated_gpu = ScaledGatedLinear(ScaledLinear(weight, None, ops, torch.float32), ops)
    assert not gated_gpu.takes_normed, "its norm quantises"
    before = Residual(x)
    expected = gated_cpu.start_into(Fp8Linear(narrow, bias, PackedLinear), before, norm)().x_TE
    found = gated_gpu.start_into(ScaledLinear(narrow, bias, ops, torch.float32), before, norm)().x_TE
    # A last bit of the activations may round to the next number of FP8.
    assert float((found - expected).norm() / expected.norm()) < 1e-2
    plain, last = PackedLinear(rows(200, 100)), RMSNorm(rows(1, 200, seed=5)[0], 1e-5)
    monkeypatch.setattr(plain, "start_with_residual", lambda x, residual, norm: lambda: Residual(x, norm.weight), False)
    assert gated_gpu.start_into(plain, before, norm, last)().normed_TE is last.weight, "the next norm is not passed on"
    monkeypatch.undo()
    torch.testing.assert_close(
        gated_gpu.start_into(plain, before, norm)().x_TE,
        gated_cpu.start_into(plain, before, norm)().x_TE,
        rtol=1e-4,
        atol=1e-2,
    )


def test_odd_numbers() -> None:
    layer = Fp8Linear(quantise_weight(rows(8, 32)), None, PackedLinear)
    x = rows(3, 32)
    x[0], x[1, 4] = 0.0, torch.nan
    found = layer(x)
    assert torch.equal(found[0], torch.zeros(8))
    assert found[1].isnan().all()
    assert found[2].isfinite().all()
    assert quantise_weight(torch.zeros(2, 4)).dequantised().eq(0).all()
    assert quantise_weight(torch.tensor([[1e-30, 5e4]])).values_OI.float().max() == E4M3_MAX


def test_scales_of_inputs_are_above_0(tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path / "m", FORMATS["tensor, static"])
    state = load_file(model / "model.safetensors")
    for scale in (0.0, -0.5, torch.inf):
        save_file({**state, "model.layers.1.mlp.up_proj.input_scale": torch.tensor(scale)}, model / "model.safetensors")
        with pytest.raises(ModelError, match=r"1 tensors are no scales: .*input_scale has"):
            open_checkpoint(model)


def test_an_infinite_input_stays_visible() -> None:
    """With each scheme; a large one becomes the largest number with a static scale."""
    x = rows(3, 256)
    x[0, 4], x[1, 4] = torch.inf, 1e38
    for scheme in ((None, False), (None, True), (0.02, False)):
        values_TI = quantise(x, *scheme).values_TI.float()
        assert bool(values_TI[0].isnan().any())
        assert float(values_TI[1].max()) == E4M3_MAX
        assert not values_TI[1:].isnan().any()


def texts(model: Path, *sets: str) -> list[list[int]]:
    options = [f"model.target={model}", "engine.device=cpu", "engine.kv_cache_tokens=1024", *sets]
    engine = build_engine(resolve(load_config(None, options)))
    for i, prompt in enumerate(([7, 8, 9, 7, 8, 9, 7, 8], [20, 5, 99], [3])):
        engine.submit(Request(i, prompt, SamplingParams(max_tokens=14, ignore_eos=True), RngKey(0, i, 0)))
    done = {}
    while len(done) < 3:
        done |= {c.request_id: c.token_ids for c in engine.step()}
    return [done[i] for i in range(3)]


@pytest.mark.parametrize("section", FORMATS.values(), ids=FORMATS)
def test_speculation_changes_nothing(section: dict[str, Any], tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path / "m", section, hidden_size=160, intermediate_size=144, num_attention_heads=4)
    plain = texts(model, "speculation.method=none")
    assert plain == texts(model, "speculation.method=ngram", "engine.max_batch_size=1")
    for draft in (model, write_checkpoint(tmp_path / "other")):  # the other one's drafts are rejected
        assert plain == texts(model, "speculation.method=draft_model", f"speculation.draft={draft}")
    assert len({tuple(text) for text in plain}) == 3


def test_dequantised_and_quantised_while_loading(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    fp8 = fp8_checkpoint(tmp_path / "fp8", compressed())
    run = resolve(load_config(None, [f"model.target={fp8}", "engine.device=cpu", "model.quantization=none"]))
    assert run.quantization == chosen("none", open_checkpoint(fp8).quantization)
    notes = "\n".join(run.notes)
    assert "weights with a scale a channel, inputs as they are); 14 of 15 linear layers: all but lm_head" in notes
    texts(fp8, "model.quantization=none")
    on_load = resolve(load_config(None, [f"model.target={plain}", "engine.device=cpu", "model.quantization=fp8"]))
    assert on_load.quantization is ON_LOAD
    for path, name in ((plain, "none"), (fp8, "fp8")):  # what `auto` comes to, and what its name gives
        found = resolve(load_config(None, [f"model.target={path}", "engine.device=cpu"]))
        assert found.config.model.quantization == name
        named = resolve(load_config(None, [f"model.target={path}", "engine.device=cpu", f"model.quantization={name}"]))
        assert named.quantization == found.quantization
    # This file was made by the same rule, but for its other tensors, which are rounded to bfloat16.
    name = "model.layers.0.mlp.up_proj"
    loaded = [
        WeightLoader(open_checkpoint(path).tensors, torch.float32, CPU, quantization=quantization)._fp8_weight(name)
        for path, quantization in ((plain, ON_LOAD), (fp8, open_checkpoint(fp8).quantization))
    ]
    assert torch.equal(loaded[0].dequantised(), loaded[1].dequantised())


def test_bytes_that_are_saved() -> None:
    """Llama-3-8B saves a byte of two for each weight of its layers, less the scales of their outputs. Its embedding and
    head save nothing."""
    config, bf16 = random_config("random:llama-3-8b"), torch.bfloat16
    layer = 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
    scales = 4 * (4096 * 3 + 1024 * 2 + 14336 * 2)
    assert saved_bytes(ON_LOAD, config, torch.device("cuda"), bf16) == 32 * (layer - scales)
    assert saved_bytes(chosen("none", ON_LOAD), config, torch.device("cuda"), bf16) == 0
    assert saved_bytes(None, config, torch.device("cuda"), bf16) == saved_bytes(ON_LOAD, config, CPU, bf16) == 0
    rows = Rows(131072, 16, 4, 8192, 8, 1)
    wanted = CacheRequest([CachedModel.whole(config, packs=False)], rows, bf16, CPU, None, 0.9, (4, 512))
    assert wanted.weights - replace(wanted, saved=32 * layer).weights == 32 * layer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.0.mlp.up_proj.weight_scale": None}, "missing: model.layers.0.mlp.up_proj.weight_scale"),
        ({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3, 1)}, "wrong shape"),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(48, 32)}, "model.layers.0.mlp.up_proj.weight is float32"),
        ({"lm_head.weight": torch.ones(264, 32).to(torch.float8_e4m3fn)}, "lm_head.weight is float8_e4m3fn and has no"),
        ({"model.layers.0.mlp.up_proj.zero_point": torch.ones(48, 1)}, "unknown"),
        ({"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(48, 1)}, "no scales: model.layers.0.mlp.up_proj"),
        ({"model.layers.0.mlp.up_proj.weight_scale": torch.eye(48)[:1].T - 0.1}, "has -0.1 to 0.9"),
        ({"model.layers.0.mlp.up_proj.weight_scale": torch.eye(48)[:1].T * torch.inf}, "has nan to nan"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Tensor | None], words: str, tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path / "m", compressed())
    with safe_open(str(model / "model.safetensors"), "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    state = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
    save_file(state, model / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_checkpoint(model)
    assert words in caught.value.message


def test_what_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = fp8_checkpoint(tmp_path / "fp8", compressed())
    options = ["engine.device=cpu", "engine.tensor_parallel=2"]
    blocks = fp8_checkpoint(tmp_path / "blocks", BLOCKS, hidden_size=256, intermediate_size=384)
    with pytest.raises(ConfigError, match="down_proj has 384 inputs, and 192 of them is no multiple of 128"):
        resolve(load_config(None, [f"model.target={blocks}", *options]))
    resolve(load_config(None, [f"model.target={blocks}", *options, "model.quantization=none"]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"a checkpoint in FP8 needs a GPU of compute capability 8\.9"):
        resolve_quantization(
            load_config(None, [f"model.target={fp8}"]), open_checkpoint(fp8), torch.device("cuda"), torch.bfloat16, []
        )


@pytest.mark.parametrize("section", FORMATS.values(), ids=FORMATS)
def test_a_rank_has_a_part_of_dequantised_layers(section: dict[str, Any], tmp_path: Path) -> None:
    found = open_checkpoint(fp8_checkpoint(tmp_path / "m", section))
    quantization = chosen("none", found.quantization)
    shards = [ModelShard.of(found.config, LoneRank(rank)) for rank in range(2)]
    whole, *parts = (
        WeightLoader(found.tensors, torch.float32, CPU, shard=shard, quantization=quantization)
        for shard in (None, *shards)
    )
    x = rows(3, found.config.hidden_size)
    name = "model.layers.1.mlp.up_proj"
    assert torch.allclose(torch.cat([part.linear(name)(x) for part in parts], dim=1), whole.linear(name)(x))
    name = "model.layers.1.self_attn.o_proj"
    assert torch.equal(
        torch.cat([part.tensor(f"{name}.weight") for part in parts], dim=1), whole.tensor(f"{name}.weight")
    )


class LoneRank(Group):
    """One of two, for what needs no other."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        raise AssertionError("the other rank does not run")


@pytest.mark.parametrize(("strategy", "inputs"), [("channel", "token"), ("tensor", "static")])
def test_a_checkpoint_of_compressed_tensors(strategy: str, inputs: str, tmp_path: Path) -> None:
    """Written by that package from a model of transformers; our weights are those that the package dequantises, and our
    logits those of its own arithmetic."""
    ct = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {key: RAW[key] for key in (*keys, "num_key_value_heads", "max_position_embeddings", "eos_token_id")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, initializer_range=0.2))
    weights = ct.QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
    scales = ct.QuantizationArgs(
        num_bits=8, type="float", strategy="token" if inputs == "token" else "tensor", dynamic=inputs == "token"
    )
    group = ct.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=scales)
    ct.apply_quantization_config(model, ct.QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
    expected = {}
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        dims = {"dim": 1, "keepdim": True} if strategy == "channel" else {}
        least, most = torch.amin(module.weight, **dims), torch.amax(module.weight, **dims)
        scale, _ = calculate_qparams(least, most, weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if inputs == "static":
            module.input_scale.data.fill_(0.02)
        module.quantization_status = ct.QuantizationStatus.FROZEN
        expected[name] = module.weight.detach().clone()
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        logits = model(tokens).logits[0]  # inputs and weights rounded and multiplied by their scales
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="float-quantized")
    assert compressor is not None
    compressor.compress_model(model)
    folder = write_checkpoint(tmp_path / "m")  # its tokenizer
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    compressor.update_config(str(folder))

    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint.quantization, Quantization)
    assert (checkpoint.quantization.weights, checkpoint.quantization.inputs) == (strategy, inputs)
    loader = WeightLoader(checkpoint.tensors, torch.float32, CPU, quantization=checkpoint.quantization)
    compressor.decompress_model(model)
    for name in expected:
        package = model.get_submodule(name).weight.detach().float()
        assert torch.equal(loader._fp8_weight(name).dequantised(), package), name

    from specbatch.models.decoder import Decoder
    from tests.coins import plain_logits
    from tests.tiny_models import attention_of

    decoder = Decoder(checkpoint.config, loader, attention_of(checkpoint.config), 128)
    torch.testing.assert_close(plain_logits(decoder, tokens[0].tolist()), logits, rtol=1e-3, atol=1e-3)
