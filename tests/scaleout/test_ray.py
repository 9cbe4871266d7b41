"""Workers in processes of a Ray that is started here. `test_ray_cluster.py` has nodes that come and go."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from specbatch.errors import SpecbatchError
from specbatch.scaleout.transport import Broken, Died, Event, Placed, Refused, Reply, WorkerNeeds
from tests.scaleout.ray_workers import NeverMade, StubWorker

pytest.importorskip("ray", reason="Ray is not installed: pip install 'specbatch[ray]'")
from specbatch.scaleout.ray_session import RaySession, ray
from specbatch.scaleout.ray_transport import RayTransport

# One process runs all of these tests: two would start a Ray each.
pytestmark = [pytest.mark.timeout(120), pytest.mark.wide]
FOUR_WORKERS = 4  # more than this machine can have cores
_SECONDS = 30.0


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    """Its end is a test, too: no process and no file of it remain."""
    before = psutil.Process().children(recursive=True)  # a process that other tests have started, and that stays
    session = RaySession(None, num_cpus=FOUR_WORKERS)
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    folder = folder_of(children)
    yield session
    assert folder.is_dir()
    session.close()
    assert gone(children, 2) == []
    assert not folder.exists()


def folder_of(children: Sequence[psutil.Process]) -> Path:
    """Of a session, from the command line of its reaper."""
    commands = [command for child in children if len(command := child.cmdline()) > 1]
    (folder,) = (Path(command[-1]) for command in commands if command[-2].endswith("reaper.py"))
    return folder


def gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that live after `seconds`."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


class Calls:
    """A transport whose workers are ended after each test; its session goes on."""

    def __init__(self, session: RaySession, make_worker: Callable[[], object], **needs: object) -> None:
        self.notes: list[str] = []
        self.transport = RayTransport(session, make_worker, WorkerNeeds(**needs), self.notes.append)  # type: ignore[arg-type]
        self.num_workers = 0

    def start(self) -> int:
        self.num_workers += 1
        self.transport.start(self.num_workers)
        return self.num_workers

    def call(self, method: str, *arguments: object, worker: int | None = None) -> int:
        worker = worker or self.start()
        self.transport.call(worker, method, *arguments)
        return worker

    def events(self, count: int = 1) -> list[Event]:
        found: list[Event] = []
        end = time.monotonic() + _SECONDS
        while len(found) < count and time.monotonic() < end:
            found += [event for event in self.transport.wait(0.2) if not isinstance(event, Placed)]
        return found

    def event(self) -> Event:
        (event,) = self.events()
        return event


@pytest.fixture
def calls(session: RaySession) -> Iterator[Calls]:
    calls = Calls(session, StubWorker)
    yield calls
    for worker in range(1, calls.num_workers + 1):
        calls.transport.kill(worker)


def test_calls_run_in_order_and_large_values_arrive(calls: Calls) -> None:
    worker = calls.call("count")
    for _ in range(3):
        calls.call("count", worker=worker)
    large = bytes(range(256)) * 4096
    calls.call("echo", large, worker=worker)
    assert calls.events(5) == [*(Reply(worker, i) for i in (1, 2, 3, 4)), Reply(worker, large)]
    assert calls.transport.wait(0.01) == []


def test_a_process_is_ready_for_an_engine(calls: Calls) -> None:
    """Ctrl-C is for the job's process. Ray has set no number of threads, and torch has not been imported before."""
    calls.call("facts")
    event = calls.event()
    assert isinstance(event, Reply)
    assert event.value == {"threads": None, "interrupts": True, "folder": str(Path.cwd()), "torch": False}


@pytest.mark.wide
def test_threads_are_limited_where_they_are_given(session: RaySession) -> None:
    calls = Calls(session, StubWorker, threads="3")
    worker = calls.call("facts")
    event = calls.event()
    assert isinstance(event, Reply)
    assert event.value["threads"] == "3"
    calls.transport.kill(worker)


def test_four_workers_run_at_once_whatever_the_number_of_cores(calls: Calls) -> None:
    for _ in range(FOUR_WORKERS):
        calls.call("pid")
    pids = {event.value for event in calls.events(FOUR_WORKERS) if isinstance(event, Reply)}
    assert len(pids) == FOUR_WORKERS


def test_errors_are_values(calls: Calls) -> None:
    worker = calls.call("refuse")
    calls.call("fail", worker=worker)
    calls.call("unsendable", worker=worker)
    calls.call("count", worker=worker)
    refused, broken, unsendable, count = calls.events(4)
    assert refused == Refused(worker, "no such model", "give another name")
    assert isinstance(broken, Broken)
    assert broken.traceback.endswith("ValueError: a mistake of ours\n")
    assert isinstance(unsendable, Broken)
    assert "pickle" in unsendable.traceback
    assert count == Reply(worker, 1), "the process goes on"


def test_a_worker_that_cannot_be_made_refuses(session: RaySession) -> None:
    calls = Calls(session, NeverMade)
    worker = calls.call("anything")
    assert calls.event() == Refused(worker, "no weights", None)
    calls.transport.kill(worker)


@pytest.mark.parametrize(
    ("method", "arguments", "reason"),
    [
        ("signal", (signal.SIGKILL,), "its process was killed or crashed"),
        ("lose_a_rank", (), "rank 1 of engine.tensor_parallel ended by signal 9"),
        pytest.param("segfault", (), "its process crashed (SIGSEGV)", marks=pytest.mark.wide),
        pytest.param("leave", (3,), "its process ended with exit code 3", marks=pytest.mark.wide),
    ],
)
def test_a_death_is_one_event(calls: Calls, method: str, arguments: tuple[object, ...], reason: str) -> None:
    """Also with calls that it has not begun, and calls that come later."""
    calls.call("count")
    assert len(calls.events()) == 1
    began = time.monotonic()
    calls.call(method, *arguments, worker=1)
    calls.call("count", worker=1)
    assert calls.event() == Died(1, reason)
    assert time.monotonic() - began < 5
    calls.call("count", worker=1)
    assert calls.transport.wait(0.3) == []
    assert calls.call("count") == 2
    assert calls.event() == Reply(2, 1), "a new worker starts from the beginning"


def test_a_killed_worker_sends_nothing(calls: Calls) -> None:
    calls.call("pid")
    event = calls.event()
    assert isinstance(event, Reply)
    calls.call("spin", worker=1)
    calls.call("count", worker=1)
    calls.transport.kill(1)
    assert calls.transport.wait(0.5) == []
    assert not psutil.pid_exists(event.value)


class NoNodes(RaySession):
    """A Ray that was killed."""

    def __init__(self) -> None:
        pass

    def nodes(self) -> list[Mapping[str, float]]:
        return []


def test_no_worker_waits_for_a_ray_that_has_ended(session: RaySession) -> None:
    with pytest.raises(SpecbatchError, match="Ray has ended"):
        RayTransport(NoNodes(), StubWorker, WorkerNeeds()).start(1)


@pytest.mark.wide
def test_an_idle_transport_waits(calls: Calls) -> None:
    began = time.monotonic()
    assert calls.transport.wait(0.2) == []
    assert time.monotonic() - began >= 0.2


def test_nothing_listens_to_the_network(session: RaySession) -> None:
    """Neither this process nor one of Ray's."""
    me, found = psutil.Process(), []
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            listening = (c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN)
            found += [connection.laddr.ip for connection in listening]
    assert len(found) >= 4, "the test sees no sockets"
    assert {address.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}


def test_ray_leaves_signals_and_environment_as_they_were(session: RaySession) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert ray.get_runtime_context().get_node_id()
    assert session.nodes()[0]["CPU"] == FOUR_WORKERS


def test_a_second_ray_in_a_process_is_refused(session: RaySession) -> None:
    """It would end with the first one, or wait for room that the first one has."""
    for address in (None, "auto"):
        with pytest.raises(SpecbatchError, match="this process has workers already") as caught:
            RaySession(address, 1)
        assert "ray.init()" in str(caught.value.hint)
    assert session.nodes()


class Ended(RaySession):
    def __init__(self) -> None:
        self.looks = 0

    def has_ended(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_answers_come_before_the_end_of_ray(session: RaySession) -> None:
    calls = Calls(Ended(), StubWorker)
    worker = calls.start()
    assert [type(event) for event in calls.transport.wait(_SECONDS)] == [Placed]
    calls.call("count", worker=worker)
    time.sleep(1)
    assert calls.transport.wait(_SECONDS) == [Reply(worker, 1)], "it is there already"
    with pytest.raises(SpecbatchError, match="Ray has ended") as caught:
        calls.transport.wait(_SECONDS)
    assert "run the same command again" in str(caught.value.hint)
    calls.transport.kill(worker)


def test_a_signal_is_handled_after_the_start_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside of it can end this process by SIGSEGV."""
    finished = []

    def init(**options: object) -> None:
        signal.raise_signal(signal.SIGINT)
        finished.append(options)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(RaySession, "_own", None)  # another test's
    # A process that a shell started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            RaySession("auto", 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert finished


SCRIPT = """
import time
from specbatch.scaleout.transport import WorkerNeeds
from specbatch.scaleout.ray_session import RaySession
from specbatch.scaleout.ray_transport import RayTransport
from specbatch.scaleout.transport import Reply
from tests.scaleout.ray_workers import StubWorker

transport = RayTransport(RaySession(None, 2), StubWorker, WorkerNeeds())
for worker in (1, 2):
    transport.start(worker)
    transport.call(worker, "count")
answers = 0
while answers < 2:
    answers += sum(isinstance(event, Reply) for event in transport.wait(1))
transport.call(1, "segfault")
transport.call(2, "spin")
transport.wait(10)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_terminated", [False, True])
def test_nothing_remains_of_a_killed_job(is_terminated: bool, tmp_path: Path) -> None:
    """No process and no file; and Ray prints nothing, though a worker has crashed. `is_terminated`: each process gets
    SIGTERM, as from a scheduler that ends a job."""
    command = [sys.executable, "-c", SCRIPT]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        folder = folder_of(children)
        assert len(children) >= 6
        assert folder.is_dir()
        if is_terminated:
            for running in [process, *children]:
                running.terminate()
        else:
            process.kill()
        assert gone(children, 15) == []
        assert not folder.exists()
        assert process.stdout.read() == ""
        assert process.stderr.read() == ""
