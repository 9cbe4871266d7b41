"""Settings that must be made before anything else.

Without a GPU, Triton kernels run in its interpreter, which must be set before triton is imported. Two processes run the
tests, with one thread of torch each, because two threads each would compete for two cores.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

import specbatch
from tests.gpu_memory import memory_for

_MANY_VARIANTS = {"attention", "cli", "draft", "engine", "files", "graphs", "job", "kernels", "models"}  # folders
_MANY_VARIANTS |= {"blocks", "fallback", "formats", "grammar", "parallel", "report", "results", "rows"}
_MANY_VARIANTS |= {"scaleout", "schemas", "serve", "setup", "text", "train", "tune"}
# One of that number of variants of a test is not `wide`. A test always has at least one.
_ONE_OF, _ONE_OF_MANY = 24, 32
_MANY = 48

# Python keeps what it has compiled, also where PYTHONDONTWRITEBYTECODE is set. Otherwise each process that a test
# starts compiles specbatch again, and each of pytest's processes all test files: 7 of the 15 s before its first test.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test cuts the power, so nothing is lost without fsync. It takes 3 ms, and each job calls it several times.
os.fsync = lambda fd: None

# Until all tests are collected there is nothing to free: the collector takes a sixth of the time until then.
gc.disable()

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but one of 24 variants of a test as `wide`, and all but one of 32 of a test with 48 or more. They are
    chosen by a hash of their names, so that a value that several tests have as a parameter is run by some of them.
    Variants that a test itself marks are not counted."""
    variants: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.path.parent.name in _MANY_VARIANTS and not marks & {"slow", "gpu", "wide"}:
            variants.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for some in variants.values():
        of = _ONE_OF_MANY if len(some) >= _MANY else _ONE_OF
        some.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in some[-(-len(some) // of) :]:
            item.add_marker("wide")


def pytest_collection_finish() -> None:
    """Freeze the objects that imports made, so that the garbage collector skips them. This saves a tenth of the time of
    some tests. Each job asks whether the heap is frozen, and the true count takes 30 ms for a million objects."""
    gc.freeze()
    gc.set_threshold(50_000)  # the collector takes a twentieth of the time with Python's 700
    gc.enable()
    gc.get_freeze_count = lambda: 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Send traces of crashes to pytest's copy of stderr. After a file job they go to stderr, which tests replace."""
    if (stderr := item.config.stash.get(fault_handler_stderr_fd_key, None)) is not None:
        faulthandler.enable(stderr)


@pytest.fixture(autouse=True)
def _shared_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let GPU tests of several processes share one card's memory."""
    if not torch.cuda.is_available() or request.node.get_closest_marker("gpu") is None:
        yield
        return
    with memory_for(request.node):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of two layers to disk. A whole run with it takes a quarter of the time that `random:tiny` takes."""
    from tests.tiny_checkpoint import write_checkpoint  # here, because it imports transformers: 1 s of each process

    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the modules of scripts/ importable."""
    folder = Path(specbatch.__file__).resolve().parent.parent / "scripts"
    if not folder.is_dir():
        pytest.skip("no checkout")
    for name in ("bench", "check"):
        monkeypatch.syspath_prepend(str(folder / name))
    monkeypatch.chdir(tmp_path)  # ./specbatch.yaml of a developer must not matter
