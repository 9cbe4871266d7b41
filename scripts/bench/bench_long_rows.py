"""Times one attention launch of a decode step on a GPU where one row is far longer than the others, and checks the bits
of the kernel of engine.deterministic with several tiles.

    python scripts/bench/bench_long_rows.py -o long_rows.json

Shapes: qwen2.5-7b (28/4 heads of 128) and llama-3.2-1b (32/8 heads of 64), bfloat16, pages of 64, and a page table as
wide as 131,072 tokens, as a run that allows such rows has it. Kernels:

- `fast`: splits follow the number of rows.
- `fast, rows of N split`: in a large batch, rows of N tokens are split, too. Batches without such rows show the cost.
- `deterministic`: its kernel, by tile. `same_bits`: as with the first tile.

One line is one layer, in CUDA-graph replay over the caches of two layers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from bench_attention import replay_us

from specbatch.attention.invariant import InvariantAttention
from specbatch.attention.triton import PagedAttention
from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.kernels.triton.parts.attention_tile import Tile
from specbatch.results.stats import commit, versions

SHAPES = {"qwen2.5-7b": (28, 4, 128), "llama-3.2-1b": (32, 8, 64)}
BATCHES = {
    "256 x 1k": [1024] * 256,
    "255 x 1k + 100k": [1024] * 255 + [100_000],
    "8 x 1k": [1024] * 8,
    "1 x 1k": [1024],
    "1 x 100k": [100_000],
    "8 prompts of 1k": [1024] * 8,
}
TILES = [Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), *(Tile(16, 64, 4, stages) for stages in (5, 3, 2))]
LONG_TOKENS = (4096, 8192)
PAGE, MAX_TOKENS, LAYERS = 64, 131_072, 2
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def make(lengths: list[int], kv_heads: int, dim: int, queries: int) -> tuple[PagedBatch, KVCache]:
    """Make rows of `lengths` tokens, whose last `queries` tokens are new."""
    pages = [-(-length // PAGE) for length in lengths]
    table = torch.zeros(len(lengths), MAX_TOKENS // PAGE, dtype=torch.int32)
    order = torch.randperm(sum(pages), dtype=torch.int32).split(pages)
    for row, own in enumerate(order):
        table[row, : len(own)] = own
    tokens = torch.zeros(len(lengths) * queries, dtype=torch.int64, device=DEVICE)
    starts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - queries
    ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE) * queries
    cache = KVCache(LAYERS, sum(pages) * PAGE, kv_heads, dim, DTYPE, DEVICE)
    for layer in range(LAYERS):
        cache.layer(layer).normal_()
    return PagedBatch(tokens, tokens, table.to(DEVICE), PAGE, starts, ends, queries), cache


def backends(shape: tuple[int, int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"fast": PagedAttention(*shape, DTYPE, DEVICE, long_tokens=None)}
    for tokens in LONG_TOKENS:
        found[f"fast, rows of {tokens} split"] = PagedAttention(*shape, DTYPE, DEVICE, long_tokens=tokens)
    for tile in TILES:
        name = f"deterministic {tile.block_m}x{tile.block_n}, {tile.num_stages} stages"
        found[name] = InvariantAttention(*shape, DTYPE, DEVICE, tile=tile)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--queries", default="1,4", help="new tokens of a row")
    parser.add_argument("--only", default="", help="batches whose names hold this")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    head = {"device": torch.cuda.get_device_name(), "commit": commit(), "versions": versions()}
    torch.manual_seed(0)
    for shape_name, shape in SHAPES.items():
        heads, kv_heads, dim = shape
        for batch_name, lengths in BATCHES.items():
            if args.only not in batch_name:
                continue
            for queries in [1024] if "prompts" in batch_name else map(int, args.queries.split(",")):
                batch, cache = make(lengths, kv_heads, dim, queries)
                q = torch.randn(len(lengths) * queries, heads, dim, device=DEVICE).to(DTYPE)
                expected = None
                for name, backend in backends(shape).items():

                    def launch(backend: Any = backend) -> None:
                        plan = backend.plan(batch)  # noqa: B023  # part of a forward pass, for all its layers
                        for layer in range(4 * LAYERS):
                            backend.attend(plan, q, cache, layer % LAYERS, None)  # noqa: B023

                    line: dict[str, Any] = {
                        "shape": shape_name,
                        "batch": batch_name,
                        "queries": queries,
                        "kernel": name,
                    }
                    try:
                        line["us"] = round(replay_us(launch) / (4 * LAYERS), 2)
                        out = backend.attend(backend.plan(batch), q, cache, 0, None)
                        if name.startswith("deterministic"):
                            expected = out if expected is None else expected
                            line["same_bits"] = torch.equal(out, expected)
                    except Exception as error:  # the tile does not fit
                        line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                    lines.append(line)
                    print(json.dumps(line), flush=True)
                if args.output is not None:
                    args.output.write_text(json.dumps(head | {"lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
