"""Scales of keys and values in an FP8 cache, in every backend, from a checkpoint or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbatch.attention.cpu import TorchAttention
from specbatch.attention.interface import AttentionBackend
from specbatch.attention.triton import PagedAttention
from specbatch.cache.pages import KVScales
from specbatch.config_load import load_config
from specbatch.errors import ModelError
from specbatch.models.config import expected_tensors
from specbatch.models.decoder import Decoder
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.weight_loader import WeightLoader
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.oracle.spans import Span, batch_of
from tests.tiny_checkpoint import write_checkpoint
from tests.tiny_models import CPU, VOCAB, RandomTensors, tiny_config

F64 = torch.float64
K_SHIFTS, V_SHIFTS = (2.0**9, 2.0**5), (2.0**7, 2.0**-4)  # of each layer


class Shifted(RandomTensors):
    """The same model with smaller keys and values."""

    def load(self, name: str) -> Tensor:
        if "self_attn" not in name:
            return super().load(name)
        layer, projection = int(name.split(".")[2]), name.split(".")[4]
        k, v = K_SHIFTS[layer], V_SHIFTS[layer]
        return super().load(name) * {"q_proj": k, "k_proj": 1 / k, "v_proj": 1 / v, "o_proj": v}[projection]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_scales_are_divided_and_multiplied_by(name: str) -> None:
    config = tiny_config(2)
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    tokens_T = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0))

    def logits(tensors: type[RandomTensors], scales: Sequence[KVScales] = ()) -> Tensor:
        weights = WeightLoader(tensors(expected_tensors(config), 0), F64, CPU)
        backend: AttentionBackend = (
            TorchAttention(*sizes, CPU, chunk=16) if name == "torch" else PagedAttention(*sizes, F64, CPU)
        )
        model = Decoder(config, weights, backend, 64, kv_scales=scales)
        batch = batch_of([Span(range(10), 0, 40)], 4, CPU)
        hidden_TE, _ = model.forward(tokens_T, batch, model.new_cache(44, torch.float8_e4m3fn))
        return model.logits(hidden_TE)

    scales = [KVScales(1 / k, 1 / v) for k, v in zip(K_SHIFTS, V_SHIFTS, strict=True)]
    plain = logits(RandomTensors)
    torch.testing.assert_close(logits(Shifted, scales), plain)
    assert not torch.allclose(logits(Shifted), plain, atol=1e-3)


FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
COMPRESSED["kv_cache_scheme"] = FP8_SCHEME
MODELOPT = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}


def checkpoint(folder: Path, section: dict[str, Any] | None, scales: dict[str, Tensor]) -> Path:
    write_checkpoint(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **({"quantization_config": section} if section else {})}))
    file = folder / "model.safetensors"
    own = {f"model.layers.{name}": scale for name, scale in scales.items()}
    save_file({**load_file(file), **own}, file)
    return folder


@pytest.mark.parametrize(
    ("section", "names"),
    [(COMPRESSED, ("k_scale", "v_scale")), (MODELOPT, ("k_proj.k_scale", "v_proj.v_scale"))],
)
def test_scales_of_a_checkpoint(section: dict[str, Any], names: tuple[str, str], tmp_path: Path) -> None:
    scales = {f"1.self_attn.{name}": torch.tensor(value) for name, value in zip(names, (0.5, 0.25), strict=True)}
    model = open_checkpoint(checkpoint(tmp_path, section, scales))
    assert model.kv_scales == (KVScales(), KVScales(0.5, 0.25))
    assert model.quantization is None


@pytest.mark.parametrize("section", [None, {**COMPRESSED, "kv_cache_scheme": {**FP8_SCHEME, "type": "int"}}])
def test_scales_of_another_cache_are_not_used(section: dict[str, Any] | None, tmp_path: Path) -> None:
    model = checkpoint(tmp_path, section, {"0.self_attn.k_scale": torch.tensor(0.5)})
    assert open_checkpoint(model).kv_scales == ()


@pytest.mark.parametrize("scale", [torch.ones(2), torch.tensor(0.0), torch.tensor(torch.nan)])
def test_what_is_no_scale(scale: Tensor, tmp_path: Path) -> None:
    model = checkpoint(tmp_path, COMPRESSED, {"0.self_attn.v_scale": scale})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.v_scale"):
        open_checkpoint(model)


def test_a_run_uses_them_and_speculation_changes_nothing(tmp_path: Path) -> None:
    """On a CPU, the target with scales, and the same model as the draft."""
    scales = {f"{i}.self_attn.{name}_scale": torch.tensor(40.0) for i in (0, 1) for name in "kv"}
    model = checkpoint(tmp_path, COMPRESSED, scales)

    def texts(*sets: str) -> list[list[int]]:
        options = [f"model.target={model}", "engine.device=cpu", "engine.kv_cache_tokens=1024", *sets]
        run = resolve(load_config(None, options))
        assert any("checkpoint's scales" in note for note in run.notes) == ("engine.kv_dtype=fp8_e4m3" in sets)
        engine = build_engine(run)
        for i, prompt in enumerate(([7, 8, 9, 7, 8, 9, 7, 8], [20, 5, 99], [3])):
            engine.submit(Request(i, prompt, SamplingParams(max_tokens=14, ignore_eos=True), RngKey(0, i, 0)))
        done: dict[int, list[int]] = {}
        while len(done) < 3:
            done |= {c.request_id: list(c.token_ids) for c in engine.step()}
        return [done[i] for i in range(3)]

    fp8 = "engine.kv_dtype=fp8_e4m3"
    plain = texts("speculation.method=none", fp8)
    assert plain == texts("speculation.method=ngram", "engine.max_batch_size=1", fp8)
    assert plain == texts("speculation.method=draft_model", f"speculation.draft={model}", fp8)
    assert plain != texts("speculation.method=none")
