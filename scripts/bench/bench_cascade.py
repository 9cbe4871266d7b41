"""Times attention of a round on a GPU where requests share a prefix: as each reads all of its keys, and with
`engine.cascade_attention`, which reads the prefix once.

    python scripts/bench/bench_cascade.py -o cascade.json [--tune] [--seconds 55]

One layer at the sizes of Llama-3-8B (32/8 heads of 128, bfloat16, pages of 64); each request has 100 to 500 tokens of
its own. In CUDA-graph replay over as many layers' caches as do not fit the second-level cache. Prints JSON lines:

- `now_us`, `cascade_us`: a layer's attention; `prefix_us`: the part of it that is of the shared tokens.
- `empty_us`: the graph of `cascade_us` with no group, over the same requests; `empty_cost`: over `now_us`, 0.02 is 2%.
- `floor_us`: distinct bytes of keys and values over 4.2 TB/s. `now_GB/s` counts the bytes that requests read,
  `cascade_GB/s` the distinct ones.
- `difference`: of the two outputs, relative; `error_now` and `error_cascade`: to a float32 reference, of few requests.

--tune times other tiles, parts and numbers of programs instead. No new case begins after --seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_attention import replay_us
from torch import Tensor

from specbatch.attention.triton import WORKSPACE_ROWS, PagedAttention, num_prefix_parts, num_splits
from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.cache.prefix_groups import Group, GroupLimits, GroupTable
from specbatch.kernels import torch as reference
from specbatch.kernels.triton.parts.attention_tile import Tile
from specbatch.results.stats import commit, versions

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
TOKEN_BYTES = 2 * KV_HEADS * DIM * DTYPE.itemsize
COLD_BYTES = 400 << 20  # the size of all caches, which are read in turn: several times the second-level cache
FLOOR_BYTES_PER_US = 4.2e6
CHECKED = 64  # the requests of a batch that are compared with the reference
TILES = [Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3)]
PARTS, PROGRAMS = (1, 2, 4, 8), (132, 264, 528)


@dataclass(frozen=True)
class Case:
    """A batch in which `groups` groups of equal size share `shared` tokens, of which whole pages are read once. Each of
    its `batch` requests has `queries` new tokens."""

    batch: int
    shared: int
    queries: int
    groups: int = 1


def cases(tune: bool) -> list[Case]:
    if tune:
        found = [Case(batch, shared, 1) for batch in (32, 256) for shared in (1000, 4000)]
        found += [Case(512, 1000, 1, 64), Case(128, 1000, 4), Case(512, 1000, 4), Case(512, 1000, 4, 64)]
        return sorted(found, key=lambda case: -case.queries)  # cases with the largest gains come first
    wide = [Case(512, 1000, 1, 64), Case(512, 1000, 4, 64), Case(256, 1000, 1, 32), Case(256, 1000, 4, 32)]
    found = [Case(b, s, q) for s, b, q in itertools.product((1000, 4000, 256), (32, 128, 256, 512), (1, 4))]
    return found[:8] + wide + found[8:]


class Inputs:
    """Random queries and caches. The pages are scattered. A prefix has the same pages in all tables."""

    def __init__(self, case: Case) -> None:
        rows, own = torch.Generator().manual_seed(0), case.shared % PAGE
        own_tokens = own + torch.randint(100, 501, (case.batch,), generator=rows)
        prefix_pages, own_pages = case.shared // PAGE, -(-(own_tokens + case.queries) // PAGE)
        num_pages = case.groups * prefix_pages + int(own_pages.sum())
        order = torch.randperm(num_pages, generator=rows, dtype=torch.int32)
        prefixes, others = (
            order[: case.groups * prefix_pages].view(case.groups, -1),
            order[case.groups * prefix_pages :],
        )
        table = torch.zeros(case.batch, prefix_pages + int(own_pages.max()), dtype=torch.int32)
        for row, pages in enumerate(others.split(own_pages.tolist())):
            table[row, :prefix_pages] = prefixes[row % case.groups]
            table[row, prefix_pages : prefix_pages + len(pages)] = pages
        starts = prefix_pages * PAGE + own_tokens
        members = [list(range(group, case.batch, case.groups)) for group in range(case.groups)]
        self.found = [Group(rows, prefix_pages * PAGE) for rows in members]
        self.read_bytes = int((starts + case.queries).sum()) * TOKEN_BYTES
        saved = sum(group.saved for group in self.found)
        self.distinct_bytes = self.read_bytes - saved * TOKEN_BYTES
        self.num_layers = min(32, max(2, -(-COLD_BYTES // self.distinct_bytes)))
        self.cache = KVCache(self.num_layers, num_pages * PAGE, KV_HEADS, DIM, DTYPE, DEVICE)
        for layer in range(self.num_layers):
            self.cache.layer(layer).normal_()
        self.q_THD = torch.randn(case.batch * case.queries, HEADS, DIM, dtype=DTYPE, device=DEVICE)
        ends = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.queries
        tokens = torch.zeros(case.batch * case.queries, dtype=torch.int64, device=DEVICE)
        self.plain = PagedBatch(
            tokens, tokens, table.to(DEVICE), PAGE, starts.to(DEVICE, torch.int32), ends, case.queries
        )
        self.table = GroupTable(case.batch, GroupLimits(), DEVICE)
        self.grouped = replace(self.plain, groups=self.table.of_batch(case.batch))

    def write(self, groups: list[Group]) -> None:
        self.table.write(groups, lambda packed: torch.from_numpy(packed).to(DEVICE))


def measure(case: Case) -> Iterator[dict[str, Any]]:
    inputs = Inputs(case)
    backend = PagedAttention(HEADS, KV_HEADS, DIM, DTYPE, DEVICE)
    now, cascade = (partial(attend, backend, inputs, batch) for batch in (inputs.plain, inputs.grouped))
    inputs.write(inputs.found)
    plain_THD, out_THD = now(0), cascade(0)
    line: dict[str, Any] = {"now_us": layers_us(now, inputs), "cascade_us": layers_us(cascade, inputs)}
    parts = num_prefix_parts(case.batch, KV_HEADS, case.queries * HEADS // KV_HEADS)
    line["prefix_us"] = layers_us(partial(prefixes, inputs, parts), inputs)
    inputs.write([])
    line["empty_us"] = layers_us(cascade, inputs)
    line["empty_equals_now"] = torch.equal(cascade(0), plain_THD)
    line["empty_cost"] = line["empty_us"] / line["now_us"] - 1
    line["floor_us"] = inputs.distinct_bytes / FLOOR_BYTES_PER_US
    line["now_GB/s"] = inputs.read_bytes / line["now_us"] / 1e3
    line["cascade_GB/s"] = inputs.distinct_bytes / line["cascade_us"] / 1e3
    line["gain"] = line["now_us"] / line["cascade_us"]
    line["difference"] = difference(out_THD, plain_THD)
    if case.batch <= CHECKED:
        exact_THD = exact(inputs)
        line["error_now"], line["error_cascade"] = difference(plain_THD, exact_THD), difference(out_THD, exact_THD)
    yield line


def tune(case: Case) -> Iterator[dict[str, Any]]:
    """Time both launches of a layer, with one thing changed."""
    from specbatch.kernels.triton import attention
    from specbatch.kernels.triton.parts.attention_tile import prefix_tile_for
    from specbatch.kernels.triton.prefixes import attend_prefixes_by

    inputs = Inputs(case)
    inputs.write(inputs.found)
    rows = case.queries * HEADS // KV_HEADS
    usual, parts = prefix_tile_for(rows, DIM, DTYPE.itemsize), num_prefix_parts(case.batch, KV_HEADS, rows)
    workspace, splits = attention.Workspace(DEVICE, WORKSPACE_ROWS, DIM), num_splits(case.batch, KV_HEADS, rows)
    tried = [(tile, parts, 264) for tile in TILES] + [(usual, count, 264) for count in PARTS if count != parts]
    for tile, count, programs in tried + [(usual, parts, count) for count in PROGRAMS if count != 264]:

        def layer_of(layer: int, tile: Tile = tile, count: int = count, programs: int = programs) -> Tensor:
            q, kv, batch = inputs.q_THD, inputs.cache.layer(layer), inputs.grouped
            prefix = attend_prefixes_by(tile, programs, q, kv, batch, DIM**-0.5, count)
            return attention.attend(q, kv, batch, DIM**-0.5, None, splits, workspace, prefix=prefix)

        line: dict[str, Any] = {"tile": asdict(tile), "parts": count, "programs": programs}
        line["is_chosen"] = (tile, count, programs) == (usual, parts, 264)
        try:
            line["cascade_us"] = layers_us(layer_of, inputs)
        except Exception as error:  # the tile does not fit
            line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        yield line


def attend(backend: PagedAttention, inputs: Inputs, batch: PagedBatch, layer: int) -> Tensor:
    return backend.attend(backend.plan(batch), inputs.q_THD, inputs.cache, layer, None)


def prefixes(inputs: Inputs, parts: int, layer: int) -> None:
    from specbatch.kernels.triton.prefixes import attend_prefixes

    attend_prefixes(inputs.q_THD, inputs.cache.layer(layer), inputs.grouped, DIM**-0.5, parts)


def layers_us(layer_of: Callable[[int], Any], inputs: Inputs) -> float:
    """Return the microseconds of one layer."""

    def layers() -> None:
        for layer in range(inputs.num_layers):
            layer_of(layer)

    return replay_us(layers, repeats=3) / inputs.num_layers


def exact(inputs: Inputs) -> Tensor:
    """Compute attention in float32 over the keys and values of the cache, a few requests at a time."""
    batch, step = inputs.plain, 4
    outs = []
    for first in range(0, len(batch.starts_B), step):
        part = batch.divided(first, first * batch.max_queries)[1] if first else batch
        part = part.divided(step, step * batch.max_queries)[0]
        tokens = slice(first * batch.max_queries, (first + step) * batch.max_queries)
        outs.append(reference.attend(inputs.q_THD[tokens].float(), inputs.cache.layer(0), part, DIM**-0.5))
    return torch.cat(outs)


def difference(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=55.0)
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    head = {"device": torch.cuda.get_device_name(), "commit": commit(), "versions": versions()}
    began = time.monotonic()

    def add(line: dict[str, Any]) -> None:
        lines.append({name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in line.items()})
        print(json.dumps(lines[-1]), flush=True)
        if args.output is not None:  # written each time, so that a run that is cut off loses nothing
            args.output.write_text(json.dumps(head | {"lines": lines}, indent=1) + "\n", encoding="utf-8")

    for case in cases(args.tune):
        if time.monotonic() - began > args.seconds:
            add({**asdict(case), "error": "no time was left"})
            continue
        try:
            for line in (tune if args.tune else measure)(case):
                add({**asdict(case), **line})
        except Exception as error:
            add({**asdict(case), "error": f"{type(error).__name__}: {str(error)[:300]}"})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
