"""Workers that share a node: its memory, and what it downloads."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specbatch.config import Config
from specbatch.config_load import load_config
from specbatch.scaleout.worker import MakeWorker, SharingWorker


class Recorder:
    """In place of a `Worker`."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.fractions: list[float | None] = []
        self.times: list[tuple[float, float]] = []

    def describe(self, config: Config) -> str:
        began = time.monotonic()
        self.fractions.append(config.engine.memory_fraction)
        time.sleep(0.1)
        if self.fails:
            raise RuntimeError
        self.times.append((began, time.monotonic()))
        return "described"

    def limit_length(self, tokens: int) -> int:
        return tokens - 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sharing(share: float, worker: Recorder, pool_id: str = "pool 1") -> SharingWorker:
    return SharingWorker(worker, share, pool_id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "sets", "expected"),
    [
        (0.25, [], 0.125),  # half of the free memory is the default on a CPU
        (0.25, ["engine.memory_fraction=0.8"], 0.2),
        (1.0, [], None),
        (1.0, ["engine.memory_fraction=0.8"], 0.8),
    ],
)
def test_memory_is_divided(share: float, sets: list[str], expected: float | None) -> None:
    worker = Recorder()
    sharing(share, worker).describe(load_config(None, ["engine.device=cpu", *sets]))
    assert worker.fractions == [expected if expected is None else pytest.approx(expected)]


def test_the_first_worker_of_a_node_describes_alone() -> None:
    """The next pool's first worker, too. One that fails leaves it to the next one."""
    for pool_id in ("pool 1", "pool 2"):
        worker, failing = Recorder(), Recorder(fails=True)
        with pytest.raises(RuntimeError):
            sharing(1, failing, pool_id).describe(load_config())
        config = load_config()
        workers = [sharing(1, worker, pool_id) for _ in range(4)]
        threads = [threading.Thread(target=one.describe, args=(config,)) for one in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, *others = sorted(worker.times)
        assert len(others) == 3
        assert all(began >= first[1] for began, _ in others)
        assert max(began for began, _ in others) < min(ended for _, ended in others), "they take turns"


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert sharing(1, Recorder()).describe(load_config()) == "described"


def test_all_other_methods_are_the_workers_own() -> None:
    assert sharing(0.5, Recorder()).limit_length(7) == 6


def test_what_makes_a_worker_can_be_sent() -> None:
    make: Any = pickle.loads(pickle.dumps(MakeWorker(Recorder, 0.5, "pool 1")))  # type: ignore[arg-type]
    assert make().limit_length(3) == 2
