"""scripts/bench/tune_linear.py: the table that it prints of what was measured."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.kernels.triton.parts.shared_memory import HOPPER_SHARED_BYTES
from specbatch.kernels.triton.skinny.tile import (
    _MEASURED,
    GemmTile,
    fitting,
    gemm_tile_for,
    invariant_tile_for,
    is_skinny,
    shared_of,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("scripts")

CHAINED = {name: asdict(GemmTile("dot", 8, 16, 256, 5, 1, pdl=True)) for name in ("qkv", "o", "gate_up", "down")}
ALONE = asdict(GemmTile("dot", 8, 32, 256, 4, 2))


@pytest.mark.parametrize(
    ("chain_ms", "alone_us", "expected"),
    [
        (0.4, 6.0, 'GemmTile("dot", 8, 16, 256, 5, 1, pdl=True)'),  # slower alone, faster where they start early
        (0.8, 6.0, None),
        (0.8, 4.0, 'GemmTile("dot", 8, 32, 256, 4, 2, pdl=True)'),
        (None, 4.0, 'GemmTile("dot", 8, 32, 256, 4, 2, pdl=True)'),
        (None, 6.0, None),
    ],
)
def test_a_chain_that_is_faster_decides(
    chain_ms: float | None,
    alone_us: float,
    expected: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tune_linear import Geometry, geometries, print_table

    geometry = Geometry.of(geometries()["smollm2-135m"])
    chains: list[dict[str, Any]] = [{"M": 8, "label": "torch and library", "milliseconds": 0.7, "configs": {}}]
    if chain_ms is not None:
        chains.append({"M": 8, "label": "fused, pdl, tuned", "milliseconds": chain_ms, "configs": CHAINED})
    timed = [
        {"product": "o", "M": 8, "config": config, "microseconds": us}
        for config, us in ((None, 5.0), (ALONE, alone_us))
    ]
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"timed": timed, "chains": chains}))
    print_table(geometry, path, with_pdl=True)
    text = capsys.readouterr().out
    ast.parse(text)
    assert "    (576, 576): {  # o" in text, "of the shape that was asked for"
    assert f"        8: {expected}," in text


def test_tiles_of_all_models_fit() -> None:
    """Tiles for each number of tokens fit Hopper's shared memory. Tiles of measured sizes have all their stages."""
    from tune_linear import Geometry, geometries

    found = [Geometry.of(config, ranks) for config in geometries().values() for ranks in (1, 2)]
    found.append(Geometry.of(geometries()["llama-3-70b"], ranks=4))
    gemms = {
        (gemm.weight_shape, gemm.op == "norm_gated")
        for geometry in found
        for gemm in (*geometry.layer.values(), *geometry.others)
    }
    assert {size for size, _ in gemms} >= set(_MEASURED)
    for size, gated in gemms:
        for M in range(1, 129):
            tiles = [invariant_tile_for(M, size[0])]
            if is_skinny(M, *size, torch.bfloat16):
                tiles.append(gemm_tile_for(M, *size, torch.bfloat16))
            for tile in filter(None, tiles):
                fitted = fitting(tile, HOPPER_SHARED_BYTES, gated=gated)
                assert shared_of(fitted, gated=gated) <= HOPPER_SHARED_BYTES - 1024, (M, size, fitted)
                assert size not in _MEASURED or fitted == tile, (M, size, gated)


@pytest.mark.parametrize(("stages", "is_early"), [(4, False), (3, True)])
def test_an_early_start_is_copied_where_it_fits(
    stages: int, is_early: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tune_linear import Geometry, geometries, print_table

    chain = {name: {**config, "early": True} for name, config in CHAINED.items()}
    chains = [
        {"M": 64, "label": label, "milliseconds": ms, "configs": chain}
        for label, ms in (("torch and library", 0.7), ("fused, pdl, tuned", 0.4))
    ]
    alone = asdict(GemmTile("dot", 64, 128, 128, stages, 4, tma=True, fuse_norm=False))
    timed = [
        {"product": "lm_head", "M": 64, "config": config, "microseconds": us}
        for config, us in ((None, 5.0), (alone, 4.0))
    ]
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"timed": timed, "chains": chains}))
    print_table(Geometry.of(geometries()["phi-4-mini"]), path, with_pdl=True)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("        64:"))
    assert f"128, 128, {stages}, 4" in row
    assert ("early=True" in row) == is_early
