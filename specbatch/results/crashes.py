"""Which rows ran when a process crashed: the file `OUTPUT.partial.running`.

The file holds a header line, the trace of a crash and a table of the rows in flight. Each row costs one write of 16
bytes to the operating system, about 2 microseconds. It survives `kill -9`, like the lines of the partial file. A shared
memory mapping would be a little faster. But on a full disk it ends the process by SIGBUS, where a write is an error
that can be reported, and some file systems have none. A job that ends removes the file.

What counts as a crash of the rows in flight:

- SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT: `faulthandler` writes the trace into the file.
- An exception that is an error of this program. On a GPU, a fault in a kernel is one.
- SIGKILL from the kernel because memory ran out: the number of such kills in the process's control group is higher than
  it was when the process began, in the same boot of the machine and the same control group. The number for the whole
  machine is not used: it counts the processes of other users. A container that ends with its process takes its number
  with it, so its kills are not found.

All else is not the fault of a row: SIGKILL by a user or a scheduler, a power cut, the end of a rented machine. Nothing
is counted then. A kill for memory of another process in the group, followed by a SIGKILL by hand, is counted wrongly.
That does little harm: a row is left out only after three crashes, the last one alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from specbatch.errors import SpecbatchError, WorkerFailed
from specbatch.files.jsonl import encode_line
from specbatch.files.local import disk_errors, unlink_quietly

_TRACE_AT, _TABLE_AT = 1 << 13, 1 << 16  # the header is before the trace, and the table after it
_ENTRY = struct.Struct("<QQ")  # digest of the row, its index + 1; zeros: unused
_SIGNAL = re.compile(r"Fatal Python error: (.+)")
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_SYSTEM = Path("/")
_NO_CRASH = (SpecbatchError, WorkerFailed, MemoryError, OSError)
_OUT_OF_MEMORY = "killed by the system: memory ran out"


@dataclass(frozen=True)
class Crash:
    """The cause of a process's death, and the rows that it ran: row index -> RawRow.digest."""

    cause: str
    rows: dict[int, int]


class RunningRows:
    """The rows in flight in this process, for the time of a `with` block. `job`: identifies the partial file that
    `path` belongs to. The caller holds the lock of that file, and has read the last process's table. `system`: the
    folder of /proc and /sys.

    Raises InputError for errors of the disk.
    """

    def __init__(self, path: Path, job: str, system: Path = _SYSTEM) -> None:
        self._path = path
        self._slots: dict[int, int] = {}  # row index -> its entry of the table
        self._free: list[int] = []
        self._finished: list[int] = []  # entries of finished rows that are not cleared yet
        header = encode_line({"specbatch_running": {"job": job, "boot": _boot(system), "kills": _memory_kills(system)}})
        with disk_errors(path):
            path.unlink(missing_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            # Zeros, so that a full disk does not lose the trace of a crash.
            os.write(self._file, header.ljust(_TRACE_AT + (1 << 12), b"\0"))
            os.lseek(self._file, _TRACE_AT, os.SEEK_SET)
        # Someone else may have switched it on, for stderr. `enable` alone would then leave the signals to a library, if
        # one has taken them since, as Ray does.
        self._had_faulthandler = faulthandler.is_enabled()
        faulthandler.disable()
        faulthandler.enable(self._file, all_threads=False)

    def start(self, index: int, digest: int) -> None:
        free = self._finished or self._free
        slot = self._slots[index] = free.pop() if free else len(self._slots)
        self._write(slot, digest, index + 1)

    def finish(self, index: int) -> None:
        """The row is in the table until `clear`, or until another row takes its entry."""
        self._finished.append(self._slots.pop(index))

    def clear(self) -> None:
        """Remove the finished rows from the table. To be called before rows run."""
        while self._finished:
            slot = self._finished.pop()
            self._write(slot, 0, 0)
            self._free.append(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        """The file stays if an error of this program ended the work. A full memory or disk is none."""
        crashed = isinstance(exc, Exception) and not isinstance(exc, _NO_CRASH)
        if crashed:
            with contextlib.suppress(OSError):  # the exception is what is reported
                os.write(self._file, type(exc).__name__.encode())
        faulthandler.disable()
        if self._had_faulthandler:
            faulthandler.enable(2)
        os.close(self._file)
        if not crashed:
            unlink_quietly(self._path)  # a table without rows in flight does no harm

    def _write(self, slot: int, *entry: int) -> None:
        try:
            os.pwrite(self._file, _ENTRY.pack(*entry), _TABLE_AT + slot * _ENTRY.size)
        except OSError:
            with disk_errors(self._path):
                raise


def last_crash(path: Path, job: str, system: Path = _SYSTEM) -> Crash | None:
    """Return how the last process of this job crashed. Returns None if it did not crash."""
    try:
        content = path.read_bytes()
        header = json.loads(content[:_TRACE_AT].rstrip(b"\0"))["specbatch_running"]
        if header["job"] != job:
            return None
        trace = content[_TRACE_AT:_TABLE_AT].partition(b"\0")[0].decode("utf-8", "replace")
        cause = _cause(trace) or (_OUT_OF_MEMORY if _killed_for_memory(header, system) else None)
    except (OSError, ValueError, LookupError, TypeError):  # none, or torn
        return None
    if cause is None:
        return None
    table = content[_TABLE_AT:]
    entries = _ENTRY.iter_unpack(table[: len(table) // _ENTRY.size * _ENTRY.size])
    return Crash(cause, {number - 1: digest for digest, number in entries if number})


def _cause(trace: str) -> str | None:
    """`segmentation fault in multiply, gemm.py line 33`"""
    if not trace:
        return None
    signal, frame = _SIGNAL.match(trace), _FRAME.search(trace)
    what = signal[1].lower() if signal else trace
    return f"{what} in {frame[3]}, {os.path.basename(frame[1])} line {frame[2]}" if frame else what


def _killed_for_memory(header: dict[str, Any], system: Path) -> bool:
    before = header["kills"]
    if before is None or header["boot"] != _boot(system):
        return False
    now = _kills_of(Path(before["file"]))
    return now is not None and now["group"] == before["group"] and now["count"] > before["count"]


def _memory_kills(system: Path) -> dict[str, Any] | None:
    """The kills for memory in this process's control group, of version 2 or 1; None if they cannot be read."""
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, name = system / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            root, name = system / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In some containers the group's name is that of outside, and its folder is the root.
        for folder in (root / group.lstrip("/"), root):
            if (kills := _kills_of(folder / name)) is not None:
                return kills
    return None


def _kills_of(file: Path) -> dict[str, Any] | None:
    fields = dict(line.split(" ", 1) for line in _text(file).splitlines() if " " in line)
    if "oom_kill" not in fields:
        return None
    return {"file": str(file), "group": file.parent.stat().st_ino, "count": int(fields["oom_kill"])}


def _boot(system: Path) -> str:
    return _text(system / "proc/sys/kernel/random/boot_id").strip()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
