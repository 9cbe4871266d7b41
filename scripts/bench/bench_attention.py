"""Times attention at the sizes of Llama-3-8B (32/8 heads of 128, bf16, pages of 64): Triton's kernel and FlashInfer's.

    python scripts/bench/bench_attention.py -o attention.json [--only decode,chain,tree,prompt]

Rounds (1, 4 or 8 new tokens for each row, the latter as a tree) and prompts. Each line is one layer's attention, from
CUDA-graph replays over as many layers' caches as do not fit the second-level cache; `plan` is what a forward pass does
once for all layers. Extra lines where the host knows all lengths, which an engine that runs ahead does not:
`flashinfer split` (split keys, planned by FlashInfer), `flashinfer fa3` (its Hopper kernel) and torch's `sdpa` (dense).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.attention.flashinfer import FlashInferAttention
from specbatch.attention.triton import PagedAttention
from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
BACKENDS: dict[str, type[PagedAttention | FlashInferAttention]] = {
    "triton": PagedAttention,
    "flashinfer": FlashInferAttention,
}
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4]  # the parents of the tree's nodes
COLD_BYTES = 400 << 20  # the size of all caches, which are read in turn: several times the second-level cache
MAX_LAYERS = 32


@dataclass(frozen=True)
class Case:
    """A batch of `batch` rows with `queries` new tokens each, after `start` others."""

    kind: str
    batch: int
    start: int
    queries: int

    @property
    def kv_bytes(self) -> int:
        return self.batch * (self.start + self.queries) * KV_HEADS * DIM * 2 * DTYPE.itemsize

    @property
    def flops(self) -> float:
        pairs = self.queries * self.start + self.queries * (self.queries + 1) / 2
        return 4 * HEADS * DIM * self.batch * pairs

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch} x {self.queries} after {self.start}"


def cases(kinds: list[str]) -> list[Case]:
    found = [
        Case(kind, batch, start, queries)
        for kind, queries in (("decode", 1), ("chain", 4), ("tree", 8))
        for start in (1000, 8000)
        for batch in (1, 16, 64, 256)
    ]
    found += [Case("prompt", 8, 0, 1000), Case("prompt", 1, 0, 8000), Case("prompt", 1, 6000, 2000)]
    return [case for case in found if case.kind in kinds]


class Inputs:
    """Random queries and caches; the pages of a row are scattered."""

    def __init__(self, case: Case) -> None:
        total = case.start + case.queries
        pages_per_row = -(-total // PAGE)
        num_pages = case.batch * pages_per_row
        self.num_layers = min(MAX_LAYERS, max(2, -(-COLD_BYTES // case.kv_bytes)))
        self.cache = KVCache(self.num_layers, num_pages * PAGE, KV_HEADS, DIM, DTYPE, DEVICE)
        for layer in range(self.num_layers):
            self.cache.layer(layer).normal_()
        self.q_THD = torch.randn(case.batch * case.queries, HEADS, DIM, dtype=DTYPE, device=DEVICE)
        table = torch.randperm(num_pages, device=DEVICE).view(case.batch, pages_per_row).int()
        starts = torch.full((case.batch,), case.start, dtype=torch.int32, device=DEVICE)
        host = np.arange(case.batch + 1, dtype=np.int32) * np.int32(case.queries)
        tokens = torch.zeros(case.batch * case.queries, dtype=torch.int64, device=DEVICE)
        tree = case.kind == "tree"
        self.batch = PagedBatch(
            slots_T=tokens,
            positions_T=tokens,
            page_table_BP=table,
            page_size=PAGE,
            starts_B=starts,
            query_starts=torch.from_numpy(host).to(DEVICE),
            max_queries=case.queries,
            mask_TW=torch.tensor(tree_words(), device=DEVICE).int().repeat(case.batch)[:, None] if tree else None,
            mask_starts_B=starts if tree else None,
            host_query_starts=host if case.kind == "prompt" else None,
        )

    def paged(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values in FlashInfer's layout."""
        kv = self.cache.layer(layer).view(2, KV_HEADS, -1, PAGE, DIM).transpose(1, 2)
        return kv[0], kv[1]


def tree_words() -> list[int]:
    words: list[int] = []
    for node, parent in enumerate(PARENTS):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    return words


def replay_us(function: Callable[[], Any], repeats: int = 5) -> float:
    """Return the median microseconds of one replay of `function` as a graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return events_us(graph.replay, repeats)


def events_us(function: Callable[[], Any], repeats: int = 5) -> float:
    function()
    first = _events_us(function, 3)
    count = max(3, min(200, int(50_000 / max(first, 1.0))))  # about 50 ms each time
    return statistics.median(_events_us(function, count) for _ in range(repeats))


def _events_us(function: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def time_backend(name: str, case: Case, inputs: Inputs) -> tuple[dict[str, float], Tensor]:
    backend = BACKENDS[name](HEADS, KV_HEADS, DIM, DTYPE, DEVICE)
    plan: Any = backend.plan(inputs.batch)

    def layers() -> None:
        for layer in range(inputs.num_layers):
            backend.attend(plan, inputs.q_THD, inputs.cache, layer, None)

    us = replay_us(layers) / inputs.num_layers
    found = {"us": us}
    if name == "flashinfer":  # Triton's kernel plans nothing; the host plans a prompt
        timed = events_us if case.kind == "prompt" else replay_us
        found["plan_us"] = timed(lambda: backend.plan(inputs.batch))
    return found, backend.attend(plan, inputs.q_THD, inputs.cache, 0, None)


def time_ordinary_plan(kernel: str, case: Case, inputs: Inputs) -> tuple[dict[str, float], Tensor]:
    """Time FlashInfer as in its documentation: all lengths are known, and keys may be split."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=kernel)
    pages = inputs.batch.page_table_BP.shape[1]
    row = torch.arange(case.batch + 1, dtype=torch.int32)
    last = (case.start + case.queries - 1) % PAGE + 1
    wrapper.plan(
        row * case.queries,
        row * pages,
        inputs.batch.page_table_BP.view(-1),
        torch.full((case.batch,), last, dtype=torch.int32),
        HEADS,
        KV_HEADS,
        DIM,
        PAGE,
        causal=True,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    out = torch.empty_like(inputs.q_THD)

    def layers() -> None:
        for layer in range(inputs.num_layers):
            wrapper.run(inputs.q_THD, inputs.paged(layer), out=out)

    us = replay_us(layers) / inputs.num_layers
    return {"us": us}, wrapper.run(inputs.q_THD, inputs.paged(0))


def time_sdpa(case: Case, inputs: Inputs) -> dict[str, float]:
    """Time torch's attention with dense keys and values, in torch's layout."""
    q = inputs.q_THD.view(case.batch, case.queries, HEADS, DIM).transpose(1, 2)
    k, v = torch.randn(2, case.batch, KV_HEADS, case.queries, DIM, dtype=DTYPE, device=DEVICE)
    return {"us": replay_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))}


def on_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def compile_kernels() -> None:
    """Compile both of FlashInfer's modules at once, which takes some minutes the first time."""
    from flashinfer.jit import build_jit_specs, gen_batch_prefill_module

    geometry = (DTYPE, DTYPE, DTYPE, torch.int32, DIM, DIM, 0, False, False, False)
    build_jit_specs([gen_batch_prefill_module(kernel, *geometry) for kernel in ("fa2", *["fa3"] * on_hopper())])


def measure(case: Case, has_flashinfer: bool) -> list[dict[str, Any]]:
    inputs = Inputs(case)
    lines: list[dict[str, Any]] = []
    reference: Tensor | None = None

    def add(name: str, found: dict[str, float], out: Tensor | None = None) -> None:
        line = {"case": case.name, "kind": case.kind, "batch": case.batch, "start": case.start, "kernel": name, **found}
        line["GB/s"], line["TFLOP/s"] = case.kv_bytes / found["us"] / 1e3, case.flops / found["us"] / 1e6
        if out is not None and reference is not None:
            line["difference"] = float((out.float() - reference.float()).norm() / reference.float().norm())
        lines.append(line)
        show(line)

    found, reference = time_backend("triton", case, inputs)
    add("triton", found)
    if has_flashinfer:
        add("flashinfer", *time_backend("flashinfer", case, inputs))
        if case.kind in ("decode", "chain"):
            add("flashinfer split", *time_ordinary_plan("fa2", case, inputs))
        if case.kind == "prompt" and on_hopper():
            add("flashinfer fa3", *time_ordinary_plan("fa3", case, inputs))
    if case.kind == "prompt" and case.start == 0:
        add("sdpa", time_sdpa(case, inputs))
    return lines


def show(line: dict[str, Any]) -> None:
    extra = f"  plan {line['plan_us']:.1f} us" if "plan_us" in line else ""
    extra += f"  differs by {line['difference']:.1e}" if "difference" in line else ""
    print(
        f"{line['case']:34} {line['kernel']:17} {line['us']:10.1f} us {line['GB/s']:8.0f} GB/s "
        f"{line['TFLOP/s']:7.1f} TFLOP/s{extra}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="decode,chain,tree,prompt", help="kinds of cases")
    args = parser.parse_args()
    has_flashinfer = importlib.util.find_spec("flashinfer") is not None
    if not has_flashinfer:
        print("flashinfer is not installed: without its lines")
    else:
        compile_kernels()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": []}
    with torch.inference_mode():
        for case in cases(args.only.split(",")):
            result["lines"] += measure(case, has_flashinfer)
            torch.cuda.empty_cache()
            if args.output is not None:  # written each time, so that a run that is cut off loses nothing
                args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
