"""What does not run with a hybrid is refused by its name before weights are read, and what its states take is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.errors import ConfigError, SpecbatchError
from specbatch.setup.resolve import ResolvedRun, resolve

TARGET = "model.target=random:tiny-hybrid"


def resolved(*sets: str) -> ResolvedRun:
    return resolve(load_config(None, [TARGET, "engine.device=cpu", *sets]))


@pytest.mark.parametrize(
    ("sets", "match"),
    [
        (["engine.tensor_parallel=2"], r"engine\.tensor_parallel: 2 does not run with a hybrid"),
        (["engine.two_batch_overlap=on"], r"engine\.two_batch_overlap: on does not run with a hybrid"),
        (["model.quantization=int4"], r"model\.quantization: int4 does not run with a hybrid"),
        (["speculation.method=eagle", "speculation.draft=random:eagle", "speculation.topk=2"], "drafts trees"),
        (["speculation.method=mtp", "speculation.topk=2"], "topk must be 1 for mtp"),
        (["speculation.method=draft_model", "speculation.draft=random:tiny-hybrid"], "draft is a hybrid"),
        (["speculation.method=mtp", "speculation.draft=random:tiny"], "drafts with a layer of the target"),
    ],
)
def test_refused_by_name(sets: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        resolved(*sets)
    assert caught.value.hint or "topk must be 1" in match


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    from tests.engine.test_hybrid import CONFIGS, write_model

    path = write_model(CONFIGS["qwen3.5"], tmp_path)
    with pytest.raises(SpecbatchError, match=r"model\.adapter is not supported for qwen3_5_text"):
        resolve(load_config(None, [f"model.target={path}", "engine.device=cpu", f"model.adapter={tmp_path}"]))


def test_tune_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 40)
    arguments = ["tune", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.yaml"), "--set", TARGET]
    done = CliRunner().invoke(app, [*arguments, "--set", "engine.device=cpu"])
    assert done.exit_code == 2
    assert "tune does not support hybrids" in done.output


def test_states_are_planned_and_said() -> None:
    run = resolved("engine.max_batch_size=8", "speculation.method=mtp", "speculation.num_steps=3")
    [note] = [note for note in run.notes if "a hybrid, whose state takes" in note]
    assert "for 8 rows and padding" in note
    assert f"for {run.num_checkpoints} checkpoints" in note
    assert run.num_checkpoints == 8
    assert resolved("engine.prefix_cache=false").num_checkpoints == 0


def test_the_published_sizes() -> None:
    """24 layers of 32 heads with 128 x 128 numbers: 50 MB a row, as much as the KV cache of 1,536 tokens."""
    from specbatch.models.pass_weights import PassWeights
    from specbatch.models.random_weights import random_config

    config = random_config("random:qwen3.5-4b")
    assert config.delta is not None
    assert config.delta.matrix_bytes == 50_331_648
    assert len(config.cached_layers) == 8
    assert PassWeights.of_all(config).total == pytest.approx(4.2e9, rel=0.02)
    assert PassWeights.of_all(random_config("random:qwen3.5-9b")).total == pytest.approx(8.95e9, rel=0.02)


def test_states_that_do_not_fit_are_refused_by_their_option() -> None:
    with pytest.raises(ConfigError, match=r"the states of 100000000 rows take .* GiB, and the weights leave") as caught:
        resolved("engine.max_batch_size=100000000")
    assert caught.value.hint == "lower engine.max_batch_size"


def test_a_small_card_has_a_smaller_default_batch() -> None:
    """256 rows of a 9B hybrid have 13 GiB of states, and a card of 24 GiB has 3 GiB left."""
    from specbatch.models.random_weights import random_config
    from specbatch.setup.cache import CacheRequest, default_batch_size
    from specbatch.setup.memory import GIB, CachedModel, Rows

    config, bf16 = random_config("random:qwen3.5-9b"), torch.bfloat16
    assert config.delta is not None
    model = CachedModel.whole(config, packs=False)
    rows = Rows(model.bytes_per_token(bf16), 64, 2, config.max_position_embeddings, 256)
    state_bytes = config.delta.state_sizes(2).line_bytes(bf16)
    wanted = CacheRequest([model], rows, bf16, torch.device("cuda"), 4096, 0.9, (2, 8192), state_bytes=state_bytes)
    batches = {gib: default_batch_size(wanted, gib * GIB, 256) for gib in (24, 48, 80)}
    assert batches == {24: 32, 48: 256, 80: 256}


def test_working_memory_of_prompts_has_the_systems_of_chunks() -> None:
    """They are 4 KiB a token of 32 value heads."""
    from specbatch.models.random_weights import random_config
    from specbatch.setup.memory import estimated_working_bytes

    config = random_config("random:qwen3.5-4b")
    assert config.delta is not None
    values, channels = 32 * 128, (2 * 16 + 32) * 128
    assert config.delta.token_bytes(2) == 2 * (2 * channels + 3 * values + 2 * 32) + 4096
    dense = replace(config, delta=None, intermediate_size=1)
    more = [
        estimated_working_bytes(replace(config, intermediate_size=1), 16, 1, chunk, 2)
        - estimated_working_bytes(dense, 16, 1, chunk, 2)
        for chunk in (8192, 16384)
    ]
    assert more[1] - more[0] == 8192 * (config.delta.token_bytes(2) - 6)
