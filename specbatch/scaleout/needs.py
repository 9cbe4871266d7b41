"""Resources that a worker needs from its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
