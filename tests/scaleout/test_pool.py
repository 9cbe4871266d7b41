"""The rules of a pool, one at a time. `test_pool_orders.py` has random orders of events."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from specbatch.errors import SpecbatchError, WorkerFailed
from specbatch.results.results import ResultFile
from specbatch.scaleout.worker_manager import PoolLimits
from tests.scaleout.job import exchanges, indices, loaded_job
from tests.scaleout.simulation import (
    Machine,
    Simulation,
    broken,
    raw_row,
    refused,
    result,
)

NEVER = float("inf")


def test_every_row_comes_back_once_with_its_line_and_sums() -> None:
    simulation = Simulation(batch=4)
    job = loaded_job(simulation, 3).run(100)
    assert job.indices == list(range(100))
    assert {row.index: json.loads(row.line) for row in job.finished.rows} == {i: result(i) for i in range(100)}
    assert job.finished.totals.ok == 100
    assert job.finished.totals.completion_tokens == sum(result(i)["usage"]["completion_tokens"] for i in range(100))


def test_workers_share_the_rows_evenly() -> None:
    job = loaded_job(Simulation(batch=4), 4)
    for index in range(10):
        job.pool.submit(raw_row(index))
    job.pool.collect(last=True)
    sent = [len(process.sent) for process in job.simulation.processes.values()]
    assert sorted(sent) == [2, 2, 3, 3]


def test_there_is_room_for_three_batches_a_worker() -> None:
    simulation = Simulation(batch=4, machines={1: Machine(placed_after=100)})
    job = loaded_job(simulation)
    for index in range(12):
        assert job.pool.has_room, index
        job.pool.submit(raw_row(index))
    assert not job.pool.has_room, "the second worker is not loaded"


def test_two_exchanges_are_at_a_worker_with_rows_and_none_at_another() -> None:
    job = loaded_job(Simulation(batch=4))
    job.pool.collect(last=False)
    job.pool.submit(raw_row(0))
    job.pool.collect(last=True)
    assert sorted(process.num_exchanges for process in job.simulation.processes.values()) == [0, 2]


class TestEnd:
    def test_an_idle_worker_takes_the_rows_of_a_slow_one(self) -> None:
        machines = {1: Machine(speed=0.01)}
        simulation = Simulation(batch=4, machines=machines)
        job = loaded_job(simulation, 2).run(24)
        assert job.indices == list(range(24))
        assert simulation.now - 1000 < 15, "a row takes 30 seconds on the slow worker"
        assert job.finished.totals.ok == 24

    def test_rows_that_were_not_begun_are_moved_first_and_the_youngest(self) -> None:
        simulation = Simulation(batch=2, machines={1: Machine(speed=0.001)})
        job = loaded_job(simulation, 2).run(12)
        had = [index for worker, _, (rows, *_) in exchanges(simulation) if worker == 1 for index in indices(rows)]
        drops = [drop for worker, _, (_, drop, _) in exchanges(simulation) if worker == 1 and drop]
        moved = [index for worker, _, (rows, *_) in exchanges(simulation) if worker == 0 for index in indices(rows)][6:]
        assert len(had) == 6
        assert moved[:3] == [had[5], had[4], had[3]]
        assert drops[0] == moved[:3]
        assert job.indices == list(range(12))

    def test_a_worker_with_long_rows_is_not_slow(self) -> None:
        """It finishes no row while the other finishes all of its own, but it computes as many tokens a second."""
        seconds = {1: 10.0, 3: 10.0, 4: 10.0}  # the first worker has these
        simulation = Simulation(batch=4, seconds_of=lambda index: seconds.get(index, 2.0), row_speed=100)
        job = loaded_job(simulation, 2).run(5)
        assert job.indices == list(range(5))
        assert sorted(index for _, _, (rows, *_) in exchanges(simulation) for index in indices(rows)) == list(range(5))

    def test_the_second_result_of_a_row_is_not_counted(self) -> None:
        """Both workers finish copies: the sums are those of each row once."""
        seconds = {1: 1.0, 3: 1.0, 4: 4.0, 0: 4.0}  # the first worker has 1, 3 and 4
        simulation = Simulation(batch=4, seconds_of=lambda index: seconds.get(index, 30.0))
        job = loaded_job(simulation, 2).run(5)
        results = [index for delivered in simulation.delivered.values() for index in delivered]
        copies = [index for _, _, (rows, *_) in exchanges(simulation) for index in indices(rows)]
        assert len(copies) > 5, "nothing was copied"
        assert job.indices == list(range(5))
        assert job.finished.totals.rows == 5, results

    def test_nothing_is_copied_while_rows_come(self) -> None:
        simulation = Simulation(batch=4, machines={1: Machine(speed=0.01)})
        job = loaded_job(simulation, 2)
        for index in range(24):
            job.pool.submit(raw_row(index))
        for _ in range(50):
            job.keep(job.pool.collect(last=False))
        sent = [index for _, _, (rows, *_) in exchanges(simulation) for index in indices(rows)]
        assert sorted(sent) == list(range(24))


class TestFailure:
    def test_an_exception_in_a_worker_has_its_traceback(self) -> None:
        """Another worker takes its place. Where none is left, it is the error of the job."""
        fails = Machine(fail={"exchange": broken("Traceback\nZeroDivisionError: x")})
        job = loaded_job(Simulation(machines={1: fails}), 2).run(100)
        assert job.indices == list(range(100))
        assert job.log[0] == "warning: an error in worker 2 on node:\nTraceback\nZeroDivisionError: x"
        assert job.log[1] == "warning: worker 2 on node died (ZeroDivisionError: x); it is replaced"
        machines = dict.fromkeys(range(10), fails)
        with pytest.raises(WorkerFailed, match=r"no worker is left.*\nTraceback\nZeroDivisionError: x"):
            loaded_job(Simulation(machines=machines), 2, limits=PoolLimits(max_deaths=1)).run(100)

    def test_slices_that_run_when_a_worker_fails_are_kept(self) -> None:
        """The failure comes at once, the rows of the other worker after 0.2 seconds."""
        machines = {1: Machine(fail={"exchange": refused("no memory")})}
        simulation = Simulation(batch=4, machines=machines, seconds_of=lambda index: 0.2)
        job = loaded_job(simulation, 2)
        with pytest.raises(SpecbatchError):
            job.run(100)
        assert len(job.indices) >= 4

    def test_a_mistake_of_the_user_during_the_job_names_the_worker(self) -> None:
        simulation = Simulation(machines={0: Machine(fail={"exchange": refused("no memory", "smaller")})})
        with pytest.raises(SpecbatchError, match="worker 1 on node: no memory"):
            loaded_job(simulation, 2).run(100)

    def test_an_error_is_not_lost_with_the_last_row(self) -> None:
        """The job does not look idle when its only row is the killer."""
        with pytest.raises(WorkerFailed, match="row 0"):
            loaded_job(Simulation(killers=[0]), 1).run(1)

    def test_the_first_of_two_errors_is_raised(self) -> None:
        machines = {0: Machine(fail={"exchange": refused("first")}), 1: Machine(fail={"exchange": refused("second")})}
        with pytest.raises(SpecbatchError, match="first"):
            loaded_job(Simulation(machines=machines), 2).run(10)

    def test_drain_returns_what_the_running_slices_finish(self) -> None:
        simulation = Simulation(batch=4)
        job = loaded_job(simulation, 2)
        for index in range(24):
            job.pool.submit(raw_row(index))
        for _ in range(3):
            job.keep(job.pool.collect(last=True))
        began, before = simulation.now, len(job.indices)
        job.keep(job.pool.drain())
        assert len(job.indices) > before
        assert simulation.now - began <= 0.25 + 1e-9
        assert job.indices == sorted(i for delivered in simulation.delivered.values() for i in delivered)

    def test_drain_ends_with_a_stuck_worker(self) -> None:
        simulation = Simulation()
        job = loaded_job(simulation, 2)
        for index in range(12):
            job.pool.submit(raw_row(index))
        job.pool.collect(last=True)
        simulation.get_stuck(0)
        began = simulation.now
        job.pool.drain()
        assert simulation.now - began <= 10 + 1e-9

    def test_deaths_while_a_job_ends_are_not_the_fault_of_rows(self, tmp_path: Path) -> None:
        """A scheduler sends SIGTERM to all processes of a job."""
        simulation = Simulation()
        job = loaded_job(simulation, 2)
        with closing(ResultFile(tmp_path / "o.jsonl", {}, overwrite=False)) as results, job.pool.recording(results):
            for index in range(12):
                job.pool.submit(raw_row(index))
            job.pool.collect(last=True)
            simulation.at(0.0, lambda: simulation.die(0))
            simulation.at(0.0, lambda: simulation.die(0))
            job.pool.drain()
            assert len(simulation.deaths_with) == 2
            assert not any(results.deaths_of(raw_row(index)) for index in range(12))

    def test_close_ends_the_processes(self) -> None:
        job = loaded_job(Simulation())
        job.pool.close()
        assert job.simulation.is_closed


class TestState:
    def test_sums_survive_deaths(self) -> None:
        simulation = Simulation()
        job = loaded_job(simulation)
        simulation.at(2.0, lambda: simulation.die(0))
        job.run(100)
        state = job.pool.state()
        computed = sum(len(delivered) for delivered in simulation.delivered.values())
        assert job.pool.stats.generated_tokens == computed
        assert sum(line.tokens for line in state.workers) == computed
        assert sum(line.rows for line in state.workers) == 100
        assert state.load.num_submitted >= computed
        assert state.num_workers == sum(line.state == "running" for line in state.workers)
        assert all(0 < line.seconds <= simulation.now - 1000 for line in state.workers)

    def test_lines_follow_a_workers_life(self) -> None:
        simulation = Simulation(machines={1: Machine(placed_after=2, load_seconds=3), 2: Machine(placed_after=NEVER)})
        job = loaded_job(simulation)
        seen: list[str] = []
        simulation.at(6.0, lambda: simulation.die(1))

        def look() -> None:
            state = job.pool.state().workers[1].state
            if seen[-1:] != [state]:
                seen.append(state)

        job.run(300, look)
        assert seen == ["starting", "loading", "running", "starting"]
        assert job.pool.state().workers[1].device == "cpu (A)"

    def test_running_requests_are_those_of_all_workers(self) -> None:
        job = loaded_job(Simulation(batch=3, seconds_of=lambda index: 100.0))
        for index in range(18):
            job.pool.submit(raw_row(index))
        for _ in range(8):
            job.pool.collect(last=True)
        state = job.pool.state()
        assert [line.running for line in state.workers] == [3, 3]
        assert len(state.load.running) == 6
        assert len(state.load.waiting) == 12
