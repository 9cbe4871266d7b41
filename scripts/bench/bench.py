"""A benchmark of throughput by workload, concurrency and method, in one process; see docs/bench/README.md.

    python scripts/bench/bench.py --target random:llama-3-8b --method none --method eagle3:3/1/4@2.5 -o bench.json
    python scripts/bench/bench.py --target random:tiny --method none --concurrency 1,2 --tokens 16/8    # CPU, seconds

A method is NAME[:STEPS/TOPK/TOKENS][@ACCEPTANCE][=DRAFT]: speculation.method, num_steps/topk/num_draft_tokens, the
simulated tokens per round, and speculation.draft (defaults: random:eagle, for eagle3 random:eagle3-32k, for peagle
random:peagle, for block random:dflash).
All rows of a cell are submitted at once; times run from the first submit to the last completion. A line is printed for
each cell as soon as it is measured, and the JSON file is replaced then: nothing is lost when a run is cut short. The
last line is one JSON object, without the configurations that the file has.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_compare import Peer, ratios, read_peer
from bench_floor import DeviceRates, measure_device, prefill_floor, round_floor
from bench_work import Rows, UniformRows, file_jobs, file_rows, warm_up_rows

from specbatch.config_load import config_to_dict, load_config
from specbatch.counts import ExpertCounts
from specbatch.draft import METHODS
from specbatch.engine.engine import Engine
from specbatch.errors import SpecbatchError
from specbatch.models.catalog import random_name
from specbatch.models.pass_weights import measured_curve
from specbatch.results.stats import commit, device_name, versions
from specbatch.setup.build import build_engine
from specbatch.setup.ranks.ranked_engine import build_ranked
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.tune.timing import time_phases
from specbatch.types import BatchEngine, Request, RngKey, SamplingParams

_METHOD = re.compile(
    rf"(?P<name>{'|'.join(METHODS)})"
    r"(:(?P<steps>\d+)/(?P<topk>\d+)/(?P<tokens>\d+))?(@(?P<acceptance>\d+(\.\d+)?))?(=(?P<draft>.+))?"
)
_DEFAULT_DRAFTS = {
    "eagle": "random:eagle",
    "eagle3": "random:eagle3-32k",
    "peagle": "random:peagle",
    "block": "random:dflash",
}
_HEADER = (
    f"{'workload':<18}{'rows':>5}{'tok/s':>10}{'wall s':>9}{'prefill s':>10}{'(floor)':>9}{'decode tok/s':>13}"
    f"{'rounds':>8}{'ms/round':>9}{'floor ms':>9}{'reached':>8}{'accept':>8}  "
)


@dataclass(frozen=True)
class Method:
    """One column of the grid."""

    text: str
    name: str
    steps: int | None
    topk: int
    tokens: int | None
    acceptance: float | None
    draft: str | None

    def sets(self) -> list[str]:
        """Return the options of the method, as --set takes them."""
        options: dict[str, Any] = {"method": self.name, "num_steps": self.steps, "topk": self.topk}
        options |= {"num_draft_tokens": self.tokens, "simulate_acceptance": self.acceptance, "draft": self.draft}
        return [f"speculation.{key}={'null' if value is None else value}" for key, value in options.items()]


@dataclass(frozen=True)
class Measured:
    """One pass over some rows. Counters are differences of the engine's own."""

    seconds: float
    tokens: int
    rounds: int
    row_rounds: int  # verified sequences, summed over the rounds
    committed: int
    engine_prefill_seconds: float
    engine_decode_seconds: float
    preemptions: int
    experts: ExpertCounts = field(default_factory=ExpertCounts)

    @property
    def acceptance_length(self) -> float | None:
        return self.committed / self.row_rounds if self.row_rounds else None


def parse_method(text: str) -> Method:
    """Parse a method. It raises argparse.ArgumentTypeError."""
    match = _METHOD.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no method: NAME[:STEPS/TOPK/TOKENS][@ACCEPTANCE][=DRAFT], NAME one of {', '.join(METHODS)}"
        )
    part = match.groupdict()
    return Method(
        text,
        part["name"],
        int(part["steps"]) if part["steps"] else None,
        int(part["topk"] or 1),
        int(part["tokens"]) if part["tokens"] else None,
        float(part["acceptance"]) if part["acceptance"] else None,
        part["draft"] or _DEFAULT_DRAFTS.get(part["name"]),
    )


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    bench = Bench(args)
    failed = bench.run()
    bench.say(json.dumps(summary(bench.report)))
    sys.exit(1 if failed else 0)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:llama-3-8b")
    parser.add_argument("--method", type=parse_method, action="append", help="may be repeated; default: none")
    parser.add_argument(
        "--workload", action="append", choices=["uniform", *file_jobs()], help="may be repeated; default: uniform"
    )
    parser.add_argument("--concurrency", type=_numbers, default=[1, 4, 16, 32, 64, 128, 256], metavar="1,4,...")
    parser.add_argument("--tokens", type=_in_out, default=(1000, 512), metavar="IN/OUT", help="of `uniform`")
    parser.add_argument("--max-running", type=int, default=256, help="rows running at once in a file job")
    parser.add_argument("--rows", type=int, help="only the first ROWS rows of a file job (no figure to compare then)")
    parser.add_argument("-c", "--config", type=Path, help="YAML; the options of the grid go on top")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="on top of everything")
    parser.add_argument("--compare", type=Path, action="append", default=[], metavar="FILE.json")
    parser.add_argument("--phases", action=argparse.BooleanOptionalAction, default=True, help="time a round's parts")
    parser.add_argument("--tries", type=int, help="of each cell of `uniform`; default: 2 up to 16 rows, else 1")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no cell after that")
    parser.add_argument("--commit", help="what is measured, where the checkout does not say")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    args.method = args.method or [parse_method("none")]
    args.workload = args.workload or ["uniform"]
    if args.workload != ["uniform"] and "uniform" in args.workload and max(args.concurrency) > args.max_running:
        parser.error(f"a file job runs at most --max-running {args.max_running} rows, --concurrency asks for more")
    return args


def _numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return values


def _in_out(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    return int(first), int(second)


class Bench:
    """The run of the grid. At any time, `report` has all cells that are measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.perf_counter()
        self._peers: list[Peer] = []
        for path in args.compare:
            try:
                self._peers.append(read_peer(path))
            except ValueError as error:  # the other engine may have failed: ours is measured all the same
                self.say(f"WARNING: {error}")
        self._rates: DeviceRates | None = None
        self.report: dict[str, Any] = {
            "commit": args.commit or commit(),
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "target": args.target,
            "versions": _versions(),
            "tokens": {"in": args.tokens[0], "out": args.tokens[1]},
            "max_running": args.max_running,
            "rows_limit": args.rows,
            "methods": [],
        }

    def say(self, line: str) -> None:
        print(line, flush=True)

    def run(self) -> bool:
        """Run the grid. Return True if a method failed; the others are measured all the same."""
        failed = False
        for method in self._args.method:
            entry: dict[str, Any] = {"method": method.text, "simulated": method.acceptance is not None, "cells": []}
            self.report["methods"].append(entry)
            if self._out_of_time(method.text):
                entry["skipped"] = "time limit"
                continue
            try:
                self._run_method(method, entry)
            except SpecbatchError as error:
                entry["error"] = f"{error.message} ({error.hint})" if error.hint else error.message
                failed = True
                self.say(f"{method.text}: error: {entry['error']}")
            except Exception as error:  # the other methods are measured all the same
                entry["error"] = f"{type(error).__name__}: {error}"
                failed = True
                self.say(traceback.format_exc())
            # This is after the handlers, because their traceback keeps the engine alive.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._save()
        return failed

    def _run_method(self, method: Method, entry: dict[str, Any]) -> None:
        args = self._args
        batch = args.max_running if args.workload != ["uniform"] else max(args.concurrency)
        sets = [f"model.target={args.target}", *method.sets()]
        # Random rows have no common prefix, and the other engines run without a prefix cache.
        sets += [f"engine.max_batch_size={batch}", "engine.prefix_cache=false", *args.set]
        began = time.perf_counter()
        run = resolve(load_config(args.config, sets))
        ready = time.perf_counter() - began
        if self._rates is None:
            self._measure_device(run.device)
        began = time.perf_counter()
        engine = (build_ranked if run.config.engine.tensor_parallel > 1 else build_engine)(run)
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        ready += time.perf_counter() - began
        try:
            self._measure(method, run, engine, entry, ready)
        finally:
            engine.close()

    def _measure(
        self, method: Method, run: ResolvedRun, engine: BatchEngine, entry: dict[str, Any], ready: float
    ) -> None:
        args = self._args
        split = dict(getattr(engine, "start_seconds", {}))
        entry |= {
            "ready_s": round(ready, 2),
            "start_seconds": {name: round(seconds, 3) for name, seconds in split.items()},
            "random_weights": random_name(run.config.model.target) is not None,
            "models": run.description,
            "notes": run.notes,
            "config": config_to_dict(run.config),
        }
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in split.items())
        marks = [] if method.acceptance is None else [f"SIMULATED acceptance {method.acceptance:g}"]
        marks += ["random weights"] if entry["random_weights"] else []
        if run.kv_dtype != run.dtype:
            marks.append(f"keys and values in {run.config.engine.kv_dtype}")
        self.say(f"\n{method.text}: {args.target}, {', '.join([*marks, run.config.model.dtype])}")
        self.say(f"engine ready after {ready:.1f} s" + (f" ({shown})" if shown else ""))
        self.say(_HEADER + "  ".join(sorted({peer.engine for peer in self._peers})))
        if "uniform" in args.workload:
            self._uniform(method, run, engine, entry)
        for name in args.workload:
            if name != "uniform":
                self._file_job(name, method, run, engine, entry)
        # The phases come after all cells, so that no cell is lost to an error there.
        if args.phases:
            self._time_phases(engine, entry)

    def _measure_device(self, device: torch.device) -> None:
        self._rates = rates = measure_device(device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device_name("cpu")
        self.report["device"] = name
        self.report["measured"] = {
            "copy_gb_per_second": round(rates.copy_bytes_per_second / 1e9, 1),
            "matmul_tflops": round(rates.matmul_flops_per_second / 1e12, 2),
        }
        self.say(
            f"{name}: copy {rates.copy_bytes_per_second / 1e12:.2f} TB/s (read and written), "
            f"matmul {rates.matmul_flops_per_second / 1e12:.1f} TFLOP/s"
        )

    def _uniform(self, method: Method, run: ResolvedRun, engine: BatchEngine, entry: dict[str, Any]) -> None:
        tokens_in, tokens_out = self._args.tokens
        rows = UniformRows(tokens_in, tokens_out, vocab_size=run.target.config.vocab_size)
        generate(engine, rows.draw(4, tokens_out=min(32, tokens_out)))
        for concurrency in self._args.concurrency:
            if self._out_of_time(f"uniform {concurrency}"):
                entry["cells"].append({"workload": "uniform", "concurrency": concurrency, "skipped": "time limit"})
                continue
            # A short run counts the better of two, as the script of the other engines does.
            num_tries = self._args.tries or 1 + (concurrency <= 16)
            tries = [(batch := rows.draw(concurrency), generate(engine, batch)) for _ in range(num_tries)]
            batch, measured = min(tries, key=lambda pair: pair[1].seconds)
            prefill = generate(engine, rows.draw(concurrency, tokens_out=1))
            self._keep(entry, self._cell("uniform", concurrency, method, run, batch, measured, prefill))

    def _file_job(
        self, name: str, method: Method, run: ResolvedRun, engine: BatchEngine, entry: dict[str, Any]
    ) -> None:
        if self._out_of_time(name):
            entry["cells"].append({"workload": name, "concurrency": None, "skipped": "time limit"})
            return
        vocab_size = run.target.config.vocab_size
        rows = file_rows(name, vocab_size).first(self._args.rows)
        generate(engine, warm_up_rows(vocab_size))
        measured = generate(engine, rows)
        prefill = generate(engine, rows.prefill_only())
        self._keep(entry, self._cell(name, len(rows.prompts), method, run, rows, measured, prefill))

    def _time_phases(self, engine: BatchEngine, entry: dict[str, Any]) -> None:
        """Measure the milliseconds of each part of a round, and of the rest of its time."""
        if not isinstance(engine, Engine):
            return
        for cell in entry["cells"]:
            if cell["workload"] != "uniform" or cell.get("ms_per_round") is None:
                continue
            if self._out_of_time(f"phases at {cell['concurrency']}"):
                return
            # The context is that of the cell's rounds on average.
            times = time_phases(engine, cell["concurrency"], cell["mean_context"])
            phases = {name: round(ms, 4) for name, ms in times.items()}
            cell["phases_ms"] = phases
            # `round` is all phases as one graph. In the rest of the time the GPU waits.
            cell["rest_ms"] = rest = round(cell["ms_per_round"] - phases["round"], 4)
            parts = "".join(f"{name} {ms:.3f}, " for name, ms in phases.items())
            self.say(f"round at {cell['concurrency']}, ms: {parts}rest {rest:.3f}")

    def _cell(
        self,
        workload: str,
        concurrency: int,
        method: Method,
        run: ResolvedRun,
        rows: Rows,
        measured: Measured,
        prefill: Measured,
    ) -> dict[str, Any]:
        assert self._rates is not None
        decode = max(measured.seconds - prefill.seconds, 1e-9)
        tok_s = measured.tokens / measured.seconds
        cell: dict[str, Any] = {
            "workload": workload,
            "concurrency": concurrency,
            "tok_s": round(tok_s, 1),
            "wall_s": round(measured.seconds, 3),
            "in_tokens": rows.tokens_in,
            "out_tokens": measured.tokens,
            "prefill_s": round(prefill.seconds, 3),
            "prefill_floor_s": round(prefill_floor(run, self._rates, [len(p) for p in rows.prompts]), 3),
            "decode_tok_s": round(measured.tokens / decode, 1),
            "rounds": measured.rounds,
            "ms_per_round": None,
            "acceptance_length": None,
            "engine_prefill_s": round(measured.engine_prefill_seconds, 3),
            "engine_decode_s": round(measured.engine_decode_seconds, 3),
            "preemptions": measured.preemptions,
        }
        if measured.tokens != rows.tokens_out:
            cell["warning"] = f"{rows.tokens_out} tokens were asked for"
        length = measured.acceptance_length
        if measured.rounds and length is not None:
            batch = measured.row_rounds / measured.rounds
            # A row's context grows from its prompt to its end. The mean is weighted with the rounds of each row.
            pairs = list(zip(rows.prompts, rows.lengths, strict=True))
            context = sum((len(p) + n / 2) * n for p, n in pairs) / sum(n for _, n in pairs)
            curve, moe = None, run.target.config.moe
            if moe is not None and (counted := measured.experts.distinct):
                curve = measured_curve(moe, {one.tokens: one.experts for one in counted})
                cell["experts"] = [[round(n, 2) for n in (one.tokens, one.experts)] for one in counted]
            floor = round_floor(run, self._rates, batch, context, length, curve)
            cell |= {
                "acceptance_length": round(length, 4),
                "mean_batch": round(batch, 2),
                "mean_context": round(context),
                "ms_per_round": round(decode / measured.rounds * 1e3, 4),
                "floor_ms": round(floor * 1e3, 4),
                "reached": round(floor * measured.rounds / decode, 4),
            }
        if self._args.rows is None or workload == "uniform":
            steps = 0 if method.name == "none" else run.config.speculation.num_steps or 0
            peers = [p for p in self._peers if p.same_method(steps, method.topk, method.acceptance)]
            if found := ratios(peers, workload, concurrency, tok_s, measured.seconds):
                cell["ratios"] = found
        return cell

    def _keep(self, entry: dict[str, Any], cell: dict[str, Any]) -> None:
        entry["cells"].append(cell)
        self.say(_line(cell))
        self._save()

    def _save(self) -> None:
        self.report["seconds"] = round(time.perf_counter() - self._began, 1)
        if self._args.output is not None:
            temporary = self._args.output.with_name(self._args.output.name + ".tmp")
            temporary.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self._args.output)

    def _out_of_time(self, what: str) -> bool:
        limit = self._args.time_limit
        if limit is None or time.perf_counter() - self._began < limit:
            return False
        self.say(f"{what}: skipped, the time limit of {limit:g} s is over")
        return True


def generate(engine: BatchEngine, rows: Rows) -> Measured:
    """Run all rows, submitted at once, to the end: greedy, and end-of-sequence tokens are ignored."""
    requests = [
        Request(i, prompt, SamplingParams(max_tokens=length, ignore_eos=True), RngKey(0, i, 0))
        for i, (prompt, length) in enumerate(zip(rows.prompts, rows.lengths, strict=True))
    ]
    before = copy.deepcopy(engine.stats)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a round may be under way whose rows have all ended
    tokens, left = 0, len(requests)
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while left:
        for completion in engine.step():
            tokens += len(completion.token_ids)
            left -= 1
    seconds = time.perf_counter() - began
    after = engine.stats
    experts = copy.deepcopy(after.experts)
    experts.add(before.experts, times=-1)
    return Measured(
        seconds,
        tokens,
        after.rounds - before.rounds,
        after.speculation.rounds - before.speculation.rounds,
        after.speculation.committed - before.speculation.committed,
        after.prefill_seconds - before.prefill_seconds,
        after.decode_seconds - before.decode_seconds,
        after.preemptions - before.preemptions,
        experts,
    )


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a report, short enough for one line."""
    names = ("tok_s", "wall_s", "prefill_s", "ms_per_round", "floor_ms", "acceptance_length", "ratios", "skipped")
    methods = {}
    for entry in report["methods"]:
        cells = {
            f"{cell['workload']} {cell['concurrency']}": {name: cell[name] for name in names if name in cell}
            for cell in entry["cells"]
        }
        kept = ("simulated", "ready_s", "start_seconds", "error", "skipped")
        methods[entry["method"]] = {name: entry[name] for name in kept if name in entry} | {"cells": cells}
    shown = ("commit", "target", "device", "measured", "tokens", "rows_limit", "seconds")
    return {name: report.get(name) for name in shown} | {"methods": methods}


def _line(cell: dict[str, Any]) -> str:
    def shown(name: str, format: str) -> str:
        return "-" if cell.get(name) is None else f"{cell[name]:{format}}"

    reached = shown("reached", ".0%")
    ratio = "  ".join(f"{engine} {value:.2f}x" for engine, value in sorted(cell.get("ratios", {}).items()))
    return (
        f"{cell['workload']:<18}{cell['concurrency']:>5}{cell['tok_s']:>10.1f}{cell['wall_s']:>9.2f}"
        f"{cell['prefill_s']:>10.3f}{cell['prefill_floor_s']:>9.3f}{cell['decode_tok_s']:>13.1f}{cell['rounds']:>8}"
        f"{shown('ms_per_round', '.3f'):>9}{shown('floor_ms', '.3f'):>9}{reached:>8}"
        f"{shown('acceptance_length', '.3f'):>8}  {ratio}"
        + (f"  WARNING: {cell['warning']}" if "warning" in cell else "")
        + (f"  {cell['preemptions']} preemptions" if cell["preemptions"] else "")
    )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {**versions(), "cuda": torch.version.cuda}
    for package in ("triton", "flashinfer-python"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
