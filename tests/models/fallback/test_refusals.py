"""Tests of models that transformers' code cannot compute over a paged cache. They are refused before weights are read,
which the folders of these tests lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, ModelError
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.setup.resolve import resolve
from tests.models.fallback.variants import REFUSED, small_config, write_model

# One for each reason.
_ALWAYS = ("bloom", "phi3-longrope", "gemma4_text", "minimax", "diffllama", "doge", "llama4_text", "bert")
NAMES = [pytest.param(name, marks=[] if name in _ALWAYS else [pytest.mark.wide]) for name in REFUSED]


@pytest.mark.parametrize("name", NAMES)
def test_models_that_a_paged_cache_cannot_hold(name: str, tmp_path: Path) -> None:
    model_type, changes, reason = REFUSED[name]
    small_config(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path, "transformers")
    assert reason in caught.value.message
    assert f"model_type '{model_type}'" in caught.value.message
    assert caught.value.hint


def _folder(folder: Path, **changes: Any) -> Path:
    """Write the configuration of a model without a native family. `changes`: keys of the file."""
    small_config("codegen").save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["CodeGenForCausalLM"]} | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
        ({"architectures": ["CodeGenForSequenceClassification"]}, "CodeGenForSequenceClassification"),
        ({"model_type": "own_model", "auto_map": {"AutoConfig": "config.Own"}}, "never runs such code"),
        ({"model_type": "own_model"}, "cannot read config.json"),
        ({"model_type": ["codegen"]}, "cannot read config.json"),
        ({"architectures": 5}, "architectures must be a list of names"),
        ({"n_positions": "long"}, "n_positions"),
    ],
)
def test_configurations(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    for backend in ("auto", "transformers"):
        with pytest.raises(ModelError) as caught:
            open_checkpoint(_folder(tmp_path, **changes), backend)  # type: ignore[arg-type]
        assert words in caught.value.message


def test_models_that_also_read_images(tmp_path: Path) -> None:
    small_config("gemma3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="also reads images") as caught:
        open_checkpoint(tmp_path, "transformers")
    assert "own code runs its text part" in str(caught.value.hint)


def test_auto_takes_transformers_where_no_family_reads_the_model(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    assert not open_checkpoint(folder).config.is_native
    with pytest.raises(ModelError, match=r"'codegen' is not supported by model\.backend: native") as caught:
        open_checkpoint(folder, "native")
    assert "model.backend: transformers" in str(caught.value.hint)


def test_the_other_backend_is_named_where_it_runs_the_model(tmp_path: Path) -> None:
    """A family can lack what transformers' code has, such as the norms of Command R+."""
    small_config("cohere", use_qk_norm=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="use_qk_norm") as caught:
        open_checkpoint(tmp_path)
    assert "set model.backend: transformers" in str(caught.value.hint)
    assert not open_checkpoint(tmp_path, "transformers").config.is_native
    with pytest.raises(ModelError, match="use_qk_norm") as caught:
        open_checkpoint(tmp_path, "native")
    assert "model.backend" not in str(caught.value.hint)


def test_it_is_not_named_where_it_does_not_run_the_model(tmp_path: Path) -> None:
    small_config("stablelm", qk_layernorm=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="qk_layernorm") as caught:
        open_checkpoint(tmp_path)
    assert "model.backend" not in str(caught.value.hint)


def test_the_reason_is_given_where_neither_runs_the_model(tmp_path: Path) -> None:
    small_config("bloom").save_pretrained(tmp_path)
    for backend in ("auto", "native"):
        with pytest.raises(ModelError, match=r"'bloom' is not supported: .* another attention function"):
            open_checkpoint(tmp_path, backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("engine.tensor_parallel=2", "engine.tensor_parallel: 2"),
        ("engine.deterministic=true", "engine.deterministic"),
        ("engine.two_batch_overlap=on", "engine.two_batch_overlap: on"),
        ("model.quantization=fp8", "model.quantization: fp8"),
    ],
)
def test_options_that_need_layers_of_specbatch(option: str, words: str) -> None:
    options = ["model.target=random:tiny", "model.backend=transformers", "engine.device=cpu", option]
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(None, options))
    assert words in caught.value.message
    assert "model.backend" in caught.value.message


def test_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"GGUF files do not run with model\.backend: transformers"):
        open_checkpoint(tmp_path / "model.gguf", "transformers")


def test_tensors_that_are_missing(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "codegen", {})
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "fc_in.weight" in name)
    save_file(
        {key: value for key, value in tensors.items() if key != name}, folder / "model.safetensors", {"format": "pt"}
    )

    with pytest.raises(ModelError, match=f"missing keys {name}"):
        open_checkpoint(folder).tensors.model(torch.float32, torch.device("cpu"))  # type: ignore[attr-defined]
