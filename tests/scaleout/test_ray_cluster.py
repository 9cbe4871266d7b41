"""Nodes of a Ray cluster that are lost, and that come later."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from specbatch.errors import SpecbatchError
from specbatch.scaleout.transport import Died, Event, Placed, Reply, WorkerNeeds
from tests.scaleout.ray_workers import StubWorker

pytest.importorskip("ray", reason="Ray is not installed: pip install 'specbatch[ray]'")
from ray.cluster_utils import Cluster

from specbatch.scaleout.ray_session import RaySession
from specbatch.scaleout.ray_transport import RayTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head node that has no room for workers."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def transport(cluster: Any, notes: list[str]) -> Iterator[RayTransport]:
    session = RaySession(cluster.address, num_cpus=1)
    transport = RayTransport(session, StubWorker, WorkerNeeds(), notes.append, note_seconds=1.0)
    yield transport
    transport.close()


def events_of(transport: RayTransport, count: int, seconds: float = 60.0) -> list[Event]:
    found: list[Event] = []
    end = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end:
        found += [event for event in transport.wait(0.2) if not isinstance(event, Placed)]
    return found


def test_a_lost_node_ends_its_workers_and_no_others(cluster: Any, transport: RayTransport) -> None:
    nodes = [cluster.add_node(**NODE, resources={name: 1}) for name in ("a", "b")]
    for worker in (1, 2):
        transport.start(worker)
        transport.call(worker, "pid")
    events = events_of(transport, 2)
    pids = {event.worker: event.value for event in events if isinstance(event, Reply)}
    raylet = {c.pid: n for n in nodes for c in [psutil.Process(n.all_processes["raylet"][0].process.pid)]}
    lost = next(worker for worker, pid in pids.items() if raylet.get(psutil.Process(pid).ppid()) is nodes[0])
    stays = 3 - lost
    transport.call(lost, "rest", 100)
    transport.call(stays, "rest", 3)
    time.sleep(0.5)
    began = time.monotonic()
    cluster.remove_node(nodes[0], allow_graceful=False)
    transport.start(3)  # Ray can place it on the lost node at first
    transport.call(3, "count")
    found = {type(event): event for event in events_of(transport, 2)}
    assert found == {Died: Died(lost, "its node was lost", node_lost=True), Reply: Reply(stays, "rested")}
    assert time.monotonic() - began < 30
    transport.kill(stays)
    third = events_of(transport, 1)[0]
    assert third in (Reply(3, 1), Died(3, "its node was lost", node_lost=True))


def test_a_worker_is_placed_when_a_node_comes(cluster: Any, transport: RayTransport, notes: list[str]) -> None:
    """Once, a note says what is missing."""
    transport.start(1)
    transport.call(1, "count")
    assert events_of(transport, 1, seconds=3) == []
    assert notes == [
        "1 of 1 workers wait for room in the Ray cluster: each needs 1 CPU; in all there is nothing, free is nothing"
    ]
    cluster.add_node(**NODE)
    assert events_of(transport, 1) == [Reply(1, 1)]
    assert len(notes) == 1


SCRIPT = """
import sys, time
from specbatch.scaleout.transport import WorkerNeeds
from specbatch.scaleout.ray_session import RaySession
from specbatch.scaleout.ray_transport import RayTransport
from specbatch.scaleout.transport import Reply
from tests.scaleout.ray_workers import StubWorker
transport = RayTransport(RaySession(sys.argv[1], 1), StubWorker, WorkerNeeds())
transport.start(1)
transport.call(1, "pid")
while not (found := [event for event in transport.wait(1) if isinstance(event, Reply)]):
    pass
transport.call(1, "spin")
print(found[0].value, flush=True)
time.sleep(100)
"""


def test_workers_end_with_the_jobs_process(cluster: Any) -> None:
    cluster.add_node(**NODE)
    with subprocess.Popen([sys.executable, "-c", SCRIPT, cluster.address], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        worker = psutil.Process(int(job.stdout.readline()))
        job.kill()
        assert psutil.wait_procs([worker], timeout=30)[1] == []


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere.invalid:6379", "ray://127.0.0.1:9"])
def test_an_address_where_nothing_answers_is_an_error_at_once(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(SpecbatchError, match=r"nothing answers at cluster\.address"):
        RaySession(address, 1)
    assert time.monotonic() - began < 20


def test_a_cluster_that_ray_remembers_and_that_is_gone_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # as the file that `ray start` leaves on each node
    began = time.monotonic()
    with pytest.raises(SpecbatchError, match=r"nothing answers at cluster\.address auto \(.*:9\)"):
        RaySession("auto", 1)
    assert time.monotonic() - began < 20


def test_an_address_of_another_form_is_an_error() -> None:
    with pytest.raises(SpecbatchError, match="must be auto, HOST:PORT"):
        RaySession("somewhere", 1)


HEAD_SCRIPT = """
import sys, time
from specbatch.errors import SpecbatchError
from specbatch.scaleout.transport import WorkerNeeds
from specbatch.scaleout.ray_session import RaySession
from specbatch.scaleout.ray_transport import RayTransport
from tests.scaleout.ray_workers import StubWorker
transport = RayTransport(RaySession(None, 1), StubWorker, WorkerNeeds())
transport.start(1)
try:
    while True:
        for event in transport.wait(1):
            print(event, flush=True)
            transport.call(1, "rest", 0.5)
except SpecbatchError as error:
    print("error:", error.message, flush=True)
    transport.close()
    sys.exit(2)
"""


def test_a_head_that_is_killed_is_an_error_soon() -> None:
    """Before Ray ends the process itself, with exit code 1. No process remains."""
    command = [sys.executable, "-c", HEAD_SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert "Placed" in job.stdout.readline()
        children = psutil.Process(job.pid).children(recursive=True)
        (head,) = (child for child in children if "gcs_server" in child.name())
        began = time.monotonic()
        head.kill()
        said, errors = job.communicate(timeout=100)
        assert job.returncode == 2, said[-1000:] + errors[-3000:]
        assert time.monotonic() - began < 30
    assert said.splitlines()[-1].startswith("error: Ray has ended")
    assert "Traceback" not in errors
    assert psutil.wait_procs(children, timeout=20)[1] == []
