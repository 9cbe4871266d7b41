"""A benchmark of the seconds from the command to the first row of a job, cold and warm.

    python scripts/bench/bench_start.py --target random:llama-3-8b -o start.json

Runs `specbatch generate` over a few short rows, each time in a process of its own. The first run finds no compiled
kernels: the caches of Triton, Inductor and CUDA are an empty folder. The next ones find what it left. Prints a JSON
line for each run: `first_row_s`, to the first line of the output; `seconds`, to the end of the process; `session`, the
job's own seconds (`load` begins with the command); `parts`, which the tool says of its start. Weights are made at
random, so reading them from a disk is not in it. A run that fails is a line with its error. `kernels`: that Triton has
compiled, in all runs with these caches. `rows`: a digest, which must be the same in all runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from specbatch.results.stats import commit, device_name, versions

ROOT = Path(__file__).resolve().parents[2]
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_SHOWN = re.compile(r"engine.*: .*ready in|engine: .*compiled (ahead|by)|engine\.cuda_graphs: \d|prefill\.graphs: \w+,")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:llama-3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--warm", type=int, default=1, help="runs after the first")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=80.0, help="a run that takes longer is ended")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    head = {
        "command": " ".join(["python", "scripts/bench/bench_start.py", *sys.argv[1:]]),
        "commit": commit(), "device": device_name(args.device), "versions": versions(),
    }  # fmt: skip
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + args.warm):
            line = {"target": args.target, "set": args.set, "start": "warm" if number else "cold"}
            try:
                line |= start(args, Path(folder), number)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {str(error)[-1500:]}"
            lines.append(line)
            print(json.dumps(line), flush=True)
            if args.output is not None:
                args.output.write_text(json.dumps(head | {"lines": lines}, indent=1) + "\n", encoding="utf-8")


def start(args: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    data, output, log = folder / "rows.jsonl", folder / f"{number}.jsonl", folder / f"{number}.log"
    rows = [{"id": str(i), "prompt": f"{i} clips were sold to friends in April. " * 12} for i in range(args.rows)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sets = [f"model.target={args.target}", f"engine.device={args.device}", "speculation.method=none"]
    sets += ["model.generation_config=none"]
    sets += ["sampling.max_tokens=16", "sampling.ignore_eos=true", *args.set]
    command = [sys.executable, "-m", "specbatch", "generate", str(data), "-o", str(output)]
    command += [part for one in sets for part in ("--set", one)]
    caches = {name: str(folder / name) for name in _CACHES}
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began, first = time.perf_counter(), None
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, cwd=folder,
            env=os.environ | caches | {"PYTHONPATH": search, "NO_COLOR": "1"},
        )  # fmt: skip
        while process.poll() is None:
            if first is None and output.is_file() and output.stat().st_size:
                first = time.perf_counter() - began
            if time.perf_counter() - began > args.seconds:
                process.kill()
            time.sleep(0.01)
    seconds, text = time.perf_counter() - began, log.read_text(errors="replace")
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {text[-1200:]}")
    stats = json.loads(output.with_suffix(".stats.json").read_text())
    return {
        "first_row_s": round(seconds if first is None else first, 2), "seconds": round(seconds, 2),
        "session": stats["session"]["seconds"], "parts": [note for note in stats["notes"] if _SHOWN.match(note)],
        "rows": hashlib.sha256(b"".join(sorted(output.read_bytes().splitlines()))).hexdigest()[:16],
        "kernels": sum(1 for _ in (folder / "TRITON_CACHE_DIR").rglob("*.cubin")),
    }  # fmt: skip


if __name__ == "__main__":
    main()
