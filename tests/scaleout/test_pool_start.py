"""How the workers of a pool start, and which of them do a job together."""

from __future__ import annotations

import pytest

from specbatch.config import Config, DataSection
from specbatch.errors import SpecbatchError
from specbatch.scaleout.rows import Holding
from specbatch.scaleout.worker_manager import Member, PoolLimits, PoolWorker
from tests.scaleout.job import Job, exchanges, loaded_job
from tests.scaleout.simulation import (
    Machine,
    Simulation,
    batch_config,
    description,
    died,
    raw_row,
    refused,
    silent,
)

NEVER = float("inf")


def test_all_workers_start_at_once_and_nothing_loads_before_it_must() -> None:
    simulation = Simulation()
    job = Job(simulation, 3)
    described = job.pool.describe(batch_config(2))
    assert described.node == "node"
    assert simulation.started == [0, 1, 2]
    assert {method for _, method, _ in simulation.calls} == {"describe"}, "weights are read too early"


def test_load_awaits_the_engines_that_were_described_and_no_others() -> None:
    simulation = Simulation(
        machines={
            1: Machine(load_seconds=50, longest_row=70),
            2: Machine(placed_after=60),
            3: Machine(longest_row=80),
        }
    )
    job = Job(simulation, 4)
    settled: list[int] = []
    notes = job.load(lambda here: settled.append(here) or 60)  # type: ignore[func-returns-value]
    assert settled == [70], "the smallest of all engines"
    assert simulation.now - 1000 == pytest.approx(50, abs=1)
    assert notes == ["note of a machine 100", "note of a machine 70", "note of a machine 80"]
    assert "2 of 4 workers are ready" in job.progress
    job.run(1000)
    limits = {worker: arguments for worker, method, arguments in simulation.calls if method == "limit_length"}
    assert limits == dict.fromkeys(range(4), (60,)), "the late worker, too"


def test_a_late_worker_joins() -> None:
    simulation = Simulation(machines={1: Machine(placed_after=5)})
    job = loaded_job(simulation)
    assert [line.state for line in job.pool.state().workers] == ["running", "starting"]
    job.run(200)
    assert job.indices == list(range(200))
    assert len(simulation.delivered[1]) > 50


@pytest.mark.parametrize(
    ("method", "machine"), [("load", Machine(load_seconds=NEVER)), ("describe", Machine(fail={"describe": silent}))]
)
def test_a_worker_that_never_loads_is_an_error_that_names_it(method: str, machine: Machine) -> None:
    simulation = Simulation(machines={0: machine})
    with pytest.raises(SpecbatchError, match=f"worker 1 on node: no answer to `{method}` for 100 seconds") as caught:
        Job(simulation, 1, PoolLimits(start_seconds=100)).load()
    assert "cluster.start_seconds" in str(caught.value.hint)
    assert simulation.now - 1000 == pytest.approx(100, abs=3)


def test_a_worker_that_comes_late_and_never_loads_is_left_out() -> None:
    simulation = Simulation(machines={1: Machine(placed_after=5, load_seconds=NEVER)}, seconds_of=lambda index: 5.0)
    job = loaded_job(simulation, limits=PoolLimits(start_seconds=100)).run(100)
    assert job.indices == list(range(100))
    assert job.log == ["warning: worker 2 on node is not used: no answer to `load` for 100 seconds"]
    assert simulation.killed == [1]


def test_a_worker_may_wait_for_its_place_for_longer() -> None:
    simulation = Simulation(machines={0: Machine(placed_after=500)})
    job = loaded_job(simulation, 1, limits=PoolLimits(start_seconds=100))
    assert job.run(10).indices == list(range(10))


def test_no_request_runs_at_a_worker_without_rows() -> None:
    """Its last answer can be older than the end of its rows, which another worker has computed again."""
    member = Member(1)
    holding = Holding(4)
    member.worker = worker = PoolWorker(0, member, holding=holding)
    worker.load.running = [(1, 2)]
    assert member.line(0.0).running == 0
    holding.own[1] = raw_row(1)
    assert member.line(0.0).running == 1


def test_a_worker_that_is_never_placed_stops_nothing() -> None:
    job = loaded_job(Simulation(machines={0: Machine(placed_after=NEVER)})).run(20)
    assert job.indices == list(range(20))


def test_deaths_before_the_engine_is_built_are_paused_after() -> None:
    dies = Machine(fail={"load": died("no memory")})
    simulation = Simulation(machines=dict.fromkeys(range(10), dies))
    job = Job(simulation, 1, PoolLimits(max_deaths=3))
    with pytest.raises(SpecbatchError, match=r"no worker is left.*worker 1 on node: no memory"):
        job.load()
    assert len(simulation.started) == 4
    assert simulation.now - 1000 == pytest.approx(1 + 2 + 4, abs=0.6)


def test_an_error_in_describe_is_the_users() -> None:
    simulation = Simulation(machines={0: Machine(fail={"describe": refused("no such model", "look")})})
    with pytest.raises(SpecbatchError, match="worker 1 on node: no such model") as caught:
        Job(simulation, 1).load()
    assert caught.value.hint == "look"


def test_workers_of_different_jobs_are_an_error_that_names_node_and_difference() -> None:
    other = description(node="b", made_by={**description().made_by, "versions": {"specbatch": "1", "torch": "3"}})
    simulation = Simulation(machines={1: Machine(description=other)})
    with pytest.raises(SpecbatchError, match=r"worker 2 on b: .* first worker, on node: versions.torch: 2 -> 3"):
        Job(simulation).load()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"digests": {"model.target": "e"}}, "model.target"),
        ({"row_tokens": 7}, "kv_cache_tokens"),
        ({"made_by": {**description().made_by, "device": "cuda (B)"}}, "device"),
        ({"config": Config(data=DataSection(chat_template_date="2026-01-01"))}, "chat_template_date"),
    ],
)
def test_what_must_be_equal(changes: dict[str, object], named: str) -> None:
    simulation = Simulation(machines={1: Machine(description=description(**changes))})
    with pytest.raises(SpecbatchError, match=named):
        Job(simulation).load()


def test_capacity_may_differ() -> None:
    simulation = Simulation(batch=6, machines={1: Machine(description=description(batch=2))})
    job = loaded_job(simulation).run(60)
    assert job.indices == list(range(60))
    assert next(len(rows) for worker, _, (rows, *_) in exchanges(simulation) if worker == 1) == 6


def test_recorded_models_are_compared_by_a_worker_that_lives() -> None:
    simulation = Simulation(machines={0: Machine(fail={"model_differences": died("killed")})})
    job = Job(simulation)
    job.pool.describe(batch_config(2))
    assert job.pool.models.record() == description().weights
    assert job.pool.models.differences({"a": 1}) == ["asked 1"]


def test_the_record_of_the_models_is_the_first_workers() -> None:
    job = loaded_job(Simulation()).run(50)
    assert job.pool.models.record() == {"target/w": {"mtime_ns": 1, "sha256": "of 0"}}
