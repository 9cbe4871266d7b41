"""The files of a tuning, by the name of its output, and how its own files are recognised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbatch.job.paths import Written, unless

MARK = "Written by `specbatch tune`."  # the first line of the configuration, in a comment
PLOTS = ("acceptance", "throughput", "predicted")
IDENTITY, TRACE, COSTS, UNFINISHED_COSTS = "identity.json", "trace.npz", "costs.json", "costs.json.part"


def report_path(output: Path) -> Path:
    return output.with_suffix(".report.json")


def plot_paths(output: Path) -> list[Path]:
    return [output.with_suffix(f".{name}.png") for name in PLOTS]


def cache_folder(output: Path) -> Path:
    """tuned.yaml -> tuned.measured"""
    return output.with_suffix(".measured")


def tuned_files(output: Path) -> list[Written]:
    """All that a tuning writes."""
    report, folder = report_path(output), cache_folder(output)
    # A plot or a measurement does not name its job: other files of the same folder do.
    has_report = unless(lambda path: _keys(report) >= {"verdict", "made_by"})
    has_identity = unless(lambda path: _keys(folder / IDENTITY) >= {"kinds", "widest"})
    return [
        Written("the tuned configuration", output, unless(_is_tuned)),
        Written("the report", report, has_report),
        *(Written("a plot", path, has_report) for path in plot_paths(output)),
        *(Written("what is measured", folder / n, has_identity) for n in (IDENTITY, TRACE, COSTS, UNFINISHED_COSTS)),
    ]


def _is_tuned(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(1 << 10)
    return not head or head.startswith(f"# {MARK}".encode())


def _keys(path: Path) -> set[str]:
    """Of the JSON object in a file; none where there is no such thing."""
    if not path.is_file():
        return set()
    try:
        found: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return set()
    return set(found) if isinstance(found, dict) else set()
