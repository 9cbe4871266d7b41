"""What follows when workers of a pool die, and which rows are the cause."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from specbatch.errors import SpecbatchError, WorkerFailed
from specbatch.results.partial import RowDeaths
from specbatch.results.results import ResultFile
from specbatch.scaleout.transport import Event
from specbatch.scaleout.worker_manager import PoolLimits
from tests.scaleout.job import exchanges, indices, loaded_job
from tests.scaleout.simulation import (
    Machine,
    Simulation,
    description,
    died,
    raw_row,
    refused,
)


def test_rows_of_a_dead_worker_run_again_before_others_in_order() -> None:
    simulation = Simulation(batch=2, machines={1: Machine(load_seconds=0)})
    job = loaded_job(simulation, 1)
    simulation.at(0.5, lambda: simulation.die(0))
    job.run(40)
    assert job.indices == list(range(40))
    again = [index for worker, _, (rows, *_) in exchanges(simulation) if worker == 1 for index in indices(rows)]
    returned = simulation.delivered[0]
    assert again == [index for index in range(40) if index not in returned]
    assert job.log == ["warning: worker 1 on node died (killed); it is replaced"]


def test_a_loaded_worker_is_replaced_at_once() -> None:
    simulation = Simulation()
    job = loaded_job(simulation)
    simulation.at(0.5, lambda: simulation.die(0))
    job.run(100, lambda: None)
    (started,) = [call for call in simulation.calls if call[:2] == (2, "describe")]
    assert started
    assert [line.deaths for line in job.pool.state().workers] == [1, 0]


def test_too_many_deaths_leave_the_rows_to_the_others() -> None:
    dies = Machine(fail={"exchange": died("broken card", node_lost=True)})
    simulation = Simulation(machines=dict.fromkeys([1, 2, 3], dies))
    job = loaded_job(simulation, 2, limits=PoolLimits(max_deaths=2)).run(50)
    assert job.indices == list(range(50))
    assert len(simulation.started) == 4
    assert job.log[-1] == "warning: worker 2 on node died (broken card); it is not replaced after 3 deaths"
    assert [line.state for line in job.pool.state().workers] == ["running", "lost"]


def test_no_worker_left_is_an_error_after_the_finished_rows() -> None:
    simulation = Simulation()
    job = loaded_job(simulation, 2, limits=PoolLimits(max_deaths=0))
    simulation.at(1.0, lambda: simulation.die(0))
    simulation.at(1.1, lambda: simulation.die(0))
    with pytest.raises(SpecbatchError, match=r"no worker is left.*killed") as caught:
        job.run(1000)
    assert job.indices == sorted(simulation.delivered[0] + simulation.delivered[1])
    assert job.indices
    assert "finished rows are kept" in str(caught.value.hint)


def test_workers_that_are_gone_after_the_last_row_are_no_error() -> None:
    simulation = Simulation(killers=[9])
    job = loaded_job(simulation, 1, limits=PoolLimits(max_deaths=2), quarantine=True).run(10)
    assert job.indices == list(range(10))
    assert job.pool.state().workers[0].state == "starting", "its last death was that of a row alone"


def test_a_lost_node_blames_no_row() -> None:
    simulation = Simulation(batch=1, seconds_of=lambda index: 10.0)
    job = loaded_job(simulation, 1, limits=PoolLimits(max_deaths=10))
    for seconds in range(1, 20, 4):
        simulation.at(seconds, lambda: simulation.die(0, node_lost=True))
    job.run(1)
    assert job.indices == [0]
    assert job.finished.totals.ok == 1


def test_a_stuck_worker_is_killed_and_its_rows_run_elsewhere() -> None:
    simulation = Simulation()
    job = loaded_job(simulation, limits=PoolLimits(stuck_seconds=60))
    simulation.at(0.5, lambda: simulation.get_stuck(0))
    began = simulation.now
    job.run(1000)
    assert job.indices == list(range(1000))
    assert simulation.killed == [0]
    assert job.log == ["warning: worker 1 on node died (no answer for 60 seconds); it is replaced"]
    assert simulation.now - began > 60


def test_slow_exchanges_that_wait_for_each_other_are_not_stuck() -> None:
    """The time of an exchange begins when the one before it has answered."""
    simulation = Simulation()
    job = loaded_job(simulation, 1, limits=PoolLimits(slice_seconds=50, stuck_seconds=60)).run(2000)
    assert simulation.killed == []
    assert len(job.indices) == 2000


def test_answers_that_came_while_this_process_was_away_count() -> None:
    simulation = Simulation()
    job = loaded_job(simulation, limits=PoolLimits(stuck_seconds=60))
    away = iter([0.0, 500.0])

    def stop() -> None:
        simulation.now += next(away, 0.0)

    job.run(100, stop)
    assert simulation.killed == []


def test_a_replacement_of_another_job_is_left_out() -> None:
    simulation = Simulation(machines={2: Machine(description=description(node="old", row_tokens=7))})
    job = loaded_job(simulation)
    simulation.at(0.5, lambda: simulation.die(0))
    job.run(100)
    assert job.indices == list(range(100))
    assert "warning: worker 1 on old is not used: its job differs" in job.log[1]
    assert simulation.killed == [2]
    assert [line.state for line in job.pool.state().workers] == ["lost", "running"]


def test_a_replacement_that_cannot_do_the_job_is_an_error_if_it_is_the_only_one() -> None:
    simulation = Simulation(machines={1: Machine(fail={"load": refused("no memory", "more")})})
    job = loaded_job(simulation, 1)
    simulation.at(0.5, lambda: simulation.die(0))
    with pytest.raises(SpecbatchError, match="worker 1 on node: no memory"):
        job.run(100)
    assert job.indices == sorted(simulation.delivered[0])


def test_a_row_that_kills_is_named() -> None:
    simulation = Simulation(killers=[17])
    job = loaded_job(simulation, 2)
    with pytest.raises(WorkerFailed, match="the row with index 17 ends the process each time") as caught:
        job.run(100)
    assert "--quarantine" in str(caught.value.hint)
    assert "row 17 killed it" in caught.value.message
    assert job.indices == [index for index in range(100) if index != 17], "all other rows have finished"
    assert job.left_out[17].times == 3


def test_quarantine_makes_it_an_error_row() -> None:
    simulation = Simulation(batch=4, killers=[17, 18, 60])
    job = loaded_job(simulation, 3, quarantine=True).run(100)
    assert job.indices == list(range(100))
    bad = {row.index: json.loads(row.line) for row in job.finished.rows if b'"error"' in row.line}
    assert list(bad) == [17, 18, 60] or sorted(bad) == [17, 18, 60]
    assert bad[17]["error"]["type"] == "worker_died"
    assert bad[17]["id"] == "row-17"
    assert job.finished.totals.errors == {"worker_died": 3}
    assert job.finished.totals.ok == 97


def test_many_rows_that_kill_do_not_use_up_the_worker() -> None:
    """Deaths of rows that run alone are not the worker's fault."""
    killers = [1, 7, 20, 21, 22, 23]
    simulation = Simulation(batch=4, killers=killers)
    job = loaded_job(simulation, 1, quarantine=True, limits=PoolLimits(max_deaths=4)).run(40)
    assert job.finished.totals.errors == {"worker_died": len(killers)}
    assert job.finished.totals.ok == 40 - len(killers)
    assert len(simulation.deaths_with) == 4 + len(killers)


def test_a_suspect_runs_alone_and_last() -> None:
    simulation = Simulation(batch=4, killers=[5])
    job = loaded_job(simulation, 2, quarantine=True).run(60)
    third = simulation.deaths_with[2]
    assert third == [5], "the third worker had it alone"
    assert len(simulation.deaths_with) == 3
    assert set(range(60)) - {5} - set(job.indices) == set()


def test_deaths_are_counted_over_sessions(tmp_path: Path) -> None:
    def open_results() -> ResultFile:
        return ResultFile(tmp_path / "o.jsonl", {"input.sha256": "0"}, overwrite=False)

    job = loaded_job(Simulation(batch=2, killers=[5]), 1, limits=PoolLimits(max_deaths=1))
    no_worker = pytest.raises(SpecbatchError, match="no worker is left")
    with closing(open_results()) as results, no_worker, job.pool.recording(results):
        job.run(20)
    with closing(open_results()) as results:
        assert results.deaths_of(raw_row(5)) == RowDeaths(2, raw_row(5).digest(), "row 5 killed it")
        simulation = Simulation(batch=2, killers=[5])
        job = loaded_job(simulation, 1)
        for index in range(20):
            deaths = results.deaths_of(raw_row(index))
            job.pool.submit(raw_row(index), deaths.times if deaths is not None else 0)
        with pytest.raises(WorkerFailed, match="index 5"), job.pool.recording(results):
            job.run(0)
        assert simulation.deaths_with == [[5]], "alone at once"
        assert len(job.indices) == 19
        assert results.deaths_of(raw_row(5)) == RowDeaths(3, raw_row(5).digest(), "row 5 killed it")


def test_suspects_do_not_keep_the_input_from_being_read() -> None:
    """All rows of the only worker are suspects after two deaths."""
    simulation = Simulation(batch=2, killers=[0])
    job = loaded_job(simulation, 1, quarantine=True).run(50)
    assert job.indices == list(range(50))


def test_rows_that_finished_before_the_transport_ended_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has ended, for example. Nothing is awaited then."""
    simulation = Simulation()
    job = loaded_job(simulation)
    wait, num_waits = simulation.wait, 0

    def ending(seconds: float) -> list[Event]:
        nonlocal num_waits
        num_waits += 1
        if num_waits > 10:
            raise SpecbatchError("Ray has ended", "again")
        return wait(seconds)

    monkeypatch.setattr(simulation, "wait", ending)
    with pytest.raises(SpecbatchError, match="Ray has ended"):
        job.run(1000)
    assert num_waits < 20
    assert sorted(index for rows in simulation.delivered.values() for index in rows) == job.indices != []


def test_a_row_that_raises_an_exception_each_time_is_left_out() -> None:
    """As one that ends the process: with quarantine it is an error row, and all others finish."""
    simulation = Simulation(batch=4, raisers=[5])
    job = loaded_job(simulation, 2, quarantine=True).run(40)
    assert job.indices == list(range(40))
    assert job.finished.totals.errors == {"worker_died": 1}
    error = next(json.loads(row.line) for row in job.finished.rows if row.index == 5)["error"]["message"]
    assert error.endswith("ValueError: row 5")
    assert len(simulation.killed) == 3
    with pytest.raises(WorkerFailed, match="row with index 5"):
        loaded_job(Simulation(batch=4, raisers=[5]), 2).run(40)
