"""Times attention over keys and values in FP8 (E4M3) on a GPU, by tile, next to bf16's.

    python scripts/bench/bench_kv8.py -o kv8.jsonl [--budget 55]

One layer of decoding (1 new token) and of verification (4, a chain), at the sizes of Llama-3-8B and Qwen2.5-1.5B:
batches of 1 to 512 with 1,024 tokens each, and 8 with 16,384; and a chunk of prompts. Each in CUDA-graph replay over
several layers' caches, so that keys and values come from memory. Kernels are compiled beforehand by processes without a
GPU, as in tune_linear.py.

Each line: microseconds, GB/s of keys and values, time of bf16 over this one's (`speedup`), and the error of the result
(mean and largest, over the root mean square of the right one): against float32 attention over the unrounded keys and
values (`error`), and over what the cache holds (`kernel_error`). Queries are three times a normal distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from tune_attention import only_compile_for_hopper
from tune_linear import replay_time

from specbatch.attention.triton import WORKSPACE_ROWS, num_splits
from specbatch.batch import PagedBatch
from specbatch.kernels import torch as reference
from specbatch.kernels.triton.attention import attend_by
from specbatch.kernels.triton.parts.attention_tile import Fp8Form, Tile, tile_for
from specbatch.kernels.triton.workspace import Workspace

PAGE, DIM = 64, 128
DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn
COLD_BYTES, MAX_LAYERS = 300 << 20, 16  # caches that are read in turn: several times the second-level cache
HEADS = {"8b": (32, 8), "1.5b": (12, 2)}


@dataclass(frozen=True)
class Case:
    """A batch of sequences with `tokens` tokens, of which the last `queries` are new."""

    shape: str
    batch: int
    tokens: int
    queries: int

    @property
    def num_rows(self) -> int:
        heads, kv_heads = HEADS[self.shape]
        return self.queries * heads // kv_heads

    @property
    def splits(self) -> int:
        return num_splits(self.batch, HEADS[self.shape][1], self.num_rows)

    @property
    def kernel(self) -> Case:
        """Return the smallest case with the same kernels."""
        same = [n for n in (2, 16) if (n % 16 == 0) == (self.batch % 16 == 0)] if self.batch > 1 else [1]
        return replace(self, batch=same[0], tokens=1024, queries=1)


def cases() -> list[Case]:
    sizes = [(512, 1024), (64, 1024), (8, 16384), (256, 1024), (8, 1024), (1, 1024)]
    found = [Case(shape, *size, queries) for shape in HEADS for queries in (1, 4) for size in sizes]
    # The most important cases come first.
    found.sort(key=lambda case: sizes.index((case.batch, case.tokens)))
    return [*found, *(Case(shape, 8, 1024, 1024) for shape in HEADS)]


def variants(case: Case) -> dict[str, tuple[Tile, torch.dtype]]:
    num_programs = case.batch * HEADS[case.shape][1]
    now = replace(tile_for(case.num_rows, DIM, DTYPE.itemsize, num_programs=num_programs), fp8="widen")
    found = {"bf16": (now, DTYPE), "widen": (now, FP8)}

    def add(form: Fp8Form, block_n: int, num_warps: int, num_stages: int, peeled: bool = False) -> None:
        tile = Tile(now.block_m, block_n, num_warps, num_stages, peeled, form)
        found[f"{form} n{block_n} w{num_warps} s{num_stages}{' peeled' * peeled}"] = tile, FP8

    if case.queries > 4:
        for form in ("half", "pairs"):
            add(form, 64, 4, 2, True)
            add(form, 64, 4, 3, True)
        add("half", 128, 4, 2, True)
        return found
    # These were measured before and are no better: "half", 128 keys, 8 warps.
    for warps, stages, peeled in ((4, 3, False), (4, 6, False), (4, 8, False), (4, 6, True), (2, 6, True)):
        add("pairs", 64, warps, stages, peeled)
    add("pairs", 32, 2, 6, True)
    return found


class Inputs:
    """Random queries and caches; on a CPU they are not written, since kernels are only compiled."""

    def __init__(self, case: Case, device: str, num_layers: int) -> None:
        heads, kv_heads = HEADS[case.shape]
        pages = case.tokens // PAGE
        num_tokens, slots = case.batch * case.queries, case.batch * pages * PAGE
        self.q_THD = torch.empty(num_tokens, heads, DIM, dtype=DTYPE, device=device)
        self.wide = [torch.empty(2, kv_heads, slots, DIM, dtype=DTYPE, device=device) for _ in range(num_layers)]
        self.rounded = [torch.empty(cache.shape, dtype=FP8, device=device) for cache in self.wide]
        if device != "cpu":
            self.q_THD.normal_(0.0, 3.0)
            for wide, rounded in zip(self.wide, self.rounded, strict=True):
                rounded.copy_(wide.normal_())
        table = torch.arange(case.batch * pages, dtype=torch.int32, device=device).view(case.batch, pages)
        starts = torch.full((case.batch,), case.tokens - case.queries, dtype=torch.int32, device=device)
        ends = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.batch = PagedBatch(zeros, zeros, table, PAGE, starts, ends, case.queries)

    def caches(self, dtype: torch.dtype) -> list[Tensor]:
        return self.rounded if dtype == FP8 else self.wide

    def attend(self, case: Case, tile: Tile, cache: Tensor, workspace: Workspace) -> Tensor:
        return attend_by(tile, self.q_THD, cache, self.batch, DIM**-0.5, None, case.splits, workspace)


def compile_one(case: Case, splits: int, tile: Tile, dtype: torch.dtype) -> str | None:
    """Compile one kernel. Return the error, or None."""
    try:
        inputs, workspace = Inputs(case, "cpu", 1), Workspace(torch.device("cpu"), WORKSPACE_ROWS, DIM)
        attend_by(tile, inputs.q_THD, inputs.caches(dtype)[0], inputs.batch, DIM**-0.5, None, splits, workspace)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return None


Compiled = dict[tuple[Case, int, Tile, torch.dtype], "AsyncResult[str | None]"]


def errors(found: Tensor, right: Tensor) -> list[float]:
    """Return the mean and the largest error."""
    apart = (found.float() - right.float()).abs() / right.float().square().mean().sqrt()
    return [round(float(apart.mean()), 6), round(float(apart.max()), 5)]


def measure(case: Case, compiled: Compiled, workspace: Workspace, out: Output, deadline: float) -> None:
    kv_bytes = case.batch * case.tokens * HEADS[case.shape][1] * DIM * 2  # a number is one byte
    inputs = Inputs(case, "cuda", min(MAX_LAYERS, max(2, -(-COLD_BYTES // kv_bytes))))
    right: dict[torch.dtype, Tensor] = {}
    if case.batch * case.queries <= 64:
        for dtype in (DTYPE, FP8):
            args = inputs.q_THD.float(), inputs.caches(dtype)[0], inputs.batch, DIM**-0.5
            right[dtype] = reference.attend(*args)
    bf16_us = math.nan
    for name, (tile, dtype) in variants(case).items():
        line: dict[str, Any] = {**asdict(case), "splits": case.splits, "variant": name}
        try:
            problem = compiled[case.kernel, case.splits, tile, dtype].get(max(deadline - time.monotonic(), 0.1))
            if problem is not None:
                raise RuntimeError(problem)
            caches = inputs.caches(dtype)

            def launch() -> None:
                for cache in caches:  # noqa: B023
                    inputs.attend(case, tile, cache, workspace)  # noqa: B023

            us = replay_time(launch, 7) / len(caches) * 1e6
            bf16_us = us if name == "bf16" else bf16_us
            line |= {"us": round(us, 2), "GB/s": round(kv_bytes * dtype.itemsize / us / 1e3)}
            line["speedup"] = round(bf16_us / us, 3)
            if right:
                found = inputs.attend(case, tile, caches[0], workspace)
                line |= {"error": errors(found, right[DTYPE]), "kernel_error": errors(found, right[dtype])}
        except Exception as error:
            line["problem"] = f"{type(error).__name__}: {str(error)[:200]}"
        out.add(line)
        if time.monotonic() > deadline:
            return


def check_tiles(workspace: Workspace, out: Output) -> None:
    """Measure the difference between the last tokens of a prompt and those of a round, which has another tile and
    another kernel."""
    case = Case("8b", 4, 1024, 256)
    inputs = Inputs(case, "cuda", 1)
    last = replace(case, queries=1)
    for name, dtype in (("bf16", DTYPE), ("fp8", FP8)):
        cache, rows = inputs.caches(dtype)[0], torch.arange(255, 1024, 256, device="cuda")
        tiles = (Tile(64, 64, 4, 2, True, "half"), Tile(16, 64, 4, 3, False, "pairs"))
        whole = attend_by(tiles[0], inputs.q_THD, cache, inputs.batch, DIM**-0.5, None, 1, workspace)[rows]
        part = Inputs(last, "cuda", 0)
        q = inputs.q_THD[rows].contiguous()
        found = attend_by(tiles[1], q, cache, part.batch, DIM**-0.5, None, 1, workspace)
        apart = float((whole.float() - found.float()).abs().max())
        out.add({"check": "a prompt and a round", "cache": name, "apart": apart})


class Output:
    """The lines of JSON, which are printed and written at once."""

    def __init__(self, path: Path | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self._file = None if path is None else path.open("w", encoding="utf-8")

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        if self._file is not None:
            print(json.dumps(line), file=self._file, flush=True)

    def add_means(self) -> None:
        """Add the geometric mean of the speedups of each variant that all cases of its kind have."""
        groups: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in [line for line in self.lines if "speedup" in line]:
            few = "1 or 8 short" if line["batch"] <= 8 and line["tokens"] == 1024 else "many or long"
            kind = "prompts" if line["queries"] > 4 else f"q={line['queries']} {few}"
            groups[line["shape"], kind][line["variant"]].append(line["speedup"])
        for (shape, kind), by_variant in groups.items():
            count = max(map(len, by_variant.values()))
            means = {v: round(math.prod(x) ** (1 / len(x)), 3) for v, x in by_variant.items() if len(x) == count}
            best = dict(sorted(means.items(), key=lambda item: -item[1]))
            self.add({"mean_speedup": f"{shape} {kind}", "cases": count, **best})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--budget", type=float, default=55.0, help="seconds")
    args = parser.parse_args()
    deadline, out = time.monotonic() + args.budget, Output(args.output)
    compiled: Compiled = {}
    with multiprocessing.get_context("fork").Pool(max((os.cpu_count() or 2) - 1, 1), only_compile_for_hopper) as pool:
        for case in cases():
            for tile, dtype in variants(case).values():
                key = (case.kernel, case.splits, tile, dtype)
                if key not in compiled:
                    compiled[key] = pool.apply_async(compile_one, key)
        out.add({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__})
        workspace = Workspace(torch.device("cuda"), WORKSPACE_ROWS, DIM)
        with torch.inference_mode():
            for case in cases():
                if time.monotonic() > deadline:
                    out.add({**asdict(case), "problem": "no time is left"})
                    continue
                try:
                    measure(case, compiled, workspace, out, deadline)
                except Exception as error:
                    out.add({**asdict(case), "problem": f"{type(error).__name__}: {str(error)[:200]}"})
            try:
                check_tiles(workspace, out)
            except Exception as error:
                out.add({"check": "a prompt and a round", "problem": f"{type(error).__name__}: {str(error)[:200]}"})
        out.add_means()


if __name__ == "__main__":
    main()
