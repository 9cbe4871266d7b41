"""A transport without processes: workers are simulated, and time passes only in `wait`."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbatch.config import Config
from specbatch.counts import EngineStats
from specbatch.job.runner import Load
from specbatch.job.worker import Description, Loaded, Slice
from specbatch.results.finished import Finished, FinishedRow
from specbatch.rows.sources import RawRow
from specbatch.scaleout.transport import Broken, Died, Event, Placed, Refused, Reply, WorkerId

MAX_WAITS = 20_000  # of a job: more is a job that does not end


def raw_row(index: int) -> RawRow:
    return RawRow(index, b'{"prompt": "%d", "id": "row-%d"}\n' % (index, index))


def result(index: int) -> dict[str, Any]:
    return {
        "id": f"row-{index}",
        "index": index,
        "text": f"answer {index}",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": index % 7 + 1},
        "speculation": {
            "rounds": index % 5 + 1,
            "drafted": 2,
            "accepted": 1,
            "acceptance_length": 2.0,
            "accept_histogram": [1] * (index % 3),
        },
    }


def finished_row(index: int) -> FinishedRow:
    finished = Finished()
    finished.add(index, raw_row(index).digest(), result(index))
    return finished.rows[0]


def batch_config(batch: int) -> Config:
    config = Config()
    return replace(config, engine=replace(config.engine, max_batch_size=batch))


def description(batch: int = 2, **changes: Any) -> Description:
    made_by = {"versions": {"specbatch": "1", "torch": "2"}, "commit": None, "device": "cpu (A)"}
    values: dict[str, Any] = {
        "config": batch_config(batch),
        "row_tokens": None,
        "digests": {"model.target": "d"},
        "models": {},
        "notes": [],
        "low_acceptance": None,
        "node": "node",
        "made_by": made_by,
        "weights": {"target/w": {"mtime_ns": 1, "sha256": None}},
    }
    return Description(**(values | changes))


@dataclass
class Machine:
    """How the process with a number behaves. The default: it answers at once, and dies with a row of `killers`."""

    speed: float = 1.0
    placed_after: float = 0.0  # seconds after start; infinity: never
    load_seconds: float = 1.0
    longest_row: int = 100
    description: Description | None = None
    fail: dict[str, Callable[[WorkerId], Event | None]] = field(default_factory=dict)  # by method: instead of an answer


@dataclass
class Process:
    id: WorkerId
    machine: Machine
    ready_at: float  # for the next call
    calls: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=deque)
    is_busy: bool = False
    is_stuck: bool = False
    unstarted: deque[RawRow] = field(default_factory=deque)
    running: dict[int, float] = field(default_factory=dict)  # row -> seconds that it still takes
    digests: dict[int, int] = field(default_factory=dict)  # of rows that it has begun
    sent: dict[int, RawRow] = field(default_factory=dict)  # rows that the pool has not got back, nor dropped
    num_exchanges: int = 0  # without an answer
    num_begun: int = 0
    num_finished: int = 0
    num_prefilled: float = 0.0
    most_finished: int = 0  # in a slice


class Simulation:
    """`seconds_of`: what a row takes. `killers`: rows that end the process that starts them; `raisers`: rows for
    which it raises an exception. `machines`: by number of
    the process. `row_speed`: tokens of a row's prompt that are computed in one of these seconds."""

    def __init__(
        self,
        batch: int = 2,
        *,
        machines: dict[int, Machine] | None = None,
        seconds_of: Callable[[int], float] = lambda index: 0.3,
        killers: Sequence[int] = (),
        raisers: Sequence[int] = (),
        row_speed: float = 0.0,
    ) -> None:
        self.batch = batch
        self.now = 1000.0
        self.num_waits = 0
        self.processes: dict[WorkerId, Process] = {}  # that live
        self.started: list[WorkerId] = []
        self.killed: list[WorkerId] = []
        self.calls: list[tuple[WorkerId, str, tuple[Any, ...]]] = []
        self.deaths_with: list[list[int]] = []  # for each death: the rows that the process had
        self.delivered: dict[WorkerId, list[int]] = {}
        self.is_closed = False
        self._machines = machines or {}
        self._seconds_of = seconds_of
        self._killers, self._raisers = set(killers), set(raisers)
        self._row_speed = row_speed
        self._due: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    # What the pool calls.

    def start(self, worker: WorkerId) -> None:
        assert worker not in self.started, "a worker's number is used twice"
        self.started.append(worker)
        machine = self._machines.get(worker, Machine())
        self.processes[worker] = Process(worker, machine, self.now + machine.placed_after)
        if machine.placed_after < float("inf"):
            node = (machine.description or description(self.batch)).node
            self.at(machine.placed_after, lambda: Placed(worker, node) if worker in self.processes else None)
        self.delivered[worker] = []

    def call(self, worker: WorkerId, method: str, *arguments: Any) -> None:
        self.calls.append((worker, method, arguments))
        assert worker in self.processes or worker not in self.killed, f"{method} to a worker that was killed"
        process = self.processes.get(worker)
        if process is None:  # it died, and the pool has not been informed yet
            return
        if method == "exchange":
            rows, drop, _ = arguments
            for index in drop:
                process.sent.pop(index, None)
            assert not process.sent.keys() & {row.index for row in rows}, "a row is sent twice"
            process.sent.update({row.index: row for row in rows})
            process.num_exchanges += 1
            assert process.num_exchanges <= 2, "three exchanges wait"
            assert process.sent, "an exchange with a worker that has no rows"
            assert len(process.sent) <= 3 * max(self.batch, process.most_finished), "more rows than the credit"
        process.calls.append((method, arguments))
        self._begin(process)

    def wait(self, seconds: float) -> list[Event]:
        self.num_waits += 1
        assert self.num_waits < MAX_WAITS, "the job does not end"
        events: list[Event] = []
        end = self.now + seconds
        while not events and self._due and self._due[0][0] <= end:
            self.now = max(self.now, self._due[0][0])
            while self._due and self._due[0][0] <= self.now:
                event = heapq.heappop(self._due)[2]()
                if event is not None:
                    events.append(event)
        if not events:
            self.now = end
        return events

    def kill(self, worker: WorkerId) -> None:
        self.killed.append(worker)
        self.processes.pop(worker, None)

    def close(self) -> None:
        self.is_closed = True

    # What a test does.

    def at(self, seconds: float, action: Callable[[], Event | None]) -> None:
        """Do something `seconds` from now."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), action))

    def die(self, number: int, *, node_lost: bool = False) -> Event | None:
        """End one of the living processes."""
        if not self.processes:
            return None
        process = list(self.processes.values())[number % len(self.processes)]
        return self._end(process, "node lost" if node_lost else "killed", node_lost)

    def get_stuck(self, number: int) -> None:
        """One of the living processes does not answer any more."""
        running = [p for p in self.processes.values() if p.num_exchanges]
        if running:
            running[number % len(running)].is_stuck = True

    def _end(self, process: Process, reason: str, node_lost: bool = False) -> Event | None:
        if self.processes.pop(process.id, None) is None:
            return None
        if not node_lost:
            self.deaths_with.append(sorted(process.sent))
        return Died(process.id, reason, node_lost)

    def _begin(self, process: Process) -> None:
        if process.is_busy or not process.calls or process.ready_at == float("inf"):
            return
        process.is_busy = True
        method, arguments = process.calls.popleft()
        begins = max(self.now, process.ready_at)

        def run() -> Event | None:
            if process.id not in self.processes:
                return None
            if method in process.machine.fail:
                self._answer(process, 0.0, method, process.machine.fail[method](process.id))
            elif method == "exchange":
                self._exchange(process, *arguments)
            else:
                seconds = process.machine.load_seconds if method == "load" else 0.0
                value = {
                    "describe": process.machine.description or description(self.batch),
                    "load": Loaded(process.machine.longest_row, [f"note of a machine {process.machine.longest_row}"]),
                    "limit_length": arguments[0] if arguments else None,
                    "model_differences": [f"asked {process.id}"],
                }[method]
                self._answer(process, seconds, method, Reply(process.id, value))
            return None

        self.at(begins - self.now, run)

    def _answer(self, process: Process, seconds: float, method: str, event: Event | None) -> None:
        def deliver() -> Event | None:
            if process.id not in self.processes or process.is_stuck or event is None:
                return None
            if isinstance(event, Died):
                return self._end(process, event.reason, event.node_lost)
            process.is_busy = False
            if method == "exchange":
                process.num_exchanges -= 1
                if isinstance(event, Reply):
                    for row in event.value.finished.rows:
                        process.sent.pop(row.index, None)
                        self.delivered[process.id].append(row.index)
            self._begin(process)
            return event

        self.at(seconds, deliver)

    def _exchange(self, process: Process, rows: Sequence[RawRow], drop: Sequence[int], seconds: float) -> None:
        """See `Worker.exchange`."""
        dropped = set(drop)
        process.unstarted = deque(row for row in process.unstarted if row.index not in dropped)
        process.unstarted.extend(rows)
        finished = Finished()
        passed = 0.0
        while passed < seconds:
            while process.unstarted and len(process.running) < self.batch:
                row = process.unstarted.popleft()
                index = row.index
                process.digests[index] = row.digest()
                process.running[index] = self._seconds_of(index) / process.machine.speed
                process.num_begun += 1
                if index in self._raisers:
                    lines = f"Traceback\nValueError: row {index}\n"
                    self._answer(process, passed, "exchange", Broken(process.id, lines))
                    return
                if index in self._killers:
                    self._answer(process, passed, "exchange", Died(process.id, f"row {index} killed it"))
                    return
            if not process.running:
                break
            step = min(seconds - passed, *process.running.values())
            passed += step
            process.num_prefilled += step * process.machine.speed * len(process.running) * self._row_speed
            for index in list(process.running):
                process.running[index] -= step
                if process.running[index] <= 1e-9:
                    del process.running[index]
                    finished.add(index, process.digests[index], result(index))
                    process.num_finished += 1
        load = Load(
            EngineStats(generated_tokens=process.num_finished, prefill_tokens=int(process.num_prefilled)),
            num_submitted=process.num_begun,
            num_admitted=process.num_begun,
            running=[(1, 2)] * len(process.running),
            waiting=[2] * len(process.unstarted),
        )
        weights = {"target/w": {"mtime_ns": 1, "sha256": f"of {process.id}"}}
        process.most_finished = max(process.most_finished, len(finished.rows))
        value = Slice(finished, load, list(process.running), weights)
        self._answer(process, passed, "exchange", Reply(process.id, value))


def silent(worker: WorkerId) -> None:
    """No answer ever comes."""


def refused(message: str, hint: str | None = None) -> Callable[[WorkerId], Event]:
    return lambda worker: Refused(worker, message, hint)


def broken(traceback: str) -> Callable[[WorkerId], Event]:
    return lambda worker: Broken(worker, traceback)


def died(reason: str, node_lost: bool = False) -> Callable[[WorkerId], Event]:
    return lambda worker: Died(worker, reason, node_lost)
