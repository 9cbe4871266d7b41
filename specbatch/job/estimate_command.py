"""The command around `estimate`: load as the job would, count, try, report."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from specbatch.config import Config
from specbatch.errors import InputError
from specbatch.files.stats_types import SCHEMA_VERSION
from specbatch.files.template_files import with_template_texts
from specbatch.job.estimate import Estimate, FileTokens, Trial, count_tokens, estimate, run_trial
from specbatch.job.plan import with_method, with_shared_tokens
from specbatch.job.progress import PLAIN_SECONDS, duration
from specbatch.job.runner import RowRunner
from specbatch.job.terminal import input_bar, print_notes
from specbatch.job.worker import Runtime, Worker
from specbatch.models.pass_weights import PassWeights, round_bytes
from specbatch.results.results import ResultFile
from specbatch.rows.parser import RowParser, with_checked_fields
from specbatch.rows.shard import part_of
from specbatch.rows.sources import RawRow, open_source

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_TRIAL_BATCHES, _MIN_TRIAL_ROWS = 2, 8  # rows of a trial: full batches, at least
_MIN_TRIAL_SECONDS = 5.0  # while two batches take less, more are run: what happens once in a job counts for less then
_MAX_TRIAL_ROWS = 4096  # they are kept in memory
_START_NOISE = 0.15  # from one start to the next


@dataclass(frozen=True)
class EstimateOptions:
    """The command line."""

    input: str
    limit: int | None = None
    trial_rows: int | None = None  # None: two batches, and what runs in the first seconds
    trial_seconds: float = 60.0  # the trial ends then, finished or not


def estimate_file(
    options: EstimateOptions, config: Config, runtime: Runtime, console: Console, *, began: float
) -> dict[str, Any]:
    """The figures, JSON-ready. `began`: when the command did (time.perf_counter). Only a temporary file is
    written. Raises SpecbatchError."""
    config = with_template_texts(config)
    parser = RowParser(config.sampling, config.data, config.model.target)
    with input_bar(options.input, console) as on_bytes:
        source = open_source(options.input, config.data, on_bytes=on_bytes)
    source = with_checked_fields(source, parser)
    notes: list[str] = []
    config = with_method(config, source, parser, notes)
    source = part_of(source, options.limit, None)
    worker = Worker(runtime, lambda line: print_notes([line], console))
    what = worker.describe(with_shared_tokens(config, source, parser))
    print_notes([*notes, *what.notes], console)
    batch = what.config.engine.rows_at_once

    with _doing("loading the models", console):
        loaded = worker.load()
        worker.limit_length(loaded.longest_row)
    load_seconds = time.perf_counter() - began
    runner = worker.runner
    num_rows = options.trial_rows or max(_TRIAL_BATCHES * batch, _MIN_TRIAL_ROWS)
    num_drawn, min_seconds = num_rows, 0.0
    if options.trial_rows is None:
        num_drawn, min_seconds = max(_MAX_TRIAL_ROWS, num_rows), _MIN_TRIAL_SECONDS
    with _doing("counting tokens", console) as show:
        seed = what.config.engine.seed
        tokens = count_tokens(source, runner.preparer(), runner.engine.limits, num_drawn, seed, num_rows, show)
    with _doing("running some rows", console) as show:
        seconds = options.trial_seconds
        trial = _run_trial(runner, tokens.drawn, seconds, num_rows, min_seconds, show)
    context = (np.mean(tokens.prompts) + np.mean([length for length, _ in trial.ended]) / 2).item()
    found = estimate(tokens, trial, max_batch_size=batch, round_bytes=_bytes_of_rounds(worker.run, context))
    work = sum(tokens.prompts) + found.completion_tokens.expected
    memory = _memory(worker.run, runtime, runner.engine, sum(tokens.drawn_prompts) + trial.tokens, math.ceil(work))
    worker.close()
    return _report(source.name, tokens, trial, found, load_seconds, memory, what.made_by)


@contextmanager
def _doing(text: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Show what is done: on a terminal a line that lasts as long as the block, elsewhere a line every few seconds. The
    value takes how far it is."""
    if console.is_terminal:
        with console.status(text) as status:
            yield lambda state: status.update(f"{text}: {state}")
        return
    shown_at = time.monotonic()

    def show(state: str) -> None:
        nonlocal shown_at
        if time.monotonic() >= shown_at + PLAIN_SECONDS:
            shown_at = time.monotonic()
            print_notes([f"{text}: {state}"], console)

    yield show


def _run_trial(
    runner: RowRunner,
    rows: Sequence[RawRow],
    max_seconds: float,
    min_rows: int,
    min_seconds: float,
    show: Callable[[str], object],
) -> Trial:
    """Run the trial with a file of results, as a job does. Raises InputError if no temporary file can be written."""
    with _folder() as folder, closing(ResultFile(folder / "trial.results.jsonl", {}, overwrite=True)) as results:
        trial = run_trial(
            runner, rows, max_seconds, min_rows=min_rows, min_seconds=min_seconds, keep=results.append, show=show
        )
        with closing(ResultFile(folder / "empty.results.jsonl", {}, overwrite=True)) as empty:
            spared = _seconds_of(empty.finish)  # what does not grow with the rows
        trial.sort_seconds = max(_seconds_of(results.finish) - spared, 0.0) / max(trial.rows, 1)
    return trial


@contextmanager
def _folder() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory()
    except OSError as exc:
        hint = "the trial writes its results there: set TMPDIR to a folder that can be written"
        raise InputError(f"there is no temporary folder: {exc}", hint) from exc
    with folder as name:
        yield Path(name)


def _seconds_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _report(
    name: str,
    tokens: FileTokens,
    trial: Trial,
    found: Estimate,
    load_seconds: float,
    memory: dict[str, Any],
    made_by: Any,
) -> dict[str, Any]:
    starts = {"expected": 1.0, "low": 1 - _START_NOISE, "high": 1 + _START_NOISE}
    run_seconds = asdict(found.run_seconds)
    seconds = {key: round(run_seconds[key] + part * load_seconds, 1) for key, part in starts.items()}
    parts = {"load": round(load_seconds, 1), "prefill": round(found.prefill_seconds, 1)}
    return {
        "schema_version": SCHEMA_VERSION,
        "input": name,
        "rows": tokens.num_rows,
        "failed_rows": tokens.num_failed,
        "requests": len(tokens.prompts),
        "prompt_tokens": sum(tokens.prompts),
        "completion_tokens": {
            **{key: round(value) for key, value in asdict(found.completion_tokens).items()},
            "limit": sum(tokens.limits),
        },
        "seconds": {**seconds, **parts},
        "memory": memory,
        "trial": {
            "rows": trial.rows,
            "seconds": round(trial.seconds, 1),
            "completion_tokens": trial.tokens,
            "acceptance_length": None if trial.acceptance_length is None else round(trial.acceptance_length, 4),
        },
        **made_by,
    }


def _bytes_of_rounds(run: Any, context: float) -> Callable[[int], float]:
    """Return a function of the number of requests: the bytes that a round reads, with `context` tokens of each request
    in the cache. Without experts it is the number of requests itself, on which the bytes depend by a straight line."""
    target = getattr(run, "target", None)  # the tests' stub engine has none
    if target is None or target.config.moe is None:
        return float
    weights, schedule = PassWeights.of_model(target.config), run.speculation.schedule

    def of(batch: int) -> float:
        shape = schedule.at(batch)
        num_tokens = batch * (1 if shape is None else shape.num_draft_tokens)
        kv_bytes = batch * context * run.rows.token_bytes
        if target.config.delta is not None:
            kv_bytes += 2 * batch * target.config.delta.matrix_bytes  # states are read and written
        return round_bytes(weights, run.dtype.itemsize, num_tokens, kv_bytes, expert_itemsize=run.expert_itemsize)

    return of


def _memory(run: Any, runtime: Runtime, engine: Any, tried: int, work: int) -> dict[str, Any]:
    """Bytes; None: not known. `tried`, `work`: the tokens of the trial, and of the whole file. `kv_cache_used`: the
    part of the cache that these fill at most. `peak`: what the job takes of the GPU, else of the memory."""
    weights = 0
    for path in runtime.model_paths(run.config).values():
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _WEIGHTS]
        weights += sum(file.stat().st_size for file in files)
    tokens = engine.num_pages * engine.page_size if hasattr(engine, "num_pages") else None
    known: dict[str, Any] = {"kv_cache_tokens": None, "kv_cache": None, "kv_cache_used": None}
    peak = _peak_bytes(run.config.engine.device)
    if tokens is not None:
        token_bytes = run.rows.token_bytes
        used = min(work, tokens) * token_bytes
        known = {"kv_cache_tokens": tokens, "kv_cache": tokens * token_bytes, "kv_cache_used": used}
        if not run.config.engine.device.startswith("cuda"):  # the cache takes memory where it is written to
            peak += max(used - min(tried, tokens) * token_bytes, 0)
    return {"weights": weights or None, **_parameters(run), **known, "peak": peak}


def _parameters(run: Any) -> dict[str, int]:
    """Return the numbers of parameters of a target with experts: all, and those of one token."""
    target = getattr(run, "target", None)
    if target is None or target.config.moe is None:
        return {}
    weights = PassWeights.of_all(target.config)
    return {"parameters": weights.total, "active_parameters": weights.active}


def _peak_bytes(device: str) -> int:
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_reserved(device))
    # getrusage's `ru_maxrss` is no less than the memory of the process that started this one.
    found = re.search(r"VmHWM:\s*(\d+) kB", _read(Path("/proc/self/status")))
    if found is not None:
        return int(found[1]) << 10
    import psutil

    return int(psutil.Process().memory_info().rss)


def _read(path: Path) -> str:
    """Return the text of a file. Only Linux has those of /proc: elsewhere it is empty."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def estimate_table(report: dict[str, Any]) -> Table:
    """Make the table that people read."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    failed = f", {report['failed_rows']:,} of them cannot run" if report["failed_rows"] else ""
    completions, seconds, memory = report["completion_tokens"], report["seconds"], report["memory"]
    trial = report["trial"]
    table.add_row("rows", f"{report['rows']:,}{failed}; {report['requests']:,} completions")
    table.add_row("prompt tokens", f"{report['prompt_tokens']:,}")
    table.add_row(
        "completion tokens",
        f"{completions['expected']:,} ({completions['low']:,} to {completions['high']:,}; at most "
        f"{completions['limit']:,})",
    )
    table.add_row(
        "time",
        f"{duration(seconds['expected'])} ({duration(seconds['low'])} to {duration(seconds['high'])}), with "
        f"{duration(seconds['load'])} to load the models and {duration(seconds['prefill'])} for prompts",
    )
    used, size = (f"{(memory[name] or 0) / 2**30:.2f}" for name in ("kv_cache_used", "kv_cache"))
    kinds = (
        ("weights {} GiB", memory["weights"]),
        (f"KV cache {{}} GiB, of which {used} are used" if used != size else "KV cache {} GiB", memory["kv_cache"]),
        ("peak {} GiB", memory["peak"]),
    )
    table.add_row("memory", ", ".join(words.format(f"{value / 2**30:.2f}") for words, value in kinds if value))
    table.add_row("from a trial of", f"{trial['rows']:,} rows, {duration(trial['seconds'])}")
    return table
