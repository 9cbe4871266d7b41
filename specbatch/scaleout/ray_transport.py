"""Workers as actors of Ray.

Ray starts the processes, places them on nodes, carries the calls, and reports deaths. What to do about a death is
decided by the pool. So no actor is restarted by Ray, and no call is repeated by it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import re
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specbatch.errors import RankDied, SpecbatchError
from specbatch.scaleout.ray_session import RaySession, ray
from specbatch.scaleout.transport import Broken, Died, Event, Placed, Refused, Reply, WorkerId, WorkerNeeds, amounts

_PICKLE = 5  # the protocol
_ENDED = "Ray has ended: the process that has its state (gcs_server) does not answer"
_AGAIN = "run the same command again: finished rows are kept"
_NODE_DIED = re.compile("node has died|node was terminated|node is dead|preempted", re.IGNORECASE)
_LOW_MEMORY = re.compile("NODE_OUT_OF_MEMORY|running low on memory|memory monitor", re.IGNORECASE)


@dataclass(slots=True)
class _Process:
    actor: Any
    answers: deque[Any]  # answers of its calls, in their order; the first is that of `place`
    asked_at: float
    pid: int | None = None  # None: not placed yet


class RayTransport:
    """`make_worker` makes, in the new process, the object whose methods are called. See `Transport`."""

    def __init__(
        self,
        session: RaySession,
        make_worker: Callable[[], object],
        needs: WorkerNeeds,
        log: Callable[[str], None] = lambda line: None,
        *,
        note_seconds: float = 30.0,
    ) -> None:
        """`log` gets a note, once, if a worker is not placed within `note_seconds`."""
        self._note_seconds = note_seconds
        self._session = session
        self._needs = needs
        self._log = log
        self._actor = ray.remote(_Actor).options(
            num_cpus=needs.num_cpus,
            num_gpus=needs.num_gpus,
            resources=dict(needs.resources) or None,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._make_worker = ray.cloudpickle.dumps(make_worker)  # plain pickle refuses what a script defines
        self._processes: dict[WorkerId, _Process] = {}
        self._has_noted = False
        self._is_ending = False  # the last answers were read
        self._look_at = 0.0

    def start(self, worker: WorkerId) -> None:
        self._check_nodes()
        actor = self._actor.remote(worker, self._make_worker, os.getcwd(), self._needs.threads)
        self._processes[worker] = _Process(actor, deque([actor.place.remote()]), time.monotonic())

    def call(self, worker: WorkerId, method: str, *arguments: Any) -> None:
        if process := self._processes.get(worker):  # else its death is an event already
            process.answers.append(process.actor.call.remote(pickle.dumps((method, arguments), _PICKLE)))

    def wait(self, seconds: float) -> Sequence[Event]:
        end = time.monotonic() + seconds
        while True:
            if self._session.has_ended():
                return self._last_answers()
            events = self._ready(max(0.0, end - time.monotonic()))
            if not events:
                self._look_for_missing()
            if events or time.monotonic() >= end:
                return events

    def kill(self, worker: WorkerId) -> None:
        if process := self._processes.pop(worker, None):
            ray.kill(process.actor, no_restart=True)

    def close(self) -> None:
        for worker in list(self._processes) if not self._session.is_lost else ():
            with contextlib.suppress(Exception):  # the cluster is gone: so are they
                self.kill(worker)
        self._session.close()

    def _ready(self, seconds: float) -> list[Event]:
        """The events that have come after the first answer, or after `seconds`."""
        first = {process.answers[0]: worker for worker, process in self._processes.items() if process.answers}
        if not first:
            time.sleep(seconds)
            return []
        ready, rest = ray.wait(list(first), num_returns=1, timeout=seconds)
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [self._read(first[answer]) for answer in ready]

    def _read(self, worker: WorkerId) -> Event:
        """A worker's next answer, which is there."""
        process = self._processes[worker]
        try:
            value = ray.get(process.answers.popleft())
        except ray.exceptions.RayTaskError as error:  # Ray itself raised this: `_Actor` returns what its worker raises.
            return Broken(worker, str(error))
        except ray.exceptions.RayError as error:
            self.kill(worker)  # a node that is unreachable for a moment could come back with it
            return self._death(worker, process, error)
        if process.pid is None:
            process.pid, node = value
            return Placed(worker, node)
        event: Event = pickle.loads(value)
        if isinstance(event, Died):  # one of its ranks has, and it is of no use without
            self.kill(worker)
        return event

    def _death(self, worker: WorkerId, process: _Process, error: Exception) -> Event:
        text = str(error)
        if "No module named 'specbatch" in text:
            return Refused(
                worker, "a node of the Ray cluster has no specbatch", "install the same version on every node"
            )
        if isinstance(error, ray.exceptions.ActorUnavailableError) or _NODE_DIED.search(text):
            return Died(worker, "its node was lost", node_lost=True)
        if _LOW_MEMORY.search(text) and "common causes" not in text:
            return Died(worker, "Ray ended it, because its node ran low on memory")
        if code := re.search(r"with an exit code (\d+)", text):
            return Died(worker, f"its process ended with exit code {code[1]}")
        if process.pid is None:
            return Died(worker, f"its process did not start: {text.strip().splitlines()[-1]}")
        crash = self._session.crash_of(process.pid)
        return Died(worker, f"its process crashed ({crash})" if crash else "its process was killed or crashed")

    def _last_answers(self) -> list[Event]:
        """Return the answers that have come when Ray has ended. If there are none, raise an error, before Ray itself
        ends this process, which it does a minute after its head has gone."""
        events = [] if self._is_ending else self._ready(0.0)
        self._is_ending = True
        if not events:
            raise SpecbatchError(_ENDED, _AGAIN)
        return events

    def _check_nodes(self) -> None:
        """Raise SpecbatchError if Ray has no node, for example because Ray of this host was killed. Otherwise workers
        would wait for ever."""
        if not self._session.nodes():
            raise SpecbatchError("Ray has ended: it has no node", _AGAIN)

    def _look_for_missing(self) -> None:
        """Now and then: what keeps workers from being placed. The note comes once."""
        now = time.monotonic()
        if now < self._look_at:
            return
        missing = [p for p in self._processes.values() if p.pid is None and p.asked_at < now - self._note_seconds]
        if not missing:
            return
        self._look_at = now + self._note_seconds
        self._check_nodes()
        if not self._has_noted:
            self._has_noted = True
            has, free = amounts(ray.cluster_resources()), amounts(ray.available_resources())
            self._log(
                f"{len(missing)} of {len(self._processes)} workers wait for room in the Ray cluster: each needs "
                f"{self._needs}; in all there is {has}, free is {free}"
            )


class _Actor:
    """The process of a worker."""

    def __init__(self, worker: WorkerId, make_worker: bytes, folder: str, threads: str | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job's process decides what Ctrl-C means
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the number of CPUs, rounded up
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        with contextlib.suppress(OSError):  # another node need not have it
            os.chdir(folder)
        self._id = worker
        self._make_worker = make_worker
        self._worker: object | None = None

    def place(self) -> tuple[int, str]:
        return os.getpid(), platform.node()

    def call(self, call: bytes) -> bytes:
        """A pickled (method, arguments) -> a pickled event. Ray's own pickle takes twice the time. Errors are values:
        Ray neither wraps nor prints them."""
        try:
            if self._worker is None:  # not in __init__: this can import torch, and can raise
                self._worker = pickle.loads(self._make_worker)()
            method, arguments = pickle.loads(call)
            return pickle.dumps(Reply(self._id, getattr(self._worker, method)(*arguments)), _PICKLE)
        except RankDied as error:
            return pickle.dumps(Died(self._id, error.message), _PICKLE)
        except SpecbatchError as error:
            return pickle.dumps(Refused(self._id, error.message, error.hint), _PICKLE)
        except Exception:
            return pickle.dumps(Broken(self._id, traceback.format_exc()), _PICKLE)
