"""The day that a chat template prints: the first day of the job. Later sessions read it in the job's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from specbatch.config import Config
from specbatch.files.paths import partial_path, read_stats, stats_path_of
from specbatch.results.partial import read_header


def with_first_day(config: Config, today: date, output: Path | None = None) -> Config:
    """`config` with the day that all workers of the job print, if it names none. `output`: of a job that can have
    started before; None: it starts now."""
    if config.data.chat_template_date is not None:
        return config
    recorded = None if output is None else _recorded_job(output).get("data.chat_template_date")
    return replace(config, data=replace(config.data, chat_template_date=recorded or today.isoformat()))


def _recorded_job(output: Path) -> Mapping[str, Any]:
    """Read the identity of the job from the files of `output`. It is empty if there are no files, or if they are
    damaged."""
    partial = partial_path(output)
    if not partial.exists():
        report = read_stats(stats_path_of(output)) if output.exists() else None
        return {} if report is None else report["job"]
    with partial.open("rb") as file:
        header = file.readline()
    return (read_header(header, str(partial)) if header.endswith(b"\n") else None) or {}
