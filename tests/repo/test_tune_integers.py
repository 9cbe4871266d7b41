"""scripts/bench/tune_integers.py: the tiles that it tries, and the table that it prints of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbatch.kernels.triton.integers.tile import DirectTile, IntegerTile, fitting, is_direct

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("scripts")


def test_the_table_is_source_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tune_integers import fields_of, print_table

    tile, direct = IntegerTile(8, 16, 64, 6, 1, prefetch=512), DirectTile(8, 16, 8, ahead=False)
    best = {"how": "best", "shape": "a-model", "gemm": "qkv", "weight": [96, 64]}
    lines = [{**best, "tokens": 64, "tile": None}, {**best, "tokens": 2, "tile": fields_of(tile)}]
    lines += [
        {**best, "tokens": 4, "tile": fields_of(tile)},
        {**best, "tokens": 1, "tile": fields_of(direct)},
        {"how": "bf16", "us": 1.0},
    ]
    file = tmp_path / "tiles.json"
    file.write_text("\n".join(map(json.dumps, lines)))
    print_table(file)
    found: dict[str, object] = {}
    source = capsys.readouterr().out.replace(": dict[tuple[int, int], dict[int, Tile | None]]", "")
    exec(source, {"IntegerTile": IntegerTile, "DirectTile": DirectTile}, found)
    assert found["_MEASURED"] == {(96, 64): {1: direct, 4: tile, 64: None}}


def test_the_tiles_fit_into_shared_memory() -> None:
    from tune_integers import ROWS, Gemm, candidates

    for outputs in (4096, 6144, 28672):
        for tokens in ROWS:
            tiles = list(candidates(Gemm("a", "norm", outputs, 4096), tokens))
            assert len(set(tiles)) == len(tiles)
            for tile in tiles:
                if isinstance(tile, DirectTile):
                    assert tokens <= tile.block_m
                    assert is_direct(4096, 128)
                else:
                    assert tile == fitting(tile, 4, 232_448), (outputs, tokens)
