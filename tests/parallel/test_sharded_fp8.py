"""Ranks that share a model in FP8 compute what the whole one does, but for the order of sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.kernels import ops_for
from specbatch.kernels.torch.fp8 import quantise, quantise_part
from specbatch.models.decoder import Decoder
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.linears.fp8 import quantise_weight
from specbatch.models.linears.quantization import ON_LOAD
from specbatch.models.linears.scaled import ScaledLinear
from specbatch.models.linears.sharded import ModelShard, check_group_borders
from specbatch.models.weight_loader import WeightLoader
from specbatch.parallel.group import Group
from tests.coins import plain_logits
from tests.fp8_checkpoints import FORMATS, fp8_checkpoint
from tests.parallel.threads import on_ranks
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import CPU, attention_of, tiny_config

TOKENS = list(range(1, 40))
SIZES = {"hidden_size": 512, "intermediate_size": 256, "num_attention_heads": 4}
LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def loader_of(model: Path, group: Group | None) -> WeightLoader:
    found = open_checkpoint(model)
    shard = None if group is None else ModelShard.of(found.config, group)
    quantization = found.quantization or ON_LOAD
    return WeightLoader(found.tensors, torch.float32, CPU, shard=shard, quantization=quantization)


def logits_of(model: Path, group: Group | None) -> Tensor:
    found = open_checkpoint(model)
    config = found.config if group is None else ModelShard.of(found.config, group).config
    return plain_logits(Decoder(config, loader_of(model, group), attention_of(config), 128), TOKENS)


def checkpoint(folder: Path, section: dict[str, Any] | None) -> Path:
    return write_checkpoint(folder, **SIZES) if section is None else fp8_checkpoint(folder, section, **SIZES)


SECTIONS = {**{name: FORMATS[name] for name in ("channel, token", "tensor, static", "blocks")}, "on load": None}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_each_layer_is_that_of_the_whole_model(section: dict[str, Any] | None, tmp_path: Path) -> None:
    """One token's largest input is on the first rank, another's on the second."""
    model = checkpoint(tmp_path / "m", section)
    whole = loader_of(model, None)
    inputs = {width: torch.randn(4, width, generator=torch.Generator().manual_seed(width)) for width in (256, 512)}
    for x in inputs.values():
        x[0, 0], x[1, -1], x[2] = 100.0, -100.0, 0.0

    def outputs(loader: WeightLoader, group: Group | None) -> list[Tensor]:
        found = []
        for name in LAYERS:
            is_summed = name.endswith(("o_proj", "down_proj"))
            x = inputs[256 if "down" in name else 512]
            if is_summed and group is not None:
                x = x.chunk(group.size, 1)[group.rank]
            layer = loader.summed_linear if is_summed else loader.linear
            found.append(layer(f"model.layers.1.{name}")(x))
        return found

    expected = outputs(whole, None)
    ranks = on_ranks(2, lambda group: outputs(loader_of(model, group), group))
    for name, layer, *parts in zip(LAYERS, expected, *ranks, strict=True):
        if name.endswith(("o_proj", "down_proj")):
            assert torch.equal(parts[0], parts[1])
            torch.testing.assert_close(parts[0], layer, rtol=1e-5, atol=1e-5 * float(layer.abs().max()))
        else:
            torch.testing.assert_close(torch.cat(parts, 1), layer, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_logits_are_those_of_the_whole_model(section: dict[str, Any] | None, tmp_path: Path) -> None:
    """A last bit before an input is rounded may make it the next number of FP8. So the bound is that of few such.
    With a scale for each rank's part of a token, the difference is 0.2."""
    model = checkpoint(tmp_path / "m", section)
    expected = logits_of(model, None)
    first, second = on_ranks(2, lambda group: logits_of(model, group))
    assert torch.equal(first, second), "ranks disagree"
    assert float((first - expected).norm() / expected.norm()) < 0.03


def test_parts_of_tokens_are_quantised_as_whole_ones() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    x[1, 3], x[2, 30], x[3], x[4, 0] = 50.0, torch.inf, 0.0, torch.nan
    whole = quantise(x)
    parts = on_ranks(2, lambda group: quantise_part(x.chunk(2, 1)[group.rank], group.largest))
    values = torch.cat([part.values_TI.float() for part in parts], 1)
    for scale in (parts[0].scale_TG, parts[1].scale_TG):
        torch.testing.assert_close(scale, whole.scale_TG, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, whole.values_TI.float(), rtol=0, atol=0, equal_nan=True)


def test_a_layer_of_a_gpu_takes_the_scale_of_the_whole_token() -> None:
    """With the reference kernels."""
    generator = torch.Generator().manual_seed(0)
    weight = quantise_weight(torch.randn(24, 40, generator=generator))
    x, residual = torch.randn(3, 40, generator=generator), torch.randn(3, 24, generator=generator)
    ops = ops_for(CPU, torch.float32)

    def work(group: Group) -> Tensor:
        values = weight.values_OI.chunk(2, 1)[group.rank].contiguous()
        part = type(weight)(values, weight.scale, weight.inputs)
        layer = ScaledLinear(part, None, ops, torch.float32, input_ranks=group)
        return group.sum(layer.with_residual(x.chunk(2, 1)[group.rank], residual / 2))

    for found in on_ranks(2, work):
        expected = ScaledLinear(weight, None, ops, torch.float32).with_residual(x, residual)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_border_in_a_group_is_named() -> None:
    """Parts of 128, 127 and 127 inputs: the first ends with a group, the second does not."""
    config = tiny_config(num_heads=6, num_kv_heads=3, intermediate_size=382)
    with pytest.raises(ValueError, match="down_proj has 382 inputs, and 255 of them is no multiple of 128"):
        check_group_borders(["model.layers.0.mlp.down_proj"], config, 3)
    check_group_borders(["model.layers.0.mlp.up_proj"], config, 3)
