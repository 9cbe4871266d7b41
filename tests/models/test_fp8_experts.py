"""Experts in FP8: their weights stay so on a GPU, and their inputs are not quantised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, ModelError
from specbatch.models.config import expected_tensors
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.linears.experts import stack_quantised
from specbatch.models.linears.quantization import ON_LOAD, Quantization, chosen
from specbatch.models.linears.sharded import ModelShard
from specbatch.models.random_weights import random_config
from specbatch.models.weight_loader import WeightLoader
from specbatch.parallel.group import Group
from specbatch.setup.build import build_decoder, build_engine
from specbatch.setup.model import check_experts, resolve_quantization, saved_bytes, saved_of_experts
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.fp8_checkpoints import BLOCKS, FORMATS, compressed, fp8_checkpoint
from tests.oracle.spans import Span, batch_of, piecewise_logits
from tests.parallel.threads import ThreadGroup
from tests.tiny_checkpoint import RAW, random_state, write_checkpoint
from tests.tiny_models import CPU

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 136, "head_dim": 8}
SIZES: dict[str, Any] = {"model_type": "qwen3_moe", "hidden_size": 160, "norm_topk_prob": True, **EXPERTS}
# The official form of Qwen's checkpoints, with the layers that they name.
QWEN = {**BLOCKS, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}
SECTIONS = {**{name: FORMATS[name] for name in ("channel, token", "tensor, static", "weights alone")}, "blocks": QWEN}
EXPERT = "model.layers.1.mlp.experts.3"
_LAYERS = [f"model.layers.1.mlp.experts.{expert}" for expert in range(5)]
NAMES = [(f"{layer}.gate_proj", f"{layer}.up_proj", f"{layer}.down_proj") for layer in _LAYERS]


def dequantised(source: Path, folder: Path, section: dict[str, Any]) -> Path:
    """Write an unquantised checkpoint with the weights of a quantised one."""
    write_checkpoint(folder, **SIZES)
    found = open_checkpoint(source)
    state = {}
    for name in random_state({**RAW, **SIZES}):
        weight = found.tensors.load(name).float()
        layer = name.removesuffix(".weight")
        if (scale := found.tensors.shapes().get(f"{layer}.{found.quantization.scale}")) is not None:  # type: ignore[union-attr]
            value = found.tensors.load(f"{layer}.{found.quantization.scale}").float()  # type: ignore[union-attr]
            if section is QWEN:
                value = value.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
            weight = weight * (value if len(scale) == 2 else value.reshape(-1, 1))
        state[name] = weight.contiguous()
    save_file(state, folder / "model.safetensors")
    return folder


def texts(*sets: str) -> list[list[int]]:
    options = ["engine.device=cpu", "model.dtype=float32", "engine.kv_cache_tokens=1024", *sets]
    engine = build_engine(resolve(load_config(None, options)))
    for i, prompt in enumerate(([7, 8, 9, 7, 8, 9, 7, 8], [20, 5, 99], [3])):
        engine.submit(Request(i, prompt, SamplingParams(max_tokens=14, ignore_eos=True), RngKey(0, i, 0)))
    done = {}
    while len(done) < 3:
        done |= {c.request_id: c.token_ids for c in engine.step()}
    return [done[i] for i in range(3)]


def without_attention(section: dict[str, Any]) -> dict[str, Any]:
    """Leave the other layers out, whose inputs are quantised."""
    key = next(key for key in ("ignore", "exclude_modules", "modules_to_not_convert") if key in section)
    return {**section, key: [*section[key], "re:.*self_attn.*"]}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_texts_are_those_of_the_dequantised_checkpoint(section: dict[str, Any], tmp_path: Path) -> None:
    only_experts = without_attention(section)
    model = fp8_checkpoint(tmp_path / "fp8", only_experts, **SIZES)
    plain = dequantised(model, tmp_path / "plain", QWEN if section is QWEN else only_experts)
    found = texts(f"model.target={model}", "speculation.method=none")
    assert found == texts(f"model.target={plain}", "speculation.method=none")
    assert found == texts(f"model.target={model}", "speculation.method=ngram", "engine.max_batch_size=1")
    assert found == texts(f"model.target={model}", "speculation.method=draft_model", f"speculation.draft={model}")
    assert len({tuple(text) for text in found}) == 3


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_stacked_experts_are_those_of_a_cpu(section: dict[str, Any], tmp_path: Path) -> None:
    """The stacked experts of a GPU run here with the reference kernels."""
    found = open_checkpoint(fp8_checkpoint(tmp_path / "m", section, **SIZES))
    loader = WeightLoader(found.tensors, torch.float32, CPU, quantization=found.quantization)
    compare_experts(loader, keeps_fp8=section is not SECTIONS["weights alone"])


@pytest.mark.parametrize("section", [QWEN, SECTIONS["channel, token"]], ids=["blocks", "channel"])
def test_whole_experts_of_ranks_add_up(section: dict[str, Any], tmp_path: Path) -> None:
    found = open_checkpoint(fp8_checkpoint(tmp_path / "m", section, **SIZES))
    compare_experts(WeightLoader(found.tensors, torch.float32, CPU, quantization=found.quantization), keeps_fp8=True)

    def parts(group: Group | None) -> Tensor:
        shard = None if group is None else ModelShard.of(found.config, group, "experts")
        loader = WeightLoader(found.tensors, torch.float32, CPU, shard=shard, quantization=found.quantization)
        return loader.stacked_experts(NAMES, "silu")(*choices())

    both = [parts(ThreadGroup(rank, 2, None)) for rank in range(2)]  # type: ignore[arg-type]
    torch.testing.assert_close(both[0] + both[1], parts(None))


@pytest.mark.gpu
@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_experts_of_a_gpu_are_those_of_a_cpu(section: dict[str, Any], tmp_path: Path) -> None:
    """In float32. Other layers are not quantised."""
    found = open_checkpoint(fp8_checkpoint(tmp_path / "m", without_attention(section), **SIZES))
    tokens, cuda = torch.arange(1, 41), torch.device("cuda")
    expected = build_decoder(found.config, found.tensors, 64, torch.float64, CPU, quantization=found.quantization)
    decoder = build_decoder(
        found.config, found.tensors, 64, torch.float32, cuda, "triton", quantization=found.quantization
    )
    with torch.inference_mode():
        cache, logits = decoder.new_cache(40, torch.float32), []
        for start, size in ((0, 30), (30, 1), (31, 9)):
            batch = batch_of([Span(range(5), start, size)], 8, cuda)
            hidden, _ = decoder.forward(tokens[start : start + size].to(cuda), batch, cache)
            logits.append(decoder.logits(hidden).double().cpu())
        wanted = piecewise_logits(expected, tokens.tolist(), [40], torch.float64)
    torch.testing.assert_close(torch.cat(logits), wanted, atol=2e-3, rtol=2e-3)


def test_experts_that_are_quantised_while_loading(tmp_path: Path) -> None:
    found = open_checkpoint(write_checkpoint(tmp_path / "m", **SIZES))
    compare_experts(WeightLoader(found.tensors, torch.float32, CPU, quantization=ON_LOAD), keeps_fp8=True)


def choices() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and the weights and numbers of their experts."""
    x_TE = torch.randn(7, 160, generator=torch.Generator().manual_seed(1))
    weights_TK = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    return x_TE, weights_TK, torch.rand(7, 5, generator=torch.Generator().manual_seed(3)).topk(2).indices.int()


def compare_experts(loader: WeightLoader, *, keeps_fp8: bool) -> None:
    given = choices()
    stacked = loader.stacked_experts(NAMES, "silu")
    expected = loader.experts(NAMES, "silu")(*given)
    torch.testing.assert_close(stacked(*given), expected, rtol=1e-4, atol=1e-4)
    in_fp8 = [stacked.weights.gate_up_XFE.dtype, stacked.weights.down_XEI.dtype]
    assert in_fp8 == [torch.float8_e4m3fn if keeps_fp8 else torch.float32] * 2


def test_parts_go_to_their_place() -> None:
    """Gate and up follow each other, and each has its own scales."""
    parts = {name: (torch.full((2, 4), i).to(torch.float8_e4m3fn), torch.full((2, 1), i / 2)) for i, name in
             enumerate("abcd")}  # fmt: skip
    values, scales = stack_quantised([("a", "b"), ("c", "d")], parts.__getitem__, CPU)
    assert values.dtype == torch.float8_e4m3fn
    assert values[:, :, 0].float().tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert scales[:, :, 0].tolist() == [[0, 0, 0.5, 0.5], [1, 1, 1.5, 1.5]]


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path / "m", QWEN, **SIZES)
    state = load_file(model / "model.safetensors")
    state[f"{EXPERT}.up_proj.weight"].view(torch.uint8)[3, 5] = 0x7F
    save_file(state, model / "model.safetensors")
    found = open_checkpoint(model)
    loader = WeightLoader(found.tensors, torch.float32, CPU, quantization=found.quantization)
    with pytest.raises(ModelError, match=r"experts\.3\.up_proj\.weight has values that are no numbers"):
        compare_experts(loader, keeps_fp8=True)


def test_experts_of_a_layer_are_all_in_fp8_or_none(tmp_path: Path) -> None:
    section = compressed(ignore=["lm_head", f"{EXPERT}.down_proj"])
    found = open_checkpoint(fp8_checkpoint(tmp_path / "m", section, **SIZES))
    loader = WeightLoader(found.tensors, torch.float32, CPU, quantization=found.quantization)
    with pytest.raises(ModelError, match=r"is in FP8, and .*experts\.3\.down_proj of the same layer is not"):
        compare_experts(loader, keeps_fp8=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{EXPERT}.up_proj.weight_scale_inv": None}, f"missing: {EXPERT}.up_proj.weight_scale_inv"),
        ({f"{EXPERT}.up_proj.weight_scale_inv": torch.ones(2, 1)}, "wrong shape"),
        ({f"{EXPERT}.up_proj.weight_scale_inv": torch.zeros(2, 2)}, "no scales"),
        ({f"{EXPERT}.up_proj.weight": torch.ones(136, 160)}, f"{EXPERT}.up_proj.weight is float32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Tensor | None], words: str, tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path / "m", QWEN, **SIZES)
    state = load_file(model / "model.safetensors") | change
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, model / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_checkpoint(model)
    assert words in caught.value.message


@pytest.mark.parametrize("projection", ["gate_proj", "w1"])
def test_layers_of_a_mixture_that_are_in_fp8(projection: str) -> None:
    """Projections of Mixtral's experts have other names. Routers are not quantised."""
    assert ON_LOAD.covers(f"model.layers.0.mlp.experts.11.{projection}")
    assert ON_LOAD.covers("model.layers.0.mlp.shared_expert.up_proj")
    for router in ("mlp.gate", "mlp.shared_expert_gate", "block_sparse_moe.gate", "mlp.router"):
        assert not ON_LOAD.covers(f"model.layers.0.{router}")


@pytest.mark.parametrize(
    ("section", "device", "words"),
    [
        ("blocks", "cpu", "inputs of experts stay in float32; the experts are dequantised to float32 while loading"),
        ("blocks", "cuda", "inputs of experts stay in float32"),
        ("tensor, static", "cuda", "stay in float32, and the checkpoint's scales of them are not used"),
        ("weights alone", "cuda", None),
    ],
)
def test_notes(section: str, device: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found, notes = open_checkpoint(fp8_checkpoint(tmp_path / "m", SECTIONS[section], **SIZES)), []
    resolve_quantization(load_config(None, ["model.target=m"]), found, torch.device(device), torch.float32, notes)
    assert [note.endswith(words or "lm_head") for note in notes] == [False, True] if words else [True]


BLOCKS = Quantization(method="fp8", weights="block", inputs="block", block=(128, 128))


@pytest.mark.parametrize("quantization", [ON_LOAD, BLOCKS])
def test_bytes_of_an_expert(quantization: Quantization) -> None:
    """A byte for each weight, and the scales of their rows or groups: here 2048 or 768 inputs have 16 or 6 groups."""
    config, cuda, bf16 = random_config("random:qwen3-30b-a3b"), torch.device("cuda"), torch.bfloat16
    groups, of_down = (16, 6) if quantization.block else (1, 1)
    scales = 2 * 768 * groups + 2048 * of_down
    saved = saved_of_experts(quantization, config, cuda, bf16)
    assert math.isclose(saved, 1 - 4 * scales / (3 * 768 * 2048))
    assert saved_of_experts(quantization, config, CPU, bf16) == 0
    assert saved_of_experts(chosen("none", quantization), config, cuda, bf16) == 0
    assert saved_of_experts(quantization, random_config("random:llama-3-8b"), cuda, bf16) == 0
    experts = 48 * 128 * (3 * 768 * 2048)
    others = saved_bytes(quantization, config, cuda, bf16) - experts * saved
    attention = sum(math.prod(s) for n, s in expected_tensors(config).items() if "_proj" in n and "experts" not in n)
    assert 0.95 * attention < others < attention


def test_a_random_model_is_quantised_while_loading() -> None:
    options = ["model.target=random:tiny-experts", "speculation.method=none"]
    assert texts(*options, "model.quantization=fp8") == texts(*options, "model.quantization=fp8")
    run = resolve(load_config(None, [*options, "engine.device=cpu", "model.quantization=fp8"]))
    assert run.quantization is ON_LOAD
    assert run.expert_itemsize == run.dtype.itemsize, "a CPU dequantises them"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_with_a_part_of_each_expert_in_fp8_are_refused(device: str, tmp_path: Path) -> None:
    found = open_checkpoint(fp8_checkpoint(tmp_path / "m", QWEN, **SIZES))
    options = ["model.target=m", "engine.tensor_parallel=2"]
    with pytest.raises(ConfigError, match="only if each is on one rank"):
        check_experts("model.target", found, load_config(None, options), torch.device(device))
    check_experts("model.target", found, load_config(None, options), torch.device(device), "experts")
    dequantised = load_config(None, [*options, "model.quantization=none"])
    check_experts("model.target", found, dequantised, CPU)


def test_experts_in_mxfp4_do_not_become_fp8() -> None:
    options = ["model.target=random:tiny-gpt-oss", "speculation.method=none", "engine.device=cpu"]
    with pytest.raises(ConfigError, match="in MXFP4 as they are, not in FP8") as caught:
        resolve(load_config(None, [*options, "model.quantization=fp8"]))
    assert caught.value.hint == "leave model.quantization out"
