"""scripts/bench/tune_linear.py: the table that it prints of what was measured."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specbatch.kernels.triton.skinny.tile import GemmTile

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
