"""Files of gpt-oss, with the experts of a layer in one tensor: each expert's tensors are those that were stacked."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specbatch.config_load import load_config
from specbatch.errors import ModelError
from specbatch.kernels.torch.parts.mxfp4 import dequantise
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.gpt_oss_experts import GptOssExperts
from specbatch.models.linears.experts import stack_quantised
from specbatch.models.random_weights import RandomSource, open_random_model
from specbatch.setup.build import build_decoder
from specbatch.setup.expert_parallel import resolve_division
from specbatch.setup.model import resolve_mxfp4
from specbatch.setup.resolve import resolve
from tests.mxfp4_checkpoints import pack_experts
from tests.oracle.spans import Span, batch_of, piecewise_logits
from tests.tiny_checkpoint import write_checkpoint

GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "intermediate_size": 64,
    "head_dim": 8,
}


def single(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if ".experts." in name}


def write_stacked(folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint, then its experts in one tensor. Return the tensors of single experts."""
    path = write_checkpoint(folder, **GPT_OSS)
    state = load_file(path / "model.safetensors")
    experts = single(state)
    stacked = {name: tensor for name, tensor in state.items() if name not in experts}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack([state[f"{prefix}{expert}.{name}_proj.{kind}"] for expert in range(3)])
                for name in ("gate", "up", "down")
            )
            both = torch.stack((gate, up), dim=2).flatten(1, 2)
            if kind == "weight":
                both, down = both.transpose(1, 2), down.transpose(1, 2)
            stacked[f"{prefix}gate_up_proj{ending}"] = both.contiguous()
            stacked[f"{prefix}down_proj{ending}"] = down.contiguous()
    save_file(stacked, path / "model.safetensors")
    return experts


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_slices_are_the_single_experts(kind: str, tmp_path: Path) -> None:
    experts = write_stacked(tmp_path)
    if kind == "bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.description in ("safetensors float32", "pytorch float32")
    for tensors in (checkpoint.tensors, pickle.loads(pickle.dumps(checkpoint.tensors))):
        assert single(dict(tensors.shapes())).keys() == experts.keys()  # type: ignore[arg-type]
        for name, expected in experts.items():
            assert tensors.shapes()[name] == expected.shape
            assert torch.equal(tensors.load(name), expected), name


def test_single_experts_in_files(tmp_path: Path) -> None:
    """Files with one tensor an expert are read, too."""
    path = write_checkpoint(tmp_path, **GPT_OSS)
    tensors = open_checkpoint(path).tensors
    for name, expected in single(load_file(path / "model.safetensors")).items():
        assert torch.equal(tensors.load(name), expected)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Numbers are those that transformers dequantises."""
    write_stacked(tmp_path / "wide")
    path = tmp_path / "packed"
    pack_experts(tmp_path / "wide", path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.description == "safetensors float32/mxfp4"
    state = load_file(path / "model.safetensors")
    prefix = "model.layers.1.mlp.experts."
    both = convert_moe_packed_tensors(state[f"{prefix}gate_up_proj_blocks"], state[f"{prefix}gate_up_proj_scales"])
    down = convert_moe_packed_tensors(state[f"{prefix}down_proj_blocks"], state[f"{prefix}down_proj_scales"])
    for expert in range(3):
        for name, expected in (
            ("gate_proj", both[expert, :, 0::2]),
            ("up_proj", both[expert, :, 1::2]),
            ("down_proj", down[expert]),
        ):
            found = checkpoint.tensors.load(f"{prefix}{expert}.{name}.weight")
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, expected.T.to(torch.bfloat16))
    notes = resolve(load_config(None, [f"model.target={path}", "engine.device=cpu", "speculation.method=none"])).notes
    assert any("experts are in MXFP4" in note for note in notes)


def test_experts_that_stay_packed(tmp_path: Path) -> None:
    write_stacked(tmp_path / "wide")
    pack_experts(tmp_path / "wide", tmp_path / "packed")
    tensors = open_checkpoint(tmp_path / "packed").tensors
    assert isinstance(tensors, GptOssExperts)
    prefix = "model.layers.0.mlp.experts."
    names = [[f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up")] for expert in range(3)]
    values, scales = stack_quantised(names, tensors.packed, torch.device("cpu"))
    assert values.shape == (3, 128, 16)
    assert values.is_contiguous()
    assert scales.shape == (3, 128, 1)
    for expert, pair in enumerate(names):
        expected = torch.cat([tensors.load(name) for name in pair])
        assert torch.equal(dequantise(values[expert], scales[expert], torch.bfloat16), expected)


def test_a_model_with_packed_experts_is_that_of_dequantised_ones(tmp_path: Path) -> None:
    write_stacked(tmp_path / "wide")
    pack_experts(tmp_path / "wide", tmp_path / "packed")
    found = open_checkpoint(tmp_path / "packed")
    tokens = list(range(1, 41))
    logits = []
    for reader in (None, found.tensors):
        decoder = build_decoder(
            found.config,
            found.tensors,
            64,
            torch.float64,
            torch.device("cpu"),
            mxfp4=reader,  # type: ignore[arg-type]
        )
        with torch.inference_mode():
            logits.append(piecewise_logits(decoder, tokens, [30, 1, 9], torch.float64))
    torch.testing.assert_close(logits[1], logits[0])


@pytest.mark.gpu
def test_packed_experts_on_a_gpu(tmp_path: Path) -> None:
    """Float32, in the kernels of a GPU, against float64 on a CPU."""
    write_stacked(tmp_path / "wide")
    pack_experts(tmp_path / "wide", tmp_path / "packed")
    found, cuda = open_checkpoint(tmp_path / "packed"), torch.device("cuda")
    assert isinstance(found.tensors, GptOssExperts)
    exact = build_decoder(found.config, found.tensors, 64, torch.float64, torch.device("cpu"))
    packed = build_decoder(found.config, found.tensors, 64, torch.float32, cuda, "triton", mxfp4=found.tensors)
    tokens = torch.arange(1, 41)
    with torch.inference_mode():
        expected = piecewise_logits(exact, tokens.tolist(), [40], torch.float64)
        cache, logits = packed.new_cache(40, torch.float32), []
        for start, size in ((0, 30), (30, 1), (31, 9)):
            batch = batch_of([Span(range(5), start, size)], 8, cuda)
            hidden, _ = packed.forward(tokens[start : start + size].to(cuda), batch, cache)
            logits.append(packed.logits(hidden).double().cpu())
    torch.testing.assert_close(torch.cat(logits), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("options", "device", "stays"),
    [
        ([], "cuda", True),
        (["model.quantization=none"], "cuda", False),
        (["engine.tensor_parallel=2", "engine.expert_parallel=off"], "cuda", False),
        (["engine.tensor_parallel=2", "engine.expert_parallel=on", "engine.dp_attention=on"], "cuda", True),
        ([], "cpu", False),
    ],
)
def test_where_experts_stay_packed(options: list[str], device: str, stays: bool) -> None:
    config, notes = load_config(None, ["model.target=random:gpt-oss-20b", *options]), []
    target = open_random_model("random:gpt-oss-20b", torch.bfloat16, torch.device("cpu"))
    division = resolve_division(config, target, torch.device(device), torch.bfloat16, [])
    found = resolve_mxfp4(config, target, torch.device(device), torch.bfloat16, notes, division)
    assert (found is target.tensors) == stays
    assert notes == (["model.target: its experts are in MXFP4, and stay so: 26.1 GiB less than bfloat16"] * stays)


def test_random_experts_are_about_as_large_as_other_weights() -> None:
    tensors = open_random_model("random:tiny-gpt-oss", torch.float32, torch.device("cpu")).tensors
    names = [[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] for expert in range(8)]
    assert isinstance(tensors, RandomSource)
    (values, scales), again = (stack_quantised(names, tensors.packed, torch.device("cpu")) for _ in range(2))
    assert torch.equal(values, again[0])
    found = torch.stack([dequantise(values[expert], scales[expert], torch.float32) for expert in range(8)])
    assert found.shape == (8, 32, 64)
    assert 0.02 < float(found.std()) < 0.026
    assert abs(float(found.mean())) < 0.002


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no scales", ("down_proj_blocks", "scales is missing")),
        ("other blocks", ("down_proj_blocks", "[3, 32, 4, 8]")),
        ("not uint8", ("down_proj_scales", "float32")),
        ("fewer experts", ("2.down_proj.weight", "missing")),
        ("a stray tensor", ("experts.up_proj_blocks", "unknown")),
        ("both forms", ("experts.0.down_proj.weight", "twice")),
        ("one expert", ("experts.1.down_proj.weight", "twice")),
    ],
)
def test_damaged_mxfp4(change: str, words: tuple[str, ...], tmp_path: Path) -> None:
    write_stacked(tmp_path / "wide")
    path = tmp_path / "packed"
    pack_experts(tmp_path / "wide", path)
    state = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    if change == "no scales":
        del state[f"{name}_scales"]
    elif change == "other blocks":
        state[f"{name}_blocks"] = state[f"{name}_blocks"].reshape(3, 32, 4, 8)
    elif change == "not uint8":
        state[f"{name}_scales"] = state[f"{name}_scales"].float()
    elif change == "fewer experts":
        for ending in ("_blocks", "_scales"):
            state[name + ending] = state[name + ending][:2].contiguous()
    elif change == "both forms":
        state[name] = load_file(tmp_path / "wide" / "model.safetensors")[name]
    elif change == "one expert":
        state["model.layers.0.mlp.experts.1.down_proj.weight"] = torch.zeros(32, 64)
    else:
        state["model.layers.0.mlp.experts.up_proj_blocks"] = torch.zeros(3, dtype=torch.uint8)
    save_file(state, path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    write_stacked(tmp_path / "wide")
    path = tmp_path / "packed"
    pack_experts(tmp_path / "wide", path)
    state = load_file(path / "model.safetensors")
    state["model.layers.0.mlp.experts.down_proj_scales"][1, 3, 0] = 255
    save_file(state, path / "model.safetensors")
    tensors = open_checkpoint(path).tensors
    tensors.load("model.layers.0.mlp.experts.0.down_proj.weight")
    with pytest.raises(ModelError, match=r"experts\.1\.down_proj\.weight has scales"):
        tensors.load("model.layers.0.mlp.experts.1.down_proj.weight")


def test_bytes_of_other_quantisations_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    state = load_file(path / "model.safetensors")
    state["model.layers.0.mlp.down_proj.weight"] = state["model.layers.0.mlp.down_proj.weight"].to(torch.uint8)
    save_file(state, path / "model.safetensors")
    with pytest.raises(ModelError, match="has the type uint8"):
        open_checkpoint(path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelError, match="has the type uint8"):
        open_checkpoint(path)
