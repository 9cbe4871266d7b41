"""The kernels of a layer with a Gated DeltaNet, for the constants that may be chosen.

    python scripts/bench/bench_delta.py -o delta.jsonl

Prints a line of JSON for each shape, number of rows and of nodes, and set of constants: the microseconds of the kernels
of a layer (the median of CUDA graphs that are replayed), the floor of its bytes at the measured copy rate, and the
bytes a second that it reached. In a round all nodes of the last one are replayed, so each state is read and written.
`round` is the convolution and the rule, `norm` the gated norm after them, `prompt` all kernels of a chunk of prompts.

On a CPU (`--device cpu`, with `TRITON_INTERPRET=1`) small sizes show that the script runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_floor import measure_device
from torch import Tensor

from specbatch.batch import PagedBatch, StateSpans
from specbatch.kernels.delta import DeltaWeights, LayerStates
from specbatch.kernels.triton.delta.ops import PromptTiles, RoundTiles, delta_prompts, delta_rounds, gated_norm

SHAPES = {"4b": (16, 32, 128, 128), "9b": (16, 32, 128, 128), "tiny": (2, 4, 16, 32)}  # heads of keys, of values, K, V
CONV, START = 4, 1000  # inputs of the convolution, tokens before a round
REPEATS = 8  # launches in a graph
ROUND_TILES = [(8, 1), (16, 1)]  # dimensions of a part, warps
PROMPT_TILES = [(32, 4, 16), (64, 4, 16), (32, 4, 32), (64, 4, 32), (64, 8, 32), (32, 4, 64)]  # part, warps, chunk
Line = dict[str, Any]


class Layer:
    """The tensors of a layer, and of the rows or prompts that are computed."""

    def __init__(self, shape: str, rows: int, max_nodes: int, part: int, device: torch.device) -> None:
        self.key_heads, self.heads, self.k, self.v = SHAPES[shape]
        self.channels = 2 * self.key_heads * self.k + self.heads * self.v
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self.device, self.rows, kept = device, rows, CONV - 1 + 2 * max_nodes
        conv = self.random(CONV, self.channels).T  # as `GatedDelta` has it
        decay, bias = -torch.rand(self.heads, device=device), torch.randn(self.heads, device=device)
        self.weights = DeltaWeights(conv, decay, bias, self.key_heads)
        lines = rows * REPEATS  # each launch has its own, as in an engine, so that no cache holds the states
        self.states = LayerStates(
            torch.zeros(lines, self.heads, self.v, self.k, device=device),
            self.random(lines, kept, self.channels),
            self.random(lines, kept, 2 * self.heads),
            torch.zeros(lines, self.heads * math.ceil(self.v / part), dtype=torch.int32, device=device),
        )

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.device).to(self.dtype)

    def projections(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.channels, self.heads * self.v, 2 * self.heads
        qkv, z, gates = self.random(num_tokens, sum(sizes)).split(sizes, dim=1)
        return qkv, z, gates

    def batches(self, start: int, counts: list[int], *, is_prompt: bool) -> list[PagedBatch]:
        return [self._batch(start, counts, repeat, is_prompt) for repeat in range(REPEATS)]

    def _batch(self, start: int, counts: list[int], repeat: int, is_prompt: bool) -> PagedBatch:
        ends = torch.tensor([0, *counts], device=self.device).cumsum(0).int()
        slots, lines = (torch.arange(n, device=self.device) for n in (sum(counts), self.rows))
        pages = torch.zeros(self.rows, 1, dtype=torch.int32, device=self.device)
        starts = torch.full((self.rows,), start, dtype=torch.int32, device=self.device)
        return PagedBatch(
            slots, slots, pages, 1, starts, ends, max(counts), states=StateSpans(lines + repeat * self.rows, is_prompt)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="4b", help="4b and 9b are equal in these kernels")
    parser.add_argument("--rows", default="16,64,256")
    parser.add_argument("--nodes", default="2,1,4")
    parser.add_argument("--prompts", default="1x8192,8x1000", help="number of prompts x tokens of each; empty: none")
    parser.add_argument("--time-limit", type=float, default=40, help="seconds after which no measurement begins")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    device, began = torch.device(args.device), time.perf_counter()
    rate = measure_device(device).copy_bytes_per_second
    lines = []
    for shape in args.shapes.split(","):
        prompts = [tuple(map(int, text.split("x"))) for text in args.prompts.split(",") if text]
        rows, nodes = ([int(n) for n in text.split(",") if n] for text in (args.rows, args.nodes))
        most = [max(rows)]
        others = [n for n in rows if n not in most]
        for work in (
            *rounds(shape, most, nodes, device),
            *prompt_chunks(shape, prompts, device),
            *rounds(shape, others, nodes, device),
        ):
            if time.perf_counter() - began > args.time_limit:
                print(json.dumps({"left out": "the time is over"}), flush=True)
                return
            line = work()
            line["floor_us"] = round(line["bytes"] / rate * 1e6, 1)
            line["gb_s"] = round(line["bytes"] / line["us"] / 1e3)
            print(json.dumps(line), flush=True)
            lines.append(line)
            if args.output is not None:
                args.output.write_text("".join(json.dumps(one) + "\n" for one in lines))


def rounds(shape: str, all_rows: list[int], all_nodes: list[int], device: torch.device) -> Iterator[Callable[[], Line]]:
    """Give the measurements of rounds."""
    for rows in all_rows:
        for nodes in all_nodes:
            yield partial(norm_line, shape, rows, nodes, device)
            for part, warps in ROUND_TILES:
                yield partial(round_line, shape, rows, nodes, part, RoundTiles(warps), device)


def round_line(shape: str, rows: int, nodes: int, part: int, tiles: RoundTiles, device: torch.device) -> Line:
    layer = Layer(shape, rows, nodes, part, device)
    qkv, _, gates = layer.projections(rows * nodes)
    batches = layer.batches(START, [nodes] * rows, is_prompt=False)

    def compute(repeat: int) -> None:
        if repeat == 0:
            layer.states.lengths_SP.fill_(START - nodes)  # otherwise there is nothing to replay
        delta_rounds(qkv, gates, layer.weights, layer.states, batches[repeat], tiles)

    states, inputs = 2 * layer.states.states_SHVK.nbytes // REPEATS, rows * layer.channels * layer.dtype.itemsize
    line = {"kernel": "round", "shape": shape, "rows": rows, "nodes": nodes, "part": part, **tiles._asdict()}
    # The projections of new nodes, those that the convolution reads before them, and outputs.
    others = inputs * (3 * nodes + CONV - 1) + rows * nodes * layer.heads * layer.v * layer.dtype.itemsize
    return {**line, "us": round(microseconds(compute, device), 1), "bytes": states + others}


def norm_line(shape: str, rows: int, nodes: int, device: torch.device) -> Line:
    layer = Layer(shape, 1, nodes, 32, device)
    _, z, _ = layer.projections(rows * nodes)
    x, weight = layer.random(rows * nodes, layer.heads, layer.v), layer.random(layer.v)
    us = microseconds(lambda _: gated_norm(x, z, weight, 1e-6), device)
    return {
        **{"kernel": "norm", "shape": shape, "rows": rows, "nodes": nodes},
        **{"us": round(us, 1), "bytes": 3 * x.nbytes},
    }


def prompt_chunks(shape: str, prompts: list[tuple[int, ...]], device: torch.device) -> Iterator[Callable[[], Line]]:
    for number, tokens in prompts:
        for tiles in PROMPT_TILES:
            yield partial(prompt_line, shape, number, tokens, PromptTiles(*tiles), device)


def prompt_line(shape: str, number: int, tokens: int, tiles: PromptTiles, device: torch.device) -> Line:
    layer = Layer(shape, number, 1, 32, device)
    qkv, _, gates = layer.projections(number * tokens)
    batches = layer.batches(0, [tokens] * number, is_prompt=True)
    us = microseconds(lambda i: delta_prompts(qkv, gates, layer.weights, layer.states, batches[i], tiles), device)
    line = {"kernel": "prompt", "shape": shape, "prompts": number, "tokens": tokens, **tiles._asdict()}
    # Projections are read, what the convolution makes of them is written and read, and outputs are written.
    return {**line, "us": round(us, 1), "bytes": 3 * number * tokens * layer.channels * layer.dtype.itemsize}


def microseconds(work: Callable[[int], object], device: torch.device) -> float:
    """Return the median time of `work`, which gets the number of the launch: on a GPU in CUDA graphs of several."""
    if device.type != "cuda":
        began = time.perf_counter()
        work(0)
        return (time.perf_counter() - began) * 1e6
    work(0)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for repeat in range(REPEATS):
            work(repeat)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    graph.replay()
    for event in events:
        event.record()
        graph.replay()
    events.append(torch.cuda.Event(enable_timing=True))
    events[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / REPEATS * 1e3 for a, b in itertools.pairwise(events)]
    return statistics.median(times)


if __name__ == "__main__":
    main()
