"""The model of an `LLM` or an `AsyncLLM`: the pool that runs its rows, until it is closed."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.api.options import configured
from specbatch.counts import EngineStats
from specbatch.errors import InputError
from specbatch.files.template_files import with_template_texts
from specbatch.job.crash_retry import died
from specbatch.job.output import with_first_day
from specbatch.job.pool import WorkerPool
from specbatch.job.runner import failed_row
from specbatch.results.finished import FinishedRow
from specbatch.rows.parser import RowParser
from specbatch.signals import deferred_signals
from specbatch.startup import open_pool, prepare_libraries


class LoadedModel:
    """A model in memory. It raises SpecbatchError for errors that the caller can correct."""

    def __init__(self, config: str | Path | None, options: Mapping[str, Any]) -> None:
        loaded = configured(config, options)
        prepare_libraries()
        pool = open_pool(loaded, Console(quiet=True))
        try:
            what = pool.describe(with_first_day(with_template_texts(loaded), date.today()))
            self.config = what.config
            self._parser = RowParser(what.config.sampling, what.config.data, what.config.model.target)
            self.notes = list(what.notes)
            self.notes += pool.load(lambda tokens: tokens, lambda step: None)
        except BaseException:
            pool.close()
            raise
        self._pool: WorkerPool | None = pool  # None: closed

    @property
    def pool(self) -> WorkerPool:
        """The pool that runs rows. It raises InputError if the model is closed."""
        if self._pool is None:
            raise InputError("the LLM is closed, so it runs no rows", "read the results before close()")
        return self._pool

    def collect(self, last: bool) -> list[FinishedRow]:
        """Run for a moment, and return the rows that finished. See `WorkerPool.collect`."""
        with deferred_signals():  # an exception in the middle would lose rows, and the next call wait for them
            done = self.pool.collect(last)
        lost = [failed_row(row, died(deaths), self._parser) for row, deaths in done.left_out]
        return [*done.rows, *(row for failed in lost for row in failed.rows)]

    @property
    def stats(self) -> EngineStats:
        """Counters since the model was loaded, summed over workers."""
        return self._pool.stats if self._pool is not None else self._last_stats

    def close(self) -> None:
        """Free the model and end the workers."""
        if self._pool is not None:
            self._last_stats = self._pool.stats
            self._pool.close()
            self._pool = None
            gc.collect()  # needed, because parts of an engine refer to each other
