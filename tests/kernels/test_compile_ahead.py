"""Kernels that are compiled in threads, before they are launched."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specbatch

ROOT = Path(specbatch.__file__).parents[1]
KERNELS = Path(specbatch.__file__).parent / "kernels" / "triton"


def run(check: str, folder: Path) -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compiled_ahead", check]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param("gemms", marks=pytest.mark.slow),
        *[pytest.param(check, marks=pytest.mark.wide) for check in ("shares", "specialised", "failures", "sorting")],
    ],
)
def test_kernels_are_compiled_and_not_launched(check: str, tmp_path: Path) -> None:
    run(check, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["rounds", "budgets", "ranks", "experts", "drafters", "deterministic", "failed_rounds"]
)
def test_the_rounds_of_an_engine(check: str, tmp_path: Path) -> None:
    run(check, tmp_path)


def test_all_kernels_are_launched_in_one_place() -> None:
    """Others would be launched over fake tensors, too."""
    others = [
        f"{file.name}:{node.lineno}"
        for file in KERNELS.rglob("*.py")
        if file.name != "launch.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    assert not others
