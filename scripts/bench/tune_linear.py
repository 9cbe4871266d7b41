"""Times the GEMMs of few tokens (`specbatch.kernels.triton.skinny`) on a GPU and finds their best configurations.

    python scripts/bench/tune_linear.py -o tune_linear.json [--budget 230]

For the GEMMs of a layer of Llama-3-8B (or of --shape), its head and an EAGLE draft's, and 1 to 64 rows: every
candidate's error against float64, its time in CUDA-graph replay over copies of the weight that together exceed L2 (so
that weights come from memory), and the library's time. Then a chain of all layers' GEMMs with their norms,
residuals and gates, every layer with its own weights, in one graph: the candidates that did best alone are tried there
one GEMM at a time, with programmatic dependent launch and prefetch. Candidates are compiled beforehand by other
processes without a GPU.

    python scripts/bench/tune_linear.py --table tune_linear.json [--shape NAME] [--no-pdl]

prints the table of `specbatch/kernels/triton/skinny/tile.py` from such a file: of the chain's choice where a chain of
ours was faster than the library's, otherwise of what was best alone.

Stops by itself when the budget (seconds) is used up; what was measured until then is in the table and the file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specbatch.kernels.triton.model import act_mul, rms_norm
from specbatch.kernels.triton.parts.shared_memory import HOPPER_SHARED_BYTES
from specbatch.kernels.triton.skinny import ops
from specbatch.kernels.triton.skinny.tile import GemmTile, fitting, shared_of
from specbatch.models.config import ModelConfig
from specbatch.models.linears.sharded import local_config
from specbatch.models.random_weights import REDUCED_DRAFT_VOCAB, geometries

DTYPE = torch.bfloat16
EPS = 1e-5
ROWS = (1, 2, 4, 8, 16, 32, 64)
CHAIN_ROWS = (1, 8, 4, 16, 64, 32, 2)
MIN_ROTATION_BYTES = 280e6  # the size of all copies of a weight; L2 holds 60 MB
MAX_ERROR = 1e-2
KEPT = 5  # candidates of each GEMM that the chain tries
# The settings for what a program does before it waits for x: (early, prefetch).
STARTS = ((False, 0), (True, 0), (True, 512), (True, 1536), (False, 1024))


@dataclass(frozen=True)
class Gemm:
    """One fused operation at one size. num_out counts the outputs: a gated GEMM has twice as many weight rows."""

    name: str
    op: str  # "linear", "residual", "norm", "norm_gated"
    num_out: int
    num_in: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return (self.num_out * (2 if self.op == "norm_gated" else 1), self.num_in)

    @property
    def weight_bytes(self) -> int:
        return 2 * math.prod(self.weight_shape)


@dataclass(frozen=True)
class Geometry:
    """A model's GEMMs: those of a layer, by name, and its head's and an EAGLE-3 draft's."""

    layer: dict[str, Gemm]
    others: tuple[Gemm, ...]
    num_layers: int
    hidden: int
    heads: int  # features of all query heads

    @staticmethod
    def of(config: ModelConfig, ranks: int = 1) -> Geometry:
        """Return the GEMMs of a model. `ranks`: the number of ranks of engine.tensor_parallel; the GEMMs are those of
        the first rank. Each rank has all of the draft."""
        whole, config = config, local_config(config, 0, ranks)
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        qkv = heads + 2 * config.num_kv_heads * config.head_dim
        # Of a mixture of experts, the shared expert's GEMMs, or those of one expert, are in the chain.
        inner = config.intermediate_size if config.moe is None else config.moe.shared_size or config.moe.expert_size
        draft_qkv = (whole.num_heads + 2 * whole.num_kv_heads) * whole.head_dim
        draft_vocab = min(config.vocab_size, REDUCED_DRAFT_VOCAB)
        layer = (
            Gemm("qkv", "norm", qkv, hidden),
            Gemm("o", "residual", hidden, heads),
            Gemm("gate_up", "norm_gated", inner, hidden),
            Gemm("down", "residual", hidden, inner),
        )
        others = (
            Gemm("lm_head", "linear", -(-whole.vocab_size // ranks), hidden),
            Gemm("draft_fc", "linear", hidden, 3 * hidden),
            Gemm("draft_qkv", "linear", draft_qkv, 2 * hidden),
            Gemm("draft_head", "norm", draft_vocab, hidden),
        )
        return Geometry({p.name: p for p in layer}, others, config.num_layers, hidden, heads)


def apply(
    gemm: Gemm, x: Tensor, norm: Tensor, weight: Tensor, residual: Tensor, config: GemmTile | None = None
) -> Tensor:
    """Run the fused operation. Without a configuration it runs as `kernels/triton/gemm.py` does for many rows."""
    if config is None:
        if gemm.op == "residual":
            return residual.addmm_(x, weight.T)
        y = F.linear(rms_norm(x, norm, EPS) if gemm.op != "linear" else x, weight)
        return act_mul(y) if gemm.op == "norm_gated" else y
    if gemm.op == "norm":
        return ops.norm_linear(x, norm, EPS, weight, tile=config)
    if gemm.op == "norm_gated":
        return ops.norm_gated_linear(x, norm, EPS, weight, tile=config)
    return ops.linear(x, weight, None, residual if gemm.op == "residual" else None, tile=config)


def exact(gemm: Gemm, x: Tensor, norm: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    x = x.double()
    if gemm.op.startswith("norm"):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * norm.double()
    parts = [x @ part.double().t() for part in weight.split(16384)]  # divided, because float64 copies are large
    y = torch.cat(parts, dim=-1)
    if gemm.op == "norm_gated":
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up
    return y + residual.double() if gemm.op == "residual" else y


def candidates(gemm: Gemm, M: int) -> list[GemmTile]:
    """List the configurations to try, a few hundred in all, because each takes seconds to compile."""
    found: list[GemmTile] = []
    gated = gemm.op == "norm_gated"
    narrow = gemm.num_out <= 8192

    def fma(block_o: int, block_i: int, stages: int, warps: int) -> None:
        found.append(GemmTile("fma", M, block_o, block_i, stages, warps))

    def dot(block_o: int, block_i: int, stages: int, warps: int, splits: int = 1, tma: bool = False) -> None:
        block_m = max(8, M)
        if stages * block_i * 2 * (block_o + block_m) > 220e3:  # bytes of shared memory
            return
        fused = (True, False) if gemm.op.startswith("norm") and M <= 4 else (False,)
        for fuse_norm in fused:
            found.append(GemmTile("dot", block_m, block_o, block_i, stages, warps, splits, tma, fuse_norm=fuse_norm))

    if M <= 2:
        fma(4, 1024, 1, 4)
        fma(4, 2048, 1, 8)
        fma(4, 4096, 1, 8)
        fma(8, 512, 1, 2)
        fma(8, 512, 4, 2)
        fma(8, 1024, 1, 4)
        fma(8, 1024, 3, 4)
        fma(16, 1024, 3, 4)
        if M == 1:
            fma(8, 2048, 1, 8)
            fma(4, 2048, 1, 4)
            fma(2, 2048, 1, 4)
            fma(2, 4096, 1, 8)
    if 2 <= M <= 8:
        dot(16, 256, 5, 1)
        dot(16, 512, 4, 1)
        dot(16, 512, 3, 2)
        dot(32, 256, 4, 2)
        dot(32, 256, 3, 2)
        dot(32, 256, 5, 2, tma=True)
        dot(32, 512, 3, 4)
        dot(64, 128, 6, 4, tma=True)
        dot(64, 256, 4, 4, splits=2 if narrow else 1)
        if not narrow:
            dot(128, 128, 5, 4, tma=True)
    elif M == 16:
        dot(32, 256, 4, 2)
        dot(32, 256, 5, 2, tma=True)
        for splits in (1, 2) if narrow else (1,):
            dot(64, 128, 6, 4, splits, tma=True)
            dot(64, 256, 4, 4, splits)
        if not narrow:
            dot(128, 128, 5, 4, tma=True)
            dot(128, 128, 4, 4)
    elif M > 64:
        for splits in (1, 2, 4) if narrow else (1,):
            dot(64, 128, 4, 4, splits)
            dot(64, 128, 4, 4, splits, tma=True)
            dot(64, 64, 6, 4, splits, tma=True)
            dot(128, 64, 5, 8, splits, tma=True)
        if not narrow:
            dot(128, 64, 5, 4, tma=True)
            dot(128, 128, 3, 8, tma=True)
            dot(256, 64, 4, 8, tma=True)
    elif M > 16:
        for splits in (1, 2, 4) if narrow else (1,):
            dot(64, 128, 5, 4, splits, tma=True)
            dot(128, 128, 4, 4, splits, tma=True)
            dot(64, 128, 5, 4, splits)
        if gated:
            dot(256, 64, 5, 8, tma=True)
    return list(dict.fromkeys(found))


class NoGpu:
    """A replacement of the GPU's driver, for processes that only compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def only_compile() -> None:
    """Prepare a worker: from here on a launch compiles into the cache on disk and does not run."""
    torch.set_num_threads(1)
    driver.set_active(NoGpu())
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only


def compile_task(gemm: Gemm, M: int, config: GemmTile) -> str | None:
    """Compile one configuration. Return the error, or None."""
    try:
        # Only types, sizes and alignments matter; untouched memory costs nothing.
        x = torch.empty((M, gemm.num_in), dtype=DTYPE)
        norm = torch.empty(gemm.num_in, dtype=DTYPE)
        weight = torch.empty(gemm.weight_shape, dtype=DTYPE)
        residual = torch.empty((M, gemm.num_out), dtype=DTYPE)
        apply(gemm, x, norm, weight, residual, config)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


class Compiler:
    """A pool of processes that compile. They are forked before CUDA starts in this process."""

    def __init__(self, num_workers: int) -> None:
        self._pool = multiprocessing.get_context("fork").Pool(num_workers, only_compile)
        self._results: dict[tuple[Gemm, int, GemmTile], multiprocessing.pool.AsyncResult[str | None]] = {}

    def submit(self, gemm: Gemm, M: int, config: GemmTile) -> None:
        key = (gemm, M, config)
        if key not in self._results:
            self._results[key] = self._pool.apply_async(compile_task, key)

    def is_ready(self, gemm: Gemm, M: int, config: GemmTile, deadline: float) -> bool:
        """Wait for a configuration until the deadline. Return whether it was compiled without an error."""
        self.submit(gemm, M, config)
        try:
            error = self._results[gemm, M, config].get(max(deadline - time.monotonic(), 0.01))
        except multiprocessing.TimeoutError:
            say(f"  not compiled in time: {gemm.name} M={M} {brief(config)}")
            return False
        if error is not None:
            say(f"  {gemm.name} M={M} {brief(config)}: {error}")
        return error is None

    def close(self) -> None:
        self._pool.terminate()


def say(text: str) -> None:
    print(text, flush=True)


def brief(config: GemmTile) -> str:
    parts = [config.kind, f"m{config.block_m}", f"o{config.block_o}", f"i{config.block_i}", f"s{config.num_stages}"]
    parts.append(f"w{config.num_warps}")
    parts += [f"split{config.splits}"] * (config.splits > 1)
    parts += ["tma"] * config.tma + ["norm-apart"] * (not config.fuse_norm) + ["pdl"] * config.pdl
    parts += ["early"] * config.early + [f"pre{config.prefetch}"] * (config.prefetch > 0)
    return " ".join(parts)


def replay_time(launch: Callable[[], object], num_replays: int = 7) -> float:
    """Return the seconds of one replay of the launches of `launch`, as the median of a few replays."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        graph.replay()
        graph.replay()
        times = []
        for _ in range(num_replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    graph.reset()
    return sorted(times)[len(times) // 2]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(0.0, scale)


@dataclass
class Timed:
    product: str
    M: int
    config: GemmTile | None  # None: the library
    microseconds: float
    tb_per_s: float
    error: float


class Tuner:
    def __init__(self, geometry: Geometry, compiler: Compiler, deadline: float) -> None:
        self._geometry = geometry
        self._compiler = compiler
        self._deadline = deadline
        self.timed: list[Timed] = []
        self.seconds_of_first_calls = 0.0  # large: the workers' compilations were not found in the cache
        self.chains: list[dict[str, object]] = []

    def tune(self, gemm: Gemm, rows: tuple[int, ...], deadline: float) -> None:
        """Time every configuration of one GEMM."""
        num_copies = max(4, math.ceil(MIN_ROTATION_BYTES / gemm.weight_bytes))
        weights = [normal(*gemm.weight_shape, scale=gemm.num_in**-0.5)]
        weights += [weights[0].clone() for _ in range(num_copies - 1)]
        norm = (1 + 0.1 * torch.randn(gemm.num_in, device="cuda")).to(DTYPE)
        num_calls = num_copies * max(1, math.ceil(12 / num_copies))
        for M in rows:
            x, residual = normal(M, gemm.num_in), normal(M, gemm.num_out)
            reference = exact(gemm, x, norm, weights[0], residual)

            def measure(config: GemmTile | None) -> Timed:
                before = time.monotonic()
                y = apply(gemm, x, norm, weights[0], residual.clone(), config)  # noqa: B023
                self.seconds_of_first_calls += time.monotonic() - before
                error = float((y.double() - reference).norm() / reference.norm())  # noqa: B023
                if config is not None:
                    first = apply(gemm, x[:1], norm, weights[0], residual[:1], config)  # noqa: B023
                    if not torch.equal(first[0], y[0]):
                        say(f"  {gemm.name} M={M} {brief(config)}: row 0 depends on the other rows")  # noqa: B023

                added = residual.clone()  # noqa: B023

                def launch() -> None:
                    for call in range(num_calls):
                        apply(gemm, x, norm, weights[call % num_copies], added, config)  # noqa: B023

                seconds = replay_time(launch) / num_calls
                rate = gemm.weight_bytes / seconds / 1e12
                return Timed(gemm.name, M, config, seconds * 1e6, rate, error)  # noqa: B023

            results = [measure(None)]
            for config in candidates(gemm, M):
                if time.monotonic() > deadline:
                    say(f"  out of time at {gemm.name} M={M}")
                    break
                if not self._compiler.is_ready(gemm, M, config, deadline):
                    continue
                try:
                    result = measure(config)
                except Exception as error:
                    say(f"  {gemm.name} M={M} {brief(config)}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                if not result.error < MAX_ERROR:
                    say(f"  {gemm.name} M={M} {brief(config)}: WRONG, error {result.error:.2e}")
                    continue
                results.append(result)
            self.timed += results
            library = results[0]
            ranked = sorted(results[1:], key=lambda r: r.microseconds)
            for result in ranked[: 2 if gemm.name in self._geometry.layer else 1]:
                say(
                    f"{gemm.name:10} M={M:<2} {result.microseconds:6.1f} us {result.tb_per_s:.2f} TB/s (library "
                    f"{library.microseconds:6.1f}, x{library.microseconds / result.microseconds:.2f})  "
                    f"{brief(result.config)}"  # type: ignore[arg-type]
                )

    def best(self, name: str, M: int, count: int) -> list[GemmTile]:
        results = [r for r in self.timed if r.product == name and r.M == M and r.config is not None]
        return [r.config for r in sorted(results, key=lambda r: r.microseconds)[:count] if r.config is not None]

    def chain(self, layers: list[dict[str, Tensor]], M: int, deadline: float) -> None:
        """Time the GEMMs of all layers in one graph, and choose the best configuration there, one GEMM at a time."""
        gemms, heads = self._geometry.layer, self._geometry.heads
        num_bytes = sum(p.weight_bytes for p in gemms.values()) * len(layers)
        x0 = normal(M, self._geometry.hidden)

        def forward(configs: dict[str, GemmTile | None]) -> Tensor:
            x = x0.clone()  # the library adds in place
            for w in layers:
                qkv = apply(gemms["qkv"], x, w["norm"], w["qkv"], x, configs["qkv"])
                x = apply(gemms["o"], qkv[:, :heads], w["norm"], w["o"], x, configs["o"])
                h = apply(gemms["gate_up"], x, w["norm"], w["gate_up"], x, configs["gate_up"])
                x = apply(gemms["down"], h, w["norm"], w["down"], x, configs["down"])
            return x

        def measure(configs: dict[str, GemmTile | None]) -> float:
            return replay_time(lambda: forward(configs), num_replays=5)

        def report(label: str, seconds: float, configs: dict[str, GemmTile | None]) -> None:
            say(f"chain M={M:<2} {label:32} {seconds * 1e3:.3f} ms  {num_bytes / seconds / 1e12:.2f} TB/s")
            named = {name: asdict(c) if c else None for name, c in configs.items()}
            self.chains.append({"M": M, "label": label, "milliseconds": seconds * 1e3, "configs": named})

        none: dict[str, GemmTile | None] = dict.fromkeys(gemms)
        report("torch and library", measure(none), none)
        kept = {name: self.best(name, M, KEPT) for name in gemms}
        if not all(kept.values()):
            say(f"chain M={M}: no candidates")
            return
        configs: dict[str, GemmTile | None] = {name: found[0] for name, found in kept.items()}
        report("fused", measure(configs), configs)
        expected, actual = forward(none).double(), forward(configs).double()
        say(f"chain M={M:<2} fused against torch: {float((actual - expected).norm() / expected.norm()):.1e}")

        def started(gemm: Gemm, config: GemmTile, early: bool, prefetch: int) -> GemmTile:
            """Return the tile with this start. An early tile takes room, which can cost a stage."""
            tile = replace(config, pdl=True, early=early, prefetch=prefetch)
            return fitting(tile, HOPPER_SHARED_BYTES, gated=gemm.op == "norm_gated")

        for name, gemm in gemms.items():  # they are compiled while others are timed
            for config in kept[name]:
                for early, prefetch in STARTS:
                    self._compiler.submit(gemm, M, started(gemm, config, early, prefetch))
        best_time = math.inf
        current: dict[str, GemmTile | None] = {}
        for early, prefetch in STARTS:
            trials = {n: started(gemms[n], found[0], early, prefetch) for n, found in kept.items()}
            if not all(self._compiler.is_ready(gemms[n], M, c, deadline) for n, c in trials.items()):
                continue
            seconds = measure({**trials})
            report(f"fused, pdl, {'early, ' * early}prefetch {prefetch}", seconds, {**trials})
            if seconds < best_time:
                best_time, current = seconds, {**trials}
        if not current:
            return
        for name, gemm in gemms.items():
            for config in kept[name]:
                for early, prefetch in STARTS:
                    trial = started(gemm, config, early, prefetch)
                    if time.monotonic() > deadline:
                        break
                    if trial == current[name] or not self._compiler.is_ready(gemm, M, trial, deadline):
                        continue
                    try:
                        seconds = measure({**current, name: trial})
                    except Exception as error:
                        say(f"  chain {name} {brief(trial)}: {type(error).__name__}: {str(error)[:200]}")
                        continue
                    if seconds < best_time:
                        best_time, current[name] = seconds, trial
        report("fused, pdl, tuned", measure(current), current)
        for name, found in current.items():
            say(f"    {name:8} {brief(found)}")  # type: ignore[arg-type]
        actual = forward(current).double()
        say(f"chain M={M:<2} tuned against torch: {float((actual - expected).norm() / expected.norm()):.1e}")
        plain = {name: replace(c, pdl=False, early=False, prefetch=0) if c else None for name, c in current.items()}
        if all(c and self._compiler.is_ready(gemms[n], M, c, deadline) for n, c in plain.items()):
            report("the same without pdl", measure(plain), plain)

    def save(self, path: Path) -> None:
        timed = [{**asdict(r), "config": asdict(r.config) if r.config else None} for r in self.timed]
        device = torch.cuda.get_device_name()
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        path.write_text(json.dumps({"device": device, **versions, "timed": timed, "chains": self.chains}, indent=1))


def make_layers(geometry: Geometry) -> list[dict[str, Tensor]]:
    layers = []
    for _ in range(geometry.num_layers):
        layer = {name: normal(*p.weight_shape, scale=p.num_in**-0.5) for name, p in geometry.layer.items()}
        layer["norm"] = (1 + 0.1 * torch.randn(geometry.hidden, device="cuda")).to(DTYPE)
        layers.append(layer)
    return layers


def print_table(geometry: Geometry, path: Path, with_pdl: bool) -> None:
    """Print the source text of `tile._MEASURED`."""
    found = json.loads(path.read_text())
    defaults = asdict(GemmTile("dot", 8, 16, 16, 1, 1))
    required = ("kind", "block_m", "block_o", "block_i", "num_stages", "num_warps")

    def source(config: dict[str, object]) -> str:
        config = {**config, "pdl": with_pdl}
        if not with_pdl:
            config = {**config, "early": False, "prefetch": 0}
        given = [f"{config[name]!r}".replace("'", '"') for name in required]
        given += [f"{k}={v!r}" for k, v in config.items() if k not in required and v != defaults[k]]
        return f"GemmTile({', '.join(given)})"

    by_library = {c["M"]: c["milliseconds"] for c in found["chains"] if c["label"] == "torch and library"}
    # Our GEMMs of small weights take longer than the library's alone, and less in a chain, where they start early.
    chosen = {
        c["M"]: c["configs"]
        for c in found["chains"]
        if c["label"] == "fused, pdl, tuned" and c["milliseconds"] < by_library[c["M"]]
    }
    print("_MEASURED: dict[tuple[int, int], dict[int, GemmTile | None]] = {")
    for gemm in (*geometry.layer.values(), *geometry.others):
        timed = [r for r in found["timed"] if r["product"] == gemm.name]
        print(f"    {gemm.weight_shape}: {{  # {gemm.name}")
        for M in sorted({r["M"] for r in timed}):
            of_rows = [r for r in timed if r["M"] == M]
            library = min(r["microseconds"] for r in of_rows if r["config"] is None)
            ours = [r for r in of_rows if r["config"] is not None]
            best = min(ours, key=lambda r: r["microseconds"], default=None)
            in_chain = chosen.get(M, {}).get(gemm.name)
            if in_chain is None and (best is None or best["microseconds"] > 1.02 * library):
                print(f"        {M}: None,")
                continue
            config = best["config"] if in_chain is None and best is not None else in_chain
            if M in chosen and in_chain is None:  # its start counts little alone, so it starts as the widest in a chain
                early = {**config, "early": chosen[M]["gate_up"]["early"], "pdl": True}
                config = early if shared_of(GemmTile(**early)) <= HOPPER_SHARED_BYTES else config
            print(f"        {M}: {source(config)},")
        print("    },")
    print("}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a file written before, and stop")
    parser.add_argument("--no-pdl", action="store_true", help="with --table: without programmatic dependent launch")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds in all")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--chain-rows", type=int, nargs="+", default=CHAIN_ROWS)
    parser.add_argument("--shape", choices=sorted(geometries()), default="llama-3-8b", help="whose GEMMs")
    parser.add_argument("--ranks", type=int, default=1, help="of engine.tensor_parallel: the part of one GPU")
    parser.add_argument("--layers", type=int, help="of the chain; default: all")
    args = parser.parse_args()
    geometry = Geometry.of(geometries()[args.shape], args.ranks)
    if args.layers is not None:
        geometry = replace(geometry, num_layers=args.layers)
    if args.table is not None:
        print_table(geometry, args.table, not args.no_pdl)
        return
    if args.output is None:
        parser.error("one of -o and --table is required")
    start = time.monotonic()
    deadline = start + args.budget
    compiler = Compiler(max((os.cpu_count() or 2) - 1, 1))
    rows = tuple(args.rows)
    # They are compiled in the order of use.
    for gemms in (tuple(geometry.layer.values()), geometry.others):
        for gemm in gemms:
            for M in rows:
                for config in candidates(gemm, M):
                    compiler.submit(gemm, M, config)
    tuner = Tuner(geometry, compiler, deadline)
    try:
        with torch.no_grad():
            for gemm in geometry.layer.values():
                tuner.tune(gemm, rows, start + 0.5 * args.budget)
                say(f"[{time.monotonic() - start:.0f} s, first calls {tuner.seconds_of_first_calls:.0f} s]")
                tuner.save(args.output)
            layers = make_layers(geometry)
            for M in args.chain_rows:
                tuner.chain(layers, M, min(deadline, start + 0.8 * args.budget))
                say(f"[{time.monotonic() - start:.0f} s]")
                tuner.save(args.output)
            layers.clear()
            for gemm in geometry.others:
                tuner.tune(gemm, rows, deadline)
                say(f"[{time.monotonic() - start:.0f} s]")
                tuner.save(args.output)
    finally:
        tuner.save(args.output)
        compiler.close()


if __name__ == "__main__":
    main()
