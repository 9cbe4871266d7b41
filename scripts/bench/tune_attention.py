"""Times the attention kernel by tile and splits on a GPU, at the sizes of Llama-3-8B (32/8 heads of 128).

    python scripts/bench/tune_attention.py -o tune_attention.json [--budget 100]
    python scripts/bench/tune_attention.py --heads 32/4 --batch 16,64,256     # rounds of a rank of Llama-3-70B, of two

Rounds: batches of 1 to 256 rows of 1250 tokens, 1, 4 or 8 new ones each (a chain; 8 also as a tree). Prompts: a chunk
of 8 x 1024 tokens, one of 8192, one that continues a prompt. Each in CUDA-graph replay over the caches of 4 layers,
so that keys and values come from memory. Candidates are compiled beforehand by processes without a GPU, as in
tune_linear.py. Prints the best of each size next to what `tile_for` and `num_splits` choose.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor
from tune_linear import only_compile, replay_time, say

from specbatch.attention.triton import WORKSPACE_ROWS, num_splits
from specbatch.batch import PagedBatch
from specbatch.kernels.triton import attention
from specbatch.kernels.triton.attention import attend_by
from specbatch.kernels.triton.parts.attention_tile import Tile, tile_for
from specbatch.kernels.triton.workspace import Workspace

DTYPE = torch.bfloat16
LAYERS = 4  # caches in rotation
COPY_BYTES_PER_SECOND = 4.2e12


@dataclass(frozen=True)
class Size:
    """A batch of `batch` rows with `queries` new tokens each, after `start` others."""

    name: str
    batch: int
    start: int
    queries: int
    heads: int
    kv_heads: int
    tree: bool = False
    page_size: int = 64
    dim: int = 128

    @property
    def num_rows(self) -> int:
        return self.queries * self.heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        return self.batch * (self.start + self.queries) * self.kv_heads * self.dim * 2 * 2

    @property
    def flops(self) -> float:
        seen = self.batch * (self.start * self.queries + self.queries * (self.queries + 1) / 2)
        return 4.0 * seen * self.heads * self.dim


def sizes(heads: tuple[int, int], batches: list[int], queries: list[int]) -> list[Size]:
    """List the sizes to time. `batches`: the batch sizes; empty: all sizes that are named above."""
    found = [
        Size("round", batch, 1250, q, *heads) for q in queries for batch in batches or (32, 64, 128, 256, 16, 4, 1)
    ]
    if not batches:
        found += [Size("tree", batch, 1250, 8, *heads, tree=True) for batch in (1, 16, 64)]
        prompts = ("prompts", 8, 0, 1024), ("prompt", 1, 0, 8192), ("chunk", 4, 1024, 2048)
        found += [Size(*prompt, *heads) for prompt in prompts]
    return found


def candidates(size: Size) -> Iterator[tuple[Tile, int]]:
    splits = num_splits(size.batch, size.kv_heads, size.num_rows, size.dim)
    current = tile_for(size.num_rows, size.dim, DTYPE.itemsize, num_programs=size.batch * size.kv_heads)
    yield current, splits
    if size.num_rows > 64:
        for block_m, block_n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3)):
            if block_m == 64 and warps == 8:
                continue
            for peeled in (True, False) if block_n == 64 else (True,):
                yield Tile(block_m, block_n, warps, stages, peeled), 1
        return
    shapes = [
        (32, 2, 4),
        (32, 2, 6),
        (32, 4, 4),
        (64, 2, 3),
        (64, 2, 4),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
        (64, 8, 3),
        (64, 8, 4),
    ]
    choices = sorted({max(1, splits // 2), splits, min(16, splits * 2), min(16, splits * 4)})
    tiles = itertools.product(sorted({current.block_m, 64 if size.num_rows > 16 else current.block_m}), shapes, choices)
    for block_m, (block_n, warps, stages), chosen in tiles:
        if size.batch * size.kv_heads * chosen * block_m <= WORKSPACE_ROWS or chosen == 1:
            yield Tile(block_m, block_n, warps, stages), chosen


def make(size: Size, device: str, layers: int) -> tuple[Tensor, list[Tensor], PagedBatch]:
    pages = -(-(size.start + size.queries) // size.page_size)
    num_slots = size.batch * pages * size.page_size
    caches = [torch.empty(2, size.kv_heads, num_slots, size.dim, dtype=DTYPE, device=device) for _ in range(layers)]
    tokens = size.batch * size.queries
    q = torch.empty(tokens, size.heads, size.dim, dtype=DTYPE, device=device)
    if device != "cpu":
        for tensor in (q, *caches):
            tensor.normal_()
    table = torch.arange(size.batch * pages, dtype=torch.int32, device=device).view(size.batch, pages)
    starts = torch.full((size.batch,), size.start, dtype=torch.int32, device=device)
    ends = torch.arange(size.batch + 1, dtype=torch.int32, device=device) * size.queries
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = PagedBatch(positions, positions, table, size.page_size, starts, ends, size.queries)
    if size.tree:
        words = torch.full((tokens, 1), 255, dtype=torch.int32, device=device)
        batch = replace(batch, mask_TW=words, mask_starts_B=starts)
    return q, caches, batch


def only_compile_for_hopper() -> None:
    only_compile()
    attention.dependent_launch = lambda tensor: True  # the workers' tensors are the CPU's


def compile_one(size: Size, tile: Tile, splits: int) -> str | None:
    try:
        q, caches, batch = make(replace(size, batch=2), "cpu", 1)
        workspace = Workspace(torch.device("cpu"), WORKSPACE_ROWS, size.dim)
        attend_by(tile, q, caches[0], batch, size.dim**-0.5, None, splits, workspace)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--heads", default="32/8", metavar="QUERY/KEY")
    parser.add_argument("--dim", type=int, default=128, help="head dimension")
    parser.add_argument("--batch", default="", metavar="1,64,...", help="rounds of these alone")
    parser.add_argument("--queries", default="4,1", help="new tokens of a row in a round")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds")
    parser.add_argument("--commit")
    args = parser.parse_args()
    heads, kv_heads = (int(part) for part in args.heads.split("/"))
    batches, queries = ([int(part) for part in text.split(",") if part] for text in (args.batch, args.queries))
    wanted = [replace(size, dim=args.dim) for size in sizes((heads, kv_heads), batches, queries)]
    deadline = time.monotonic() + args.budget
    tasks = {}
    with multiprocessing.get_context("fork").Pool(max((os.cpu_count() or 2) - 1, 1), only_compile_for_hopper) as pool:
        for size in wanted:
            for tile, splits in candidates(size):
                # A kernel does not depend on the batch size.
                key = (replace(size, name="", batch=0), tile, splits)
                if key not in tasks:
                    tasks[key] = pool.apply_async(compile_one, (size, tile, splits))
        device = torch.device("cuda")
        workspace = Workspace(device, WORKSPACE_ROWS, args.dim)
        report = []
        for size in wanted:
            q, caches, batch = make(size, "cuda", LAYERS)
            results = []
            for tile, splits in candidates(size):
                if time.monotonic() > deadline:
                    break
                error = tasks[replace(size, name="", batch=0), tile, splits].get()
                if error is not None:
                    say(f"  {size.name} {size.batch}x{size.queries} {tile} {splits}: {error}")
                    continue

                def launch() -> None:
                    for layer in range(2 * LAYERS):
                        attend_by(tile, q, caches[layer % LAYERS], batch, size.dim**-0.5, None, splits, workspace)  # noqa: B023

                try:
                    microseconds = replay_time(launch, 5) / (2 * LAYERS) * 1e6
                except Exception as problem:
                    say(f"  {size.name} {tile} {splits}: {type(problem).__name__}: {str(problem)[:160]}")
                    continue
                results.append((microseconds, tile, splits))
            if not results:
                break
            floor = max(size.kv_bytes / COPY_BYTES_PER_SECOND, size.flops / 780e12) * 1e6
            say(f"{size.name} {size.batch} x {size.queries} after {size.start}: floor {floor:.1f} us")
            for label, (microseconds, tile, splits) in (
                ("now", results[0]),
                *(("best", r) for r in sorted(results, key=lambda r: r[0])[:3]),
            ):
                shown = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, "peeled" * tile.peeled)
                rate = f"{size.kv_bytes / microseconds / 1e6:.2f} TB/s, {size.flops / microseconds / 1e6:.0f} TFLOP/s"
                say(f"  {label:5} {microseconds:8.1f} us  {rate}  {shown} splits {splits}")
            report.append(
                asdict(size)
                | {"floor_us": floor, "results": [{"us": u, **asdict(t), "splits": s} for u, t, s in results]}
            )
            if args.output is not None:
                versions = {"torch": torch.__version__, "triton": triton.__version__}
                head = {"commit": args.commit, "device": torch.cuda.get_device_name(), **versions}
                args.output.write_text(json.dumps(head | {"sizes": report}, indent=1))


if __name__ == "__main__":
    main()
