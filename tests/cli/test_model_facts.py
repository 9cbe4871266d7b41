"""`specbatch models inspect`: facts of a model without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.cli.model_facts import inspected
from specbatch.errors import ModelError
from tests.block_reference import random_tensors, write_drafter
from tests.eagle_reference import E, head_tensors, random_target, write_head
from tests.integer_checkpoints import AWQ, integer_checkpoint
from tests.models.blocks.test_reference import CASES, described
from tests.tiny_checkpoint import write_checkpoint


def facts_of(path: Path, draft: Path | None = None) -> dict[str, str]:
    return dict(inspected(path, draft))


def test_facts_of_a_native_model(tmp_path: Path) -> None:
    facts = facts_of(write_checkpoint(tmp_path, sliding_window=16, model_type="mistral", a_new_key=1))
    assert facts["model.backend"] == "native (mistral)"
    assert facts["layers"] == "2 of 32, with 4 query heads, 2 key/value heads of 8; windows of 16 tokens"
    assert facts["vocabulary"] == "264 tokens; a text ends with [0]"
    assert facts["KV cache"] == "0.1 KiB a token in bfloat16"
    assert facts["tokenizer"] == "264 tokens, a chat template"
    assert facts["ignored keys"] == "a_new_key"
    assert "quantised" not in facts


def test_a_quantised_model_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.cli.model_facts.GIB", 1 << 10)
    integer_checkpoint(
        tmp_path / "awq", AWQ, hidden_size=160, intermediate_size=192, num_attention_heads=5, num_key_value_heads=5
    )
    other = write_checkpoint(tmp_path / "other", vocab_size=300)
    same = write_checkpoint(tmp_path / "same")
    facts = facts_of(tmp_path / "awq")
    assert facts["weights"].endswith("; 925.0 GiB in bfloat16")
    assert facts["quantised"].startswith("int4 (awq")
    # Each output of a layer has 256 numbers, and 3 bytes for each 32 of its 160 or 192 inputs.
    outputs, down_outputs = 2 * (4 * 160 + 2 * 192), 2 * 160
    plain = 925 * 1024 - 2 * (outputs * 160 + down_outputs * 192)
    left = plain + outputs * (128 + 5 * 3) + down_outputs * (128 + 6 * 3)
    assert facts["quantised"].endswith(f"; {left / 1024:.1f} GiB on CUDA if layers stay so")
    assert facts_of(tmp_path / "awq", same)["draft same"] == "speculation.method: draft_model"
    assert "does not fit: " in facts_of(tmp_path / "awq", other)["draft other"]


def test_a_model_of_transformers_and_one_without_a_tokenizer(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OPTConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "opt")
    facts = facts_of(tmp_path / "opt")
    assert facts["model.backend"] == "transformers (opt)"
    assert "engine.tensor_parallel" in facts["runs"]
    assert facts["tokenizer"].startswith("error: ")
    assert "has no tokenizer" in facts["tokenizer"]


def test_a_model_that_does_not_run(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("{", '{"is_causal": false, ', 1))
    with pytest.raises(ModelError, match="is_causal"):
        inspected(tmp_path)
    done = CliRunner().invoke(app, ["models", "inspect", str(tmp_path)])
    assert done.exit_code == 2
    assert "is_causal" in done.output
    (path / "config.json").write_text(config)
    done = CliRunner().invoke(app, ["models", "inspect", str(tmp_path)])
    assert done.exit_code == 0
    assert "native (llama)" in done.stdout


MTP = "speculators_model_type"


def test_facts_of_draft_heads(tmp_path: Path) -> None:
    """Their own files are enough; with a model, they say whether a head fits."""
    blocks = write_drafter(
        tmp_path / "block", random_tensors(described(CASES["speculators, DSpark"])), CASES["speculators, DSpark"].config
    )
    (tmp_path / "block" / "README.md").write_text("# A drafter\n\nTrained with thinking disabled.\n")
    facts = facts_of(blocks)
    assert facts["draft"] == f"block drafter (dspark), 2 layers of {E}, Markov head"
    assert facts["use"] == f"speculation.method: block, speculation.draft: {blocks}"
    assert facts["target"].startswith(
        "org/target; a model of 32 with 12 tokens, of which it reads the inputs of layers 2, 5, 7"
    )
    assert facts["mode"] == "its README.md says: Trained with thinking disabled."
    assert facts["block"] == "5 positions in one pass, up to 5 drafts a round"
    assert facts["vocabulary"] == "drafts only 8 of 12 tokens"
    assert "does not" not in facts, "tune tries its trees, too"
    assert facts["confidence"] == "a head that says how likely drafts are, for speculation.verify_budget"
    eagle = facts_of(write_head(tmp_path / "eagle", head_tensors("eagle3")))
    assert eagle["draft"] == f"EAGLE-3 head, 1 layer of {E}"
    assert "L - 3 of L" in eagle["target"]
    assert "not said by its files" in eagle["mode"]
    newer = head_tensors("eagle3", input_norms="each") | {"mask_hidden": torch.zeros(1, 1, 3 * E)}
    parallel = facts_of(write_head(tmp_path / "peagle", newer, fc_norm=True, mask_token_id=3))
    assert parallel["draft"] == f"P-EAGLE head, 1 layer of {E}"
    random_target(tmp_path / "model").tensors.close()
    model = tmp_path / "model"
    assert facts_of(model, tmp_path / "eagle")["draft eagle"] == "speculation.method: eagle3"
    assert facts_of(model, tmp_path / "peagle")["draft peagle"] == "speculation.method: peagle"
    assert "vocabulary has 12 tokens, the target's 61" in facts_of(model, blocks)["draft block"]
    layer = write_drafter(tmp_path / "mtp", {"mtp_layers.0.input_proj.weight": torch.zeros(2, 4)}, {MTP: "mtp"})
    assert facts_of(layer)["draft"].startswith("mtp, a layer for multi-token prediction")
    other = write_drafter(tmp_path / "other", {"fc.weight": torch.zeros(2, 4)}, {MTP: "mtp"})
    with pytest.raises(ModelError, match="has no layer for multi-token prediction"):
        facts_of(other)
    done = CliRunner().invoke(app, ["models", "inspect", str(blocks)])
    assert done.exit_code == 0
    assert "block drafter (dspark)" in done.stdout
