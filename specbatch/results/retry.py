"""`--retry-errors`: a finished job becomes an unfinished one that lacks only the rows that failed.

It can have another prompt template, with which these rows do not fail. The other rows keep their answers, and the
statistics say which template these are of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specbatch.errors import InputError
from specbatch.files.line_types import line_index
from specbatch.files.local import disk_errors, narrow_mode, open_locked, unlink_quietly
from specbatch.files.paths import partial_path, read_stats, sorted_path, stats_path_of
from specbatch.files.result_files import open_results
from specbatch.results.partial import PartialLines, header_line
from specbatch.results.results import EARLIER, LONGEST_ROW, MARGINS, MODELS
from specbatch.rows.sources import Source

TEMPLATE = "data.prompt_template"
_BUFFER = 1 << 20


def with_old_template(job: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return `job` with the prompt template of the finished job of `output`, if both have one."""
    old = (read_stats(stats_path_of(output)) or {}).get("job", {}).get(TEMPLATE)
    return {**job, TEMPLATE: old} if old is not None and job.get(TEMPLATE) is not None else dict(job)


def reopen_without_errors(output: Path, report: Mapping[str, Any], source: Source, template: str | None) -> None:
    """Write the partial file of the job that `output` and its statistics `report` are the result of, without the rows
    that failed. All other rows keep their bytes. The output stays until the job is finished again. `template`: the
    job's prompt template from now on."""
    temporary, partial = sorted_path(output), partial_path(output)
    other = InputError(f"another process is writing {output}", "wait for it")
    with disk_errors(partial):
        # A session that was killed here has left the file, but not the lock.
        if (opened := open_locked(temporary, os.O_RDWR)) is None:
            raise other
        with os.fdopen(opened, "r+b", buffering=_BUFFER) as file:
            try:
                narrow_mode(opened, output)
                os.ftruncate(opened, 0)
                file.writelines(_partial_lines(output, report, source, template))
                file.flush()
                os.fsync(opened)
                try:
                    # The link is made completely or not at all, and replaces no file of another process.
                    os.link(temporary, partial)
                except FileExistsError as exc:
                    raise other from exc
            finally:
                unlink_quietly(temporary)


def _partial_lines(output: Path, report: Mapping[str, Any], source: Source, template: str | None) -> Iterator[bytes]:
    job = report["job"]
    header = header_line({**job, TEMPLATE: template} if TEMPLATE in job else job)
    lines = PartialLines(header)
    yield header
    yield lines.record({MODELS: report.get("weights", {})})
    if (longest := report.get("longest_row")) is not None:
        yield lines.record({LONGEST_ROW: longest})
    if (margins := report.get("margins")) is not None:  # result lines have none, or rounded ones
        yield lines.record({MARGINS: margins})
    earlier = list(report.get("earlier_templates", []))
    if job.get(TEMPLATE) != template:
        before = sum(entry["rows"] for entry in earlier)
        earlier.append({"prompt_template": job.get(TEMPLATE), "rows": report["rows"]["ok"] - before})
    if earlier:
        yield lines.record({EARLIER: earlier})
    rows = source.rows()
    with open_results(output) as results:
        for result in results:
            index = line_index(result)
            row = next((row for row in rows if row.index >= index), None)
            if row is None or row.index != index:
                raise InputError(f"{output} has a result of row {index}, which the input {source.name} does not have")
            if not json.loads(result).get("error"):
                yield lines.row(row.digest(), result)
