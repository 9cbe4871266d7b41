"""The section `cluster`: what each worker needs, and the pool of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from specbatch.config import ClusterSection, Config, EngineSection
from specbatch.errors import ConfigError
from specbatch.job.worker import Worker
from specbatch.scaleout.pool import Pool
from specbatch.scaleout.transport import Transport, WorkerNeeds
from specbatch.scaleout.worker import MakeWorker
from specbatch.scaleout.worker_manager import PoolLimits

_SMALLEST_SHARE = 0.0001  # smallest part of a GPU that Ray can assign


@dataclass(frozen=True)
class WorkerPlan:
    """The plan of workers. `memory_share`: a worker's part of the memory that one worker alone would use."""

    needs: WorkerNeeds
    memory_share: float


def open_pool(config: Config, new_worker: Callable[[], Worker], log: Callable[[str], None]) -> Pool:
    """`cluster.workers` workers, which is not None. `new_worker` is called in each worker's process.

    Raises ConfigError. `Pool.describe` starts Ray, or joins `cluster.address`."""
    section = config.cluster
    assert section.workers is not None
    cores = num_cores()
    check_section(section, config.engine, cores)
    transport = cast(Transport, _Deferred(lambda: _open_transport(config, new_worker, cores, log)))
    limits = PoolLimits(section.max_deaths, section.stuck_seconds, section.start_seconds)
    return Pool(transport, section.workers, limits, log=log)


def _open_transport(
    config: Config, new_worker: Callable[[], Worker], cores: int, log: Callable[[str], None]
) -> Transport:
    from specbatch.scaleout.ray_session import RaySession  # it imports Ray
    from specbatch.scaleout.ray_transport import RayTransport

    section = config.cluster
    session = RaySession(section.address, num_cpus=max(cores, (section.workers or 1) * (section.cpus_per_worker or 1)))
    try:
        plan = plan_workers(section, config.engine, session.nodes())
        return RayTransport(session, MakeWorker(new_worker, plan.memory_share, uuid.uuid4().hex), plan.needs, log)
    except BaseException:
        session.close()
        raise


class _Deferred:
    """A transport that is opened when the first worker is started: it takes seconds, and mistakes in the input and the
    output are found before."""

    def __init__(self, open: Callable[[], Transport]) -> None:
        self._open = open
        self._transport: Transport | None = None

    def __getattr__(self, name: str) -> Any:
        if self._transport is None:
            self._transport = self._open()
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def check_section(section: ClusterSection, engine: EngineSection, cores: int) -> None:
    """Check the values that are wrong for every cluster. `cores`: the number of cores of this host. Raises
    ConfigError."""
    gpus, cpus, device, num_ranks = (
        section.gpus_per_worker,
        section.cpus_per_worker,
        engine.device,
        engine.tensor_parallel,
    )
    if ":" in device:
        raise ConfigError(
            f"engine.device: {device} names one GPU, and Ray gives each of cluster.workers its own",
            "use engine.device: cuda; CUDA_VISIBLE_DEVICES limits the GPUs of this host",
        )
    if gpus is not None and gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"cluster.gpus_per_worker must be a part of one GPU or a whole number, not {gpus:g}")
    if gpus is not None and 0 < gpus < _SMALLEST_SHARE:
        raise ConfigError(f"cluster.gpus_per_worker must be 0 or at least {_SMALLEST_SHARE}, not {gpus:g}")
    if gpus and device == "cpu":
        raise ConfigError(
            f"cluster.gpus_per_worker is {gpus:g}, but engine.device is cpu", "leave cluster.gpus_per_worker out"
        )
    if gpus == 0 and device != "cpu":
        raise ConfigError(
            f"cluster.gpus_per_worker is 0, but engine.device is {device}", "workers without GPUs: engine.device: cpu"
        )
    if gpus and num_ranks > 1 and gpus < num_ranks:
        raise ConfigError(
            f"cluster.gpus_per_worker is {gpus:g}, and with engine.tensor_parallel: {num_ranks} a worker has "
            f"{num_ranks} processes, each with a GPU of its own",
            "leave cluster.gpus_per_worker out",
        )
    if section.address is None and section.resources:
        raise ConfigError(
            "cluster.resources are of a Ray cluster, and cluster.address is not set", "use cluster.address: auto"
        )
    if section.address is None and cpus is not None and section.workers is not None and section.workers * cpus > cores:
        raise ConfigError(
            f"{section.workers} workers with cluster.cpus_per_worker {cpus} need {section.workers * cpus} CPU cores, "
            f"and this host has {cores}",
            "leave cluster.cpus_per_worker out: workers share the cores then",
        )


def plan_workers(
    section: ClusterSection,
    engine: EngineSection,
    nodes: Sequence[Mapping[str, float]],
    environment: Mapping[str, str] = os.environ,
) -> WorkerPlan:
    """Plan the workers. `nodes`: the resources of each node, by Ray's names. Each rank of a worker has a GPU. Ray gives
    a worker those of one node, and its process sees no others (CUDA_VISIBLE_DEVICES).

    It raises ConfigError if this host alone has too few GPUs. A cluster can grow.
    """
    assert section.workers is not None
    device, num_ranks = engine.device, engine.tensor_parallel
    all_gpus = [int(node.get("GPU", 0)) for node in nodes]
    gpus = section.gpus_per_worker
    if gpus is None:
        gpus = float(num_ranks) if device != "cpu" and (any(all_gpus) or device == "cuda") else 0.0
    per_gpu = int(1 / gpus + 1e-9) if 0 < gpus < 1 else 1  # workers
    if section.address is None and gpus:
        room = sum(all_gpus) * per_gpu if gpus < 1 else int(sum(all_gpus) / gpus)
        if section.workers > room:
            has = f"{sum(all_gpus)} GPU{'' if sum(all_gpus) == 1 else 's'}"
            fewer = f"use at most {room} worker{'' if room == 1 else 's'}, or "
            other = "lower engine.tensor_parallel" if num_ranks > 1 else "share GPUs: cluster.gpus_per_worker: 0.5"
            raise ConfigError(
                f"cluster.workers is {section.workers}, but this host has {has}, and a worker needs {gpus:g}",
                (fewer if room else "") + other if any(all_gpus) else "use engine.device: cpu",
            )
    cpus = section.cpus_per_worker or 1
    threads = environment.get("OMP_NUM_THREADS") or None
    if threads is None and section.cpus_per_worker is not None:
        threads = str(section.cpus_per_worker)
    if gpus:
        share = 1 / per_gpu
    elif section.address is None:
        share = 1 / section.workers
    else:  # Assume that all workers for which one node has cores run on that node.
        share = 1 / max(1, min(section.workers, max((int(node.get("CPU", 0)) for node in nodes), default=0) // cpus))
    return WorkerPlan(WorkerNeeds(cpus, gpus, dict(section.resources or {}), threads), share)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1
