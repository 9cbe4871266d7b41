"""Times the GEMMs of a mixture of experts (`specbatch.kernels.triton.mixture`) on a GPU and finds their best tiles.

    python scripts/bench/tune_experts.py -o tune_experts.json [--shape qwen3-30b-a3b] [--weights fp8] [--budget 230]

For each number of tokens, routed evenly: the time of both GEMMs with each candidate in CUDA-graph replay, over layers
whose weights together exceed L2; then the whole mixture with the best ones, and the library's grouped GEMM.
Candidates are compiled beforehand by other processes. The script stops by itself when the budget (seconds) is used up.
What was measured until then is in the file.
"""
# ruff: noqa: B023 - functions of a loop are called in the turn of the loop that makes them

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specbatch.kernels.experts import ExpertWeights, Routing
from specbatch.kernels.quantised import GROUP, MXFP4_BYTES, MXFP4_GROUP
from specbatch.kernels.torch.mixture import combine
from specbatch.kernels.triton.mixture import ops
from specbatch.kernels.triton.mixture.tile import ExpertTile, tokens_of_a_program
from specbatch.kernels.triton.model import act_mul
from specbatch.models.random_weights import geometries

DTYPE = torch.bfloat16
# Bytes of an element with its part of the scales.
BYTES = {"bfloat16": 2, "mxfp4": MXFP4_BYTES, "fp8": 1, "fp8_blocks": 1 + 4 / GROUP}
TOKENS = (1, 4, 16, 64, 256, 1024, 2, 8, 32, 128, 512, 4096, 8192)


def blocks_for(num_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens of a program that are tried."""
    if num_tokens <= 16:
        return (max(8, 1 << (num_tokens - 1).bit_length()),)
    return {32: (8, 16), 64: (8, 16), 128: (16, 32), 256: (16, 32), 512: (32, 64), 1024: (64, 128)}.get(
        num_tokens, (64, 128)
    )


def candidates(block_m: int, weights: str) -> Iterator[ExpertTile]:
    if weights.startswith("fp8"):
        for block_o, warps in ((32, 4), (64, 4), (128, 4), (128, 8), (256, 8)):
            for stages in (2, 3, 4, 6):
                for tma in (False, True):
                    yield ExpertTile(block_o, 128, stages, warps, tma=tma)
        return
    if weights == "mxfp4":
        for block_o, block_i, warps in (
            (32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8),
        ):  # fmt: skip
            for stages in (2, 3, 4):
                yield ExpertTile(block_o, block_i, stages, warps)
        return
    if block_m <= 32:
        for block_o, block_i, warps in (
            (16, 256, 1), (32, 256, 2), (32, 256, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4),
            (128, 128, 8),
        ):  # fmt: skip
            for stages in (2, 3, 4, 5, 6):
                if 48 << 10 <= 2 * block_o * block_i * stages <= 200 << 10 or (block_o == 16 and stages > 3):
                    yield ExpertTile(block_o, block_i, stages, warps)
                    if warps >= 4 and block_o >= 64:
                        yield ExpertTile(block_o, block_i, stages, warps, tma=True)
        return
    for block_o, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        for stages in (3, 4):
            yield ExpertTile(block_o, 64, stages, warps)
            yield ExpertTile(block_o, 64, stages, warps, tma=True)


def routed(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator, device="cuda")
    return scores.topk(top_k).indices.int()


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
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


def compile_some(job: tuple) -> None:
    """Compile candidates by running them once."""
    num_experts, hidden, inner, top_k, kind, tiles = job
    experts = make_weights(num_experts, hidden, inner, kind)
    for num_tokens, block_m, tile in tiles:
        x = torch.zeros(num_tokens, hidden, dtype=DTYPE, device="cuda")
        chosen = routed(num_tokens, num_experts, top_k, 0)
        try:
            ops.fused_experts(x, x.new_zeros(num_tokens, top_k), chosen, experts, x, block_m, (tile, tile))
        except Exception as error:  # a tile that does not fit
            print("compile", num_tokens, block_m, tile, str(error)[:60], flush=True)


def make_weights(num_experts: int, hidden: int, inner: int, kind: str) -> ExpertWeights:
    """Return random weights of a layer's experts."""
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    if kind != "mxfp4":
        gate_up, down = (torch.randn(s, dtype=DTYPE, device="cuda") / s[2] ** 0.5 for s in shapes)
        if kind == "bfloat16":
            return ExpertWeights(gate_up, down)
        scales = [torch.ones(*s[:2], s[2] // GROUP if kind == "fp8_blocks" else 1, device="cuda") for s in shapes]
        gate_up, down = gate_up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn)
        return ExpertWeights(gate_up, down, "silu", None, None, *scales)
    first, second = [torch.randint(256, (*s[:2], s[2] // 2), dtype=torch.uint8, device="cuda") for s in shapes]
    sizes = [(*s[:2], s[2] // MXFP4_GROUP) for s in shapes]
    scales = [torch.full(size, 120, dtype=torch.uint8, device="cuda") for size in sizes]
    return ExpertWeights(first, second, "clamped_swiglu", None, None, *scales)


def library(x: Tensor, weights_TK: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """Compute the mixture with `torch._grouped_mm`, sorted beforehand."""
    top_k = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    numbers = torch.arange(experts.gate_up_XFE.shape[0], device=flat.device)
    ends = (flat[:, None] == numbers).sum(0).cumsum(0).int()
    h = torch._grouped_mm(x[order // top_k], experts.gate_up_XFE.transpose(1, 2), offs=ends)
    y = torch._grouped_mm(act_mul(h), experts.down_XEI.transpose(1, 2), offs=ends)
    back = torch.empty_like(y)
    back[order] = y
    return combine(back, weights_TK, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--weights", default="bfloat16", choices=tuple(BYTES))
    parser.add_argument("--budget", type=float, default=230)
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=TOKENS)
    args = parser.parse_args()
    began = time.monotonic()
    config = geometries()[args.shape]
    moe = config.moe
    assert moe is not None
    X, K, E, I = moe.num_experts, moe.top_k, config.hidden_size, moe.expert_size  # noqa: E741
    kind = args.weights
    num_layers = int(6 / BYTES[kind])
    per_expert = 3 * E * I * BYTES[kind]
    blocks_of = {n: blocks_for(n * K * 16 // X if n > 16 else n) for n in args.tokens}
    todo = [(n, m, tile) for n in args.tokens for m in blocks_of[n] for tile in candidates(m, kind)]
    first: dict[tuple, tuple] = {}
    for n, m, tile in todo:  # one of each kernel
        first.setdefault((n if n <= 16 else 0, m, tile), (n, m, tile))
    kernels = list(first.values())
    jobs = [(X, E, I, K, kind, kernels[i::14]) for i in range(14)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_some, jobs)
    print(f"compiled {len(kernels)} in {time.monotonic() - began:.0f} s", flush=True)
    layers = [make_weights(X, E, I, kind) for _ in range(num_layers)]
    results: list[dict] = []
    torch.backends.cuda.matmul.allow_tf32 = False
    for n in args.tokens:
        x = torch.randn(n, E, dtype=DTYPE, device="cuda")
        inner = torch.randn(n * K, I, dtype=DTYPE, device="cuda")
        chosen = [routed(n, X, K, seed) for seed in range(12)]
        weights = torch.rand(n, K, dtype=DTYPE, device="cuda")
        distinct = sum(c.unique().numel() for c in chosen) / len(chosen)
        floor = distinct * per_expert / 4.2e12
        best: dict[int, tuple] = {}
        for m in blocks_of[n]:
            blocks = [ops._Blocks(c, X, m, True) for c in chosen]
            times: list[list[tuple[float, ExpertTile]]] = [[], []]
            for tile in candidates(m, kind):
                if time.monotonic() - began > args.budget:
                    break

                def gate_up(blocks: list = blocks, tile: ExpertTile = tile, x: Tensor = x) -> None:
                    for i, b in enumerate(blocks):
                        own = layers[i % num_layers]
                        ops._multiply(x, K, own.gate_up_XFE, own.gate_up_scales_XFG, None, b, tile, own.activation)

                def down(blocks: list = blocks, tile: ExpertTile = tile, inner: Tensor = inner) -> None:
                    for i, b in enumerate(blocks):
                        own = layers[i % num_layers]
                        ops._multiply(inner, 1, own.down_XEI, own.down_scales_XEG, None, b, tile)

                for part, gemm in enumerate((gate_up, down)):
                    try:
                        times[part].append((seconds(gemm, 10) / len(blocks), tile))
                    except Exception as error:
                        print("failed", n, m, part, tile, str(error)[:100], flush=True)
            if times[0] and times[1]:
                both = tuple(sorted(t, key=lambda pair: pair[0]) for t in times)
                for part in (0, 1):
                    results.append(
                        {"tokens": n, "block_m": m, "part": ("gate_up", "down")[part], "tiles": [
                            {"us": round(us * 1e6, 2), **asdict(tile)} for us, tile in both[part]]}
                    )  # fmt: skip
                best[m] = both
                tops = [f"{t[0][0] * 1e6:.1f} {t[0][1].block_o}/{t[0][1].block_i}/{t[0][1].num_stages}/"
                        f"{t[0][1].num_warps}/{int(t[0][1].tma)}" for t in both]  # fmt: skip
                print(f"T {n} M {m} distinct {distinct:.1f} gate_up {tops[0]} down {tops[1]} us", flush=True)
        if not best:
            break
        m = min(best, key=lambda m: best[m][0][0][0] + best[m][1][0][0])
        tiles = (best[m][0][0][1], best[m][1][0][1])
        line = {"tokens": n, "part": "whole", "block_m": m, "distinct": distinct, "floor_us": floor * 1e6}

        def whole(tiles: tuple = tiles, m: int = m) -> None:
            for i, c in enumerate(chosen):
                ops.fused_experts(x, weights, c, layers[i % num_layers], x, m, tiles)

        def chosen_by_table() -> None:
            for i, c in enumerate(chosen):
                ops.fused_experts(x, weights, c, layers[i % num_layers], x)

        def grouped() -> None:
            for i, c in enumerate(chosen):
                library(x, weights, c, layers[i % num_layers])

        def sort() -> None:
            for c in chosen:
                ops._Blocks(c, X, m, True)

        def route() -> None:
            for _ in chosen:
                ops.route(logits, Routing(K, norm_topk_prob=True))

        logits = torch.randn(n, X, dtype=DTYPE, device="cuda")
        for name, run in {"ours": whole, "table": chosen_by_table, "grouped_mm": grouped, "sort": sort,
                          "route": route}.items():  # fmt: skip
            if name == "grouped_mm" and kind != "bfloat16":
                continue
            try:
                line[f"{name}_us"] = round(seconds(run, 10) / len(chosen) * 1e6, 2)
            except Exception as error:
                line[f"{name}_us"] = None
                print(name, str(error)[:200], flush=True)
        flops = n * K * 3 * E * I * 2
        line["tflops"] = flops / line["ours_us"] * 1e-6
        results.append(line)
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}, flush=True)
        assert tokens_of_a_program(n, X, K) > 0
        args.output.write_text(
            json.dumps(
                {"shape": args.shape, "weights": kind, "device": torch.cuda.get_device_name(), "results": results}
            )
        )


if __name__ == "__main__":
    main()
