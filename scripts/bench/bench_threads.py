"""A benchmark of the first command on a CPU, with several thread settings, on a quiet and on a busy machine.

    python scripts/bench/bench_threads.py --busy 0 2 --repeats 3 [--before CHECKOUT] [--rows 4] [--data FILE]

`--busy N`: N endless loops run meanwhile. `--before`: another checkout to compare with. The settings take turns.
Prints one JSON line a run: seconds from start to end, tokens per second of decoding, CPU seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "questions.jsonl")
    parser.add_argument("--spin", type=int, nargs="*", default=[], help="also with these GOMP_SPINCOUNT")
    args = parser.parse_args()
    settings: list[tuple[str, Path, dict[str, str]]] = [("now", ROOT, {})]
    if args.before is not None:
        settings.append(("before", args.before, {}))
    settings += [
        ("one thread", ROOT, {"OMP_NUM_THREADS": "1"}),
        ("passive", ROOT, {"OMP_WAIT_POLICY": "passive"}),
    ]
    settings += [(f"spin {count}", ROOT, {"GOMP_SPINCOUNT": str(count)}) for count in args.spin]
    for busy in args.busy:
        with busy_loops(busy):
            for _ in range(args.repeats):
                for name, root, environment in settings:
                    figures = run(root, environment, args.data, args.rows)
                    print(json.dumps({"busy": busy, "setting": name, **figures}), flush=True)


def run(root: Path, chosen: dict[str, str], data: Path, rows: int) -> dict[str, float]:
    environment = {k: v for k, v in os.environ.items() if k not in CHOSEN} | chosen | {"PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.jsonl")
        command = [sys.executable, "-m", "specbatch", "generate", str(data), "-o", str(output), "--limit", str(rows)]
        before, began = cpu_seconds(), time.perf_counter()
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
        wall, cpu = time.perf_counter() - began, cpu_seconds() - before
        stats = json.loads(output.with_name("out.stats.json").read_text())
    seconds = stats["session"]["seconds"]
    return {
        "seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "load_seconds": round(seconds["load"], 2),
        "decode_tokens_per_second": round(stats["tokens"]["completion"] / seconds["decode"], 2),
    }


def cpu_seconds() -> float:
    """Return the CPU seconds of the processes that ran and ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main()
