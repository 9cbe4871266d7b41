"""A worker that shares its node with others: their memory, and what the node has to fetch once."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from specbatch.config import Config
from specbatch.job.worker import Description, Worker

_LOCK_NAME = "node.lock"


@dataclass(frozen=True)
class MakeWorker:
    """Makes a worker in its process. `memory_share`: its part of the memory that one worker alone would use."""

    make: Callable[[], Worker]
    memory_share: float

    def __call__(self) -> SharingWorker:
        return SharingWorker(self.make(), self.memory_share)


class SharingWorker:
    """A `Worker`, with a fraction of the node's memory; models are downloaded by one worker of the node at a time, so
    that the others find them in the cache."""

    def __init__(self, worker: Worker, memory_share: float) -> None:
        self._worker = worker
        self._memory_share = memory_share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def describe(self, config: Config) -> Description:
        if self._memory_share < 1:
            config = _with_share(config, self._memory_share)
        with _node_lock():
            return self._worker.describe(config)


def _with_share(config: Config, share: float) -> Config:
    from specbatch.engine.memory import MEMORY_FRACTION
    from specbatch.engine.resolve_device import resolve_device

    engine = config.engine
    whole = engine.memory_fraction or MEMORY_FRACTION[resolve_device(engine.device, []).type]
    return replace(config, engine=replace(engine, memory_fraction=whole * share))


@contextlib.contextmanager
def _node_lock() -> Iterator[None]:
    """In the folder that downloads go to. A folder that cannot be written is no reason to stop here."""
    from specbatch.models.catalog import cache_dir

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            cache_dir().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((cache_dir() / _LOCK_NAME).open("a")), fcntl.LOCK_EX)
        yield
