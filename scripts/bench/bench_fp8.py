"""Times the GEMMs of FP8 on a GPU against those of bfloat16, and finds the best tiles for few tokens.

    python scripts/bench/bench_fp8.py -o bench_fp8.json [--budget 70] [--shape llama-3-8b]
    python scripts/bench/bench_fp8.py --table bench_fp8.json

For each GEMM of a layer and each number of tokens: microseconds, TFLOP/s and GB/s (weights, inputs and results) in
CUDA-graph replay over copies of the weight that together exceed L2, of bfloat16 as it is used now, of the library's FP8
with sums in the tensor cores (`fast`) and in float32 (`slow`), and of our tiles; and each one's error against float64,
of the same rounded numbers.

Every measurement is one JSON line, written at once; a short table of them comes last. What fails is a line with
"error" and no time. `--table` prints the table of `specbatch/kernels/triton/scaled/tile.py` from the file. Stops by
itself when the budget (seconds) is used up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tune_linear import Gemm, Geometry, only_compile, replay_time

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specbatch.kernels import triton as kernels
from specbatch.kernels.quantised import Quantised
from specbatch.kernels.triton.gemm import linear as linear_now
from specbatch.kernels.triton.scaled import ops
from specbatch.kernels.triton.scaled.tile import ScaledTile
from specbatch.models.linears.fp8 import quantise_weight
from specbatch.models.random_weights import geometries

ROWS = (1, 4, 16, 64, 256, 512, 2048, 8192)
DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROTATION_BYTES = 280e6  # bytes of all copies of a weight; L2 holds 60 MB
CHECKED = 64  # tokens whose results are compared with float64
LARGEST_TABLE = 256  # tokens up to which `--table` chooses between us and the library


def candidates(gemm: Gemm, tokens: int) -> list[ScaledTile]:
    outputs = gemm.weight_shape[0]
    splits = (1,) if outputs > 8192 else (1, 2) if outputs > 4096 else (2, 4)
    if tokens <= 8:
        found = [
            ScaledTile(8, 16, 256, 5, 1),
            ScaledTile(8, 16, 512, 4, 1),
            ScaledTile(8, 16, 512, 4, 2, prefetch=1024),
            ScaledTile(8, 32, 256, 4, 2),
            ScaledTile(8, 64, 256, 4, 4, prefetch=1024),
        ]
        found += [ScaledTile(16, 64, 256, 4, 4, splits=s, tma=True) for s in splits]
        return [*found, ScaledTile(16, 128, 128, 6, 4, splits=splits[-1], tma=True)]
    if tokens <= 16:
        found = [ScaledTile(16, 32, 256, 4, 2), ScaledTile(16, 128, 128, 6, 4, splits=splits[-1], tma=True)]
        return found + [ScaledTile(16, 64, 256, 4, 4, splits=s, tma=tma) for s in splits for tma in (False, True)]
    if tokens <= 64:
        found = [ScaledTile(64, 128, 128, 5, 4, splits=s, tma=True) for s in splits]
        found += [ScaledTile(64, 64, 128, 6, 4, splits=s) for s in splits]
        return [*found, ScaledTile(64, 64, 256, 4, 4, splits=splits[-1], tma=True)]
    if tokens <= 256:
        found = [ScaledTile(128, 64, 128, 6, 4, tma=True), ScaledTile(128, 128, 128, 5, 8, tma=True)]
        return [*found, ScaledTile(128, 128, 128, 5, 8, splits=splits[-1], imprecise=0, tma=True)]
    return [ScaledTile(128, 128, 128, 5, 8, tma=True, imprecise=exact) for exact in (128, 0)]


def name_of(tile: ScaledTile) -> str:
    sizes = f"m{tile.block_m} o{tile.block_o} i{tile.block_i} s{tile.num_stages} w{tile.num_warps}"
    more = [f"split{tile.splits}"] * (tile.splits > 1) + ["tma"] * tile.tma + ["fast"] * (tile.imprecise == 0)
    return " ".join([sizes, *more, *[f"pre{tile.prefetch}"] * (tile.prefetch > 0)])


def start_compiling() -> None:
    """In a worker: launches only compile, as for a Hopper GPU."""
    only_compile()
    ops.dependent_launch = lambda tensor: True


def compile_task(shape: tuple[int, int], tokens: int, tile: ScaledTile) -> None:
    (num_out, num_in), one = shape, torch.empty(1, 1)
    x = Quantised(torch.empty(tokens, num_in, dtype=FP8), torch.empty(tokens, 1))
    weight, scale = torch.empty(num_out, num_in, dtype=FP8), one.expand(num_out, 1).contiguous()
    ops.linear(x, weight, scale, DTYPE, None, None, tile)


class Bench:
    def __init__(self, output: Path, deadline: float) -> None:
        self._file, self._deadline = output.open("w"), deadline
        self._pool = multiprocessing.get_context("fork").Pool(max((os.cpu_count() or 2) - 1, 1), start_compiling)
        self._compiled: dict[Any, Any] = {}

    def say(self, **line: Any) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        self._file.write(text + "\n")
        self._file.flush()

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    def compile(self, gemms: list[Gemm], rows: list[int]) -> None:
        for tokens in rows:
            for gemm in gemms:
                for tile in candidates(gemm, tokens):
                    key = (gemm.weight_shape, tokens, tile)
                    self._compiled[key] = self._pool.apply_async(compile_task, key)

    def close(self) -> None:
        self._pool.terminate()
        self._file.close()

    def guarded(self, what: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            line = work()
        except Exception as error:
            line = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        self.say(**what, **line)
        return line

    def gemm(self, shape_name: str, gemm: Gemm, rows: list[int]) -> None:
        """Every way to compute one GEMM, without what precedes and follows it."""
        num_out, num_in = gemm.weight_shape
        copies = max(4, math.ceil(ROTATION_BYTES / (num_out * num_in)))
        wide = [normal(num_out, num_in, scale=num_in**-0.5)]
        made = quantise_weight(wide[0])
        wide += [wide[0].clone() for _ in range(max(4, copies // 2) - 1)]
        weights = [made.values_OI.view(torch.uint8).clone().view(FP8) for _ in range(copies)]
        for tokens in rows:
            if self.out_of_time():
                return
            self._gemm_of(shape_name, gemm, normal(tokens, num_in), wide, weights, made.scale)

    def _gemm_of(
        self, shape_name: str, gemm: Gemm, x: Tensor, wide: list[Tensor], weights: list[Tensor], scale: Tensor
    ) -> None:
        tokens, copies, size = x.shape[0], len(weights), gemm.weight_shape
        q = kernels.quantise(x)
        unrounded = x[:CHECKED].double() @ wide[0].double().T
        exact = (q.values_TI[:CHECKED].double() @ weights[0].double().T) * q.scale_TG[:CHECKED] * scale[:, 0]
        what = {"shape": shape_name, "gemm": gemm.name, "weight": size, "tokens": tokens}
        most = copies if tokens <= 64 else 8 if tokens <= 2048 else 4

        def timed(how: str, multiply: Callable[[int], Tensor], num_bytes: int, expected: Tensor, calls: int) -> float:
            def measure() -> dict[str, Any]:
                error = float((multiply(0)[:CHECKED].double() - expected).norm() / expected.norm())
                seconds = replay_time(lambda: [multiply(i) for i in range(calls)], num_replays=5) / calls
                moved = math.prod(size) * num_bytes + tokens * (size[1] * num_bytes + 2 * size[0])
                return {
                    "us": round(seconds * 1e6, 2),
                    "tflops": round(2 * tokens * math.prod(size) / seconds / 1e12, 1),
                    "gb_s": round(moved / seconds / 1e9),
                    "error": float(f"{error:.2e}"),
                }

            return float(self.guarded({**what, "how": how}, measure).get("us", math.inf))

        timed("bf16", lambda i: linear_now(x, wide[i % len(wide)]), 2, unrounded, min(most, len(wide)))
        self.say(**what, how="rounding inputs and weights", error=float((exact - unrounded).norm() / unrounded.norm()))

        def by_library(fast: bool) -> Callable[[int], Tensor]:
            return lambda i: ops.library_linear(q, weights[i % copies], scale, DTYPE, fast=fast)

        def by_tile(tile: ScaledTile) -> Callable[[int], Tensor]:
            return lambda i: ops.linear(q, weights[i % copies], scale, DTYPE, None, None, tile)

        best: tuple[float, ScaledTile | None] = timed("library fast", by_library(True), 1, exact, most), None
        timed("library slow", by_library(False), 1, exact, most)
        for tile in candidates(gemm, tokens):
            if self.out_of_time():
                break
            try:
                self._compiled[size, tokens, tile].get(max(0.1, self._deadline - time.monotonic()))
            except Exception as error:
                self.say(**what, how=name_of(tile), error=f"{type(error).__name__}: {str(error)[:300]}")
                continue
            us = timed(name_of(tile), by_tile(tile), 1, exact, most)
            best = min(best, (us, tile), key=lambda one: one[0])
        self.say(**what, how="best", us=best[0], tile=None if best[1] is None else asdict(best[1]))


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(0.0, scale)


def print_summary(path: Path) -> None:
    """Microseconds, a line for each GEMM and number of tokens; then what failed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"{'GEMM':<24}{'tokens':>7}{'bf16':>9}{'fast':>9}{'slow':>9}{'best':>9}  its tile")
    for best in (line for line in lines if line.get("how") == "best"):
        same = {line.get("how"): line for line in lines if [line.get(k) for k in _CELL] == [best[k] for k in _CELL]}
        times = [same.get(how, {}).get("us", math.nan) for how in ("bf16", "library fast", "library slow", "best")]
        tile = "library" if best["tile"] is None else name_of(ScaledTile(**best["tile"]))
        columns = "".join(f"{us:>9.1f}" for us in times)
        print(f"{best['shape'] + ' ' + best['gemm']:<24}{best['tokens']:>7}{columns}  {tile}")
    for line in lines:
        if isinstance(line.get("error"), str):
            print(json.dumps(line))


_CELL = ("shape", "gemm", "tokens")


def source_of(tile: dict[str, Any] | None) -> str:
    if tile is None:
        return "None"
    unusual = [f"{f.name}={tile[f.name]}" for f in fields(ScaledTile)[5:] if tile[f.name] != f.default]
    return f"ScaledTile({', '.join([*(str(tile[f.name]) for f in fields(ScaledTile)[:5]), *unusual])})"


def print_table(path: Path) -> None:
    """Source text of `tile._MEASURED`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    best = [line for line in lines if line.get("how") == "best" and line["tokens"] <= LARGEST_TABLE]
    print("_MEASURED: dict[tuple[int, int], dict[int, ScaledTile | None]] = {")
    for weight in dict.fromkeys(tuple(line["weight"]) for line in best):
        of_weight = [line for line in best if tuple(line["weight"]) == weight]
        print(f"    {weight}: {{  # {of_weight[0]['shape']}, {of_weight[0]['gemm']}")
        for line, following in itertools.zip_longest(of_weight, of_weight[1:]):
            if following is None or following["tile"] != line["tile"]:
                print(f"        {line['tokens']}: {source_of(line['tile'])},")
        print("    },")
    print("}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("bench_fp8.json"))
    parser.add_argument("--table", type=Path, help="print the table of a file written before, and stop")
    parser.add_argument("--budget", type=float, default=70.0, help="seconds")
    parser.add_argument("--shape", action="append", choices=sorted(geometries()))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    if args.table is not None:
        print_table(args.table)
        return
    bench = Bench(args.output, time.monotonic() + args.budget)
    shapes = args.shape or ["llama-3-8b", "qwen2.5-1.5b"]
    all_gemms = {name: list(Geometry.of(geometries()[name]).layer.values()) for name in shapes}
    for gemms in all_gemms.values():
        bench.compile(gemms, args.rows)
    try:
        with torch.no_grad():
            for name, gemms in all_gemms.items():
                for gemm in gemms:
                    bench.gemm(name, gemm, args.rows)
    finally:
        bench.close()
        print_summary(args.output)


if __name__ == "__main__":
    main()
