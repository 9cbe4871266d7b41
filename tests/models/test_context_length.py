"""How long a row may be where rope scaling stretches the model's context, from config.json to a finished row."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.setup.resolve import resolve
from tests.tiny_checkpoint import write_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SETS = ["speculation.method=none", "engine.device=cpu", "engine.max_batch_size=2"]


def test_the_run_and_its_cache_are_sized_for_the_stretched_length(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", max_position_embeddings=160, rope_scaling=YARN)
    run = resolve(load_config(None, [f"model.target={model}", *SETS]))
    assert run.cache.capacity >= run.rows.max_positions == 512
    assert run.cache.num_pages * run.engine.page_size >= 2 * 512
    assert "model.target: rows of up to 512 tokens (yarn scaling: 128 x 4)" in run.notes


def test_nothing_is_said_without_scaling(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    run = resolve(load_config(None, [f"model.target={model}", *SETS]))
    assert run.rows.max_positions == 128
    assert not any("rows of up to" in note for note in run.notes)


def test_a_row_longer_than_max_position_embeddings_is_answered(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", max_position_embeddings=160, rope_scaling=YARN)
    rows = [
        {"prompt_token_ids": [i % 200 + 2 for i in range(size)], "max_tokens": 8, "ignore_eos": True}
        for size in (500, 505)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for setting in [f"model.target={model}", *SETS] for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "d.jsonl"), "-o", str(tmp_path / "o.jsonl"), *words])
    assert done.exit_code == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(r["usage"]["prompt_tokens"], r["usage"]["completion_tokens"]) for r in results] == [(500, 8), (505, 7)]
