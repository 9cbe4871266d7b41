"""One engine for several file jobs, each with statistics of its own."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
from collections.abc import Callable
from typing import Any

from specbatch.config import Config
from specbatch.job.command import Runtime
from specbatch.types import BatchEngine, Completion, EngineLimits, EngineStats, Request, SpeculationCounts


class SharedRuntime:
    """Resolves a configuration once and builds its engine once, when a job first needs it.

    `runtime` is what each job gets: jobs may differ in `sampling` and `data`, which no part of an engine depends on.
    """

    def __init__(self, inner: Runtime, config: Config) -> None:
        self._inner = inner
        self._engine: BatchEngine | None = None
        self.resolved: Any = inner.resolve(config)
        self.runtime = Runtime(self._resolve, self._build, inner.model_paths)

    def release(self) -> None:
        """Let go of the engine, and of the GPU's memory with it."""
        self._engine = None
        gc.collect()
        torch = sys.modules.get("torch")  # a stub engine has no need of it
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _resolve(self, config: Config) -> Any:
        own = dataclasses.replace(self.resolved.config, sampling=config.sampling, data=config.data)
        # The decisions are printed once: by the first job that needs the engine.
        notes = self.resolved.notes if self._engine is None else []
        return dataclasses.replace(self.resolved, config=own, notes=notes)

    def _build(self, run: Any, show: Callable[[str], None]) -> BatchEngine:
        if self._engine is None:
            self._engine = self._inner.build_engine(run, show)
        return _OneJob(self._engine)


class _OneJob:
    """A `BatchEngine` that counts from now on."""

    def __init__(self, engine: BatchEngine) -> None:
        assert engine.num_running == engine.num_waiting == 0, "the job before has left something"
        self._engine = engine
        self._before = copy.deepcopy(engine.stats)

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def stats(self) -> EngineStats:
        return counts_since(self._engine.stats, self._before)

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def tokens_so_far(self) -> dict[int, int]:
        return self._engine.tokens_so_far()

    def limit_rows(self, tokens: int | None) -> int:
        return self._engine.limit_rows(tokens)

    def submit(self, request: Request) -> None:
        self._engine.submit(request)

    def step(self) -> list[Completion]:
        return self._engine.step()


def counts_since(now: EngineStats, before: EngineStats) -> EngineStats:
    """What an engine has counted since it had counted `before`."""
    numbers = {f.name: getattr(now, f.name) for f in dataclasses.fields(EngineStats) if f.name != "speculation"}
    counts = SpeculationCounts()
    for f in dataclasses.fields(SpeculationCounts):
        new, old = getattr(now.speculation, f.name), getattr(before.speculation, f.name)
        if isinstance(new, list):
            value = [n - (old[i] if i < len(old) else 0) for i, n in enumerate(new)]
            while value and value[-1] == 0:  # depths that only the jobs before have reached
                value.pop()
        else:
            value = new - old
        setattr(counts, f.name, value)
    return EngineStats(**{n: v - getattr(before, n) for n, v in numbers.items()}, speculation=counts)
