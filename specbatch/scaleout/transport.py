"""Interface of the system that runs a pool's processes. `Pool` has the rules; a transport only carries calls.

Each process holds one `job.worker.Worker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

WorkerId = int  # a new process has a new one, also if it replaces another


@dataclass(frozen=True)
class WorkerNeeds:
    """Resources that Ray reserves for a worker, and the number of threads that is set in its process."""

    num_cpus: int = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    threads: str | None = None  # OMP_NUM_THREADS; None: not set, and engines share the node's cores

    def __str__(self) -> str:
        return amounts({"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources})


def amounts(resources: Mapping[str, float]) -> str:
    """Resources for a message, without those that Ray adds itself."""
    shown = {name: n for name, n in resources.items() if n and ":" not in name and "memory" not in name}
    return ", ".join(f"{n:g} {name}" for name, n in sorted(shown.items())) or "nothing"


@dataclass(frozen=True, slots=True)
class Placed:
    """The process is there: its calls begin."""

    worker: WorkerId
    node: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A call's result. It belongs to the pool: the process does not change it later."""

    worker: WorkerId
    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A call raised a SpecbatchError."""

    worker: WorkerId
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A call raised another exception."""

    worker: WorkerId
    traceback: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process is gone, with all calls that it has not answered."""

    worker: WorkerId
    reason: str
    node_lost: bool = False  # its whole node is gone, so that no row is the cause


Event = Placed | Reply | Refused | Broken | Died


class Transport(Protocol):
    """Carries calls to processes and events back. Only `wait` blocks."""

    def start(self, worker: WorkerId) -> None:
        """Ask for a process. It can begin much later, or never. Calls are allowed at once."""
        ...

    def call(self, worker: WorkerId, method: str, *arguments: Any) -> None:
        """Call a method of the process's Worker. Calls run in their order, one at a time; so do their answers."""
        ...

    def wait(self, seconds: float) -> Sequence[Event]:
        """The events that have come, at least one; none if there is none after `seconds`."""
        ...

    def kill(self, worker: WorkerId) -> None:
        """End a process. No event of it comes after this."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...
