"""The command line of `specbatch tune`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rich.console import Console

from specbatch.errors import InputError

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
EXAMPLES = "examples.jsonl"
ROWS, _MOST_ROWS, _BATCHES = 64, 256, 8


@dataclass(frozen=True)
class TuneOptions:
    data: str
    output: Path
    rows: int | None  # to trace; None: as `rows_to_trace` has it
    budget_seconds: float
    config_file: Path | None = None  # see `GenerateOptions`


def rows_to_trace(on_device: bool, max_batch_size: int) -> int:
    """Where nobody says. From 64 rows what one shape gains over another is known within about a percent, from 256
    within half of that. A device takes seconds for eight batches."""
    return max(ROWS, min(_MOST_ROWS, _BATCHES * max_batch_size)) if on_device else ROWS


def seconds_of(text: str) -> float:
    """90s, 5m, 1h -> seconds. Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is not None and not match.group(2):
        number = match.group(1)
        hint = f"{number}s is seconds, {number}m minutes, {number}h hours"
        raise InputError(f"--budget {text}: a time needs a unit", hint)
    if match is None or match.group(2) not in _UNITS or float(match.group(1)) == 0:
        raise InputError(f"--budget {text}: not a time", "for example 90s, 5m or 1h")
    return float(match.group(1)) * _UNITS[match.group(2)]


def example_rows(console: Console) -> str:
    """The packaged rows, for who has none at hand; says so."""
    path = str(resources.files("specbatch.tune").joinpath(EXAMPLES))
    console.print("no data given: tuning on packaged examples; your own rows may want other drafts", markup=False)
    return path
