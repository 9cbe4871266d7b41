"""Times the GEMMs of a mixture of experts (`specbatch.kernels.triton.mixture`) on a GPU and finds their best tiles.

    python scripts/bench/tune_experts.py -o tune_experts.json [--shape qwen3-30b-a3b] [--weights fp8] [--budget 230]

For each number of tokens, routed evenly, two things are timed in CUDA-graph replay: both GEMMs with each tile, and then
the whole mixture with the best tiles, its parts, and torch's grouped GEMM. The weights of the layers together exceed
L2. Kernels are compiled beforehand by other processes. The script ends when the budget (seconds) is used up; what was
measured until then is in the file.

Shape suffixes as in `specbatch/kernels/triton/mixture/ops.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specbatch.kernels.experts import ExpertWeights, Routing
from specbatch.kernels.mxfp4 import MXFP4_BYTES, MXFP4_GROUP
from specbatch.kernels.quantised import GROUP
from specbatch.kernels.torch.mixture import combine
from specbatch.kernels.triton.mixture import ops
from specbatch.kernels.triton.mixture.tile import MAX_UNSORTED, ExpertTile
from specbatch.kernels.triton.model import act_mul
from specbatch.kernels.triton.parts.launch import dependent_launch
from specbatch.models.random_weights import geometries

DEVICE, DTYPE = "cuda", torch.bfloat16
TOKENS = (1, 4, 16, 64, 256, 1024, 2, 8, 32, 128, 512, 4096, 8192)  # the most important ones are first
NUM_ROUTINGS = 12  # routings of the same number of tokens; a timed run computes all of them
NUM_PROCESSES = 14  # processes that compile kernels
# Bytes of an element with its part of the scales, by the form of the weights. "fp8" has a scale for each output.
BYTES = {"bfloat16": 2.0, "mxfp4": MXFP4_BYTES, "fp8": 1.0, "fp8_blocks": 1 + 4 / GROUP}
NUM_LAYERS = {"bfloat16": 3, "mxfp4": 12, "fp8": 6, "fp8_blocks": 6}  # layers whose weights exceed L2
BYTES_PER_SECOND = 4.2e12  # the rate at which an H200 reads
MXFP4_SCALE = 120  # the exponent + 127 of all random weights

# The tiles that are tried, as (block_o, block_i, num_warps).
MXFP4_TILES = (
    (32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8),
)  # fmt: skip
FP8_SMALL_TILES = ((32, 128, 4), (64, 128, 4), (128, 128, 4), (64, 256, 4), (128, 256, 8))
FP8_LARGE_TILES = ((128, 128, 4), (128, 128, 8), (256, 128, 8))
SMALL_TILES = (
    (16, 256, 1), (32, 256, 2), (32, 256, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8),
)  # fmt: skip
LARGE_TILES = ((64, 64, 4), (128, 64, 4), (128, 64, 8), (256, 64, 8))
MAX_SMALL_BLOCK = 32  # tokens of a program up to which SMALL_TILES are tried
STAGE_BYTES = range(48 << 10, (200 << 10) + 1)  # tiles in flight of a program of the SMALL_TILES

Result = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a mixture of experts. `weights`: a key of BYTES."""

    num_experts: int
    top_k: int
    hidden_size: int
    inner_size: int
    weights: str

    @property
    def expert_values(self) -> int:
        return 3 * self.hidden_size * self.inner_size

    @property
    def expert_bytes(self) -> float:
        return self.expert_values * BYTES[self.weights]

    def routed(self, num_tokens: int, seed: int) -> Tensor:
        """Return random experts (T, K) of tokens; all experts are equally likely."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        scores = torch.rand(num_tokens, self.num_experts, generator=generator, device=DEVICE)
        return scores.topk(self.top_k).indices.int()

    def make_weights(self) -> ExpertWeights:
        """Return random weights of a layer's experts."""
        num, hidden, inner = self.num_experts, self.hidden_size, self.inner_size
        shapes = (num, 2 * inner, hidden), (num, hidden, inner)
        if self.weights != "mxfp4":
            gate_up, down = (torch.randn(s, dtype=DTYPE, device=DEVICE) / s[2] ** 0.5 for s in shapes)
            if self.weights == "bfloat16":
                return ExpertWeights(gate_up, down)
            groups = [-(-s[2] // GROUP) if self.weights == "fp8_blocks" else 1 for s in shapes]
            first, second = (torch.ones(*s[:2], n, device=DEVICE) for s, n in zip(shapes, groups, strict=True))
            both = gate_up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn)
            return ExpertWeights(*both, "silu", None, None, first, second)
        gate_up, down = (torch.randint(256, (*s[:2], s[2] // 2), dtype=torch.uint8, device=DEVICE) for s in shapes)
        sizes = [(*s[:2], s[2] // MXFP4_GROUP) for s in shapes]
        first, second = (torch.full(size, MXFP4_SCALE, dtype=torch.uint8, device=DEVICE) for size in sizes)
        return ExpertWeights(gate_up, down, "clamped_swiglu", None, None, first, second)


class Inputs:
    """Random inputs of one number of tokens, with NUM_ROUTINGS routings. Each routing has the weights of a layer."""

    def __init__(self, shape: Shape, num_tokens: int, layers: Sequence[ExpertWeights]) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        self.x_TE = torch.randn(num_tokens, shape.hidden_size, dtype=DTYPE, device=DEVICE)
        self.inner_NI = torch.randn(num_tokens * shape.top_k, shape.inner_size, dtype=DTYPE, device=DEVICE)
        self.logits_TX = torch.randn(num_tokens, shape.num_experts, dtype=DTYPE, device=DEVICE)
        self.weights_TK = torch.rand(num_tokens, shape.top_k, dtype=DTYPE, device=DEVICE)
        self.experts = [shape.routed(num_tokens, seed) for seed in range(NUM_ROUTINGS)]
        self.layers = [layers[i % len(layers)] for i in range(NUM_ROUTINGS)]

    @property
    def distinct(self) -> float:
        """Return the mean number of distinct experts of a routing."""
        return sum(experts_TK.unique().numel() for experts_TK in self.experts) / NUM_ROUTINGS

    def blocks(self, block_m: int) -> list[ops._Blocks]:
        num_experts, pdl = self.shape.num_experts, dependent_launch(self.x_TE)
        return [ops._Blocks(experts_TK, 0, num_experts, block_m, pdl) for experts_TK in self.experts]

    def gate_up(self, blocks: Sequence[ops._Blocks], tile: ExpertTile) -> None:
        """Run the GEMM of gate and up of all routings."""
        for own, w in zip(blocks, self.layers, strict=True):
            weight = w.gate_up_XFE, w.gate_up_scales_XFG, w.gate_up_bias_XF
            ops._multiply(self.x_TE, self.shape.top_k, *weight, own, tile, w.activation)

    def down(self, blocks: Sequence[ops._Blocks], tile: ExpertTile) -> None:
        """Run the GEMM of down of all routings."""
        for own, w in zip(blocks, self.layers, strict=True):
            ops._multiply(self.inner_NI, 1, w.down_XEI, w.down_scales_XEG, w.down_bias_XE, own, tile)

    def mixture(self, block_m: int | None = None, tiles: tuple[ExpertTile, ExpertTile] | None = None) -> None:
        """Run the whole mixture of all routings. Without arguments, the tiles are those of the table."""
        for experts_TK, layer in zip(self.experts, self.layers, strict=True):
            ops.fused_experts(self.x_TE, self.weights_TK, experts_TK, layer, self.x_TE, block_m, tiles)

    def grouped_mm(self) -> None:
        """Run the mixture with `torch._grouped_mm`."""
        for experts_TK, layer in zip(self.experts, self.layers, strict=True):
            grouped_mixture(self.x_TE, self.weights_TK, experts_TK, layer)

    def route(self) -> None:
        for _ in self.experts:
            ops.route(self.logits_TX, Routing(self.shape.top_k, norm_topk_prob=True))


def grouped_mixture(x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, layer: ExpertWeights) -> Tensor:
    """Compute the mixture with `torch._grouped_mm`: choices are sorted by expert before, and put back after."""
    chosen_N = experts_TK.flatten()
    order_N = chosen_N.argsort(stable=True)
    numbers_X = torch.arange(layer.gate_up_XFE.shape[0], device=chosen_N.device)
    ends_X = (chosen_N[:, None] == numbers_X).sum(0).cumsum(0).int()
    h_NF = torch._grouped_mm(x_TE[order_N // experts_TK.shape[1]], layer.gate_up_XFE.transpose(1, 2), offs=ends_X)
    sorted_NE = torch._grouped_mm(act_mul(h_NF), layer.down_XEI.transpose(1, 2), offs=ends_X)
    y_NE = torch.empty_like(sorted_NE)
    y_NE[order_N] = sorted_NE
    return combine(y_NE, weights_TK, x_TE)


def blocks_for(shape: Shape, num_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens of a program that are tried."""
    if num_tokens <= MAX_UNSORTED:
        return (max(8, 1 << (num_tokens - 1).bit_length()),)
    mean = num_tokens * shape.top_k / shape.num_experts  # tokens of an expert
    return (8, 16) if mean <= 4 else (16, 32) if mean <= 16 else (32, 64) if mean <= 32 else (64, 128)


def candidates(block_m: int, weights: str) -> Iterator[ExpertTile]:
    """Yield the tiles that are tried."""
    is_small = block_m <= MAX_SMALL_BLOCK
    if weights == "mxfp4":
        yield from (ExpertTile(o, i, stages, warps) for o, i, warps in MXFP4_TILES for stages in (2, 3, 4))
        return
    if weights.startswith("fp8"):
        for o, i, warps in FP8_SMALL_TILES if is_small else FP8_LARGE_TILES:
            if weights == "fp8_blocks" and i != GROUP:
                continue
            for stages in (3, 4, 6) if is_small else (2, 3, 4):
                yield from (ExpertTile(o, i, stages, warps, tma=tma) for tma in (False, True))
        return
    for block_o, block_i, warps in SMALL_TILES if is_small else LARGE_TILES:
        for stages in (2, 3, 4, 5, 6) if is_small else (3, 4):
            fits = DTYPE.itemsize * block_o * block_i * stages in STAGE_BYTES or (block_o == 16 and stages > 3)
            if is_small and not fits:
                continue
            yield ExpertTile(block_o, block_i, stages, warps)
            if warps >= 4 and block_o >= 64:
                yield ExpertTile(block_o, block_i, stages, warps, tma=True)


def compile_all(shape: Shape, tokens: Sequence[int]) -> int:
    """Compile the kernels of all candidates in other processes. Return their number."""
    kernels: dict[tuple[int, int, ExpertTile], tuple[int, int, ExpertTile]] = {}
    for n in tokens:
        for block_m in blocks_for(shape, n):
            for tile in candidates(block_m, shape.weights):
                kernels.setdefault((n if n <= MAX_UNSORTED else 0, block_m, tile), (n, block_m, tile))
    jobs = list(kernels.values())
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        pool.map(partial(compile_some, shape), [jobs[i::NUM_PROCESSES] for i in range(NUM_PROCESSES)])
    return len(kernels)


def compile_some(shape: Shape, jobs: Sequence[tuple[int, int, ExpertTile]]) -> None:
    """Compile candidates by running each once."""
    layer = shape.make_weights()
    for num_tokens, block_m, tile in jobs:
        x_TE = torch.zeros(num_tokens, shape.hidden_size, dtype=DTYPE, device=DEVICE)
        weights_TK, experts_TK = x_TE.new_zeros(num_tokens, shape.top_k), shape.routed(num_tokens, 0)
        try:
            ops.fused_experts(x_TE, weights_TK, experts_TK, layer, x_TE, block_m, (tile, tile))
        except Exception as error:  # a tile that does not fit into shared memory
            print("compile", num_tokens, block_m, tile, str(error)[:60], flush=True)


def seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Return the median time of one replay of a graph of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def microseconds(run: Callable[[], object], name: str) -> float | None:
    """Return the time of one routing; None: `run`, which runs all of them, fails."""
    try:
        return seconds(run) / NUM_ROUTINGS * 1e6
    except Exception as error:  # such as a tile that does not fit into shared memory
        print("failed", name, str(error)[:100], flush=True)
        return None


def measure_tiles(inputs: Inputs, block_m: int, deadline: float) -> list[Result]:
    """Time both GEMMs with each tile until the deadline. Return a result for each of them, the fastest tile first."""
    blocks = inputs.blocks(block_m)
    results: list[Result] = []
    for part, gemm in (("gate_up", inputs.gate_up), ("down", inputs.down)):
        times: list[tuple[float, ExpertTile]] = []
        for tile in candidates(block_m, inputs.shape.weights):
            if time.monotonic() > deadline:
                break
            us = microseconds(partial(gemm, blocks, tile), f"{part} T {inputs.num_tokens} M {block_m} {tile}")
            if us is not None:
                times.append((us, tile))
        times.sort(key=lambda pair: pair[0])
        tiles = [{"us": round(us, 2), **asdict(tile)} for us, tile in times]
        results.append({"tokens": inputs.num_tokens, "block_m": block_m, "part": part, "tiles": tiles})
    return results if all(result["tiles"] for result in results) else []


def fastest_tile(result: Result) -> ExpertTile:
    """Return the first tile of a result of `measure_tiles`."""
    return ExpertTile(**{name: value for name, value in result["tiles"][0].items() if name != "us"})


def measure_whole(inputs: Inputs, gate_up: Result, down: Result) -> Result:
    """Time the mixture with the fastest tiles of these results, with those of the table, its parts, and torch's grouped
    GEMM."""
    shape, block_m = inputs.shape, gate_up["block_m"]
    runs: dict[str, Callable[[], object]] = {
        "ours": partial(inputs.mixture, block_m, (fastest_tile(gate_up), fastest_tile(down))),
        "table": inputs.mixture,
        "sort": partial(inputs.blocks, block_m),
        "route": inputs.route,
    }
    if shape.weights == "bfloat16":
        runs["grouped_mm"] = inputs.grouped_mm
    times = {f"{name}_us": microseconds(run, name) for name, run in runs.items()}
    floor_us = inputs.distinct * shape.expert_bytes / BYTES_PER_SECOND * 1e6
    flops = 2 * inputs.num_tokens * shape.top_k * shape.expert_values
    return {
        "tokens": inputs.num_tokens,
        "part": "whole",
        "block_m": block_m,
        "distinct": inputs.distinct,
        "floor_us": floor_us,
        **times,
        "tflops": flops / times["ours_us"] * 1e-6 if times["ours_us"] else None,
    }


def measure(inputs: Inputs, deadline: float) -> list[Result]:
    """Time all tiles for one number of tokens, then the whole mixture with the fastest ones. Return no result if the
    deadline came first."""
    pairs: list[list[Result]] = []
    for block_m in blocks_for(inputs.shape, inputs.num_tokens):
        if pair := measure_tiles(inputs, block_m, deadline):
            pairs.append(pair)
            for result in pair:
                print(f"T {inputs.num_tokens} M {block_m} {result['part']}: {result['tiles'][0]}", flush=True)
    if not pairs:
        return []
    best = min(pairs, key=lambda pair: sum(result["tiles"][0]["us"] for result in pair))
    whole = measure_whole(inputs, *best)
    print({key: round(value, 2) if isinstance(value, float) else value for key, value in whole.items()}, flush=True)
    return [*(result for pair in pairs for result in pair), whole]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a model of random:NAME with experts")
    parser.add_argument("--weights", choices=tuple(BYTES), default="bfloat16")
    parser.add_argument("--budget", type=float, default=230, help="seconds")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), default=TOKENS)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    began = time.monotonic()
    config = geometries()[arguments.shape]
    if config.moe is None:
        sys.exit(f"--shape {arguments.shape} has no experts")
    moe = config.moe
    shape = Shape(moe.num_experts, moe.top_k, config.hidden_size, moe.expert_size, arguments.weights)
    print(f"compiled {compile_all(shape, arguments.tokens)} in {time.monotonic() - began:.0f} s", flush=True)
    layers = [shape.make_weights() for _ in range(NUM_LAYERS[shape.weights])]
    file = {"shape": arguments.shape, "device": torch.cuda.get_device_name()}
    results: list[Result] = []
    for num_tokens in arguments.tokens:
        found = measure(Inputs(shape, num_tokens, layers), began + arguments.budget)
        if not found:
            break
        results += found
        arguments.output.write_text(json.dumps({**file, "results": results}))


if __name__ == "__main__":
    main()
