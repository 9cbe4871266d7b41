"""The result file of a job: append-only while it grows, in input order when it is complete.

`X.results.jsonl.partial` has a header line (the job's fingerprint), then result lines in the order in which rows
finished (`partial` has the format). Every line is given to the operating system at once, so `kill -9` loses at most a
torn last line. Every few seconds the file is forced to the disk. Rows that failed count as finished: the same input
would fail again. A result of an earlier session counts after its input row was read again and is the same (`is_done`).
When the job is complete, its rows are copied in input order to `X.results.jsonl.sorted`, by an index of their offsets.
That file then replaces `X.results.jsonl` atomically. The partial file is removed last: after a crash at any point the
same command finishes the job.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import InputError
from specbatch.files.flat_table import FlatTable
from specbatch.files.jsonl import encode_line
from specbatch.files.line_types import index_of
from specbatch.files.local import disk_errors, force_to_disk, narrow_mode, open_locked, replace_durably, unlink_quietly
from specbatch.files.paths import ELSEWHERE, partial_path, running_path, sorted_path
from specbatch.files.result_files import result_suffix, write_lines
from specbatch.results.fingerprint import INPUT_FACTS, ModelFiles, ModelRecord, differences, flat_columns
from specbatch.results.finished import Finished
from specbatch.results.margins import MarginTotals
from specbatch.results.partial import Entry, OpenedRow, PartialLines, RowDeaths, RowIndex, header_line, read_header
from specbatch.results.results_format import certificate
from specbatch.results.stats import RowTotals
from specbatch.rows.sources import RawRow

_SYNC_SECONDS = 5.0
_COPY_BUFFER = 1 << 20
_INPUT_NOW = "specbatch_input"  # the record of an input that is not that of the first line
LONGEST_ROW = "specbatch_longest_row"  # the record of `ResultFile.longest_row`
MARGINS = "specbatch_margins"  # the record of margins that the lines do not have, see `retry`
MODELS = "specbatch_weights"  # the record of the models' large files, see `fingerprint`
EARLIER = "specbatch_templates"  # the record of `ResultFile.earlier_templates`
_DEATHS = "specbatch_deaths"  # the record of rows whose process died
_START_AGAIN = f"--overwrite drops it and starts again; {ELSEWHERE}"


class ResultFile:
    """Open for one job, with a lock on the partial file, so that no second process writes it.

    Raises InputError if another process has it, if it is of a different job, or if it cannot be written.
    """

    def __init__(
        self, output: Path, job: Mapping[str, Any], models: ModelRecord | None = None, *, overwrite: bool
    ) -> None:
        self.output = output
        self.renamed_columns: list[str] = []  # flat columns with a suffix, because the input has the name, too
        self._job = job
        self.totals = RowTotals()
        self.resumed_rows = 0  # finished by earlier sessions
        self.damaged_lines = 0  # complete lines of earlier sessions that are left out
        self.stale_rows = 0  # rows of earlier sessions whose input row has changed or was removed
        # Maximum tokens of a row, prompt and output. All sessions have that of the first one, because it decides which
        # rows are errors. None: not decided yet.
        self.longest_row: int | None = None
        self.earlier_templates: list[dict[str, Any]] = []  # rows that a retry kept have answers to these
        self._input_released = False  # earlier sessions allow another input
        self._models = models or ModelFiles({})
        self._recorded_models: dict[str, Any] = {}  # their record in the file
        self._deaths: dict[int, RowDeaths] = {}
        self._margins_before = MarginTotals()  # margins of rows whose lines do not have them
        self._has_rows = False  # or damaged lines
        self._path = partial_path(output)
        self._rows = RowIndex()
        self._end = 0
        self._synced_at = time.monotonic()
        self._is_replacing = False  # the output, whose statistics are not those of this job from now on
        self._file = self._open_locked()
        try:
            with disk_errors(self._path):
                # A session that was killed while it sorted can leave this file.
                sorted_path(output).unlink(missing_ok=True)
                if overwrite:
                    os.ftruncate(self._file.fileno(), 0)
                    running_path(output).unlink(missing_ok=True)
                self._load(dict(job))
        except BaseException:
            self._file.close()
            raise

    def notes(self) -> list[str]:
        """Return notes for the user about the rows that were found when the file was opened."""
        notes = [f"resuming: {self.resumed_rows:,} rows are done"] if self.resumed_rows else []
        if self._input_released and self.resumed_rows:
            notes.append("the last run allowed another input: rows that are still the same are kept")
        if self.damaged_lines:
            lines = "1 damaged line" if self.damaged_lines == 1 else f"{self.damaged_lines:,} damaged lines"
            notes.append(f"left out {lines} of {self._path}: missing rows are computed again")
        return notes

    def settle_longest_row(self, tokens: int) -> None:
        """Record it, unless an earlier session has. The engine's memory decides it, after this file was locked
        and before the first row is written."""
        if self.longest_row is None:
            self.longest_row = tokens
            self._append({LONGEST_ROW: tokens})

    def is_done(self, row: RawRow) -> bool:
        """Return whether this row has a result. A result of another row with the same index is dropped."""
        entry = self._rows.get(row.index)
        if entry is None:
            return False
        if entry.digest != row.digest():
            self._drop(row.index)
            self.stale_rows += 1
            return False
        self._rows.confirm(row.index)
        return True

    def append(self, finished: Finished) -> None:
        """Write results of input rows that are not done yet. Raises InputError for errors of the disk."""
        lines = [self._lines.row(row.digest, row.line, row.margin) for row in finished.rows]
        self._has_rows |= bool(lines)
        self._write(b"".join(lines))
        for row, line in zip(finished.rows, lines, strict=True):
            assert self._rows.get(row.index) is None, row.index
            self._rows.put(row.index, Entry(self._end, len(line), row.digest, row.margin.value), confirmed=True)
            self._end += len(line)
        self.totals.merge(finished.totals)
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self.sync()

    @property
    def job_id(self) -> str:
        """All sessions of this job have the same."""
        return self._lines.job_id

    def deaths_of(self, row: RawRow) -> RowDeaths | None:
        """Return the deaths of processes that ran this row. Returns None if there were none. Deaths of another row with
        the same index are forgotten."""
        deaths = self._deaths.get(row.index)
        if deaths is not None and deaths.digest != row.digest():
            del self._deaths[row.index]
            return None
        return deaths

    def add_deaths(self, rows: Mapping[int, int], cause: str) -> None:
        """Count one more death for rows that a process ran when it died. `rows`: index -> RawRow.digest. All later
        sessions have the counts."""
        for index, digest in rows.items():
            before = self._deaths.get(index)
            times = before.times if before is not None and before.digest == digest else 0
            self._deaths[index] = RowDeaths(times + 1, digest, cause)
        if rows:
            self._append({_DEATHS: {str(index): self._deaths[index] for index in rows}})

    def release_input(self) -> None:
        """Allow the next session another input."""
        if self._is_worth_keeping:
            self._append({_INPUT_NOW: None})
            self.sync()

    def sync(self) -> None:
        """Force all lines to the disk, and first write what was learned of the models."""
        if (models := self._models.record()) != self._recorded_models:
            self._append({MODELS: models})
            self._recorded_models = models
        with disk_errors(self._path):
            os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Write the lines in input order to the output file; returns what identifies it. The partial file stays until
        `discard_partial`.

        The input has been read to its end. Rows that `is_done` was not called for are not in it, and are dropped.
        """
        self.sync()
        for index in self._rows.unconfirmed():
            self._drop(index)
            self.stale_rows += 1
        return self.write_output(lambda: (self._read(entry).line for entry in self._rows.in_order()))

    def write_output(self, lines: Callable[[], Iterable[bytes]]) -> dict[str, Any]:
        """Replace the output file; returns what identifies it. From then on the partial file stays until
        `discard_partial`: an output without statistics of its own would be refused. `lines` is called twice for flat
        columns."""

        def keep_partial() -> None:
            self._is_replacing = True

        known = flat_columns(self._job)
        table = None if known is None else FlatTable(known, lines())
        self.renamed_columns = [] if table is None else table.renamed
        return write_in_order(self.output, lines(), keep_partial, table)

    def margins(self) -> MarginTotals:
        """Return the margins of the rows that `is_done` was called for or that were appended."""
        totals, lowest, index = MarginTotals(), math.inf, None
        for first, values in self._rows.margins():
            totals.add(values)
            if values.min() < lowest:
                lowest, index = values.min(), first + int(values.argmin())
        if index is not None:
            entry = self._rows.get(index)
            assert entry is not None, index
            opened = self._read(entry)
            line = json.loads(opened.line)
            totals.smallest = {"id": line.get("custom_id", line["id"]), "index": index, **certificate(opened.margin)}
        totals.merge(self._margins_before)
        return totals

    def discard_partial(self) -> None:
        """Remove the partial file. Call it when output and statistics are in place."""
        unlink_quietly(running_path(self.output))  # if it could not be removed before
        with disk_errors(self._path):
            self._path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        """Leave a job that can be resumed. A partial file without rows and deaths is removed."""
        if self._file.closed:
            return
        if not (self._is_worth_keeping or self._is_replacing):
            unlink_quietly(self._path)
        else:
            with contextlib.suppress(InputError):
                self.sync()
        self._file.close()

    @property
    def _is_worth_keeping(self) -> bool:
        return self._has_rows or bool(self._deaths)

    def _open_locked(self) -> BinaryIO:
        try:
            opened = open_locked(self._path, os.O_RDWR | os.O_APPEND)
        except OSError as exc:  # some network file systems have no locks
            raise InputError(f"cannot write or lock {self._path}: {exc.strerror}", ELSEWHERE) from exc
        if opened is None:
            raise InputError(f"another process is writing {self.output}", f"wait for it; {ELSEWHERE}")
        narrow_mode(opened, self.output)
        return os.fdopen(opened, "a+b", buffering=0)  # type: ignore[return-value]

    def _load(self, job: dict[str, Any]) -> None:
        """Read the finished rows. New lines are written after the last complete one."""
        with self._path.open("rb", buffering=_COPY_BUFFER) as lines:
            header = lines.readline()
            if not header.endswith(b"\n"):  # new, or torn
                self._start(job)
                return
            old = read_header(header, str(self._path))
            if old is not None:  # before all rows are read
                self._check_job(_without_input(old), _without_input(job))
            # If the header is damaged, the checksums of the rows show whether they are of this job.
            self._lines = PartialLines(header if old is not None else header_line(job))
            self.damaged_lines += old is None
            records: dict[str, Any] = {_INPUT_NOW: _input_of(old if old is not None else job), MODELS: {}}
            end = len(header)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                if not self._add_finished(line, end):
                    record = self._lines.open_record(line)
                    self.damaged_lines += record is None
                    for index, deaths in (record or {}).pop(_DEATHS, {}).items():
                        self._deaths[int(index)] = RowDeaths(*deaths)
                    records |= record or {}
                end += len(line)
        if old is None and not self.totals.rows:
            raise InputError(
                f"the first line of {self._path} is damaged, and no other line is of this job", _START_AGAIN
            )
        self._input_released = records[_INPUT_NOW] is None
        if not self._input_released:
            self._check_job(records[_INPUT_NOW], _input_of(job))
        self._recorded_models = records[MODELS]
        if (before := records.get(MARGINS)) is not None:
            self._margins_before = MarginTotals.of_report(before)
        if changed := self._models.differences(self._recorded_models):
            self._refuse(changed)
        os.ftruncate(self._file.fileno(), end)
        self._end = end
        self._has_rows = bool(self.totals.rows or self.damaged_lines)
        self.longest_row = records.get(LONGEST_ROW)
        self.earlier_templates = records.get(EARLIER, [])
        self.resumed_rows = self.totals.rows
        if self._input_released:
            self._append({_INPUT_NOW: _input_of(job)})

    def _check_job(self, old: Mapping[str, Any], job: Mapping[str, Any]) -> None:
        # As JSON, like the old one: tuples become lists.
        if changed := differences(old, json.loads(encode_line(dict(job)))):
            self._refuse(changed)

    def _refuse(self, changed: Sequence[str]) -> None:
        raise InputError(f"{self._path} is an unfinished run of a different job: {'; '.join(changed)}", _START_AGAIN)

    def _start(self, job: dict[str, Any]) -> None:
        os.ftruncate(self._file.fileno(), 0)
        header = header_line(job)
        self._lines = PartialLines(header)
        self._write(header)
        self._end = len(header)
        self.sync()  # This also writes the record of the models' large files.

    def _add_finished(self, line: bytes, offset: int) -> bool:
        """Add a result line to the index; False if it is damaged or not a result."""
        opened = self._lines.open_row(line)
        if opened is None:
            return False
        try:
            result = json.loads(opened.line)
            index = index_of(result)
            if self._rows.get(index) is not None:  # a later line replaces an earlier one
                self._drop(index)
            self.totals.add(result)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False  # not a result of specbatch, although the checksum is right
        self._rows.put(index, Entry(offset, len(line), opened.digest, opened.margin.value), confirmed=False)
        return True

    def _drop(self, index: int) -> None:
        """Forget a result of an earlier session."""
        entry = self._rows.get(index)
        assert entry is not None, index
        self.totals.add(json.loads(self._read(entry).line), times=-1)
        self._rows.remove(index)

    def _read(self, entry: Entry) -> OpenedRow:
        """A result. Raises InputError if it has changed since it was written."""
        opened = self._lines.open_row(os.pread(self._file.fileno(), entry.length, entry.offset))
        if opened is None:
            raise InputError(
                f"{self._path} was damaged while the job was running",
                "run the same command again: only damaged rows are computed again",
            )
        return opened

    def _append(self, record: Mapping[str, Any]) -> None:
        line = self._lines.record(record)
        self._write(line)
        self._end += len(line)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with disk_errors(self._path):
            while view:
                view = view[os.write(self._file.fileno(), view) :]


def _input_of(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name.startswith(INPUT_FACTS)}


def _without_input(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if not name.startswith(INPUT_FACTS)}


def write_in_order(
    output: Path,
    lines: Iterable[bytes],
    before_replacing: Callable[[], None] = lambda: None,
    table: FlatTable | None = None,
) -> dict[str, Any]:
    """Write the lines of a finished job and replace `output` atomically; returns what identifies the file. The caller
    has the lock of the output's partial file, whose mode is that of a new output. `table`: see `write_lines`."""
    path = sorted_path(output)
    with disk_errors(output):
        path.unlink(missing_ok=True)  # A session that was killed here can leave this file.
        try:
            written = write_lines(path, lines, result_suffix(output), output, partial_path(output), table=table)
            force_to_disk(path)
            before_replacing()
            replace_durably(path, output)
        finally:
            unlink_quietly(path)
    return written
