"""Runs rows through the project's own pipeline, in this process: the answers to learn from, and the evaluation."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from specbatch.config_load import load_config
from specbatch.errors import InputError
from specbatch.files.paths import stats_path_of
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.pool import LocalPool
from specbatch.job.worker import Runtime, Worker
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.startup import model_paths

INTERRUPTED = 130


def run_rows(rows: Path, output: Path, sets: Sequence[str], config: Path | None, *, overwrite: bool = False) -> dict:
    """Do the same as `specbatch generate ROWS -o OUTPUT --set ...`, and return its statistics. A job that was
    interrupted goes on, and one that is finished is not run again.

    It raises SpecbatchError for mistakes, and KeyboardInterrupt if a signal ended it (finished rows are kept).
    """
    console = Console(stderr=True, highlight=False)
    pool = LocalPool(Worker(Runtime(resolve, build_engine, model_paths)))
    options = GenerateOptions(str(rows), output, overwrite=overwrite)
    code = run_file_job(options, load_config(config, sets), pool, console, began=time.perf_counter()).exit_code
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
