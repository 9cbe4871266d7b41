"""Matrices of GGUF files that stay whole numbers on CUDA: each type, and files that mix types."""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import LlamaConfig, Qwen2Config

from specbatch.cli.model_facts import inspected
from specbatch.config_load import load_config
from specbatch.kernels import torch as reference
from specbatch.kernels.integers import IntegerWeight
from specbatch.models.config import expected_tensors
from specbatch.models.decoder import Decoder
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.gguf_integers import FORMS, read_integers
from specbatch.models.linears.fp8 import JoinedLinear
from specbatch.models.linears.integer import IntegerLinear
from specbatch.models.linears.sharded import ModelShard
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.model import resolve_quantization, saved_bytes
from tests.coins import plain_logits
from tests.models.formats.test_gguf import SIZES, random_blocks, state_of, write
from tests.models.test_quantization import LoneRank
from tests.tiny_models import attention_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SYMMETRIC = (Q.Q4_0, Q.Q5_0, Q.Q6_K, Q.Q8_0)
# As llama.cpp mixes types for Q4_K_M, and more of them.
MIXED = {
    "lm_head": Q.Q6_K,
    "layers.0.self_attn.v_proj": Q.Q6_K,
    "layers.0.mlp.down_proj": Q.Q6_K,
    "layers.1.mlp.down_proj": Q.Q5_K,
    "layers.1.self_attn.k_proj": Q.Q8_0,
    "layers.1.self_attn.o_proj": Q.F16,
    "layers.1.mlp.up_proj": Q.Q5_0,
}


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_gguf_package(kind: Q) -> None:
    """Random bytes: also scales that are 0 or negative."""
    blocks = random_blocks(kind, (40, 6), 0.01).reshape(40, 6, -1)
    minimum = {Q.Q4_1: 2, Q.Q5_1: 2}.get(kind)
    if minimum is not None:
        blocks[..., minimum : minimum + 2] = np.frombuffer(np.float16(-0.3).tobytes(), np.uint8)
    blocks[:3, 1, *([slice(208, 210)] if kind == Q.Q6_K else [slice(2)])] = 0
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(40, -1), kind))
    numbers = read_integers(torch.from_numpy(blocks.copy()), tuple(expected.shape), kind).checked("a layer")
    error = float((numbers.dequantised() - expected).abs().max() / expected.abs().max())
    assert error <= (0 if kind in SYMMETRIC else 1e-6), error
    packed, form = numbers.packed(None), FORMS[kind]
    assert (packed.bits, packed.group) == (form.bits, form.group)
    assert bytes_of(packed) == form.num_bytes(*expected.shape), "768 or 192 inputs are packed as 768 or 256"


def bytes_of(weight: IntegerWeight) -> int:
    return sum(one.nbytes for one in weight[:3] if isinstance(one, torch.Tensor))


def test_a_file_of_one_type(tmp_path: Path) -> None:
    """The layers that CUDA has, with the reference kernels; a CPU dequantises."""
    config = LlamaConfig(**SIZES)
    for kind in FORMS:
        path = tmp_path / f"{kind.name}.gguf"
        write(path, config, state_of(config), kind)
        checkpoint = open_checkpoint(path)
        found = checkpoint.quantization
        assert found is not None
        loader = WeightLoader(checkpoint.tensors, torch.float32, CPU, quantization=found)
        dequantising = WeightLoader(checkpoint.tensors, torch.float32, CPU, quantization=found.dequantised())
        for layer in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
            weight = checkpoint.tensors.load(f"model.layers.1.{layer}.weight")
            torch.testing.assert_close(loader.tensor(f"model.layers.1.{layer}.weight"), weight, rtol=1e-5, atol=1e-7)
            assert torch.equal(dequantising.tensor(f"model.layers.1.{layer}.weight"), weight)
            x = torch.randn(3, weight.shape[1])
            linear = loader.linear(f"model.layers.1.{layer}")
            assert isinstance(linear, IntegerLinear)
            torch.testing.assert_close(linear(x), x @ weight.T)
        options = load_config(None, [f"model.target={path}"])
        for device, available in itertools.product((CPU, CUDA), (0, 1 << 40)):
            kept = resolve_quantization(options, checkpoint, device, torch.bfloat16, [], available=available)
            assert kept == (found if device == CUDA and not available else None)
        asked = load_config(None, [f"model.target={path}", "model.quantization=int4"])
        assert resolve_quantization(asked, checkpoint, CUDA, torch.bfloat16, [], available=1 << 40) == found


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])
def test_a_file_of_several_types(
    family: type[LlamaConfig] | type[Qwen2Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers but one of float16 stay packed, and logits are those of the dequantised model."""
    config, path = family(**SIZES), tmp_path / "m.gguf"
    write(path, config, state_of(config), Q.Q4_K, kinds=MIXED)
    model = open_checkpoint(path)
    notes: list[str] = []
    options = load_config(None, [f"model.target={path}", "engine.tensor_parallel=2"])
    found = resolve_quantization(options, model, CUDA, torch.bfloat16, notes, available=0)
    assert found is not None
    assert (
        "layers of a GGUF file (8 in Q4_K as int4, 2 in Q6_K as int8, 1 in Q8_0 as int8, 1 in Q5_0 as int8, "
        "1 in Q5_K as int8; inputs as they are); 13 of 15 linear layers"
    ) in " ".join(notes)
    loader = WeightLoader(model.tensors, torch.float32, CPU, quantization=found)
    plain = WeightLoader(model.tensors, torch.float32, CPU)
    names = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv"]
    has_bias = family is Qwen2Config
    linear = loader.linear(*names, has_bias=has_bias)
    assert isinstance(linear, JoinedLinear)
    x = torch.randn(5, 256)
    calls: list[int] = []
    multiply = reference.integer_linear
    monkeypatch.setattr(reference, "integer_linear", lambda x, *rest: calls.append(1) or multiply(x, *rest))
    torch.testing.assert_close(linear(x), plain.linear(*names, has_bias=has_bias)(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == 2, "queries and keys are one GEMM"
    logits = []
    for one in (loader, plain):
        decoder = Decoder(model.config, one, attention_of(model.config), 128)
        with torch.inference_mode():
            logits.append(plain_logits(decoder, list(range(3, 40))))
    assert float(logits[0].std()) > 0.01
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_rank_has_a_part(tmp_path: Path) -> None:
    config, path = LlamaConfig(**SIZES), tmp_path / "m.gguf"
    write(path, config, state_of(config), Q.Q5_K, kinds={"down_proj": Q.Q6_K})
    model = open_checkpoint(path)
    whole, *parts = (
        WeightLoader(model.tensors, torch.float32, CPU, shard=shard, quantization=model.quantization)
        for shard in (None, *(ModelShard.of(model.config, LoneRank(rank)) for rank in range(2)))
    )
    x, query, down = torch.randn(3, 512), "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    of_query = torch.cat([part.linear(query)(x[:, :256]) for part in parts], dim=1)
    torch.testing.assert_close(of_query, whole.linear(query)(x[:, :256]), rtol=1e-4, atol=1e-5)
    of_down = sum(part.linear(down)(half) for part, half in zip(parts, x.chunk(2, dim=1), strict=True))
    torch.testing.assert_close(of_down, whole.linear(down)(x), rtol=1e-4, atol=1e-5)


def test_bytes_that_are_saved(tmp_path: Path) -> None:
    """They are those of the packed tensors."""
    config, path = LlamaConfig(**SIZES), tmp_path / "m.gguf"
    write(path, config, state_of(config), Q.Q4_K, kinds=MIXED)
    model = open_checkpoint(path)
    found, saved = model.quantization, 0
    assert found is not None
    for name, shape in expected_tensors(model.config).items():
        if found.keeps(name.removesuffix(".weight")):
            packed = model.tensors.integers(name, CPU).packed(None)  # type: ignore[union-attr]
            saved += 2 * shape[0] * shape[1] - bytes_of(packed)
    assert saved_bytes(found, model.config, CUDA, torch.bfloat16) == saved > 0


def test_inspect_does_not_say_that_layers_are_dequantised(tmp_path: Path) -> None:
    """A run may leave them packed."""
    config, path = LlamaConfig(**SIZES), tmp_path / "m.gguf"
    write(path, config, state_of(config), Q.Q4_1)
    facts = dict(inspected(path))
    assert "Q4_1" in facts["files"] + facts["quantised"]
    assert "dequantised" not in str(facts)
