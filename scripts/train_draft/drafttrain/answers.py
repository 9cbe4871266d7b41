"""Runs rows through the project's own pipeline, in this process: the answers to learn from, and the evaluation."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from specbatch.config import Config
from specbatch.config_load import load_config
from specbatch.engine.build import build_engine
from specbatch.engine.resolve import resolve
from specbatch.errors import InputError
from specbatch.job.command import GenerateOptions, Runtime, generate_file
from specbatch.job.paths import stats_path_of
from specbatch.models.catalog import random_name, resolve_model

INTERRUPTED = 130


def run_rows(rows: Path, output: Path, sets: Sequence[str], config: Path | None, *, overwrite: bool = False) -> dict:
    """`specbatch generate ROWS -o OUTPUT --set ...`; returns its statistics. A job that was interrupted goes on, one
    that is finished is not run again.

    Raises SpecbatchError for mistakes, KeyboardInterrupt where a signal ended it (finished rows are kept).
    """
    console = Console(stderr=True, highlight=False)
    runtime = Runtime(resolve, build_engine, _model_paths)
    options = GenerateOptions(str(rows), output, overwrite=overwrite)
    code = generate_file(options, load_config(config, sets), runtime, console, began=time.perf_counter())
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


def _model_paths(config: Config) -> Mapping[str, Path]:
    refs = {"model.target": config.model.target, "speculation.draft": config.speculation.draft}
    return {
        option: resolve_model(ref, allow_download=False)
        for option, ref in refs.items()
        if ref is not None and random_name(ref) is None
    }
