"""The members of a pool: each has one worker at a time, and another one after its death."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from specbatch.job.runner import Load
from specbatch.job.worker import Description, Loaded
from specbatch.results.stats import WorkerLine
from specbatch.scaleout.rows import Holding
from specbatch.scaleout.transport import WorkerId


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
        """The seconds until the next process is requested: 1, 2, 4 ... after deaths without an engine."""
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
        """Note that the process is gone. Its tokens and seconds still count."""
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
