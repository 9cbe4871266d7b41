"""The life of a pool's workers: start, describe, load, deadlines, deaths and replacements.

A worker answers describe, load and limit_length once each, and exchange after exchange from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbatch.config import Config
from specbatch.errors import SpecbatchError, WorkerFailed
from specbatch.job.runner import Load
from specbatch.job.worker import Description, Loaded, Slice
from specbatch.results.fingerprint import differences
from specbatch.results.stats import WorkerLine
from specbatch.scaleout.rows import Holding
from specbatch.scaleout.transport import Broken, Died, Event, Placed, Refused, Reply, Transport, WorkerId

_WAIT_SECONDS = 0.2
_CHECK_SECONDS = 1.0  # between two looks at the deadlines
_KEPT = "finished rows are kept, and the same command continues"


@dataclass(frozen=True)
class PoolLimits:
    max_deaths: int = 5  # deaths of a member after which it gets another worker
    stuck_seconds: float = 300.0  # longest wait for the answer to an exchange; then the worker is killed
    start_seconds: float = 3600.0  # longest wait for each answer before that; then the worker is not used
    slice_seconds: float = 0.25  # time that a worker runs in an exchange


@dataclass(slots=True, eq=False)
class PoolWorker:
    """One process, from its start to its death."""

    id: WorkerId
    member: Member
    calls: deque[str] = field(default_factory=deque)  # methods that have not answered, the oldest first
    began: float = 0.0  # when the oldest of them could begin
    node: str | None = None  # None: not placed yet
    description: Description | None = None
    loaded: Loaded | None = None
    holding: Holding | None = None  # None: not ready for rows
    load: Load = field(default_factory=Load)  # at its last answer

    @property
    def name(self) -> str:
        node = f" on {self.node}" if self.node is not None else ""
        return f"worker {self.member.number}{node}"


@dataclass(slots=True, eq=False)
class Member:
    """One of the N workers that the user asked for."""

    number: int  # from 1
    worker: PoolWorker | None = None
    restart_at: float | None = None  # when the next process is asked for
    deaths: int = 0
    deaths_at_start: int = 0  # the last ones, before an engine was built
    deaths_by_row: int = 0  # while a row ran alone, which is the cause then
    node: str = ""
    device: str = ""
    rows: int = 0
    tokens: int = 0  # tokens that earlier processes generated
    seconds: float = 0.0  # seconds of earlier processes since their engines were built
    ready_at: float = 0.0

    @property
    def is_lost(self) -> bool:
        """Return whether the member has no process and gets none."""
        return self.worker is None and self.restart_at is None

    @property
    def back_off_seconds(self) -> float:
        """Until the next process is asked for: 1, 2, 4 ... after deaths without an engine."""
        return 2.0 ** (self.deaths_at_start - 1) if self.deaths_at_start else 0.0

    def line(self, now: float) -> WorkerLine:
        worker, running = self.worker, 0
        tokens, seconds = self.tokens, self.seconds
        state = "lost" if self.is_lost else "starting"
        if worker is not None and worker.holding is not None:
            # At its last answer, which can be older than the end of its rows.
            state, running = "running", len(worker.load.running) if worker.holding.num_rows else 0
            tokens += worker.load.stats.generated_tokens
            seconds += now - self.ready_at
        elif worker is not None and worker.description is not None:
            state = "loading"
        return WorkerLine(self.node, self.device, state, self.rows, running, tokens, self.deaths, round(seconds, 3))

    def end(self, now: float) -> None:
        """Its process is gone. What that has done counts."""
        line = self.line(now)
        self.tokens, self.seconds, self.worker = line.tokens, line.seconds, None


def merged(loads: Iterable[Load]) -> Load:
    """Sums over engines."""
    total = Load()
    for load in loads:
        total.stats.add(load.stats)
        total.num_submitted += load.num_submitted
        total.num_admitted += load.num_admitted
        total.running += load.running
        total.waiting += load.waiting
        total.num_unprepared += load.num_unprepared
    return total


@dataclass(frozen=True)
class Handlers:
    """Functions of the pool that are called when something happens to a worker."""

    ready: Callable[[PoolWorker], None]
    answered: Callable[[PoolWorker, Slice], None]
    gone: Callable[[PoolWorker, str, bool], None]  # (worker, reason, whether a row can be the cause)


class WorkerManager:
    """An error is kept in `error`: when it comes, rows can have finished that are to be returned first."""

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        limits: PoolLimits,
        handlers: Handlers,
        log: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.members = [Member(number) for number in range(1, num_workers + 1)]
        self.workers: dict[WorkerId, PoolWorker] = {}  # workers that live
        self.error: Exception | None = None
        self.is_cut_off = False  # no event will come
        self.models: Mapping[str, Any] = {}  # the record of the models' files, as the first worker sees them
        self._transport = transport
        self._limits = limits
        self._handlers = handlers
        self._log = log
        self._clock = clock
        self._num_started = 0
        self._config: Config | None = None
        self._first: WorkerId | None = None  # the worker that described the job
        self._job: Description | None = None
        self._is_loading = False
        self._longest_row: int | None = None
        self._answer: Any = None  # answer to `ask`
        self._last_reason = ""  # why a worker was lost
        self._error: str | None = None  # the error of this program by which the last worker was lost
        self._checked_at = clock()

    def describe(self, config: Config) -> Description:
        """Start all workers. Waits until the first has described the job."""
        self._config = config
        for member in self.members:
            self._start(member)
        self._wait_until(lambda: self._job is not None)
        assert self._job is not None
        return self._job

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of any worker that has described the job. Waits for its answer, which is not None."""
        asked: PoolWorker | None = None
        self._answer = None

        def is_answered() -> bool:
            nonlocal asked
            if self._answer is None and (asked is None or asked.id not in self.workers):
                asked = next(iter(self._describers()), None)
                if asked is not None:
                    self.call(asked, method, *arguments)
            return self._answer is not None

        self._wait_until(is_answered)
        return self._answer

    def load(self, settle: Callable[[int], int], on_progress: Callable[[str], None]) -> Sequence[str]:
        """Waits until one engine is built, and those of all workers that have described the job by then. See
        `WorkerPool.load`."""
        self._is_loading = True
        for worker in self._describers():
            self.call(worker, "load")

        def show() -> None:
            on_progress(f"{len(self._builders())} of {len(self.members)} workers are ready")

        self._wait_until(lambda: bool(self._builders()), show)
        described = self._describers()

        def all_are_loaded() -> bool:
            return bool(self._builders()) and all(w.loaded is not None or w.id not in self.workers for w in described)

        self._wait_until(all_are_loaded, show)
        loaded = self._builders()
        self._longest_row = settle(min(item.longest_row for _, item in loaded))
        for worker, _ in loaded:
            self._make_ready(worker)
        return list(dict.fromkeys(note for _, item in loaded for note in item.notes))

    def call(self, worker: PoolWorker, method: str, *arguments: Any) -> None:
        if not worker.calls:
            worker.began = self._clock()
        worker.calls.append(method)
        self._transport.call(worker.id, method, *arguments)

    def advance(self) -> None:
        """Wait for events for a moment, handle them, and do what is due."""
        now = self._clock()
        for member in self.members:
            if member.restart_at is not None and member.restart_at <= now:
                self._start(member)
        self.handle_events(_WAIT_SECONDS)
        if self._clock() >= self._checked_at + _CHECK_SECONDS:
            self._kill_stuck()
            self._checked_at = self._clock()

    def handle_events(self, seconds: float) -> Sequence[Event]:
        """Wait for at most `seconds`. Returns the events, which have been handled."""
        try:
            events = self._transport.wait(seconds)
        except SpecbatchError as error:  # rows that have finished are returned first
            self.fail(error)
            self.is_cut_off = True
            return []
        for event in events:
            worker = self.workers.get(event.worker)
            if worker is not None:
                self._handle(worker, event)
        return events

    def fail(self, error: Exception) -> None:
        """The first error counts."""
        self.error = self.error or error

    def raise_failure(self) -> None:
        if self.error is not None:
            raise self.error
        if all(member.is_lost for member in self.members) and self._error is not None:
            raise WorkerFailed(f"no worker is left. There was {self._error}", _KEPT)
        if all(member.is_lost for member in self.members):
            raise SpecbatchError(f"no worker is left. The last one was {self._last_reason}", _KEPT)

    def _wait_until(self, condition: Callable[[], bool], show: Callable[[], None] = lambda: None) -> None:
        while not condition():
            self.raise_failure()
            show()
            self.advance()
        self.raise_failure()

    def _describers(self) -> list[PoolWorker]:
        return [worker for worker in self.workers.values() if worker.description is not None]

    def _builders(self) -> list[tuple[PoolWorker, Loaded]]:
        return [(worker, worker.loaded) for worker in self.workers.values() if worker.loaded is not None]

    def _start(self, member: Member) -> None:
        member.worker = worker = PoolWorker(self._num_started, member)
        member.restart_at = None
        self.workers[worker.id] = worker
        self._num_started += 1
        self._transport.start(worker.id)
        self.call(worker, "describe", self._config)

    def _handle(self, worker: PoolWorker, event: Event) -> None:
        match event:
            case Placed(_, node):
                worker.began, worker.node = self._clock(), node
            case Reply(_, value):
                worker.began = self._clock()
                self._handle_reply(worker, worker.calls.popleft(), value)
            case Refused(_, message, hint):
                if worker.calls.popleft() == "exchange":
                    self.fail(SpecbatchError(f"{worker.name}: {message}", hint))
                else:
                    self._leave_out(worker, message, hint)
            case Broken(_, traceback):
                error = f"an error in {worker.name}:\n{traceback}"
                if worker.calls.popleft() != "exchange" or worker.holding is None:
                    self.fail(WorkerFailed(error, _KEPT))
                    return
                # One of its rows can be the cause, as when its process dies. Its engine is of no use any more.
                self._log(f"warning: {error}")
                self._error = error
                self._transport.kill(worker.id)
                self._end(worker, traceback.strip().rpartition("\n")[2], blame=True)
            case Died(_, reason, node_lost):
                self._error = None
                self._end(worker, reason, blame=not node_lost)

    def _handle_reply(self, worker: PoolWorker, method: str, value: Any) -> None:
        if method == "exchange":
            worker.load = value.load
            if worker.id == self._first:
                self.models = value.models
            self._handlers.answered(worker, value)
        elif method == "describe":
            self._compare(worker, value)
        elif method == "load":
            worker.loaded = value
            worker.member.deaths_at_start = 0
            if self._longest_row is not None:
                self._make_ready(worker)
        elif method != "limit_length":
            self._answer = value

    def _compare(self, worker: PoolWorker, description: Description) -> None:
        """Every worker must do the same job as the first."""
        worker.description = description
        worker.member.node, worker.member.device = description.node, str(description.made_by["device"])
        if self._job is None:
            self._job, self._first, self.models = description, worker.id, description.weights
        elif changed := differences(_identity(self._job), _identity(description)):
            message = f"its job differs from that of the first worker, on {self._job.node}: {'; '.join(changed)}"
            self._leave_out(worker, message, "all nodes need the same models, versions and devices")
            return
        if self._is_loading:
            self.call(worker, "load")

    def _make_ready(self, worker: PoolWorker) -> None:
        self.call(worker, "limit_length", self._longest_row)
        worker.member.ready_at = self._clock()
        self._handlers.ready(worker)

    def _leave_out(self, worker: PoolWorker, message: str, hint: str | None) -> None:
        """A worker cannot do the job. That is an error, unless others do the job already."""
        others = any(not member.is_lost for member in self.members if member is not worker.member)
        if self._longest_row is None or not others:
            self.fail(SpecbatchError(f"{worker.name}: {message}", hint))
            return
        self._log(f"warning: {worker.name} is not used: {message}")
        self._transport.kill(worker.id)
        self._remove(worker, message, blame=False)

    def _end(self, worker: PoolWorker, reason: str, *, blame: bool) -> None:
        """A worker has died. It is replaced, but not too often: a row that runs alone is left out after its death, so
        such deaths do not count."""
        member = worker.member
        member.deaths += 1
        member.deaths_at_start += worker.loaded is None
        member.deaths_by_row += blame and worker.holding is not None and worker.holding.alone
        is_replaced = member.deaths - member.deaths_by_row <= self._limits.max_deaths
        then = "it is replaced" if is_replaced else f"it is not replaced after {member.deaths} deaths"
        self._log(f"warning: {worker.name} died ({reason}); {then}")
        self._remove(worker, reason, blame=blame)
        if is_replaced:
            member.restart_at = self._clock() + member.back_off_seconds

    def _remove(self, worker: PoolWorker, reason: str, *, blame: bool) -> None:
        del self.workers[worker.id]
        worker.member.end(self._clock())
        self._last_reason = f"{worker.name}: {reason}"
        if worker.holding is not None:
            self._handlers.gone(worker, reason, blame)

    def _kill_stuck(self) -> None:
        if not any(map(self._is_stuck, self.workers.values())):
            return
        while self.handle_events(0):  # this process may have been away for long, and answers have come meanwhile
            pass
        for worker in [worker for worker in self.workers.values() if self._is_stuck(worker)]:
            if worker.holding is None:
                message = f"no answer to `{worker.calls[0]}` for {self._limits.start_seconds:g} seconds"
                self._leave_out(worker, message, "cluster.start_seconds is the limit; look at that process")
            else:
                self._transport.kill(worker.id)
                self._end(worker, f"no answer for {self._limits.stuck_seconds:g} seconds", blame=True)

    def _is_stuck(self, worker: PoolWorker) -> bool:
        is_starting = worker.holding is None
        if not worker.calls or (is_starting and worker.node is None):  # it can wait for room in the cluster for ever
            return False
        limit = self._limits.start_seconds if is_starting else self._limits.stuck_seconds
        return self._clock() - worker.began > limit


def _identity(description: Description) -> dict[str, Any]:
    """Return the values that must be equal on all workers."""
    made_by = dict(description.made_by)
    versions = {f"versions.{name}": version for name, version in made_by.pop("versions").items()}
    return {**description.fingerprint({}, None), **versions, **made_by}
