"""scripts/bench/tune_experts.py: what it tries and writes, in Triton's interpreter with a clock that counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("scripts")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on a CPU")
@pytest.mark.parametrize(
    "weights", ["bfloat16", *(pytest.param(name, marks=pytest.mark.wide) for name in ("mxfp4", "fp8", "fp8_blocks"))]
)
def test_each_number_of_tokens_has_tiles_and_a_whole(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tune_experts

    calls: list[int] = []

    def seconds(run: Callable[[], object]) -> float:
        run()
        calls.append(len(calls))
        return 1.0 - 0.01 * len(calls)  # the tile that is tried last is the fastest

    tiles = [tune_experts.ExpertTile(16, 32, 2, 4), tune_experts.ExpertTile(32, 32, 2, 4)]
    monkeypatch.setattr(tune_experts, "DEVICE", "cpu")
    monkeypatch.setattr(tune_experts, "DTYPE", torch.float32)
    monkeypatch.setattr(tune_experts, "NUM_ROUTINGS", 1)
    monkeypatch.setattr(tune_experts, "seconds", seconds)
    monkeypatch.setattr(tune_experts, "candidates", lambda *_: iter(tiles))
    monkeypatch.setattr(tune_experts, "compile_all", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "interpreter")
    output = tmp_path / "tiles.json"
    arguments = [
        "-o",
        str(output),
        "--shape",
        "tiny-gpt-oss" if weights == "mxfp4" else "tiny-experts",
        "--tokens",
        "1,20",
    ]
    monkeypatch.setattr(sys, "argv", ["tune_experts.py", *arguments, "--weights", weights])
    tune_experts.main()

    results: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert {result["tokens"] for result in results} == {1, 20}
    for result in results:
        if result["part"] == "whole":
            assert result["ours_us"] > 0
            assert result["table_us"] > 0
            assert 1 <= result["distinct"] <= 8
            assert ("grouped_mm_us" in result) == (weights == "bfloat16")
        else:
            assert [tile["block_o"] for tile in result["tiles"]] == [32, 16]


def test_each_number_of_tokens_has_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    import tune_experts

    shape = tune_experts.Shape(128, 8, 2048, 768, "bfloat16")
    found = {n: tune_experts.blocks_for(shape, n) for n in tune_experts.TOKENS}
    assert found[1] == (8,)
    assert found[16] == (16,)
    assert found[256] == (16, 32)
    assert found[8192] == (64, 128)
    for weights in tune_experts.BYTES:
        for block_m in (8, 16, 32, 64, 128):
            assert len(set(tune_experts.candidates(block_m, weights))) >= 14
