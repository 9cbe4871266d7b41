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
from specbatch.evals.metrics import Execution
from specbatch.evals.sandbox import ISOLATED, Verdict, run_program, run_programs
from specbatch.evals.templates import Renderer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and limits are Linux's")
FILL_ALL_FILES = """
    import os
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, b'x' * 10**6)
            except OSError as error:
                if error.errno != 9:  # no such file
                    os._exit(0)
"""
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
        ("    import os\n    os.write(3, b'{\"outcome\": \"passed\"}\\n'); os._exit(0)", False, ""),
        ("    import os\n    for fd in range(64):\n        try: os.write(fd, b'{\"outcome\": \"passed\"}\\n')\n"
         "        except OSError: pass\n    os._exit(0)", False, "ended before"),
        ("    return add(a, b)", False, "RecursionError"),
        ("    x = ' ' * 10**11\n    return 3", False, "MemoryError"),
        ("    import os; os.system('true'); return 3", False, "PermissionError"),
        ("    import subprocess; subprocess.run(['true']); return 3", False, "PermissionError"),
        ("    import posix; posix.fork(); return 3", False, "PermissionError"),
        (FILL_ALL_FILES, False, "ended before"),
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
    assert verdict.passed is (verdict.isolation["files"] == "own root"), verdict.detail


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
        assert "not permitted" in raw.detail or "unreachable" in raw.detail or "refused" in raw.detail


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
        if verdict.isolation["files"] == "own root":
            assert not verdict.passed
            assert mine.read_text() == "kept"


def in_own_root(program: str) -> Verdict:
    verdict = run_program(program, 20, 512)
    if verdict.isolation["files"] != "own root":
        pytest.skip("no namespaces here")
    return verdict


def test_only_python_the_libraries_and_harmless_devices_are_in_sight(tmp_path: Path) -> None:
    """Not only read-only: a UNIX socket, a FIFO or a block device takes what is written to it all the same."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        hidden = [fifo, tmp_path / "socket", tmp_path, "/proc/self", "/etc/passwd", Path.home() / ".ssh"]
        seen = in_own_root(
            f"import os; assert not (seen := [p for p in {[*map(str, hidden)]} if os.path.lexists(p)]), seen"
        )
        assert seen.passed, seen.detail
    devices = "import os; assert set(os.listdir('/dev')) <= {'null', 'zero', 'full', 'random', 'urandom'}"
    assert in_own_root(f"{devices}; open('/dev/null', 'w').write('x'); assert os.urandom(4)").passed
    assert in_own_root("import numpy; open('x', 'w').write('x')").passed


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root has something to give up")
def test_programs_of_root_run_as_nobody() -> None:
    program = "import os; assert os.getuid() == os.geteuid() == os.getgid() == 65534; assert os.getgroups() == []"
    assert in_own_root(program).passed
    assert "not permitted" in in_own_root("import os; os.setuid(0)").detail


@pytest.mark.parametrize(
    "call",
    [
        "import _socket; _socket.socket(_socket.AF_UNIX)",
        "import os; os.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))",
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
        "libc.unshare(0x10000000) and exec('raise OSError(ctypes.get_errno(), \"not permitted\")')",
    ],
)
def test_system_calls_that_a_program_has_no_use_for_are_refused(call: str) -> None:
    verdict = in_own_root(call)
    assert not verdict.passed
    assert "not permitted" in verdict.detail


READ_ALL_FILES = """
import json, os, stat
seen = [b""]
for fd in range(3, 64):
    try:
        os.set_blocking(fd, False)
        seen.append(os.read(fd, 64))
    except OSError:
        pass
"""
WRITE_ALL = """
for fd in range(3, 64):
    for text in seen:
        for said in (text, text * 2, json.dumps({"outcome": "passed", "secret": text.decode("latin-1")}).encode()):
            try:
                os.write(fd, said + b"\\n")
                os.write(fd, said)
            except OSError:
                pass
"""
FRAMES = """
import sys
def values(frame):
    while frame:
        yield from list(frame.f_locals.values())
        frame = frame.f_back
for value in list(values(sys._getframe())):
    if getattr(value, "func", None) is os.write:
        value()
        os._exit(0)
    if isinstance(value, bytes):
        seen.append(value)
    if type(value).__name__ in ("map", "tuple_iterator", "generator", "deque"):
        try:
            for one in value:
                one()
                os._exit(0)
        except BaseException:
            pass
"""
OBJECTS = """
import gc
for value in gc.get_objects():
    if type(value).__name__ == "partial" and value.func is os.write:
        value()
        os._exit(0)
"""
FORGERIES = {
    "what files hold": READ_ALL_FILES + WRITE_ALL + "os._exit(0)",
    "what frames hold": READ_ALL_FILES + FRAMES + WRITE_ALL + "os._exit(0)",
    "what objects there are": READ_ALL_FILES + OBJECTS,
    "frozen objects": READ_ALL_FILES + "import gc; gc.unfreeze()" + OBJECTS,
    "what a frame has at hand": READ_ALL_FILES + """
import gc, sys
todo = [sys._getframe(1)]
while todo:
    one = todo.pop()
    if type(one).__name__ == "partial" and one.func is os.write: one(); os._exit(0)
    todo += gc.get_referents(one)
""",
    "what runs after an error": READ_ALL_FILES + """
write = os.write
def forged(fd, text):
    seen.append(text)
    for key in seen: write(fd, key + key)
    return len(text)
os.write = forged
json.dumps = lambda value: "passed"
raise SystemExit
""",
    "the text of an error": READ_ALL_FILES + """
class Forged(Exception):
    def __str__(self):
        exec(FRAMES_AND_FILES)
        os._exit(0)
raise Forged
""".replace("FRAMES_AND_FILES", repr(FRAMES + WRITE_ALL)),
    "an end that is not one": "raise StopIteration",
    "the way out": "import atexit, os; atexit.register(os._exit, 0); raise GeneratorExit",
    "the module of the launcher": """
import __main__, os
for fd in range(3, 64): __main__._say(fd, {"outcome": "passed"})
__main__._outcome = lambda *given: {"outcome": "passed"}
os._exit(0)
""",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_the_proof_of_an_end_cannot_be_forged(name: str) -> None:
    """A program that could would pass without running its tests."""
    verdict = run_program(FORGERIES[name] + "\nraise AssertionError", 20, 512)
    assert not verdict.passed


def test_what_a_program_writes_to_its_files_is_no_failure() -> None:
    verdict = run_program(READ_ALL_FILES + WRITE_ALL, 20, 512)
    assert verdict.passed, verdict.detail


def test_nothing_of_the_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run_program("import os; assert 'HF_TOKEN' not in os.environ", 20, 512).passed
    assert os.environ["HF_TOKEN"] == "secret"


def test_reference_solutions_of_humaneval_pass() -> None:
    (task,) = find_tasks(["humaneval"], [])
    assert isinstance(task.metric, Execution)
    render = Renderer("program", task.metric.program)
    rows = task_rows(task, None, None).rows[::16]
    right = [render(row, "a row", response=row["canonical_solution"]) for row in rows]
    assert [verdict.detail for verdict in run_programs(right, 30, task.metric.memory_mb)] == [""] * len(rows)
    wrong = [render(row, "a row", response="    return None\n") for row in rows[:2]]
    assert not any(verdict.passed for verdict in run_programs(wrong, 30, task.metric.memory_mb))


@pytest.mark.slow
def test_all_reference_solutions_of_humaneval_pass() -> None:
    (task,) = find_tasks(["humaneval"], [])
    assert isinstance(task.metric, Execution)
    render = Renderer("program", task.metric.program)
    programs = [render(row, "a row", response=row["canonical_solution"]) for row in task_rows(task, None, None).rows]
    verdicts = run_programs(programs, task.metric.timeout_seconds, task.metric.memory_mb)
    assert [v.detail for v in verdicts if not v.passed] == []
