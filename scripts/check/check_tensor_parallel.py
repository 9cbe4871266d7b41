"""A check of engine.tensor_parallel on a machine with N GPUs: N processes answer as one, stop together, and share the
memory.

    python scripts/check/check_tensor_parallel.py -o tensor_parallel.jsonl                    # two GPUs
    python scripts/check/check_tensor_parallel.py --device cpu --target random:tiny --rows 24  # over gloo
    python scripts/check/check_tensor_parallel.py --only tokens --target FOLDER --prompts gsm8k.jsonl  # real text

Prints a line of JSON for each check. A check that fails or takes too long is a line with `error`, and the next one
runs; each has processes of its own.

- `tokens`: N ranks against one, in float32 (`--dtype`), with each draft method, small caches, two lanes and no graphs.
  Rows that differ are listed with the margin of the first other token: sums in another order may only decide between
  two tokens that are nearly as likely (`--margin`). `--prompts`: rows of a file, as for `specbatch generate`, in place
  of random tokens.
- `deterministic`: the bytes of N ranks under two batch sizes.
- `kill`: a file job whose rank 1, then whose rank 0 is killed, and that gets SIGINT; then it resumes. Checked are its
  bytes, and that no process of it is left. `--lanes`: it has long prompts and two lanes; then bytes can depend on the
  batch on a GPU.
- `memory`: the memory for the KV cache, and the number of GPUs that each known geometry needs.
- `sums` (CUDA): microseconds of each algorithm by bytes: `LIMITS` in specbatch/parallel/algorithms.py follows from it.
- `exchanges` (CUDA): the same of gathers, and of scatters of sums, by the bytes that each GPU sends to each other one.
- `best` (CUDA): microseconds to find the best tokens of a batch, from all logits and from the best token of each part
  of the vocabulary: `_GATHERED_BYTES` in specbatch/models/linears/sharded.py follows from it.
- `norms` (CUDA): microseconds of a sum with the norm after it, in two kernels and in one.

`--only kill,sums` runs some of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch

from specbatch import LLM
from specbatch.counts import EngineStats
from specbatch.kernels import ops_for
from specbatch.models.config import expected_tensors
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.linear import Linear
from specbatch.models.linears.sharded import GatheredLinear, VocabShare, local_config
from specbatch.models.random_weights import geometries
from specbatch.parallel.algorithms import buffer_bytes, limits_for
from specbatch.parallel.group import in_order
from specbatch.parallel.shares import even_shares
from specbatch.setup.memory import GIB

if TYPE_CHECKING:
    from specbatch.parallel.cuda import CudaGroup  # needs Triton, which need not exist where CUDA does not

_LONG = 300  # a long prompt repeats three tokens this number of times
_IDS = 500  # token ids are below this number, so that each model has them
_SUMS = [1 << n for n in range(13, 28)]
_VOCAB = 128_256
_BARE = ", no log-probabilities"
Line = dict[str, Any]
_DIVISIONS: dict[str, Line] = {
    "tensors": {"expert_parallel": "off"},
    "experts": {"expert_parallel": "on", "dp_attention": "off"},
    "requests": {"expert_parallel": "on", "dp_attention": "on"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:qwen2.5-1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--division", choices=_DIVISIONS, default="tensors", help="how ranks divide experts")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--prompts", type=Path, help="of `tokens`: a JSONL file, of which the first --rows are taken")
    parser.add_argument("--head", default="random:eagle3", help="of `tokens`: the draft head")
    parser.add_argument("--variants", default="", help="of `tokens`: whose names hold A, then B (A;B)")
    parser.add_argument("--dtype", default="float32", help="of `tokens`; with bfloat16, --margin 0.1 or so")
    parser.add_argument("--margin", type=float, default=1e-4)
    parser.add_argument("--lanes", action="store_true", help="of `kill`: two lanes, and prompts that are long enough")
    parser.add_argument("--only", default="sums,exchanges,best,norms,tokens,deterministic,kill,memory")
    parser.add_argument("--time-limit", type=float, default=540.0, metavar="SECONDS", help="start nothing after that")
    parser.add_argument("--case-limit", type=float, default=120.0, metavar="SECONDS", help="of one run of rows")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # the task of a child process, as a file
    args = parser.parse_args()
    if args.run is not None:
        return run_rows(args.run)
    checks: dict[str, Callable[[argparse.Namespace, Path], Iterator[Line]]] = {
        "sums": partial(check_gpus, time_sums),
        "exchanges": partial(check_gpus, time_exchanges),
        "best": partial(check_gpus, time_best),
        "norms": partial(check_gpus, time_norms),
        "tokens": check_tokens,
        "deterministic": check_deterministic,
        "kill": check_kill,
        "memory": check_memory,
    }
    failed, began = False, time.monotonic()
    if args.output is not None:
        args.output.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only.split(","):
            lines = checks[name](args, Path(folder))
            while True:
                line: Line = {"check": name}
                if time.monotonic() - began > args.time_limit:
                    line |= {"skipped": "time limit"}
                    failed = True
                else:
                    try:
                        line |= next(lines)
                    except StopIteration:
                        break
                    except Exception as error:
                        line |= {"error": f"{type(error).__name__}: {error}"[-3500:]}
                failed |= not line.get("ok", "error" not in line)
                say(args.output, line | {"seconds": round(time.monotonic() - began, 1)})
                if "error" in line or "skipped" in line:
                    break  # a generator that raised has ended
    print("tensor parallel: FAILED" if failed else "tensor parallel: ok")
    return int(failed)


def say(output: Path | None, line: Line) -> None:
    print(json.dumps(line), flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(line) + "\n")


def make_rows(count: int) -> list[Line]:
    """Make greedy rows, half of which begin alike."""
    rng = random.Random(0)
    common = [rng.randrange(_IDS) for _ in range(64)]
    rows = []
    for i in range(count):
        ids = common[: rng.choice((0, 64))] + [rng.randrange(_IDS) for _ in range(rng.randint(1, 200))]
        rows.append(
            {
                "id": f"row {i}",
                "prompt_token_ids": ids,
                "max_tokens": rng.randint(8, 128),
                "ignore_eos": True,
            }
        )
    return rows


def rows_of(prompts: str | None, count: int, logprobs: int | None) -> list[Line]:
    """Read the rows of a file, or make random ones."""
    if prompts is None:
        rows = make_rows(count)
    else:
        with open(prompts) as file:
            rows = [json.loads(line) for line in itertools.islice(filter(str.strip, file), count)]
    return [row | {"logprobs": logprobs} for row in rows]


def run_rows(task: Path) -> int:
    """Run the rows of a task. It runs in a child process."""
    given = json.loads(task.read_text())
    with LLM(given["target"], certificate=True, generation_config="none", **given["options"]) as llm:
        results = list(llm.generate(rows_of(given["prompts"], given["rows"], given["logprobs"])))
        found = {"results": results, "notes": llm.notes, "counts": counts_of(llm.stats, results)}
    task.with_suffix(".results").write_text(json.dumps(found))
    return 0


def counts_of(stats: EngineStats, results: Sequence[Line]) -> Line:
    """Return counters that show whether the run did what it is for."""
    return {
        "tokens": stats.generated_tokens,
        "accepted": sum(result["speculation"]["accepted"] for result in results if "error" not in result),
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "preemptions": stats.preemptions,
    }


def answers(
    args: argparse.Namespace,
    folder: Path,
    rows: int,
    *,
    prompts: Path | None = None,
    logprobs: int | None = 2,
    **options: Any,
) -> Line:
    """Return the results and notes of a run. It raises RuntimeError with the end of the output of a run that failed."""
    task = folder / "task.json"
    what = {"target": args.target, "rows": rows, "prompts": prompts and str(prompts), "logprobs": logprobs}
    task.write_text(json.dumps(what | {"options": {"device": args.device, **options}}))
    task.with_suffix(".results").unlink(missing_ok=True)
    code = end_of(start([sys.executable, __file__, "--run", str(task)], folder), args, folder)
    if code:
        raise RuntimeError(f"exit code {code}: {(folder / 'stderr').read_text()[-1200:]}")
    found: Line = json.loads(task.with_suffix(".results").read_text())
    return found


def variants(args: argparse.Namespace) -> dict[str, Line]:
    draft = {"draft": args.target, "num_steps": 3}  # drafts of the target are often right, so paths are long
    head = {"method": "eagle3", "draft": args.head}
    found: dict[str, Line] = {
        "plain": {"method": "none"},
        "ngram": {"method": "ngram"},
        "draft model, chain": {"method": "draft_model", **draft},
        "draft model, tree": {"method": "draft_model", **draft, "topk": 2, "num_draft_tokens": 7},
        "head, tree": {**head, "num_steps": 3, "topk": 4, "num_draft_tokens": 8},
        "plain, preempted": {"method": "none", "kv_cache_tokens": 1500 if args.prompts else 700, "page_size": 16},
        "plain, two lanes": {"method": "none", "two_batch_overlap": "on"},
        f"plain{_BARE}": {"method": "none"},  # large rounds exchange best tokens, not logits
        f"draft model, tree{_BARE}": {"method": "draft_model", **draft, "topk": 2, "num_draft_tokens": 7},
        "draft model, two lanes": {"method": "draft_model", **draft, "two_batch_overlap": "on"},
    }
    if args.device != "cpu":
        found["plain, no graphs"] = {"method": "none", "cuda_graphs": "none"}
        found["plain, no graphs, two lanes"] = {"method": "none", "cuda_graphs": "none", "two_batch_overlap": "on"}
    return found


def check_tokens(args: argparse.Namespace, folder: Path) -> Iterator[Line]:
    common = {"dtype": args.dtype, "max_batch_size": 32}
    one = answers(args, folder, args.rows, prompts=args.prompts, **common, method="none")["results"]
    named = variants(args)
    wanted = dict.fromkeys(name for part in args.variants.split(";") for name in named if part in name)
    for name in wanted:
        options = named[name]
        try:
            logprobs = None if name.endswith(_BARE) else 2
            more: Line = {"prompts": args.prompts, "logprobs": logprobs, "tensor_parallel": args.ranks}
            more |= _DIVISIONS[args.division]
            many = answers(args, folder, args.rows, **more, **common, **options)
        except Exception as error:
            yield {"variant": name, "ok": False, "failure": f"{type(error).__name__}: {error}"[-1500:]}
            continue
        margins = [
            m for a, b in zip(one, many["results"], strict=True) if (m := margin_of_difference(a, b)) is not None
        ]
        yield {
            "variant": name,
            "rows": len(one),
            "equal": len(one) - len(margins),
            "margins_of_others": sorted(margins, reverse=True),
            **many["counts"],
            "ok": all(margin < args.margin for margin in margins)
            and (many["counts"]["preemptions"] > 0 or "preempted" not in name),
        }


def margin_of_difference(one: Line, other: Line) -> float | None:
    """Return None if the tokens are equal, else the margin by which the first different token was preferred to the next
    best. If it is large, rounding does not explain the difference. Without log-probabilities, texts are compared, and
    the margin is the smallest of the row."""
    if "error" in one or "error" in other:
        return None if one.get("error") == other.get("error") else float("inf")
    if other.get("logprobs") is None:
        is_equal = all(one[name] == other[name] for name in ("text", "finish_reason", "usage"))
        return None if is_equal else min(float(row["certificate"]["margin"]) for row in (one, other))
    for a, b in zip(one["logprobs"], other["logprobs"], strict=False):
        if a["token_id"] != b["token_id"]:
            return min(float(t["top"][0]["logprob"] - t["top"][1]["logprob"]) for t in (a, b))
    return None if len(one["logprobs"]) == len(other["logprobs"]) else float("inf")


def check_deterministic(args: argparse.Namespace, folder: Path) -> Iterator[Line]:
    options: Line = {"deterministic": True, "tensor_parallel": args.ranks, **_DIVISIONS[args.division]}
    runs: list[Line] = [
        {"method": "none", "max_batch_size": 32},
        {"method": "none", "max_batch_size": 5, "prefill_chunk_tokens": 100},
        {"method": "ngram", "max_batch_size": 17},
    ]
    first = None
    for run in runs:
        found = [
            without(result, "speculation") for result in answers(args, folder, args.rows, **options, **run)["results"]
        ]
        first = first or found
        differ = sum(one != other for one, other in zip(first, found, strict=True))
        yield {"run": run, "rows": len(found), "differ": differ, "ok": not differ}


def without(result: Line, name: str) -> Line:
    return {key: value for key, value in result.items() if key != name}


def check_kill(args: argparse.Namespace, folder: Path) -> Iterator[Line]:
    source = folder / "rows.jsonl"
    common = {"max_tokens": 200, "ignore_eos": True}
    repeats = _LONG if args.lanes else 1
    rows = [{"prompt_token_ids": [7, i % 100 + 5, 9] * repeats, **common} for i in range(args.rows)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = set(os.listdir("/dev/shm"))
    code = end_of(start_job(args, folder, "whole.jsonl"), args, folder)
    yield {"whole": code, "ok": code == 0}
    whole, output = (folder / "whole.jsonl").read_bytes(), folder / "killed.jsonl"
    for victim in ("rank 1", "rank 0", "SIGINT"):
        lines = kept(folder)
        job = start_job(args, folder, output.name)
        end = time.monotonic() + args.case_limit
        while job.poll() is None and kept(folder) < lines + args.rows // 6 and time.monotonic() < end:
            time.sleep(0.02)
        others = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        began = time.monotonic()
        if victim == "SIGINT":
            job.send_signal(signal.SIGINT)
        elif others:
            (job if victim == "rank 0" else rank_of(others)).kill()
        code = end_of(job, args, folder)
        left = psutil.wait_procs(others, timeout=10)[1]
        yield {
            "victim": victim,
            "exit_code": code,
            "ended_after_seconds": round(time.monotonic() - began, 1),
            "rows_kept": kept(folder),
            "processes_left": len(left),
            "last_words": (folder / "stderr").read_text()[-300:],
            "ok": bool(others) and not left and kept(folder) >= lines and not output.exists(),
        }
        for process in left:
            process.kill()
    code = end_of(start_job(args, folder, output.name), args, folder)
    is_equal = output.exists() and output.read_bytes() == whole
    found = sorted(set(os.listdir("/dev/shm")) - shared)
    yield {"resumed": code, "equal_bytes": is_equal, "shared_memory_left": found} | {
        "ok": (is_equal or (args.lanes and code == 0)) and not found
    }


def rank_of(processes: list[psutil.Process]) -> psutil.Process:
    """Return the process of rank 1. The others can be compilers and the like."""
    return next(process for process in processes if "ranks.process" in " ".join(process.cmdline()))


def end_of(job: subprocess.Popen[bytes], args: argparse.Namespace, folder: Path) -> int:
    """Return the exit code of a job. If it does not end, it raises RuntimeError with what the job was doing."""
    try:
        return job.wait(args.case_limit)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER the job prints its stack
        time.sleep(2)
        job.kill()
        job.wait()
        said = (folder / "stderr").read_text().partition("Extension modules:")[0]
        raise RuntimeError(f"the job did not end: {said[-3000:]}") from None


def start_job(args: argparse.Namespace, folder: Path, output: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specbatch", "generate", str(folder / "rows.jsonl")]
    command += ["-o", str(folder / output)]
    for option in (
        f"model.target={args.target}",
        f"engine.device={args.device}",
        f"engine.tensor_parallel={args.ranks}",
        "model.dtype=float32",
        "model.generation_config=none",
        "speculation.method=none",
        f"engine.max_batch_size={32 if args.lanes else 8}",
        f"engine.two_batch_overlap={'on' if args.lanes else 'auto'}",
        *(f"engine.{name}={value}" for name, value in _DIVISIONS[args.division].items()),
    ):
        command += ["--set", option]
    return start(command, folder)


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "stderr").open("w") as stderr:
        env = os.environ | {"PYTHONFAULTHANDLER": "1"}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=env)


def kept(folder: Path) -> int:
    """Count the finished rows of the killed job."""
    file = folder / "killed.jsonl.partial"
    return file.read_bytes().count(b'"row":{') if file.exists() else 0


def check_memory(args: argparse.Namespace, folder: Path) -> Iterator[Line]:
    for ranks in (1, args.ranks):
        division = _DIVISIONS[args.division] if ranks > 1 else {}
        found = answers(args, folder, 1, method="none", tensor_parallel=ranks, max_batch_size=256, **division)
        notes = [note for note in found["notes"] if note.startswith("engine.kv_cache_tokens")]
        yield {"target": args.target, "ranks": ranks, "notes": notes}
    free = 0 if args.device == "cpu" else torch.cuda.mem_get_info()[0]
    for name, config in geometries().items():
        gib: dict[str, float] = {}
        for ranks in (1, 2, 4, 8):
            try:
                part = local_config(config, 0, ranks)
            except ValueError:
                continue
            shapes = {name: torch.Size(shape).numel() for name, shape in expected_tensors(part).items()}
            vocabulary = sum(count for name, count in shapes.items() if "embed_tokens" in name or "lm_head" in name)
            gib[str(ranks)] = round(2 * (sum(shapes.values()) - vocabulary + vocabulary / ranks) / GIB, 2)
        line: Line = {"model": name, "bf16_gib_of_first_rank": gib}
        if free:  # the free memory of a GPU is for the KV cache
            fitting = [int(ranks) for ranks, size in gib.items() if size * GIB < 0.85 * free]
            line["gpus_that_hold_it"] = min(fitting, default=None)
        yield line


def check_gpus(work: Callable[[CudaGroup], list[Line]], args: argparse.Namespace, folder: Path) -> Iterator[Line]:
    """Run `work` in a process for each GPU, and yield the lines of rank 0."""
    if args.device == "cpu":
        yield {"left_out": "of GPUs"}
        return
    output = folder / f"{work.__name__}.json"
    meeting = str(output.with_suffix(".meeting"))
    torch.multiprocessing.spawn(of_gpu, (args.ranks, meeting, work, output), nprocs=args.ranks)
    yield from json.loads(output.read_text())


def of_gpu(rank: int, size: int, meeting: str, work: Callable[[CudaGroup], list[Line]], output: Path) -> None:
    """Run `work` in the process of one GPU."""
    from specbatch.parallel.cuda import CudaGroup, TorchCollectives

    device = torch.device("cuda", rank)
    group = CudaGroup(rank, size, device, TorchCollectives(rank, size, meeting, device), fixed_order=False)
    lines = work(group)
    if rank == 0:
        output.write_text(json.dumps(lines))
    torch.cuda.synchronize()
    group.close()


def time_sums(group: CudaGroup) -> list[Line]:
    rank, size, device = group.rank, group.size, group.device
    limits, lines = limits_for(size, two_passes=False), []
    for num_bytes in _SUMS:
        generators = [torch.Generator().manual_seed(i) for i in range(size)]
        parts = [torch.randn(num_bytes // 2, generator=one).bfloat16() for one in generators]
        x, expected = parts[rank].to(device), in_order(torch.stack(parts).float()).bfloat16()
        times: dict[str, float] = {}
        wrong = []
        for name in ("one_shot", "two_shot", "nccl", "gather"):
            if (name == "two_shot" and num_bytes > buffer_bytes(limits)) or (name == "one_shot" and limits is None):
                continue
            total = group.added(x, name)  # type: ignore[arg-type]
            if name in ("one_shot", "gather") and not torch.equal(total.cpu(), expected):
                wrong.append(name)
            times[name] = round(graph_micros(partial(group.added, x, name)), 2)
        lines.append({"bytes": num_bytes, "ranks": size, "microseconds": times, "other_bits": wrong, "ok": not wrong})
    return lines


def time_exchanges(group: CudaGroup) -> list[Line]:
    size, device, lines = group.size, group.device, []
    for num_bytes in _SUMS[::2]:
        generator = torch.Generator(device).manual_seed(group.rank)
        parts = torch.randn(size, num_bytes // 2, generator=generator, device=device).bfloat16()
        gathered, scattered = torch.empty_like(parts), torch.empty_like(parts[0])
        times: dict[str, dict[str, float]] = {"gather": {}, "scatter": {}}
        found: list[torch.Tensor] = []
        for name in ("nccl", *["one_shot"] * (limits_for(size, two_passes=False) is not None)):
            ways: dict[str, Callable[[], Any]] = {
                "gather": partial(group.gathered, parts[0], gathered, name),  # type: ignore[arg-type]
                "scatter": partial(group.scattered, parts, None, scattered, name),  # type: ignore[arg-type]
            }
            for what, way in ways.items():
                times[what][name] = round(graph_micros(way), 2)
            found += [gathered.clone(), scattered.clone()]
        ok = all(map(torch.equal, found[2:], found[:2]))
        lines.append({"bytes": num_bytes, "ranks": size, "microseconds": times, "ok": ok})
    return lines


def time_best(group: CudaGroup) -> list[Line]:
    """Time the best tokens of logits in bfloat16, with the vocabulary of Llama 3."""
    rank, size, device = group.rank, group.size, group.device
    ops, share = ops_for(device, torch.bfloat16), even_shares(_VOCAB, size)[rank]
    lines = []
    for num_tokens in (1, 4, 16, 32, 64, 128, 256, 512, 1024):
        logits_TV = torch.randn(num_tokens, _VOCAB, generator=torch.Generator().manual_seed(num_tokens)).bfloat16()
        part_TV, x_TI = logits_TV[:, share.start : share.stop].to(device), torch.empty(num_tokens, 1, device=device)
        head = GatheredLinear(
            cast(Linear, lambda x_TI, part=part_TV: part), group, VocabShare(share, -(-_VOCAB // size)), _VOCAB
        )
        ways = {
            "all logits": lambda head=head, x_TI=x_TI: ops.argmax_and_margin(head(x_TI)),
            "best tokens": lambda head=head, x_TI=x_TI: head.best(x_TI, ops),
        }
        (token_T, margin_T), found = (way() for way in ways.values())
        ok = torch.equal(token_T.long(), found[0]) and torch.equal(margin_T.float(), found[1])
        times = {name: round(graph_micros(way), 2) for name, way in ways.items()}
        lines.append({"tokens": num_tokens, "bytes": 2 * logits_TV.numel(), "microseconds": times, "ok": ok})
    return lines


def time_norms(group: CudaGroup) -> list[Line]:
    """Time norms with a hidden size of 8,192 in bfloat16."""
    device, lines = group.device, []
    norm = RMSNorm(torch.ones(8192, device=device, dtype=torch.bfloat16), 1e-5)

    def apart(x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        return norm(group.start_sum(x_TE, residual_TE)())

    def in_one(x_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor | None:
        return group.start_normed_sum(x_TE, residual_TE, norm)()[1]

    for num_tokens in (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        x_TE = torch.randn(num_tokens, 8192, device=device).bfloat16()
        residual_TE = torch.ones_like(x_TE)
        normed_TE = in_one(x_TE, residual_TE)
        # Sums in another order can differ by the last bit of bfloat16, which is 1/64 between 2 and 4. The residual can
        # cancel such a sum, so the tolerance is not relative alone.
        ok = normed_TE is None or torch.allclose(apart(x_TE, residual_TE), normed_TE, rtol=0.02, atol=0.02)
        ways: dict[str, Callable[..., Any]] = {"sum": lambda *xs: group.start_sum(*xs)(), "sum, norm": apart}
        if normed_TE is not None:  # else another kernel computes the norm
            ways["in one"] = in_one
        times = {name: round(graph_micros(partial(way, x_TE, residual_TE)), 2) for name, way in ways.items()}
        lines.append({"tokens": num_tokens, "microseconds": times, "ok": ok})
    return lines


def graph_micros(function: Callable[[], Any], calls: int = 20, repeats: int = 10) -> float:
    """Return the microseconds of one call, measured in a graph of `calls` calls."""
    graph = torch.cuda.CUDAGraph()
    function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(1e3 * first.elapsed_time(last) / calls)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
