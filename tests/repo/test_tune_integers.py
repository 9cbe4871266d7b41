"""scripts/bench/tune_integers.py: the tiles that it tries, and the table that it prints of what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from specbatch.kernels.triton.integers.tile import IntegerTile, fitting

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("scripts")


def test_the_table_is_source_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tune_integers import print_table

    tile = IntegerTile(8, 16, 64, 6, 1, prefetch=512)
    best = {"how": "best", "shape": "a-model", "gemm": "qkv", "weight": [96, 64]}
    lines = [{**best, "tokens": 64, "tile": None}, {**best, "tokens": 1, "tile": asdict(tile)}]
    lines += [{**best, "tokens": 4, "tile": asdict(tile)}, {"how": "bf16", "us": 1.0}]
    file = tmp_path / "tiles.json"
    file.write_text("\n".join(map(json.dumps, lines)))
    print_table(file)
    found: dict[str, object] = {}
    source = capsys.readouterr().out.replace(": dict[tuple[int, int], dict[int, IntegerTile | None]]", "")
    exec(source, {"IntegerTile": IntegerTile}, found)
    assert found["_MEASURED"] == {(96, 64): {4: tile, 64: None}}


def test_the_tiles_fit_into_shared_memory() -> None:
    from tune_integers import ROWS, Gemm, candidates

    for outputs in (4096, 6144, 28672):
        for tokens in ROWS:
            tiles = list(candidates(Gemm("a", "linear", outputs, 4096), tokens))
            assert tiles == [fitting(tile, 4, 232_448) for tile in tiles], (outputs, tokens)
            assert len(set(tiles)) == len(tiles)
