"""Tiny checkpoints with weights in whole numbers, in the formats of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specbatch.models.linears.integer_quantization import UniformIntegers
from specbatch.models.linears.quantization import parse_quantization
from tests.tiny_checkpoint import RAW, random_state, write_checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def packed(**changes: Any) -> dict[str, Any]:
    """Return a section of compressed-tensors. `changes`: those of the arguments of weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**weights, **changes}, "input_activations": None}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return {**section, "config_groups": {"group_0": group}}


FORMATS: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq, 8 bits, zeros, act-order": {**GPTQ, "bits": 8, "sym": False, "desc_act": True},
    "gptq v2, zeros": {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq, outputs": {**GPTQ, "group_size": -1},
    "awq": AWQ,
    "packed": packed(),
    "packed, 8 bits, outputs": packed(num_bits=8, strategy="channel", group_size=None),
    "packed, zeros, act-order": packed(symmetric=False, actorder="group"),
}


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack the last dimension into int32 words, the first number lowest, one number after the other."""
    in_word = 32 // bits
    numbers = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[-1] % in_word))
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // in_word, dtype=torch.int64)
    for i in range(in_word):
        words |= numbers[..., i::in_word] << (bits * i)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # as signed numbers


def awq_words(numbers: Tensor) -> Tensor:
    """AutoAWQ's `WQLinear_GEMM.from_linear`: nibble i of a word is column `order[i]`."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return pack_words(numbers.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)


def quantised(weight_OI: Tensor, found: UniformIntegers, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Return a layer's tensors in files, without its name, and the weight that they mean: (number - zero) * scale."""
    generator = torch.Generator().manual_seed(seed)
    num_out, num_in = weight_OI.shape
    num_groups, half = found.num_groups(num_in), 1 << (found.bits - 1)
    groups_I = torch.arange(num_in) // (found.group or num_in)
    if found.is_ordered:
        groups_I = groups_I[torch.randperm(num_in, generator=generator)]
    scales_OG = (weight_OI.abs().amax() / half * (0.5 + torch.rand(num_out, num_groups, generator=generator))).half()
    zeros_OG = torch.full((num_out, num_groups), half)
    if found.has_zeros:
        zeros_OG = torch.randint(0, 2 * half, (num_out, num_groups), generator=generator)
    scales, zeros = scales_OG.float()[:, groups_I], zeros_OG[:, groups_I]
    numbers_OI = (weight_OI / scales + zeros).round().clamp(0, 2 * half - 1).long()
    meant = (numbers_OI - zeros) * scales
    if found.layout == "packed":
        tensors = {
            "weight_packed": pack_words(numbers_OI, found.bits),
            "weight_scale": scales_OG,
            "weight_shape": torch.tensor([num_out, num_in]),
        }
        if found.has_zeros:
            tensors["weight_zero_point"] = pack_words(zeros_OG.T, found.bits).T
        if found.is_ordered:
            tensors["weight_g_idx"] = groups_I.int()
        return tensors, meant
    if found.layout == "awq":
        return {"qweight": awq_words(numbers_OI.T), "qzeros": awq_words(zeros_OG.T), "scales": scales_OG.T}, meant
    qzeros = pack_words(zeros_OG.T, found.bits)
    if found.layout == "gptq":  # as GPTQModel: one subtraction from the words
        qzeros = qzeros - (0x11111111 if found.bits == 4 else 0x01010101)
    return {
        "qweight": pack_words(numbers_OI, found.bits).T,
        "qzeros": qzeros,
        "scales": scales_OG.T,
        "g_idx": groups_I.int(),
    }, meant


def integer_checkpoint(folder: Path, section: dict[str, Any], **changes: Any) -> dict[str, Tensor]:
    """Write a tiny model in the format of `section`, and return the state of the model that it means."""
    write_checkpoint(folder, **changes)
    raw = {**RAW, **changes, "quantization_config": section}
    found = parse_quantization(raw)
    assert isinstance(found, UniformIntegers)
    stored, meant = {}, {}
    for i, (name, tensor) in enumerate(random_state({**RAW, **changes}).items()):
        layer = name.removesuffix(".weight")
        if not (tensor.ndim == 2 and name.endswith(".weight") and found.covers(layer)):
            stored[name] = meant[name] = tensor
            continue
        tensors, meant[name] = quantised(tensor, found, seed=i)
        stored |= {f"{layer}.{kind}": one.contiguous() for kind, one in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return meant
