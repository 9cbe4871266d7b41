"""A worker that shares its node with others: their memory, and what the node has to fetch once."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TextIO

from specbatch.config import Config
from specbatch.job.worker import Description, Worker

_LOCK_NAME = "node.lock"


@dataclass(frozen=True)
class MakeWorker:
    """Makes a worker in its process. `memory_share`: its part of the memory that one worker alone would use. `pool_id`:
    the same for all workers of a pool, and unique."""

    make: Callable[[], Worker]
    memory_share: float
    pool_id: str

    def __call__(self) -> SharingWorker:
        return SharingWorker(self.make(), self.memory_share, self.pool_id)


class SharingWorker:
    """A `Worker`, with a fraction of the node's memory. The first worker of a node downloads the models alone, so that
    the others find them in the cache."""

    def __init__(self, worker: Worker, memory_share: float, pool_id: str) -> None:
        self._worker = worker
        self._memory_share = memory_share
        self._pool_id = pool_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def describe(self, config: Config) -> Description:
        if self._memory_share < 1:
            config = _with_share(config, self._memory_share)
        with _first_of_node(self._pool_id):
            return self._worker.describe(config)


def _with_share(config: Config, share: float) -> Config:
    from specbatch.setup.device import resolve_device
    from specbatch.setup.memory import MEMORY_FRACTION

    engine = config.engine
    whole = engine.memory_fraction or MEMORY_FRACTION[resolve_device(engine.device, []).type]
    return replace(config, engine=replace(engine, memory_fraction=whole * share))


@contextlib.contextmanager
def _first_of_node(pool_id: str) -> Iterator[None]:
    """Lets one process of the node run at a time, until one has come to the end. It leaves the name of its pool in a
    file, in the folder that downloads go to. A folder that cannot be written is no reason to stop here."""
    from specbatch.models.catalog import cache_dir

    file: TextIO | None = None
    with contextlib.suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        file = (cache_dir() / _LOCK_NAME).open("a+")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if file.read() == pool_id:
            file.close()
            file = None
    if file is None:
        yield
        return
    with file:
        yield
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(pool_id)
