"""A check of jobs with workers on Ray against the same job in one process: the bytes of the results, and the faults
that jobs survive.

    python scripts/check/check_workers.py [equal] [kill] [shards] [faults] [-o FILE.json]

equal    1, 2 and 4 workers: 20,000 rows with the stub engine of the tests, 2,000 with a tiny model, 60 with the
         built-in model. Rows are greedy and sampled, with n = 2, logprobs, lines of OpenAI Batch and bad rows.
kill     30 kills at random moments: of a worker, of the command, of both (SIGKILL), and of a node of a Ray cluster,
         which another node replaces. A killed command is run again with a random number of workers, until the file is
         whole. No process and no file of it may remain.
shards   16 shards, merged.
faults   SIGINT, at work and at the start; two commands with one output; a worker that hangs (SIGSTOP); a row that ends
         its worker by SIGSEGV.

All in float32 on the CPU. Each file must be byte for byte that of one process without workers. The exit code is 0 only
if all of that holds. `-o` adds the figures to FILE.json. About 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from check_faults import count_rows, write_lines
from worker_faults import Faults
from worker_jobs import ENGINES, Jobs, Session, different, environment, mixed_rows

from specbatch.results.stats import commit, device_name, versions

_NUM_ROWS = {"stub": 20_000, "tiny": 2_000, "smollm2": 60}
_KILLED_ROWS = {"stub": 1_000, "tiny": 300, "smollm2": 60}
_KINDS = ("worker", "command", "both", "node")
_MAX_KILLS = 3  # the most kills for one file
_STARTING = 0.25  # the share of the kills that come during the start
_GONE_SECONDS = 30.0
_NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
_NUM_NODES = 2


def check_equal(folder: Path, rng: random.Random, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    figures, problems = [], []
    for engine in args.engines:
        jobs = Jobs(engine, folder)
        write_lines(folder / f"{engine}.jsonl", mixed_rows(_NUM_ROWS[engine]))
        one = jobs.run(f"{engine}.jsonl", f"{engine}.one.jsonl")
        whole = (folder / f"{engine}.one.jsonl").read_bytes()
        for workers in (None, 1, 2, 4):
            session, output = one, folder / f"{engine}.{workers}.jsonl"
            if workers is not None:
                session = jobs.run(f"{engine}.jsonl", output.name, workers)
                if problem := different(session, output, one.process.returncode, whole):
                    problems.append(f"{engine}, {workers} workers: {problem}")
            figures.append(
                {
                    "engine": engine,
                    "rows": _NUM_ROWS[engine],
                    "workers": workers,
                    "bytes": len(whole),
                    "equal": workers is None or not problem,
                    "exit_code": session.process.returncode,
                    "seconds": round(session.seconds, 1),
                }
            )
            print(figures[-1], flush=True)
    return figures, problems


def check_kill(folder: Path, rng: random.Random, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    figures: list[dict[str, Any]] = []
    problems: list[str] = []
    others = args.engines[:-1] or args.engines
    todo: dict[str, list[str]] = {engine: [] for engine in args.engines}
    for k in range(args.kills):
        real = k < args.real_kills
        todo[args.engines[-1] if real else others[k // len(_KINDS) % len(others)]].append(_KINDS[k % len(_KINDS)])
    with nodes() as cluster:
        for engine, kills in todo.items():
            if not kills:
                continue
            jobs = Jobs(engine, folder, sleep=0.02)
            num_rows = _KILLED_ROWS[engine]
            data, output = f"{engine}.kill.jsonl", folder / f"{engine}.killed.jsonl"
            write_lines(folder / data, mixed_rows(num_rows))
            one = jobs.run(data, f"{engine}.kill.one.jsonl")
            whole = (folder / f"{engine}.kill.one.jsonl").read_bytes()
            while kills:
                output.unlink(missing_ok=True)
                of_file: list[dict[str, Any]] = []
                while True:
                    kind = kills[-1] if kills and len(of_file) < _MAX_KILLS else None
                    session, figure = run_and_kill(jobs, data, output, kind, num_rows, rng, cluster)
                    if figure is not None:
                        figure = {"engine": engine, **figure}
                        kills.pop()
                        of_file.append(figure)
                        print(figure, flush=True)
                        if figure["remains"]:
                            problems.append(f"after {figure}: these remain")
                    if session.process.returncode != -signal.SIGKILL:
                        break
                problem = different(session, output, one.process.returncode, whole)
                if problem:
                    problems.append(f"after {of_file}: {problem}")
                print(f"{engine}: {len(of_file)} kills, {problem or 'equal'}", flush=True)
                figures += [{**figure, "equal": not problem} for figure in of_file]
    print(f"{len(figures)} kills: {dict(Counter(figure['kind'] for figure in figures))}", flush=True)
    return figures, problems


def run_and_kill(
    jobs: Jobs, data: str, output: Path, kind: str | None, num_rows: int, rng: random.Random, cluster: Any
) -> tuple[Session, dict[str, Any] | None]:
    """Run one command with at most one kill of this kind. The second result is None if the job had ended before the
    kill, or has not lost a worker."""
    workers = rng.choice([None, 1, 2, 3] if kind in (None, "command") else [1, 2, 3])
    on_cluster = workers is not None and (kind == "node" or rng.random() < 0.5)
    partial = output.with_name(f"{output.name}.partial")
    before = count_rows(partial)
    session = jobs.start(data, output.name, workers, address=cluster.address if on_cluster else None)
    killed = None
    if kind is not None:
        if rng.random() < _STARTING:
            moment = "start"
            session.wait_until(lambda: False, rng.uniform(0, 15))
        else:
            moment = "work"
            target = rng.randrange(before, max(before + 1, num_rows * 9 // 10))
            session.wait_until(lambda: count_rows(partial) > target)
        session.wait_until(lambda: kind == "command" or bool(session.workers()))
        processes = session.processes()
        if session.process.poll() is None:
            killed = {"kind": kind, "workers": workers, "ray": "cluster" if on_cluster else "host", "moment": moment}
            killed |= {"rows_before": before, "rows": count_rows(partial)}
            kill(kind, session, rng, cluster)
    session.wait()
    code = session.process.returncode
    if killed is None or (code != -signal.SIGKILL and " died (" not in session.stderr):
        return session, None
    remains, seconds = session.remains(processes, _GONE_SECONDS)
    return session, killed | {"exit_code": code, "gone_after_seconds": seconds, "remains": remains}


def kill(kind: str, session: Session, rng: random.Random, cluster: Any) -> None:
    victims: list[Any] = []
    if kind in ("worker", "both"):
        victims += [rng.choice(session.workers())]
    if kind in ("command", "both"):
        victims.append(session.process)
    rng.shuffle(victims)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    if kind == "node":
        used = {process.ppid() for process in session.workers()}
        node = next(n for n in cluster.worker_nodes if n.all_processes["raylet"][0].process.pid in used)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(**_NODE)


@contextlib.contextmanager
def nodes() -> Iterator[Any]:
    """Start a Ray cluster on this host: a head node without room for workers, and other nodes."""
    os.environ.update(environment(sleep=0.02) | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(_NUM_NODES):
            cluster.add_node(**_NODE)
        yield cluster
    finally:
        cluster.shutdown()


def check_shards(folder: Path, rng: random.Random, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    engine, num_shards = args.engines[0], 16
    jobs = Jobs(engine, folder)
    write_lines(folder / "data.jsonl", mixed_rows(2_000))
    one = jobs.run("data.jsonl", "one.jsonl")
    codes = []
    for i in range(num_shards):
        workers = 2 if i % 8 == 3 else None
        session = jobs.run("data.jsonl", f"data.results.{i:02}-of-16.jsonl", workers, "--shard", f"{i}/{num_shards}")
        codes.append(session.process.returncode)
    shards = [f"data.results.{i:02}-of-16.jsonl" for i in range(num_shards)]
    merge = Session(["-m", "specbatch", "merge", *shards], folder)
    merge.wait()
    problem = different(
        merge, folder / "data.results.jsonl", one.process.returncode, (folder / "one.jsonl").read_bytes()
    )
    figure = {"engine": engine, "rows": 2_000, "shards": num_shards, "with_workers": 2, "equal": not problem}
    figure |= {
        "exit_codes": codes,
        "merge_exit_code": merge.process.returncode,
        "merge_seconds": round(merge.seconds, 1),
    }
    print(figure, flush=True)
    return [figure], [f"merged shards: {problem}"] if problem else []


def check_faults(folder: Path, rng: random.Random, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    return Faults(folder).check()


def main() -> int:
    checks = {"equal": check_equal, "kill": check_kill, "shards": check_shards, "faults": check_faults}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"{', '.join(checks)}; default: all")
    parser.add_argument("--engines", default="stub,tiny,smollm2", help="of equal and kill; the first runs the others")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--real-kills", type=int, default=4, help="of these, with the last engine")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments; default: the time")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    args.engines = args.engines.split(",")
    if unknown := {*args.checks, *args.engines} - {*checks, *ENGINES}:
        parser.error(f"unknown: {unknown.pop()!r}")
    print(f"seed {args.seed}")
    problems: list[str] = []
    for check in args.checks or checks:
        print(f"== {check}", flush=True)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="w") as folder:
            figures, found = checks[check](Path(folder), random.Random(args.seed), args)
        for problem in found:
            print(f"PROBLEM: {problem}")
        print(f"== {check}: {len(found)} problems in {time.perf_counter() - began:.0f} s", flush=True)
        problems += found
        if args.output is not None:
            add_figures(args.output, check, figures, args.seed)
    print("workers: all checks passed" if not problems else f"workers: FAILED, {len(problems)} problems")
    return 1 if problems else 0


def add_figures(path: Path, check: str, figures: list[dict[str, Any]], seed: int) -> None:
    import ray

    content = json.loads(path.read_text()) if path.exists() else {}
    content |= {
        "what": "jobs with workers on Ray: the results of one process, after kills and faults, too; float32, CPU",
        "commit": "of each part",
        "command": "python scripts/check/check_workers.py -o FILE.json",
        "device": device_name("cpu"),
        "versions": {**versions(), "ray": ray.__version__},
    }
    engines = sorted({str(figure.get("engine")) for figure in figures})
    for engine in engines:
        of_engine = [figure for figure in figures if str(figure.get("engine")) == engine]
        content[f"{check}.{engine}"] = {"commit": commit(), "seed": seed, "figures": of_engine}
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
