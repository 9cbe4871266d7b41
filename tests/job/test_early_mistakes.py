"""Mistakes in paths are found before the libraries are imported that take seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import specbatch

ROOT = Path(specbatch.__file__).resolve().parent.parent
# One process for all commands: each has to leave the libraries out.
CHECK = """
import shlex, sys
from typer.testing import CliRunner
from specbatch.cli import app

for line in sys.argv[1:]:
    arguments, word = line.split(" -> ")
    done = CliRunner().invoke(app, shlex.split(arguments))
    assert done.exit_code == 2, (line, done.output)
    assert word in done.output, (line, done.output)
    late = {"torch", "transformers", "datasets"} & set(sys.modules)
    assert not late, (line, late)
"""


def test_wrong_paths_are_found_without_torch(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n' * 5)
    (tmp_path / "theirs.jsonl").write_text("precious")
    lines = [
        "generate '' -> the name of the input is empty",
        "generate d.jsonl -o '' -> the name is empty",
        "generate d.jsonl -c '' -> the name is empty",
        "tune '' -> the name of the input is empty",
        "tune d.jsonl -o '' -> the name is empty",
        "eval gsm8k -o '' -> the name is empty",
        "eval gsm8k --data '' -> the name is empty",
        "generate ftp://b/d.jsonl -> ftp: is not supported",
        "generate no.jsonl -> no.jsonl does not exist",
        "generate d.jsonl -o no/out.jsonl -> no, does not exist",
        "generate d.jsonl -o theirs.jsonl -> exists without theirs.stats.json, so the job that wrote it",
        "tune no.jsonl -> no.jsonl does not exist",
        "tune d.jsonl -o no/tuned.yaml -> no, does not exist",
        "tune d.jsonl --set speculation.method=none -> nothing to tune",
        "generate d.jsonl --set speculation.method=suffix --set speculation.corpus=no.jsonl -> no.jsonl does not exist",
        "eval gsm8k -o no/out -> no, does not exist",
        "eval gsm8k --data no.jsonl -> no.jsonl does not exist",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-c", CHECK, *lines]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
