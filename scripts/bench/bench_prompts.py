"""Times one prompt of N tokens, computed in each way: kernel by kernel, in pieces that are CUDA graphs, compiled, and
as one whole graph. Says what captures cost, and the largest difference of logits.

    python scripts/bench/bench_prompts.py --target random:smollm2-135m -o prompts.json

Prints a JSON line for each way and number of tokens. `padded`: how many tokens are computed. `whole`: as one graph.
`ms`: from the packed prompt to the chosen token, the device idle before and after. `ms_in_a_row`: of prompts launched
one after the other. `gib`, `seconds`: of all captures of a way, `trace_seconds` of tracing and compiling.
`logits_difference`: to eager, in all logits of the last token; `top_logit`: the largest of them. A way that fails is a
line with its error. Run it twice: the second time, compiled code is read from the folder that the last line names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.config_load import load_config
from specbatch.engine.prefill.graphs import PromptGraphs
from specbatch.engine.prefill.models import EAGER, PromptPieces, PromptTrunks, piecewise_trunks
from specbatch.engine.prefill.packing import PromptPacker
from specbatch.engine.round import GREEDY, Round
from specbatch.engine.scheduler import PrefillSpan
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Transfers
from specbatch.graphs.piecewise import PiecewiseTrunk, next_size, token_ladder
from specbatch.graphs.runner import GraphRunner
from specbatch.results.stats import commit, versions
from specbatch.setup.build import read_models
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams

SIZES = "16,64,100,128,256,300,512,700,1024,1500,2048,3000,4096"
WAYS = ("eager", "piecewise", "whole", "compiled", "compiled and piecewise")
REPEATS = 12


class Prompts:
    """A model whose cache holds one prompt of each size, at the same slots."""

    def __init__(self, target: str, device: str, largest: int) -> None:
        sets = [f"model.target={target}", "speculation.method=none", f"engine.device={device}"]
        self.run = resolve(load_config(None, sets))
        _, self.parts = read_models(self.run)
        self.device, self.page = self.run.device, self.run.engine.page_size
        num_slots = (-(-largest // self.page) + 2) * self.page
        self.made = self.parts.make(1, largest + 2, num_slots)
        self.round: Round = self.made.items.items[0]
        self.cache = self.made.caches[0]
        pages = torch.arange(num_slots // self.page - 1, dtype=torch.int32, device=self.device)
        self.round.state.page_table_SP[0, : len(pages)] = pages[: self.round.state.page_table_SP.shape[1]]
        self.packer, self.transfers = PromptPacker(self.page, None), Transfers(self.device)

    def span(self, size: int) -> PrefillSpan:
        tokens = torch.randint(1, 500, (size,), generator=torch.Generator().manual_seed(size)).tolist()
        request = Request(0, tokens, SamplingParams(max_tokens=1), RngKey(0, 0, 0))
        seq = Sequence(request, tokens, size + 1, req_idx=0)
        seq.pages = list(range(-(-size // self.page) + 1))
        return PrefillSpan(seq, 0, size, True, 0)

    def graphs(self, trunks: PromptTrunks, whole_tokens: int = 0) -> PromptGraphs:
        return PromptGraphs(self.packer, self.transfers, self.device, 1, whole_tokens, trunks)

    def launch(self, graphs: PromptGraphs, size: int) -> Callable[[], Any]:
        span = self.span(size)
        packed = self.packer.pack([span])
        return lambda: graphs.run(self.round, packed, GREEDY, "round")

    def logits(self, trunks: PromptTrunks, size: int) -> Tensor:
        """Of the last token, float32."""
        packed = self.packer.pack([self.span(size)])
        arrays = packed.arrays()
        buffer = self.transfers.upload(arrays.buffer)
        chunk = self.packer.chunk(arrays, buffer, self.round.state.page_table_SP, packed.max_queries)
        layout: PagedBatch = chunk.layout
        target = self.parts.target
        hidden = target.forward(chunk.tokens_T, layout, self.cache, (), chunk.logits_indices, trunks.target)[0]
        return target.logits(hidden).clone()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(launch: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    for _ in range(3):
        launch()
    synchronize(device)
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        launch()
        synchronize(device)
        found.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(repeats):
        launch()
    synchronize(device)
    in_a_row = (time.perf_counter() - began) / repeats
    return {
        "ms": round(statistics.median(found) * 1e3, 3),
        "ms_least": round(min(found) * 1e3, 3),
        "ms_in_a_row": round(in_a_row * 1e3, 3),
    }


def measured(prompts: Prompts, way: str, sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    on_cuda, compiled = prompts.device.type == "cuda", way.startswith("compiled")
    trunks, whole, cost = EAGER, 0, {}
    target, captured_sizes = prompts.parts.target, token_ladder(max(sizes))
    if way == "whole":
        whole = max(sizes)
    elif way != "eager":
        runner = GraphRunner(prompts.device) if on_cuda and way != "compiled" else None
        began = time.perf_counter()
        pieces = PromptPieces.of_models(target, None, compiled=compiled)
        trunks = piecewise_trunks(pieces, prompts.cache, None, captured_sizes, runner)
        seconds = time.perf_counter() - began
        captured = 0.0 if runner is None else runner.seconds
        cost = {
            "trace_seconds": round(seconds - captured, 2),
            "seconds": round(captured, 2),
            "gib": round(0 if runner is None else runner.bytes / 2**30, 3),
            "pool_gib": round(0 if runner is None else runner.pool_bytes / 2**30, 3),
            "num_graphs": 0 if runner is None else len(runner),
        }
        yield {"tokens": None, **cost}
    graphs = prompts.graphs(trunks, whole)
    for size in sizes:
        shape = graphs.shape_of(prompts.packer.pack([prompts.span(size)]))
        trunk = trunks.target if isinstance(trunks.target, PiecewiseTrunk) else None
        padded = shape.num_tokens if shape is not None else None if trunk is None else next_size(trunk.sizes, size)
        line: dict[str, Any] = {"tokens": size, "padded": padded or size, "whole": shape is not None}
        try:
            line |= timed(prompts.launch(graphs, size), prompts.device, repeats)
            launched, _ = graphs.run(prompts.round, prompts.packer.pack([prompts.span(size)]), GREEDY, "round")
            line["token"] = int(launched.output_BZ[0, 0])
            if trunks is not EAGER:
                expected, found = prompts.logits(EAGER, size), prompts.logits(trunks, size)
                line["logits_difference"] = float((expected - found).abs().max())
                line["top_logit"] = float(expected.max())
                line["same_token"] = bool(expected.argmax() == found.argmax())
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield line
    runner = graphs.runner
    if way == "whole" and runner is not None:
        yield {
            "tokens": None, "seconds": round(runner.seconds, 2),
            "gib": round(runner.bytes / 2**30, 3), "pool_gib": round(runner.pool_bytes / 2**30, 3),
            "num_graphs": len(runner),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default=SIZES, help="numbers of tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--seconds", type=float, default=80.0, help="ways that would begin later are left out")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    sizes = [int(part) for part in args.sizes.split(",")]
    lines: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        lines.append({"target": args.target, **line, "at": round(time.perf_counter() - began, 1)})
        print(json.dumps(lines[-1]), flush=True)
        if args.output is not None:
            head = {"commit": commit(), "versions": versions(), "arguments": vars(args)}
            args.output.write_text(json.dumps(head | {"lines": lines}, indent=1, default=str) + "\n")

    with torch.inference_mode():
        prompts = Prompts(args.target, args.device, max(sizes))
        note({"way": "load", "device": torch.cuda.get_device_name() if prompts.device.type == "cuda" else "cpu"})
        for way in args.ways:
            if time.perf_counter() - began > args.seconds:
                note({"way": way, "error": "left out: no time"})
                continue
            try:
                for line in measured(prompts, way, sizes, args.repeats):
                    note({"way": way, **line})
            except Exception as error:
                note({"way": way, "error": f"{type(error).__name__}: {str(error)[:500]}"})
    note({"way": "compiled code", "folder": os.environ.get("TORCHINDUCTOR_CACHE_DIR")})


if __name__ == "__main__":
    main()
