"""The table of running rows, the counts of deaths, and the order in which rows run after a crash."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

import pytest

from specbatch.files.paths import is_running_table, partial_path
from specbatch.job.crash_retry import HeldRows
from specbatch.results.crashes import Crash, RunningRows, last_crash
from specbatch.results.results import ResultFile
from specbatch.rows.sources import RawRow
from tests.processes import Command


def end(path: Path, how: str) -> int | None:
    """The exit code of a process that runs three of four rows, and then ends by the statement `how`."""

    def main() -> None:
        with RunningRows(path, "job") as running:
            for row in (7, 8, 9, 0):
                running.start(row, 2**64 - 1 - row)
            running.finish(8)
            running.clear()
            exec(how, {"os": os, "signal": signal, "a_kernel": lambda: ctypes.string_at(0)})

    process = Command(path.parent, main=main)
    process.communicate()
    return process.returncode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "o.jsonl.partial.running"


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("a_kernel()", "segmentation fault in string_at, __init__.py line "),
        ("os.abort()", "aborted in <module>, <string> line 1"),
        *(
            (f"os.kill(os.getpid(), signal.{name})", cause)
            for name, cause in {"SIGBUS": "bus error", "SIGFPE": "floating", "SIGILL": "illegal"}.items()
        ),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_crash_is_found_with_its_rows(path: Path, how: str, cause: str) -> None:
    assert end(path, how) != 0
    assert is_running_table(path)
    crash = last_crash(path, "job")
    assert crash is not None
    assert crash.cause.startswith(cause)
    assert crash.rows == {row: 2**64 - 1 - row for row in (7, 9, 0)}
    assert last_crash(path, "another job") is None


@pytest.mark.parametrize(
    "how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(130)", "raise MemoryError", "raise KeyboardInterrupt"]
)
def test_other_ends_are_no_crash_of_a_row(path: Path, how: str) -> None:
    assert end(path, how) != 0
    assert last_crash(path, "job") is None


def test_nothing_is_left_after_a_job(path: Path) -> None:
    assert end(path, "pass") == 0
    assert not path.exists()


class System:
    """/proc and /sys of a machine with control groups of version 2 or 1."""

    def __init__(self, folder: Path, version: int, visible: bool = True) -> None:
        self.root = folder
        base, name, line = {
            2: ("sys/fs/cgroup", "memory.events", "0::/jobs/mine"),
            1: ("sys/fs/cgroup/memory", "memory.oom_control", "4:cpu,memory:/jobs/mine"),
        }[version]
        self.group = folder / base / ("jobs/mine" if visible else "")
        self.kills = self.group / name
        self.boot = folder / "proc/sys/kernel/random/boot_id"
        for file in (self.kills, self.boot, folder / "proc/self/cgroup"):
            file.parent.mkdir(parents=True, exist_ok=True)
        (folder / "proc/self/cgroup").write_text(f"12:cpuset:/\n{line}\n")
        self.boot.write_text("first\n")
        self.set_kills(2)

    def set_kills(self, count: int) -> None:
        self.kills.write_text(f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")


@pytest.mark.parametrize("system", [(2,), (1,), (2, False), (1, False)], indirect=True)
@pytest.mark.parametrize("change", [None, "no kill", "boot", "group", "nothing to read"])
def test_a_kill_for_memory_counts(path: Path, system: System, change: str | None) -> None:
    """If the same control group had one more of them in the same boot."""
    with RunningRows(path, "job", system.root) as running:
        running.start(4, 5)
        left = path.read_bytes()
    path.write_bytes(left)
    system.set_kills(3)
    if change == "no kill":
        system.set_kills(2)
    elif change == "boot":
        system.boot.write_text("second\n")
    elif change == "group":  # another one of the same name
        system.group.rename(system.group.with_name("old"))
        system.group.mkdir()
        system.set_kills(3)
    elif change == "nothing to read":
        system.kills.unlink()
    crash = last_crash(path, "job", system.root)
    expected = Crash("killed by the system: memory ran out", {4: 5})
    assert crash == (expected if change is None else None)


@pytest.fixture
def system(tmp_path: Path, request: pytest.FixtureRequest) -> System:
    return System(tmp_path / "system", *request.param)


def test_a_torn_or_foreign_table_blames_no_row(path: Path) -> None:
    end(path, "a_kernel()")
    whole = path.read_bytes()
    for length in (0, 1, 20, 60, 8192, 9000):
        path.write_bytes(whole[:length])
        assert is_running_table(path)
        crash = last_crash(path, "job")
        assert crash is None or not crash.rows
    path.write_bytes(whole[:-8])
    assert len(last_crash(path, "job").rows) == 2  # type: ignore[union-attr]
    path.write_bytes(b"[]")
    assert not is_running_table(path)
    assert last_crash(path, "job") is None


def test_entries_are_used_again(path: Path) -> None:
    with RunningRows(path, "job") as running:
        for row in range(1000):
            running.start(row, row)
            if row >= 3:
                running.finish(row - 3)
            if row % 3:
                running.clear()
        assert path.stat().st_size == (1 << 16) + 4 * 16


@pytest.mark.parametrize("enabled", [True, False])
def test_the_handler_of_others_is_on_again(path: Path, enabled: bool) -> None:
    def main() -> None:
        (faulthandler.enable if enabled else faulthandler.disable)()
        with RunningRows(path, "job"):
            assert faulthandler.is_enabled()
        assert faulthandler.is_enabled() == enabled

    process = Command(path.parent, main=main)
    assert process.communicate()[1] == ""
    assert process.returncode == 0


def test_a_library_that_has_taken_the_signals_does_not_hide_a_crash(path: Path) -> None:
    def main() -> None:
        faulthandler.enable()
        ctypes.CDLL(None).signal(signal.SIGSEGV, 0)  # the default, which prints nothing
        with RunningRows(path, "job") as running:
            running.start(7, 1)
            ctypes.string_at(0)

    process = Command(path.parent, main=main)
    process.communicate()
    crash = last_crash(path, "job")
    assert crash is not None
    assert crash.rows == {7: 1}


def test_rows_that_ran_at_a_crash_run_in_small_groups_and_then_alone() -> None:
    held = HeldRows()
    for index in range(24):
        held.add(RawRow(index, b""), deaths=1 + (index % 8 == 0))
    groups = []
    while held:
        groups.append([row.index for row in held.next_group()])
    assert [len(group) for group in groups] == [4] * 5 + [1] * 4  # 21 rows that ran at one crash: 5 groups of 4, and 1
    assert groups[-3:] == [[0], [8], [16]]
    assert not held.next_group()


JOB = {"limit": None, "input.sha256": "0"}
ROWS = [RawRow(index, b'{"prompt": "p%d"}' % index) for index in range(4)]


def test_deaths_are_counted_over_sessions(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    for session in range(3):
        results = ResultFile(output, JOB, overwrite=False)
        assert results.deaths_of(ROWS[0]) is None
        count = 0 if session == 0 else results.deaths_of(ROWS[1]).times  # type: ignore[union-attr]
        assert count == session
        results.add_deaths({row.index: row.digest() for row in ROWS[1 : 4 - session]}, f"signal {session}")
        results.close()
        assert partial_path(output).exists(), "the counts are kept without any result"
    results = ResultFile(output, JOB, overwrite=False)
    counts = [(row.index, found[0], found[2]) for row in ROWS if (found := results.deaths_of(row)) is not None]
    assert counts == [(1, 3, "signal 2"), (2, 2, "signal 1"), (3, 1, "signal 0")]
    changed = RawRow(1, b'{"prompt": "new"}')
    assert results.deaths_of(changed) is None
    results.add_deaths({1: changed.digest()}, "abort")
    assert results.deaths_of(changed).times == 1  # type: ignore[union-attr]
    results.close()
    ResultFile(output, JOB, overwrite=True).close()
    assert not partial_path(output).exists()
