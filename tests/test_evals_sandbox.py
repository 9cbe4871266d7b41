"""Generated programs: only one that runs to its end passes, and none reaches beyond its folder."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbatch.evals.data import task_rows
from specbatch.evals.load import find_tasks
from specbatch.evals.prompts import Renderer
from specbatch.evals.sandbox import ISOLATED, run_program, run_programs
from specbatch.evals.schema import Execution

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and limits are Linux's")
HEAD = "def add(a, b):\n"
CHECK = "\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)"


@pytest.mark.parametrize(
    ("body", "passed", "detail"),
    [
        ("    return a + b", True, ""),
        ("    return a + b\n\nif __name__ == '__main__':\n    raise ValueError", True, ""),
        ("    return a - b", False, "AssertionError"),
        ("    return a +", False, "SyntaxError"),
        ("    import sys; sys.exit(0)", False, "SystemExit: 0"),
        ("    exit(0)", False, "SystemExit"),
        ("    import os; os._exit(0)", False, "ended before its tests did"),
        ("    import os, signal; os.abort()", False, "ended by SIG"),
        ("    raise KeyboardInterrupt", False, "KeyboardInterrupt"),
        ("    return 3\nimport sys\nprint('passed', file=sys.stderr); print('{\"outcome\": \"passed\"}')", True, ""),
        ("    import os\n    os.write(3, b'{\"outcome\": \"passed\"}\\n'); os._exit(0)", False, "ended before"),
        ("    import os\n    for fd in range(16):\n        try: os.write(fd, b'{\"outcome\": \"passed\"}\\n')\n"
         "        except OSError: pass\n    os._exit(0)", False, "ended before"),
        ("    return add(a, b)", False, "RecursionError"),
        ("    x = ' ' * 10**11\n    return 3", False, "MemoryError"),
        ("    import os; os.system('true'); return 3", False, "PermissionError"),
        ("    import subprocess; subprocess.run(['true']); return 3", False, "PermissionError"),
        ("    import posix; posix.fork(); return 3", False, "PermissionError"),
        ("    import os\n    while True: os.write(3, b'x' * 10**6)", False, "ended before"),
        ("    input(); return 3", False, "EOFError"),
        ("    open('here', 'w').write('x'); return len(open('here').read()) + 2", True, ""),
        ("    f = open('here', 'w')\n    while True: f.write('x' * 10**6); f.flush()", False, "OSError"),
    ],
)  # fmt: skip
def test_verdicts(body: str, passed: bool, detail: str) -> None:
    verdict = run_program(HEAD + body + CHECK, 20, 1024)
    assert verdict.passed is passed, verdict.detail
    assert detail in verdict.detail
    assert set(verdict.isolation) == {"network", "processes", "files"}


def test_temporary_files() -> None:
    program = "import tempfile\nwith tempfile.TemporaryDirectory() as f: open(f + '/x', 'w').write('x')"
    verdict = run_program(program, 20, 512)
    # Where the user's files are in reach, nothing may be removed.
    assert verdict.passed is (verdict.isolation["files"] == "read-only"), verdict.detail


def test_programs_are_isolated_where_the_kernel_allows_it() -> None:
    flags = 0x10000000 | 0x40000000 | 0x20000000 | 0x8000000 | 0x20000  # user, network, processes, IPC, mounts
    allowed = subprocess.run([sys.executable, "-c", f"import ctypes; assert ctypes.CDLL(None).unshare({flags}) == 0"])
    if allowed.returncode or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 12):
        pytest.skip("no user namespaces, or a kernel that cannot make a tree of mounts read-only")
    assert run_program("", 20, 512).isolation == ISOLATED


def test_endless_programs_end_with_all_they_started() -> None:
    began = time.monotonic()
    (waits, spins) = run_programs(["import time; time.sleep(600)", "while True: pass"], 1, 512)
    assert time.monotonic() - began < 15
    assert [waits.passed, spins.passed] == [False, False]
    assert "timed out after 1 s" in waits.detail
    assert "timed out" in spins.detail


def test_an_interrupt_waits_for_no_program() -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_programs(["pass", *["import time; time.sleep(600)"] * 20], 60, 512, interrupt)
    assert time.monotonic() - began < 30


def test_memory_that_grows_is_refused() -> None:
    verdict = run_program("x = []\nwhile True: x.append(' ' * 10**7)", 60, 512)
    assert (verdict.passed, verdict.detail) == (False, "MemoryError")


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_no_network(listener: int) -> None:
    socket.create_connection(("127.0.0.1", listener)).close()  # there is something to reach
    for call in (f"socket.create_connection(('127.0.0.1', {listener}))", "socket.socket()"):
        verdict = run_program(f"import socket; {call}", 20, 512)
        assert not verdict.passed
        assert "PermissionError" in verdict.detail
    raw = run_program(f"import _socket; _socket.socket().connect(('127.0.0.1', {listener}))", 20, 512)
    if raw.isolation["network"] == "namespace":  # by the kernel, and not by a name in a module
        assert not raw.passed
        assert "unreachable" in raw.detail or "refused" in raw.detail


def test_files_of_the_user_are_out_of_reach(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    for program in (f"import os; os.remove({str(mine)!r})", f"import shutil; shutil.rmtree({str(tmp_path)!r})"):
        assert not run_program(program, 20, 512).passed
        assert mine.read_text() == "kept"
    write = f"open({str(mine)!r}, 'w')"
    remount = f"import ctypes; ctypes.CDLL(None).mount(None, b'/', None, 32 | 4096, None)\n{write}"  # and MS_BIND
    for program in (write, remount):
        verdict = run_program(program, 20, 512)
        if verdict.isolation["files"] == "read-only":
            assert not verdict.passed
            assert mine.read_text() == "kept"


def test_nothing_of_the_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run_program("import os; assert 'HF_TOKEN' not in os.environ", 20, 512).passed
    assert os.environ["HF_TOKEN"] == "secret"


def test_reference_solutions_of_humaneval_pass() -> None:
    (task,) = find_tasks(["humaneval"], [])
    assert isinstance(task.metric, Execution)
    render = Renderer("program", task.metric.program)
    rows = task_rows(task, None, None).rows[::8]
    right = [render(row, "a row", response=row["canonical_solution"]) for row in rows]
    assert [verdict.detail for verdict in run_programs(right, 30, task.metric.memory_mb)] == [""] * len(rows)
    wrong = [render(row, "a row", response="    return None\n") for row in rows[:5]]
    assert not any(verdict.passed for verdict in run_programs(wrong, 30, task.metric.memory_mb))


@pytest.mark.slow
def test_all_reference_solutions_of_humaneval_pass() -> None:
    (task,) = find_tasks(["humaneval"], [])
    assert isinstance(task.metric, Execution)
    render = Renderer("program", task.metric.program)
    programs = [render(row, "a row", response=row["canonical_solution"]) for row in task_rows(task, None, None).rows]
    verdicts = run_programs(programs, task.metric.timeout_seconds, task.metric.memory_mb)
    assert [v.detail for v in verdicts if not v.passed] == []
