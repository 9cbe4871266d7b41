"""The check at the start finds each layer that is broken on purpose, and names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specbatch.attention.cpu import TorchAttention
from specbatch.errors import ModelError
from specbatch.models.fallback.check import StartCheck
from specbatch.models.fallback.decoder import TransformersDecoder
from specbatch.models.formats.checkpoint import open_checkpoint
from tests.models.fallback.variants import write_model
from tests.tiny_models import CPU

Break = Callable[[Any, Any], None]  # gets the model and, by layer, the places of its attention


def _parts(folder: Path, dtype: torch.dtype) -> tuple[Any, StartCheck, TransformersDecoder]:
    checkpoint = open_checkpoint(folder, "transformers")
    config, source = checkpoint.config, checkpoint.tensors
    model, calls = source.model(dtype, CPU), source.probed.calls  # type: ignore[attr-defined]
    check = StartCheck(model, config, calls)
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    backend = TorchAttention(*sizes, CPU, scale=config.attention_scale, soft_cap=config.attention_soft_cap)
    return model, check, TransformersDecoder(model, config, calls, backend, 512)


def _rope(model: nn.Module, places: list[Any]) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("sliding_attention_inv_freq"):
            buffer[1:2].mul_(1.5)


def _scale(model: nn.Module, places: list[Any]) -> None:
    places[2]._scale_ratio = 2.0


def _window(model: nn.Module, places: list[Any]) -> None:
    places[2]._window = places[2]._window - 1


def _no_window(model: nn.Module, places: list[Any]) -> None:
    places[2]._window = None


def _wrong_layer(model: nn.Module, places: list[Any]) -> None:
    places[2]._layer = 3  # whose keys layer 3 then writes over, before the next token reads them


def _norm(model: Any, places: list[Any]) -> None:
    norm = model.model.layers[2].input_layernorm
    norm.function = lambda rows: 1.1 * rows


def _head(model: Any, places: list[Any]) -> None:
    model.config.final_logit_softcapping = 1.1


BREAKS: dict[str, tuple[Break, str]] = {
    "rope table": (_rope, "layer 0"),
    "scale": (_scale, "layer 2"),
    "window": (_window, "layer 2"),
    "no window": (_no_window, "layer 2"),
    "layer of the cache": (_wrong_layer, "layer 2"),
    "norm": (_norm, "layer 2"),
    "soft cap of logits": (_head, "the head"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"layer_types": kinds, "final_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}
    return write_model(tmp_path_factory.mktemp("gemma3"), "gemma3_text", changes)


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_found(name: str, folder: Path) -> None:
    break_it, part = BREAKS[name]
    model, check, decoder = _parts(folder, torch.float32)
    check.compare(decoder, model)
    places = [layer.self_attn.place for layer in model.model.layers]
    break_it(model, places)
    with pytest.raises(ModelError) as caught:
        check.compare(decoder, model)
    assert f"{part} " in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["rope table", "scale", "no window", "norm"])
def test_in_bfloat16(name: str, folder: Path) -> None:
    model, check, decoder = _parts(folder, torch.bfloat16)
    check.compare(decoder, model)
    BREAKS[name][0](model, [layer.self_attn.place for layer in model.model.layers])
    with pytest.raises(ModelError):
        check.compare(decoder, model)
