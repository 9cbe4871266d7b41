"""The result file of a job: append-only while it grows, in input order once it is whole.

`X.results.jsonl.partial` holds a header line (the job's fingerprint) and then result lines in the order in which rows
finished (`partial` has the format); every line reaches the operating system at once, so `kill -9` loses at most a torn
last line, and the disk every few seconds. Rows that failed count as finished: the same input would fail again. What an
earlier session wrote counts once the input row that it answers has been read again and is the same (`is_done`). When
all rows are there, they are copied in input order by way of an index to `X.results.jsonl.sorted`, which then replaces
`X.results.jsonl` atomically. The partial file is removed last, so that a crash at any point leaves a job that the same
command finishes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import InputError
from specbatch.job import paths
from specbatch.job.files import FileFacts, disk_errors, replace_durably
from specbatch.job.fingerprint import INPUT_FACTS, ModelFiles, differences
from specbatch.job.jsonl import encode_line
from specbatch.job.openai_batch import index_of
from specbatch.job.partial import Entry, PartialLines, RowIndex, header_line, read_header
from specbatch.job.paths import partial_path
from specbatch.job.sources import RawRow
from specbatch.job.stats import RowTotals

_SYNC_SECONDS = 5.0
_COPY_BUFFER = 1 << 20
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
_INPUT_NOW = "specbatch_input"  # the record of an input other than that of the first line
_LONGEST_ROW = "specbatch_longest_row"  # the record of `ResultFile.longest_row`
_MODELS = "specbatch_weights"  # the record of the models' large files, see `model_files`
_START_AGAIN = "--overwrite drops it and starts again; -o PATH writes elsewhere"


class ResultFile:
    """Open for one job; holds a lock on the partial file, so that no second process writes it.

    Raises InputError: another process has it, it belongs to a different job, or it cannot be written.
    """

    def __init__(
        self, output: Path, job: Mapping[str, Any], models: ModelFiles | None = None, *, overwrite: bool
    ) -> None:
        self.output = output
        self.totals = RowTotals()
        self.resumed_rows = 0  # finished by earlier sessions
        self.damaged_lines = 0  # whole lines of earlier sessions that are left out
        self.stale_rows = 0  # rows of earlier sessions that answer an input row which is no longer there
        # Tokens that a row may have, prompt and output: in all sessions as many as in the first one, for it decides
        # which rows are errors. None: not known yet.
        self.longest_row: int | None = None
        self._other_input = False  # that of the earlier sessions was released, and need not be this one
        self._models = models or ModelFiles({})
        self._recorded_models: dict[str, Any] = {}  # what the file says of them
        self._has_rows = False  # or lines that were some
        self._path = partial_path(output)
        self._rows = RowIndex()
        self._end = 0
        self._synced_at = time.monotonic()
        self._file = self._open_locked()
        try:
            if overwrite:
                self._file.truncate(0)
            self._load(dict(job))
        except BaseException:
            self._file.close()
            raise

    def notes(self) -> list[str]:
        """What was found when the file was opened."""
        notes = [f"resuming: {self.resumed_rows:,} rows are done"] if self.resumed_rows else []
        if self._other_input and self.resumed_rows:
            notes.append("the input could not be read to its end, or changed: rows that are the same now are kept")
        if self.damaged_lines:
            lines = "1 damaged line" if self.damaged_lines == 1 else f"{self.damaged_lines:,} damaged lines"
            notes.append(f"left out {lines} of {self._path}: rows that are missing now are computed again")
        return notes

    def settle_longest_row(self, tokens: int) -> None:
        """Note it, unless an earlier session has. It is known once the memory that the engine takes has been measured,
        long after this file was opened and locked, and before the first row is written."""
        if self.longest_row is None:
            self.longest_row = tokens
            self._append({_LONGEST_ROW: tokens})

    def is_done(self, row: RawRow) -> bool:
        """Whether the result of this very row is there; one of another row in its place is dropped."""
        entry = self._rows.get(row.index)
        if entry is None:
            return False
        if entry.digest != row.digest():
            self._drop(row.index)
            self.stale_rows += 1
            return False
        self._rows.confirm(row.index)
        return True

    def append(self, index: int, digest: int, result: dict[str, Any]) -> None:
        """Write the result of an input row that is not done yet. Raises InputError where the disk refuses."""
        assert self._rows.get(index) is None, index
        line = self._lines.row(digest, encode_line(result))
        self._has_rows = True
        self._write(line)
        self.totals.add(result)
        self._rows.put(index, Entry(self._end, len(line), digest), confirmed=True)
        self._end += len(line)
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self.sync()

    def release_input(self) -> None:
        """The next session's input may differ from this one's."""
        if self._has_rows:
            self._append({_INPUT_NOW: None})
            self.sync()

    def sync(self) -> None:
        """Force what is written to the disk, and what has become known of the models."""
        if (models := self._models.record()) != self._recorded_models:
            self._append({_MODELS: models})
            self._recorded_models = models
        with disk_errors(self._path):
            os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Put the lines in input order into the output file; returns its `file_facts`. The partial file stays until
        `discard_partial`.

        The input has been read to its end: a row that `is_done` was not asked for is not in it.
        """
        self.sync()
        for index in self._rows.unconfirmed():
            self._drop(index)
            self.stale_rows += 1
        sorted_path = paths.sorted_path(self.output)
        facts = FileFacts()
        with disk_errors(self.output):
            sorted_path.unlink(missing_ok=True)  # of a session that was killed here
            with sorted_path.open("xb", _COPY_BUFFER) as out:  # "x" follows no link
                for entry in self._rows.in_order():
                    line = self._read(entry)
                    out.write(line)
                    facts.add(line)
                out.flush()
                os.fsync(out.fileno())
            replace_durably(sorted_path, self.output)
        return facts.found()

    def discard_partial(self) -> None:
        """The job is whole and its output and statistics are in place."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        """Leave the job resumable; a partial file without rows is removed."""
        if self._file.closed:
            return
        if not self._has_rows:
            self._path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(InputError):
                self.sync()
        self._file.close()

    def _open_locked(self) -> BinaryIO:
        while True:
            try:
                file = os.fdopen(os.open(self._path, _OPEN, 0o666), "a+b", buffering=0)
            except OSError as exc:
                raise InputError(f"cannot write {self._path}: {exc.strerror}", "-o PATH writes elsewhere") from exc
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                file.close()
                raise InputError(
                    f"another process is writing {self.output}", "wait for it, or write elsewhere with -o PATH"
                ) from exc
            except OSError as exc:  # some network file systems have no locks
                file.close()
                raise InputError(f"cannot lock {self._path}: {exc.strerror}", "-o PATH writes elsewhere") from exc
            # The former owner may have removed the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                    return file  # type: ignore[return-value]
            file.close()

    def _load(self, job: dict[str, Any]) -> None:
        """Take over the finished rows; writing goes on after the last whole line."""
        with self._path.open("rb", buffering=_COPY_BUFFER) as lines:
            header = lines.readline()
            if not header.endswith(b"\n"):  # new, or torn while it was made
                self._start(job)
                return
            old = read_header(header, str(self._path))
            if old is not None:  # before all rows are read
                self._check_job(_without_input(old), _without_input(job))
            # Where the header is damaged, the checksums of the rows tell whether they are of this job.
            self._lines = PartialLines(header if old is not None else header_line(job))
            self.damaged_lines += old is None
            records: dict[str, Any] = {_INPUT_NOW: _input_of(old if old is not None else job), _MODELS: {}}
            end = len(header)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                if not self._take_over(line, end):
                    record = self._lines.open_record(line)
                    self.damaged_lines += record is None
                    records |= record or {}
                end += len(line)
        if old is None and not self.totals.rows:
            raise InputError(
                f"the first line of {self._path} is damaged, and no other line is known to be of this job", _START_AGAIN
            )
        self._other_input = records[_INPUT_NOW] is None
        if not self._other_input:
            self._check_job(records[_INPUT_NOW], _input_of(job))
        self._recorded_models = records[_MODELS]
        if changed := self._models.differences(self._recorded_models):
            self._refuse(changed)
        self._file.truncate(end)
        self._end = end
        self._has_rows = bool(self.totals.rows or self.damaged_lines)
        self.longest_row = records.get(_LONGEST_ROW)
        self.resumed_rows = self.totals.rows
        if self._other_input:
            self._append({_INPUT_NOW: _input_of(job)})

    def _check_job(self, old: Mapping[str, Any], job: Mapping[str, Any]) -> None:
        # Through JSON, as the old one went: tuples are lists there.
        if changed := differences(old, json.loads(encode_line(dict(job)))):
            self._refuse(changed)

    def _refuse(self, changed: Sequence[str]) -> None:
        raise InputError(f"{self._path} holds an unfinished run of a different job: {'; '.join(changed)}", _START_AGAIN)

    def _start(self, job: dict[str, Any]) -> None:
        self._file.truncate(0)
        header = header_line(job)
        self._lines = PartialLines(header)
        self._write(header)
        self._end = len(header)
        self.sync()  # with what identifies the models' large files

    def _take_over(self, line: bytes, offset: int) -> bool:
        """Enter the line into the index; False where it is damaged, and its row not finished."""
        opened = self._lines.open_row(line)
        if opened is None:
            return False
        digest, text = opened
        try:
            result = json.loads(text)
            index = result["index"] if "index" in result else index_of(result["id"])
            if type(index) is not int or index < 0:
                return False
            if self._rows.get(index) is not None:  # a later line replaces an earlier one
                self._drop(index)
            self.totals.add(result)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False  # no line of ours, although its checksum fits
        self._rows.put(index, Entry(offset, len(line), digest), confirmed=False)
        return True

    def _drop(self, index: int) -> None:
        """Forget a result of an earlier session."""
        entry = self._rows.get(index)
        assert entry is not None, index
        self.totals.add(json.loads(self._read(entry)), times=-1)
        self._rows.remove(index)

    def _read(self, entry: Entry) -> bytes:
        """The result's own line. Raises InputError where it is no longer what was written."""
        opened = self._lines.open_row(os.pread(self._file.fileno(), entry.length, entry.offset))
        if opened is None:
            raise InputError(
                f"{self._path} was damaged while the job was running",
                "run the same command again: only the rows that were damaged are computed again",
            )
        return opened[1]

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
