"""The result file of a job: append-only while it grows, in input order once it is whole.

`X.results.jsonl.partial` holds a header line (the job's fingerprint) and then result lines in the order in which rows
finished; every line reaches the operating system at once, so `kill -9` loses at most a torn last line, and the disk
every few seconds. Rows that failed count as finished: the same input would fail again. When all rows are there, they
are copied in input order by way of an index of 8 bytes a row to `X.results.jsonl.sorted`, which then replaces
`X.results.jsonl` atomically. The partial file is removed last, so that a crash at any point leaves a job that the same
command finishes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specbatch.errors import InputError
from specbatch.pipeline import paths
from specbatch.pipeline.fingerprint import differences
from specbatch.pipeline.jsonl import encode_line
from specbatch.pipeline.openai_batch import index_of
from specbatch.pipeline.paths import partial_path
from specbatch.pipeline.totals import RowTotals

_HEADER = "specbatch_job"
_SYNC_SECONDS = 5.0
_COPY_BUFFER = 1 << 20


class ResultFile:
    """Open for one job; holds a lock on the partial file, so that no second process writes it.

    Raises InputError: another process has it, it belongs to a different job, or it cannot be written.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], *, overwrite: bool) -> None:
        self.output = output
        self.totals = RowTotals()
        self.resumed_rows = 0  # finished by earlier sessions
        self._path = partial_path(output)
        self._offsets = np.full(1024, -1, dtype=np.int64)  # [row index] = byte offset of its line; -1: not finished
        self._synced_at = time.monotonic()
        self._file = self._open_locked()
        try:
            if overwrite:
                self._file.truncate(0)
            self._end = self._load(dict(job))
        except BaseException:
            self._file.close()
            raise

    def is_done(self, index: int) -> bool:
        return index < len(self._offsets) and bool(self._offsets[index] >= 0)

    def append(self, index: int, row: dict[str, Any]) -> None:
        """Write the result of a row that is not done yet. Raises InputError where the disk refuses."""
        assert not self.is_done(index), index
        line = encode_line(row)
        self._write(line)
        self._record(index, self._end, row)
        self._end += len(line)
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Force what is written to the disk."""
        with disk_errors(self._path):
            os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def finish(self) -> None:
        """Put the lines in input order into the output file. The partial file stays until `discard_partial`."""
        self.sync()
        sorted_path = paths.sorted_path(self.output)
        with disk_errors(self.output):
            with self._path.open("rb", buffering=_COPY_BUFFER) as lines, sorted_path.open("wb", _COPY_BUFFER) as out:
                for index in np.flatnonzero(self._offsets >= 0):
                    lines.seek(self._offsets[index])
                    out.write(lines.readline())
                out.flush()
                os.fsync(out.fileno())
            replace_durably(sorted_path, self.output)

    def discard_partial(self) -> None:
        """The job is whole and its output and statistics are in place."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        """Leave the job resumable; a partial file without rows is removed."""
        if self._file.closed:
            return
        if self.totals.rows == 0:
            self._path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(InputError):
                self.sync()
        self._file.close()

    def _open_locked(self) -> BinaryIO:
        while True:
            try:
                file = self._path.open("a+b", buffering=0)
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

    def _load(self, job: dict[str, Any]) -> int:
        """Take over the finished rows; returns the offset behind the last whole line, where writing goes on."""
        with self._path.open("rb", buffering=_COPY_BUFFER) as lines:
            header = lines.readline()
            if not header.endswith(b"\n"):  # new, or torn while it was made
                return self._start(job)
            self._check_header(header, job)
            end = len(header)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._take_over(line, end)
                end += len(line)
        self._file.truncate(end)
        self.resumed_rows = self.totals.rows
        return end

    def _start(self, job: dict[str, Any]) -> int:
        self._file.truncate(0)
        header = encode_line({_HEADER: job})
        self._write(header)
        return len(header)

    def _check_header(self, header: bytes, job: dict[str, Any]) -> None:
        try:
            old = json.loads(header)[_HEADER]
        except (ValueError, KeyError, TypeError) as exc:
            raise InputError(f"{self._path} is not a partial result of specbatch", "move it away, or use -o") from exc
        # Through JSON, as the old one went: tuples are lists there.
        if changed := differences(old, json.loads(encode_line(job))):
            raise InputError(
                f"{self._path} holds an unfinished run of a different job: {'; '.join(changed)}",
                "--overwrite drops it and starts again; -o PATH writes elsewhere",
            )

    def _take_over(self, line: bytes, offset: int) -> None:
        try:
            row = json.loads(line)
            index = row["index"] if "index" in row else index_of(row["id"])
            if not isinstance(index, int) or index < 0 or self.is_done(index):
                return
            self._record(index, offset, row)
        except (ValueError, LookupError, TypeError, AttributeError):
            return  # damaged: the row is not finished, and its line is not copied to the output

    def _record(self, index: int, offset: int, row: dict[str, Any]) -> None:
        self.totals.add(row)
        if index >= len(self._offsets):
            grown = np.full(max(index + 1, len(self._offsets) * 3 // 2), -1, dtype=np.int64)
            grown[: len(self._offsets)] = self._offsets
            self._offsets = grown
        self._offsets[index] = offset

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with disk_errors(self._path):
            while view:
                view = view[os.write(self._file.fileno(), view) :]


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full disk, for one, is no error of this program: OSErrors become InputErrors."""
    try:
        yield
    except OSError as exc:
        raise InputError(
            f"cannot write {path}: {exc.strerror or exc}", "finished rows are kept; run the same command again to go on"
        ) from exc


def replace_durably(source: Path, target: Path) -> None:
    """Rename over `target`, and make the rename itself survive a power cut."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
