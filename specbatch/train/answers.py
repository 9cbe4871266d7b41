"""Runs rows through the project's own pipeline, in this process: the answers to learn from, and the evaluation."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from specbatch.config import Config
from specbatch.config_load import load_config
from specbatch.errors import InputError
from specbatch.files.paths import stats_path_of
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.pool import LocalPool
from specbatch.job.worker import Runtime, Worker
from specbatch.signals import INTERRUPTED

# What the user's options may change: the model's own filters of samples would narrow what a drafter learns from.
_DEFAULTS = ("model.generation_config=none", "sampling.max_tokens=512")


@dataclass(frozen=True)
class Pipeline:
    """Everything that a run of rows needs: the user's configuration, and the parts that run models."""

    file: Path | None
    sets: tuple[str, ...]  # options of the user, `a.b=text`
    runtime: Runtime
    console: Console

    def config(self, more: Sequence[str] = ()) -> Config:
        """Return the configuration of a run. `more`: options of this run. Raise ConfigError."""
        return load_config(self.file, [*_DEFAULTS, *self.sets, *more])

    def say(self, line: str) -> None:
        """Print progress to stderr, because stdout has the table of the evaluation."""
        self.console.print(line, markup=False, soft_wrap=True)


def run_rows(rows: Path, output: Path, more: Sequence[str], pipeline: Pipeline, *, overwrite: bool = False) -> dict:
    """Do the same as `specbatch generate ROWS -o OUTPUT --set ...`, and return its statistics. A job that was
    interrupted goes on, and one that is finished is not run again.

    It raises SpecbatchError for mistakes, and KeyboardInterrupt if a signal ended it (finished rows are kept).
    """
    pool = LocalPool(Worker(pipeline.runtime))
    options = GenerateOptions(str(rows), output, overwrite=overwrite)
    config = pipeline.config(more)
    code = run_file_job(options, config, pool, pipeline.console, began=time.perf_counter()).exit_code
    del pool  # with its engine
    # The next engine, or the training, needs the device's memory.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    report: dict = json.loads(stats_path_of(output).read_text(encoding="utf-8"))
    if not report["rows"]["ok"]:
        raise InputError(f"no row of {rows} could be answered: {report['rows']['errors']}")
    return report
