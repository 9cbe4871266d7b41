"""Times the GEMMs with weights of whole numbers on a GPU against those of bfloat16, and finds the best tiles.

    python scripts/bench/tune_integers.py -o tune_integers.json [--budget 150] [--shape llama-3-8b] [--form q6_k]
    python scripts/bench/tune_integers.py --table tune_integers.json

For each GEMM of a layer and each number of tokens: microseconds in CUDA-graph replay over copies of the weight that
together exceed L2, of bfloat16 as it is used now, of the library with a weight that is dequantised before, and of our
tiles; and each one's error against float64. Norms, residuals and gates are computed with the GEMMs, as in a model. The
numbers of tokens for which the time matters most are first. After two of them, each form of weights (bits, groups, zero
points) is checked: our kernels against float64.

Every measurement is one JSON line, written at once; a short table of them comes last. What fails is a line with
"error" and no time. `--table` prints the table of `specbatch/kernels/triton/integers/tile.py` from the file. Stops by
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
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tune_linear import Gemm, Geometry, normal, only_compile, replay_time

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specbatch.kernels.integers import UNIT, IntegerWeight
from specbatch.kernels.torch.integers import dequantise_integers, pack_integers
from specbatch.kernels.triton.gemm import linear, norm_gated_linear, norm_linear
from specbatch.kernels.triton.integers import ops
from specbatch.kernels.triton.integers.tile import DirectTile, IntegerTile, Tile
from specbatch.models.random_weights import geometries


class Form(NamedTuple):
    """A form of weights. `group` None: one scale for each output. `is_wide`: scales and zero points are in float32, and
    zero points are no whole numbers, as those of K types of GGUF."""

    bits: int
    group: int | None
    zeros: bool
    is_wide: bool = False


TIMED = {
    "int4": Form(4, 128, False),
    "int8": Form(8, 128, False),
    "q8_0": Form(8, 32, False),
    "q4_k": Form(4, 32, True, True),
    "q5_k": Form(8, 32, True, True),
    "q6_k": Form(8, 16, False, True),
}


ROWS = [1, 16, 64, 256, 4, 512, 32, 128, 8, 1024, 2048]  # the most important ones are first
FIRST = 2  # how many of them come before the check of all forms, each of whose kernels has to be compiled
DEVICE, DTYPE = "cuda", torch.bfloat16
ROTATION_BYTES = 280e6  # bytes of all copies of a weight; L2 holds 60 MB
CHECKED = 64  # tokens whose results are compared with float64
EPS = 1e-5  # the epsilon of norms
LARGEST_ERROR = 8e-3  # results that are rounded to bfloat16 have an error of 1.7e-3, gated ones of about twice that
# What is checked: forms of weights, a size that is no multiple of tiles, and tiles. None: the weight is dequantised.
FORMS = [Form(bits, group, z) for bits in (4, 8) for group in (32, 64, 128, 256, None) for z in (False, True)]
FORMS += [TIMED["q4_k"], TIMED["q5_k"], TIMED["q6_k"]]
CHECKED_SIZE, CHECKED_ROWS = (616, 1088), 300
CHECKED_TILES = (
    None,
    IntegerTile(8, 16, 64, 4, 1),
    IntegerTile(64, 64, 64, 4, 4, splits=2),
    IntegerTile(16, 128, 32, 4, 8),
    IntegerTile(128, 128, 32, 4, 8, scale_sums=False),
    DirectTile(8, 16, 8),
    DirectTile(8, 32, 4, ahead=False, registers=168),
    DirectTile(16, 32, 2, registers=168, splits=2),
    DirectTile(32, 32, 8, ahead=False, registers=255),
)


def candidates(gemm: Gemm, tokens: int, form: Form = TIMED["int4"]) -> Iterator[Tile]:
    """Yield the tiles that are tried."""
    has_small_groups = form.bits == 8 or form.is_wide
    yield from small_direct_candidates(tokens) if has_small_groups else direct_candidates(gemm, tokens)
    if not (form.is_wide and form.zeros):
        yield from staged_candidates(gemm, tokens)


def staged_candidates(gemm: Gemm, tokens: int) -> Iterator[IntegerTile]:
    outputs = gemm.weight_shape[0]
    splits = (1,) if outputs > 8192 else (1, 2) if outputs > 4096 else (1, 2, 4)
    if tokens <= 8:
        yield IntegerTile(8, 64, 64, 4, 4)
        yield from (IntegerTile(8, 64, 64, 5, 4, splits=s, prefetch=256) for s in splits[1:])
    elif tokens <= 32:
        block_m = 16 if tokens <= 16 else 32
        yield IntegerTile(block_m, 128, 64, 4, 4)
        yield IntegerTile(block_m, 128, 64, 4, 8)
        yield from (IntegerTile(block_m, 64, 64, 4, 4, splits=s) for s in splits)
    elif tokens <= 64:
        yield from (IntegerTile(64, 64, 64, 4, 4, splits=s) for s in splits)
        yield from (IntegerTile(64, 128, 64, 4, 8, splits=s) for s in splits)
        yield from (IntegerTile(64, 128, 64, 3, 4, splits=s) for s in splits)
        yield from (IntegerTile(64, 256, 32, 4, 8, splits=s) for s in splits)
        yield from (IntegerTile(64, 128, 32, 6, 8, splits=s, scale_sums=False) for s in splits)
        yield from (IntegerTile(64, 64, 64, 4, 4, splits=s, scale_sums=False) for s in splits)
    else:
        shapes = [(128, 128, 32, 4, 8), (128, 128, 64, 2, 8), (128, 128, 16, 5, 4), (128, 64, 32, 3, 4)]
        if tokens > 128:
            shapes[3:] = (256, 128, 32, 3, 8), (256, 128, 16, 5, 8), (256, 64, 16, 5, 4), (128, 256, 16, 5, 8)
        for shape in shapes:
            tiles = math.ceil(outputs / shape[1]) * math.ceil(tokens / shape[0])
            # One and two waves of programs.
            fill = {max((n for n in (1, 2, 3, 4) if n * tiles <= waves * 132), default=1) for waves in (1, 2)}
            yield from (IntegerTile(*shape, splits=n, scale_sums=False) for n in sorted(fill))
        yield IntegerTile(128, 128, 32, 4, 8, splits=splits[-1])


def direct_candidates(gemm: Gemm, tokens: int) -> Iterator[DirectTile]:
    if tokens <= 8:
        yield DirectTile(8, 16, 8)
        yield DirectTile(8, 16, 4)
        yield DirectTile(8, 16, 16)
        yield DirectTile(8, 16, 8, prefetch=1024)
        yield DirectTile(8, 16, 8, ahead=False, registers=80)
        yield DirectTile(8, 16, 4, ahead=False, registers=96)
        yield DirectTile(8, 32, 4, registers=168)
        yield DirectTile(8, 32, 8, registers=168)
        yield DirectTile(8, 32, 4, ahead=False)
        if tokens == 1 and gemm.op.startswith("norm"):
            yield DirectTile(8, 16, 8, fuse_norm=False)
            yield DirectTile(8, 32, 4, registers=168, fuse_norm=False)
    elif tokens <= 16:
        yield DirectTile(16, 32, 8, registers=168)
        yield DirectTile(16, 32, 4, registers=168)
        yield DirectTile(16, 16, 8, registers=168)
        yield DirectTile(16, 16, 16)
        yield DirectTile(16, 64, 4, ahead=False, registers=255)
        yield DirectTile(16, 64, 8, ahead=False, registers=255)
        if gemm.weight_shape[0] <= 8192:
            yield DirectTile(16, 64, 4, ahead=False, registers=255, splits=2)
    elif tokens <= 32:
        yield DirectTile(32, 32, 8, ahead=False, registers=255)
        yield DirectTile(32, 32, 4, ahead=False, registers=255)
        yield DirectTile(32, 16, 8, ahead=False, registers=168)


def small_direct_candidates(tokens: int) -> Iterator[DirectTile]:
    """Yield tiles for weights of 8 bits or with small groups, which need more registers."""
    if tokens <= 8:
        yield DirectTile(8, 16, 8, registers=168)
        yield DirectTile(8, 16, 8)
        yield DirectTile(8, 16, 4, registers=168)
        yield DirectTile(8, 16, 8, registers=168, prefetch=1024)
        yield DirectTile(8, 32, 4, ahead=False, registers=255)
        yield DirectTile(8, 32, 8, ahead=False, registers=255)
    elif tokens <= 16:
        yield DirectTile(16, 16, 8, registers=232)
        yield DirectTile(16, 16, 8, ahead=False, registers=255)
        yield DirectTile(16, 16, 4, registers=232)
        yield DirectTile(16, 32, 4, ahead=False, registers=255)
    elif tokens <= 32:
        yield DirectTile(32, 16, 8, ahead=False, registers=255)
        yield DirectTile(32, 16, 4, ahead=False, registers=255)


def checked_ops(form: Form) -> tuple[str, ...]:
    return ("residual", "norm", "norm_gated") if form.group == 128 else ("residual",)


def fits(tile: Tile | None, form: Form) -> bool:
    """Return whether a tile can multiply weights of this form, whose numbers its registers can hold."""
    if isinstance(tile, IntegerTile):
        return not (form.is_wide and form.zeros)
    return tile is None or form.bits == 4 or tile.block_o * tile.block_m <= 256


def name_of(tile: Tile) -> str:
    """Return the first letters of what is unusual about a tile, and its sizes."""
    if isinstance(tile, DirectTile):
        name = f"direct m{tile.block_m} o{tile.block_o} w{tile.num_warps} r{tile.registers}"
        more = ["late"] * (not tile.ahead) + ["norm before"] * (not tile.fuse_norm)
    else:
        name = f"m{tile.block_m} o{tile.block_o} s{tile.step} n{tile.num_stages} w{tile.num_warps}"
        more = ["weights"] * (not tile.scale_sums)
    return " ".join(
        [name, *[f"split{tile.splits}"] * (tile.splits > 1), *more, *[f"pre{tile.prefetch}"] * bool(tile.prefetch)]
    )


def random_weight(size: tuple[int, int], form: Form, device: str = DEVICE) -> IntegerWeight:
    (num_out, num_in), bits = size, form.bits
    groups = 1 if form.group is None else math.ceil(num_in / form.group)
    numbers = torch.randint(1 << bits, size, dtype=torch.uint8, device=device)
    scales = (torch.rand(groups, num_out, device=device) + 0.5) * 2.0**-bits
    scales = scales if form.is_wide else scales.to(DTYPE)
    zeros = torch.randint(1 << bits, (groups, num_out), dtype=torch.uint8, device=device) if form.zeros else None
    if zeros is not None and form.is_wide:
        zeros = zeros + torch.rand(groups, num_out, device=device)
    return IntegerWeight(pack_integers(numbers, bits), scales, zeros, bits, num_in, form.group or num_in)


def start_compiling() -> None:
    """In a worker: launches only compile, as for a Hopper GPU."""
    only_compile()
    ops.dependent_launch = lambda tensor: True


def compile_task(size: tuple[int, int], form: Form, tile: Tile | None, op: str, is_single: bool) -> None:
    """Compile what multiplies with a tile, or dequantises. `is_single`: one token, whose norm can be fused."""
    (num_out, num_in), bits = size, form.bits
    groups = 1 if form.group is None else math.ceil(num_in / form.group)
    words = torch.empty(num_out, math.ceil(num_in / UNIT) * UNIT * bits // 16, dtype=torch.int16)
    zeros = torch.empty(groups, num_out, dtype=torch.float32 if form.is_wide else torch.uint8) if form.zeros else None
    scales = torch.empty(groups, num_out, dtype=torch.float32 if form.is_wide else DTYPE)
    weight = IntegerWeight(words, scales, zeros, bits, num_in, form.group or num_in)
    if tile is None:
        ops.dequantised(weight, DTYPE)
        return
    tokens = 1 if is_single else tile.block_m
    x, norm = torch.empty(tokens, num_in, dtype=DTYPE), torch.empty(num_in, dtype=DTYPE)
    multiply(x, weight, norm, torch.empty(tokens, num_out, dtype=DTYPE), tile, op)


def multiply(x: Tensor, weight: IntegerWeight, norm: Tensor, residual: Tensor, tile: Tile, op: str) -> Tensor:
    added = residual[: len(x)] if op == "residual" else None
    activation: Any = "silu" if op == "norm_gated" else None
    return ops.multiply(x, weight, None, added, tile, activation, (norm, EPS) if op.startswith("norm") else None)


def by_library(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, op: str) -> Tensor:
    """Return the result of the GEMM in bfloat16 as it is used now. A sum is written over the residual, or not."""
    if op == "norm_gated":
        return norm_gated_linear(x, norm, EPS, weight)
    return norm_linear(x, norm, EPS, weight) if op == "norm" else linear(x, weight, None, residual[: len(x)])


def exact_result(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, op: str) -> Tensor:
    """Return the result in float64."""
    wide = x.double()
    if op.startswith("norm"):
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * norm.double()
    y = wide @ weight.double().T
    if op == "residual":
        y += residual[: len(x)].double()
    if op != "norm_gated":
        return y
    gate, up = y.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


class Bench:
    def __init__(self, output: Path, deadline: float, form: Form) -> None:
        self._file, self._deadline, self._form = output.open("w"), deadline, form
        self._pool = multiprocessing.get_context("fork").Pool(max((os.cpu_count() or 2) - 1, 1), start_compiling)
        self._compiled: dict[Any, Any] = {}
        self._weights: dict[Gemm, tuple[list[Tensor], list[IntegerWeight], Tensor]] = {}

    def say(self, **line: Any) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        self._file.write(text + "\n")
        self._file.flush()

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    def compile_tiles(self, gemms: list[Gemm], rows: list[int]) -> None:
        for tokens in rows:
            for gemm in gemms:
                for tile in (None, *candidates(gemm, tokens, self._form)):
                    self._start(gemm.weight_shape, self._form, tile, gemm.op, tokens == 1)

    def compile_checks(self) -> None:
        for form in FORMS:
            for tile, op in itertools.product(CHECKED_TILES, checked_ops(form)):
                if fits(tile, form):
                    self._start(CHECKED_SIZE, form, tile, op, op.startswith("norm"))

    def _start(self, *task: Any) -> None:
        if task not in self._compiled:
            self._compiled[task] = self._pool.apply_async(compile_task, task)

    def _await(self, *task: Any) -> None:
        """Wait until a kernel is compiled. Raise what its compilation raised."""
        self._compiled[task].get(max(0.1, self._deadline - time.monotonic()))

    def close(self) -> None:
        self._pool.terminate()
        self._file.close()

    def check(self) -> None:
        """Compare all forms of weights with float64."""
        worst = 0.0
        for form in FORMS:
            weight = random_weight(CHECKED_SIZE, form)
            exact, errors = dequantise_integers(weight, torch.float64), {}
            x, residual = normal(CHECKED_ROWS, CHECKED_SIZE[1]), normal(CHECKED_ROWS, CHECKED_SIZE[0])
            norm = normal(CHECKED_SIZE[1])
            for tile, op in itertools.product(CHECKED_TILES, checked_ops(form)):
                if not fits(tile, form):
                    continue
                self._await(CHECKED_SIZE, form, tile, op, op.startswith("norm"))
                if tile is None:
                    found, expected = ops.dequantised(weight, DTYPE), exact
                else:
                    most = tile.block_m if isinstance(tile, DirectTile) else 2 * tile.block_m - 1
                    n = 1 if op.startswith("norm") else min(CHECKED_ROWS, most)
                    found = multiply(x[:n], weight, norm, residual, tile, op)
                    expected = exact_result(x[:n], exact, norm, residual, op)
                error = float((found.double() - expected).norm() / expected.norm())
                errors["dequantised" if tile is None else f"{name_of(tile)} {op}"] = float(f"{error:.1e}")
                worst = max(worst, math.inf if math.isnan(error) else error)
            self.say(check=str(form), errors=errors)
        self.say(check="all", largest=worst, passed=worst < LARGEST_ERROR)

    def gemm(self, shape_name: str, gemm: Gemm, tokens: int) -> None:
        """Every way to compute one GEMM."""
        if self.out_of_time():
            return
        if gemm not in self._weights:
            first = random_weight(gemm.weight_shape, self._form)
            copies = max(4, math.ceil(ROTATION_BYTES / (2 * first.words_OW.numel())))
            weights = [first._replace(words_OW=first.words_OW.clone()) for _ in range(copies)]
            exact = dequantise_integers(first, torch.float32)
            copies = 1 + math.ceil(ROTATION_BYTES / (2 * exact.numel()))
            self._weights[gemm] = [exact.to(DTYPE, copy=True) for _ in range(copies)], weights, exact
        self._gemm_of(shape_name, gemm, normal(tokens, gemm.num_in), *self._weights[gemm])

    def _gemm_of(
        self, shape_name: str, gemm: Gemm, x: Tensor, wide: list[Tensor], weights: list[IntegerWeight], exact: Tensor
    ) -> None:
        tokens, size, op = x.shape[0], gemm.weight_shape, gemm.op
        norm, residual = normal(gemm.num_in), normal(tokens, size[0])
        first_residual = residual.clone()
        expected = exact_result(x[:CHECKED], exact, norm, residual, op)
        what = {"shape": shape_name, "gemm": gemm.name, "weight": size, "tokens": tokens}
        calls = len(weights) if tokens <= 64 else min(len(weights), 8)

        def library(weight: Tensor) -> Tensor:
            return by_library(x, weight, norm, residual, op)

        def by_tile(tile: Tile) -> Callable[[int], Tensor]:
            return lambda i: multiply(x, weights[i], norm, residual, tile, op)

        def timed(how: str, compute: Callable[[int], Tensor], calls: int) -> float:
            residual.copy_(first_residual)  # the library writes sums over it
            try:
                error = float((compute(0)[:CHECKED].double() - expected).norm() / expected.norm())
                seconds = replay_time(lambda: [compute(i) for i in range(calls)], num_replays=5) / calls
                line: dict[str, Any] = {"us": round(seconds * 1e6, 2), "rounding": float(f"{error:.2e}")}
                if not error < LARGEST_ERROR:
                    line = {"error": f"the result is wrong: {error}"}
            except Exception as error:
                line = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            self.say(**what, how=how, **line)
            return float(line.get("us", math.inf))

        timed("bf16", lambda i: library(wide[i % len(wide)]), min(calls, len(wide)))
        best: tuple[float, Tile | None] = math.inf, None
        if tokens >= 16:
            best = timed("dequantise", lambda i: library(ops.dequantised(weights[i], DTYPE)), calls), None
        for tile in candidates(gemm, tokens, self._form):
            if self.out_of_time():
                break
            try:
                self._await(size, self._form, tile, op, tokens == 1)
            except Exception as error:
                self.say(**what, how=name_of(tile), error=f"{type(error).__name__}: {str(error)[:300]}")
                continue
            us = timed(name_of(tile), by_tile(tile), calls)
            best = min(best, (us, tile), key=lambda one: one[0])
        self.say(**what, how="best", us=best[0], tile=None if best[1] is None else fields_of(best[1]))


def fields_of(tile: Tile) -> dict[str, Any]:
    return {"kind": type(tile).__name__, **asdict(tile)}


def tile_of(found: dict[str, Any]) -> Tile:
    """Return the tile of `fields_of`."""
    sizes = {name: value for name, value in found.items() if name != "kind"}
    return DirectTile(**sizes) if found.get("kind") == "DirectTile" else IntegerTile(**sizes)


def print_summary(path: Path) -> None:
    """Microseconds, a line for each GEMM and number of tokens; the sums of a layer; then what failed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"{'GEMM':<24}{'tokens':>7}{'bf16':>9}{'dequant':>9}{'best':>9}{'ratio':>7}  its tile")
    sums: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for best in (line for line in lines if line.get("how") == "best"):
        same = {line.get("how"): line for line in lines if [line.get(k) for k in _CELL] == [best[k] for k in _CELL]}
        times = [same.get(how, {}).get("us", math.nan) for how in ("bf16", "dequantise", "best")]
        tile = "dequantise" if best["tile"] is None else name_of(tile_of(best["tile"]))
        columns = "".join(f"{us:>9.1f}" for us in times)
        label = best["shape"] + " " + best["gemm"]
        print(f"{label:<24}{best['tokens']:>7}{columns}{times[0] / times[2]:>7.2f}  {tile}")
        sums.setdefault((best["shape"], best["tokens"]), []).append((times[0], times[2]))
    for (shape, tokens), pairs in sums.items():
        bf16, ours = (sum(pair[i] for pair in pairs) for i in (0, 1))
        print(f"{shape}, {len(pairs)} GEMMs, {tokens} tokens: {bf16:.1f} us bf16, {ours:.1f} us, {bf16 / ours:.2f}")
    for line in lines:
        if "error" in line or line.get("check") == "all":
            print(json.dumps(line))


_CELL = ("shape", "gemm", "tokens")


def source_of(found: dict[str, Any] | None) -> str:
    if found is None:
        return "None"
    tile = tile_of(found)
    values = [(field, getattr(tile, field.name)) for field in fields(tile)]
    usual = [str(value) for field, value in values if field.default is MISSING]
    unusual = [f"{field.name}={value}" for field, value in values if field.default not in (MISSING, value)]
    return f"{type(tile).__name__}({', '.join([*usual, *unusual])})"


def print_table(path: Path) -> None:
    """Source text of `tile._MEASURED`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    best = sorted((line for line in lines if line.get("how") == "best"), key=lambda line: int(line["tokens"]))
    print("_MEASURED: dict[tuple[int, int], dict[int, Tile | None]] = {")
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
    parser.add_argument("-o", "--output", type=Path, default=Path("tune_integers.json"))
    parser.add_argument("--table", type=Path, help="print the table of a file written before, and stop")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    parser.add_argument("--shape", action="append", choices=sorted(geometries()))
    parser.add_argument("--form", default="int4", choices=TIMED)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    if args.table is not None:
        print_table(args.table)
        return
    bench = Bench(args.output, time.monotonic() + args.budget, TIMED[args.form])
    all_gemms = {name: list(Geometry.of(geometries()[name]).layer.values()) for name in args.shape or ["llama-3-8b"]}
    first, others = args.rows[:FIRST], args.rows[FIRST:]
    every = list(itertools.chain(*all_gemms.values()))
    bench.compile_tiles(every, first)
    bench.compile_checks()
    bench.compile_tiles(every, others)
    try:
        with torch.no_grad():
            for tokens in (*first, None, *others):
                if tokens is None:
                    bench.check()
                    continue
                for name, gemms in all_gemms.items():
                    for gemm in gemms:
                        bench.gemm(name, gemm, tokens)
    finally:
        bench.close()
        print_summary(args.output)


if __name__ == "__main__":
    main()
