"""A job whose workers have two ranks each, on Ray: its bytes, also if a rank is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'specbatch[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def started(folder: Path, name: str, *more: str) -> subprocess.Popen[bytes]:
    sets = ["model.target=random:tiny", "model.generation_config=none", "engine.device=cpu", "engine.max_batch_size=4"]
    sets += ["engine.tensor_parallel=2", "engine.two_batch_overlap=off", "speculation.method=ngram"]
    command = [sys.executable, "-m", "specbatch", "generate", str(folder / "rows.jsonl"), "-o", str(folder / name)]
    command += [part for one in sets for part in ("--set", one)]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([*command, *more], stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def ranks_of(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of ranks other than 0, which are children of workers."""
    found = []
    for child in psutil.Process(job.pid).children(recursive=True):
        try:
            if "ranks.process" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:  # it has ended
            continue
    return found


def kept_rows(folder: Path, name: str) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob(f"{name}.*") if file.suffix != ".log")


def test_a_killed_rank_ends_its_worker_which_is_replaced(tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": [i % 50 + 5, 9, i % 7 + 1], "max_tokens": 60, "ignore_eos": True} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert started(tmp_path, "one.jsonl").wait(100) == 0
    job = started(tmp_path, "many.jsonl", "--workers", "2")
    end, ranks = time.monotonic() + 100, list[psutil.Process]()
    while job.poll() is None and time.monotonic() < end and not (len(ranks) == 2 and kept_rows(tmp_path, "many.jsonl")):
        time.sleep(0.05)
        ranks = ranks_of(job)
    ranks[0].kill()
    code, log = job.wait(100), (tmp_path / "many.jsonl.log").read_text()
    assert code == 0, log[-2000:]
    assert "died (rank 1 of engine.tensor_parallel ended" in log
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert psutil.wait_procs(ranks, timeout=5)[1] == []
