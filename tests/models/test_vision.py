"""Models that also read images: logits of their text part are those of transformers' whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from specbatch.errors import ModelError
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.setup.build import build_decoder
from tests.engine.test_parity import GEMMA, LENGTH, NO_EOS, PIECES, SIZES
from tests.fp8_checkpoints import compressed, fp8_checkpoint
from tests.oracle.spans import piecewise_logits

CLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**CLIP, "image_size": 28, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
QWEN_VISION = {
    **{"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 14, "out_hidden_size": 48},
    **{"embed_dim": 16, "intermediate_size": 16, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]},
}
IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config={**SIZES, **GEMMA, "sliding_window": 9, "sliding_window_pattern": 2},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=90,
    ),
    "mistral3": Mistral3Config(
        text_config=MistralConfig(**SIZES, sliding_window=None, head_dim=8),
        vision_config={**VISION, "head_dim": 8, "model_type": "pixtral"},
        image_token_index=90,
        tie_word_embeddings=False,
    ),
    "ministral3": Mistral3Config(
        text_config=Ministral3Config(**SIZES, **NO_EOS, head_dim=8),
        vision_config={**VISION, "head_dim": 8, "model_type": "pixtral"},
        image_token_index=90,
        tie_word_embeddings=False,
    ),
    "llava": LlavaConfig(
        text_config=LlamaConfig(**SIZES),
        vision_config={**VISION, "projection_dim": 16, "model_type": "clip_vision_model"},
        image_token_index=90,
    ),
    "llava-next": LlavaNextConfig(
        text_config=MistralConfig(**SIZES, sliding_window=9, head_dim=8),
        vision_config={**VISION, "projection_dim": 16, "model_type": "clip_vision_model"},
        image_token_index=90,
        image_grid_pinpoints=[[28, 28]],
    ),
    "internvl": InternVLConfig(
        text_config=Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
        vision_config={**CLIP, "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=90,
    ),
    "smolvlm": SmolVLMConfig(
        text_config=LlamaConfig(**SIZES, pad_token_id=None),
        vision_config={**VISION, "model_type": "smolvlm_vision"},
        image_token_id=90,
        pad_token_id=0,
        scale_factor=2,
    ),
    "idefics3": Idefics3Config(
        text_config=LlamaConfig(**SIZES, pad_token_id=None),
        vision_config={**VISION, "model_type": "idefics3_vision"},
        image_token_id=90,
        pad_token_id=0,
    ),
    "qwen2-vl": Qwen2VLConfig(text_config={**SIZES, "rope_parameters": MROPE}, vision_config=QWEN_VISION, **IDS),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": MROPE}, vision_config=QWEN_VISION, **IDS, tie_word_embeddings=True
    ),
    "qwen3-vl": Qwen3VLConfig(
        text_config={**SIZES, "head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config=QWEN_VISION,
        **IDS,
    ),
}
# Names as in files of transformers before version 5.
OLD_NAMES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


def written(name: str, path: Path) -> torch.nn.Module:
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return model


def check(path: Path, model: torch.nn.Module) -> None:
    tokens = torch.randint(0, 90, (LENGTH,)).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
        checkpoint = open_checkpoint(path)
        decoder = build_decoder(checkpoint.config, checkpoint.tensors, LENGTH, torch.float32, torch.device("cpu"))
        assert expected.std() > 0.1, "logits too flat to compare"
        for pieces in PIECES.values():
            found = piecewise_logits(decoder, tokens, pieces, torch.float32)
            assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.wide) for name in CONFIGS]
)
def test_text_parts(name: str, tmp_path: Path) -> None:
    model = written(name, tmp_path)
    check(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.text_of == CONFIGS[name].model_type
    assert not checkpoint.ignored


@pytest.mark.wide
@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_names_of_older_files(name: str, tmp_path: Path) -> None:
    model = written(name, tmp_path)
    state = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        old = next((new + key.removeprefix(old) for old, new in OLD_NAMES.items() if key.startswith(old)), key)
        state[old] = tensor
    save_file(state, tmp_path / "model.safetensors")
    check(tmp_path, model)


@pytest.mark.wide
def test_keys_of_older_files_of_qwen(tmp_path: Path) -> None:
    """The keys of the text part are among the others, and its tensors have no beginning of their own."""
    model = written("qwen2.5-vl", tmp_path)
    raw: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **raw}))
    state = load_file(tmp_path / "model.safetensors")
    save_file(
        {key.replace("language_model.", ""): value for key, value in state.items()}, tmp_path / "model.safetensors"
    )
    check(tmp_path, model)


def test_a_text_part_in_fp8(tmp_path: Path) -> None:
    """Scales have the names of their weights, and the section of the quantization is the whole model's."""
    plain = fp8_checkpoint(tmp_path / "plain", compressed())
    whole = tmp_path / "whole"
    whole.mkdir()
    raw = json.loads((plain / "config.json").read_text())
    section = raw.pop("quantization_config")
    config = {"model_type": "llava", "text_config": raw, "quantization_config": section}
    (whole / "config.json").write_text(json.dumps(config))
    state = {f"language_model.{name}": tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(state | {"vision_tower.weight": torch.ones(2)}, whole / "model.safetensors")
    expected, found = open_checkpoint(plain), open_checkpoint(whole)
    assert (found.config, found.quantization, found.text_of) == (expected.config, expected.quantization, "llava")
    assert found.tensors.shapes() == expected.tensors.shapes()
    for name in expected.tensors.shapes():
        assert torch.equal(found.tensors.load(name).float(), expected.tensors.load(name).float()), name


def test_a_text_part_of_no_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {"model_type": "opt"}}))
    with pytest.raises(ModelError, match="'opt'"):
        open_checkpoint(tmp_path)
