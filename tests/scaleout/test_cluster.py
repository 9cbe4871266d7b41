"""What workers need, by the section `cluster` and what the nodes have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from specbatch.config import ClusterSection, EngineSection
from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.scaleout.cluster import WorkerPlan, check_section, plan_workers
from specbatch.scaleout.transport import WorkerNeeds, amounts

Nodes = Sequence[Mapping[str, float]]
CPU_HOST: Nodes = [{"CPU": 16.0, "memory": 1e9, "node:127.0.0.1": 1.0}]
GPU_HOST: Nodes = [{"CPU": 64.0, "GPU": 8.0}]
CLUSTER: Nodes = [{"CPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 32.0, "GPU": 4.0}]


def plan(
    nodes: Nodes,
    device: str = "auto",
    environment: Mapping[str, str] | None = None,
    num_ranks: int = 1,
    **options: object,
) -> WorkerPlan:
    engine = EngineSection(device=device, tensor_parallel=num_ranks)
    return plan_workers(ClusterSection(**options), engine, nodes, environment or {})  # type: ignore[arg-type]


def test_a_worker_of_a_gpu_host_has_a_gpu_of_its_own() -> None:
    assert plan(GPU_HOST, workers=8) == WorkerPlan(WorkerNeeds(num_cpus=1, num_gpus=1), 1.0)
    assert plan(GPU_HOST, workers=4, gpus_per_worker=2.0).needs.num_gpus == 2


def test_each_rank_of_a_worker_has_a_gpu() -> None:
    assert plan(GPU_HOST, workers=4, num_ranks=2) == WorkerPlan(WorkerNeeds(num_cpus=1, num_gpus=2), 1.0)
    assert plan(GPU_HOST, workers=2, num_ranks=4).needs.num_gpus == 4
    assert plan(GPU_HOST, workers=1, num_ranks=4, gpus_per_worker=8.0).needs.num_gpus == 8
    assert plan(CLUSTER, workers=64, num_ranks=4, address="auto").needs.num_gpus == 4
    assert plan(CPU_HOST, workers=4, num_ranks=2).needs.num_gpus == 0
    assert plan(GPU_HOST, "cpu", workers=4, num_ranks=2).needs.num_gpus == 0


def test_workers_of_a_host_without_gpus_share_its_memory_and_its_cores() -> None:
    found = plan(CPU_HOST, workers=4)
    assert found == WorkerPlan(WorkerNeeds(num_cpus=1, num_gpus=0, threads=None), 0.25)
    assert plan(GPU_HOST, "cpu", workers=4) == found


@pytest.mark.parametrize(("part", "share"), [(0.5, 0.5), (0.3, 1 / 3), (1 / 3, 1 / 3), (0.25, 0.25)])
def test_workers_on_one_gpu_share_its_memory(part: float, share: float) -> None:
    assert plan(GPU_HOST, workers=2, gpus_per_worker=part).memory_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("options", "nodes", "hint"),
    [
        ({"workers": 9}, GPU_HOST, "use at most 8 workers, or share GPUs: cluster.gpus_per_worker: 0.5"),
        ({"workers": 17, "gpus_per_worker": 0.5}, GPU_HOST, "use at most 16 workers"),
        ({"workers": 5, "gpus_per_worker": 2.0}, GPU_HOST, "use at most 4 workers"),
        ({"workers": 1, "gpus_per_worker": 1.0}, CPU_HOST, "use engine.device: cpu"),
        ({"workers": 3, "num_ranks": 4}, GPU_HOST, "use at most 2 workers, or lower engine.tensor_parallel"),
        ({"workers": 2, "num_ranks": 8}, GPU_HOST, "use at most 1 worker, or lower engine.tensor_parallel"),
        ({"workers": 1, "num_ranks": 16}, GPU_HOST, "lower engine.tensor_parallel"),
    ],
)
def test_too_few_gpus_on_this_host(options: dict[str, object], nodes: Nodes, hint: str) -> None:
    with pytest.raises(ConfigError, match=r"but this host has \d GPUs") as raised:
        plan(nodes, **options)
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(hint)
    plan(nodes, address="auto", **options)  # a cluster can grow


def test_a_cluster_with_gpus_gives_each_worker_one() -> None:
    needs = plan(CLUSTER, workers=64, address="auto", resources={"rack": 1.0}).needs
    assert needs == WorkerNeeds(1, 1, {"rack": 1.0})
    assert str(needs) == "1 CPU, 1 GPU, 1 rack"
    assert plan([{"CPU": 4.0}], "cuda", workers=2, address="auto").needs.num_gpus == 1, "GPUs can come later"


def test_in_a_cluster_a_cpu_worker_takes_memory_for_the_fullest_node() -> None:
    """Where Ray places workers is not known: at most as many as there are cores for."""
    assert plan(CLUSTER, "cpu", workers=200, address="auto", cpus_per_worker=16).memory_share == 0.25
    assert plan(CLUSTER, "cpu", workers=3, address="auto").memory_share == pytest.approx(1 / 3)
    assert plan([], "cpu", workers=3, address="auto").memory_share == 1


def test_threads_are_the_users_number_or_that_of_the_reserved_cores() -> None:
    assert plan(CPU_HOST, workers=2).needs.threads is None
    assert plan(CPU_HOST, workers=2, cpus_per_worker=8).needs == WorkerNeeds(8, 0, threads="8")
    assert plan(CPU_HOST, environment={"OMP_NUM_THREADS": "3"}, workers=2, cpus_per_worker=8).needs.threads == "3"


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({}, "cuda:1", "engine.device: cuda:1 names one GPU"),
        ({"gpus_per_worker": 1.5}, "auto", "a part of one GPU or a whole number, not 1.5"),
        ({"gpus_per_worker": 1e-6}, "auto", "at least 0.0001, not 1e-06"),
        ({"gpus_per_worker": 1.0}, "cpu", "engine.device is cpu"),
        ({"gpus_per_worker": 0.0}, "auto", "engine.device is auto"),
        ({"resources": {"rack": 1.0}}, "auto", "cluster.address is not set"),
        ({"cpus_per_worker": 5}, "cpu", "need 10 CPU cores, and this host has 8"),
        ({"gpus_per_worker": 1.0}, "2 ranks", "with engine.tensor_parallel: 2 a worker has 2 processes"),
        ({"gpus_per_worker": 0.5}, "2 ranks", "with engine.tensor_parallel: 2 a worker has 2 processes"),
    ],
)
def test_mistakes_are_found_before_ray_starts(options: dict[str, object], device: str, message: str) -> None:
    engine = EngineSection(tensor_parallel=2) if device == "2 ranks" else EngineSection(device=device)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check_section(ClusterSection(workers=2, **options), engine, cores=8)  # type: ignore[arg-type]
    check_section(ClusterSection(workers=2, cpus_per_worker=4), EngineSection(), cores=8)
    check_section(ClusterSection(workers=2, gpus_per_worker=2.0), EngineSection(tensor_parallel=2), cores=8)


def test_an_address_needs_a_number_of_workers() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.workers is not"):
        load_config(None, ["cluster.address=auto"])
    assert load_config(None, ["cluster.address=auto", "cluster.workers=2"]).cluster.workers == 2


def test_amounts_leave_out_what_ray_adds() -> None:
    assert amounts({"CPU": 2.0, "GPU": 0.5, "memory": 1e9, "object_store_memory": 1e8, "node:1.2.3.4": 1.0}) == (
        "2 CPU, 0.5 GPU"
    )
    assert amounts({}) == "nothing"


def test_ray_is_imported_only_for_a_job_with_workers() -> None:
    script = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from rich.console import Console
from specbatch import startup
from specbatch.config_load import load_config
from specbatch.errors import SpecbatchError
config = load_config(None, ["cluster.workers=2"])
startup.open_pool(load_config(), Console())
try:
    startup.open_pool(config, Console()).describe(config)
except SpecbatchError as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "pip install 'specbatch[ray]'\n"
