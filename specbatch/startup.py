"""Preparation of commands and the Python interface before a model runs: paths of models, quiet libraries."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from specbatch.errors import SpecbatchError
from specbatch.parallel.multicast import disable_multicast
from specbatch.signals import end_at_once, on_signals

if TYPE_CHECKING:
    from rich.console import Console

    from specbatch.config import Config
    from specbatch.job.pool import WorkerPool
    from specbatch.job.worker import Runtime, Worker
    from specbatch.setup.resolve import ResolvedRun
    from specbatch.types import BatchEngine

_MIN_OPEN_FILES = 64  # A job on a CPU has about 8 open files; a GPU's driver and a model of many files need more.

_THREADS_OF_TOKENIZER = "TOKENIZERS_PARALLELISM"  # whether the library `tokenizers` uses threads
_MAX_TOKENIZER_THREADS = 8  # on a machine with many cores, more of them would only wait for the interpreter


def import_engine() -> None:
    """Import torch and all that engines need. It takes seconds. No file is open yet: a signal ends the process.

    Raises SpecbatchError if the limit of open files is too low for these imports.
    """
    allow_open_files()
    with on_signals(end_at_once):
        import specbatch.setup.build
        import specbatch.setup.resolve  # noqa: F401


def allow_open_files(more: int = 0) -> None:
    """Raise the soft limit of open files to what a job needs, and `more`. Raises SpecbatchError if that is not
    allowed."""
    needed = _MIN_OPEN_FILES + more
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < needed:  # -1: no limit
        most = needed if hard < 0 else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            raise SpecbatchError(
                f"at most {most} files can be open at once, and {needed} are needed", f"ulimit -n {max(needed, 1024)}"
            )


def runtime(console: Console) -> Runtime:
    """Return the functions of the engine that jobs need. Torch is imported on first use: it takes seconds, and mistakes
    in the command line, the input and the output are found before."""
    from specbatch.job.worker import Runtime

    def build(run: ResolvedRun, on_progress: Callable[[str], None]) -> BatchEngine:
        from specbatch.setup.build import build_engine

        if run.config.engine.tensor_parallel > 1:
            from specbatch.setup.ranks.ranked_engine import build_ranked

            return build_ranked(run, on_progress)
        return build_engine(run, on_progress)

    return Runtime(resolving(console), build, model_paths)


def open_pool(config: Config, console: Console) -> WorkerPool:
    """Open the pool that runs the rows of a job: in this process, or on the workers of `cluster`."""
    from specbatch.job.terminal import print_notes

    def log(line: str) -> None:
        print_notes([line], console)

    if config.cluster.workers is not None:
        from specbatch.scaleout import cluster

        return cluster.open_pool(config, new_worker, log)
    from specbatch.job.pool import LocalPool
    from specbatch.job.worker import Worker

    return LocalPool(Worker(runtime(console), log))


def new_worker() -> Worker:
    """Make the worker in a worker process, which prints nothing. The imports come first, because the workers of a node
    take turns in what follows."""
    prepare_libraries()
    import_engine()
    from rich.console import Console

    from specbatch.job.worker import Worker

    return Worker(runtime(Console(quiet=True)))


def resolving(console: Console) -> Callable[[Config], ResolvedRun]:
    """Return a `resolve` that shows a bar for each download."""

    def resolve_with_bar(config: Config) -> ResolvedRun:
        import_engine()
        from specbatch.job.terminal import download_bar
        from specbatch.setup.resolve import resolve

        with download_bar(console) as on_progress:
            return resolve(config, progress=on_progress)

    return resolve_with_bar


def model_paths(config: Config) -> Mapping[str, Path]:
    """Return the paths of the models of a resolved config, which `resolve` has downloaded. Random weights have no
    files: they depend on name, dtype and device, which are in the config."""
    from specbatch.models.catalog import random_name
    from specbatch.models.download import resolve_model

    refs = {"model.target": config.model.target, "speculation.draft": config.speculation.draft}
    refs["model.adapter"] = config.model.adapter
    return {
        option: resolve_model(ref, allow_download=False)
        for option, ref in refs.items()
        if ref is not None and random_name(ref) is None
    }


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads spin only 30,000 times before they sleep. The default of 300,000 takes milliseconds, which a
    thread with work loses on a busy core. On a quiet machine both are equally fast.

    Call it before torch is imported. A setting of the user stays.
    """
    if not environment.get("OMP_WAIT_POLICY"):
        environment.setdefault("GOMP_SPINCOUNT", "30000")


def use_tokenizer_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the tokenizer read the rows of a call in several threads. A fast engine would wait for one thread. A child
    that is forked has none of the threads, and would wait for them for ever, so it uses none. Settings of the user
    stay."""
    if _THREADS_OF_TOKENIZER in environment:
        return
    environment[_THREADS_OF_TOKENIZER] = "true"
    environment.setdefault("RAYON_NUM_THREADS", str(min(_MAX_TOKENIZER_THREADS, os.cpu_count() or 1)))
    os.register_at_fork(after_in_child=lambda: environment.update({_THREADS_OF_TOKENIZER: "false"}))


def prepare_libraries() -> None:
    """Silence messages that libraries print for other callers, and keep NVLink multicast off. Call it before torch is
    imported."""
    bound_spinning()
    disable_multicast()
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("DATASETS_VERBOSITY", "critical"),
        ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(name, value)
    use_tokenizer_threads()
    if not sys.warnoptions:
        import warnings

        warnings.filterwarnings("ignore", module=r"(transformers|datasets|huggingface_hub|torch)\b")
