"""The rules of a pool, one at a time. `test_pool_orders.py` has random orders of events."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import SpecbatchError, WorkerFailed
from specbatch.job.partial import RowDeaths
from specbatch.job.results import ResultFile
from specbatch.job.sources import RawRow
from specbatch.scaleout.crew import PoolLimits
from tests.scaleout.simulation import (
    Job,
    Machine,
    Simulation,
    batch_config,
    broken,
    description,
    died,
    raw_row,
    refused,
    result,
)

NEVER = float("inf")


def loaded_job(simulation: Simulation, num_workers: int = 2, **options: object) -> Job:
    job = Job(simulation, num_workers, **options)  # type: ignore[arg-type]
    job.load()
    return job


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


class TestStart:
    def test_all_workers_start_at_once_and_nothing_loads_before_it_must(self) -> None:
        simulation = Simulation()
        job = Job(simulation, 3)
        described = job.pool.describe(batch_config(2))
        assert described.node == "node"
        assert simulation.started == [0, 1, 2]
        assert {method for _, method, _ in simulation.calls} == {"describe"}, "weights are read too early"

    def test_load_awaits_the_engines_that_were_described_and_no_others(self) -> None:
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

    def test_a_late_worker_joins(self) -> None:
        simulation = Simulation(machines={1: Machine(placed_after=5)})
        job = loaded_job(simulation)
        assert [line.state for line in job.pool.state().workers] == ["running", "starting"]
        job.run(200)
        assert job.indices == list(range(200))
        assert len(simulation.delivered[1]) > 50

    def test_a_worker_that_is_never_placed_stops_nothing(self) -> None:
        job = loaded_job(Simulation(machines={0: Machine(placed_after=NEVER)})).run(20)
        assert job.indices == list(range(20))

    def test_deaths_before_the_engine_is_built_are_paused_after(self) -> None:
        dies = Machine(fail={"load": died("no memory")})
        simulation = Simulation(machines=dict.fromkeys(range(10), dies))
        job = Job(simulation, 1, PoolLimits(max_deaths=3))
        with pytest.raises(SpecbatchError, match=r"no worker is left.*worker 1 on node: no memory"):
            job.load()
        assert len(simulation.started) == 4
        assert simulation.now - 1000 == pytest.approx(1 + 2 + 4, abs=0.6)

    def test_an_error_in_describe_is_the_users(self) -> None:
        simulation = Simulation(machines={0: Machine(fail={"describe": refused("no such model", "look")})})
        with pytest.raises(SpecbatchError, match="worker 1: no such model") as caught:
            Job(simulation, 1).load()
        assert caught.value.hint == "look"

    def test_workers_of_different_jobs_are_an_error_that_names_node_and_difference(self) -> None:
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
            ({"date": "2026-01-01"}, "date"),
        ],
    )
    def test_what_must_be_equal(self, changes: dict[str, object], named: str) -> None:
        simulation = Simulation(machines={1: Machine(description=description(**changes))})
        with pytest.raises(SpecbatchError, match=named):
            Job(simulation).load()

    def test_capacity_may_differ(self) -> None:
        simulation = Simulation(batch=6, machines={1: Machine(description=description(batch=2))})
        job = loaded_job(simulation).run(60)
        assert job.indices == list(range(60))
        assert max(len(rows) for worker, method, (rows, *_) in exchanges(simulation) if worker == 1) <= 6

    def test_recorded_models_are_compared_by_a_worker_that_lives(self) -> None:
        simulation = Simulation(machines={0: Machine(fail={"model_differences": died("killed")})})
        job = Job(simulation)
        job.pool.describe(batch_config(2))
        assert job.pool.models.record() == description().weights
        assert job.pool.models.differences({"a": 1}) == ["asked 1"]

    def test_the_record_of_the_models_is_the_first_workers(self) -> None:
        job = loaded_job(Simulation()).run(50)
        assert job.pool.models.record() == {"target/w": {"mtime_ns": 1, "sha256": "of 0"}}


class TestDeath:
    def test_rows_of_a_dead_worker_run_again_before_others_in_order(self) -> None:
        simulation = Simulation(batch=2, machines={1: Machine(load_seconds=0)})
        job = loaded_job(simulation, 1)
        simulation.at(0.5, lambda: simulation.die(0))
        job.run(40)
        assert job.indices == list(range(40))
        again = [index for worker, _, (rows, *_) in exchanges(simulation) if worker == 1 for index in indices(rows)]
        returned = simulation.delivered[0]
        assert again == [index for index in range(40) if index not in returned]
        assert job.log == ["warning: worker 1 on node died (killed); it is replaced"]

    def test_a_loaded_worker_is_replaced_at_once(self) -> None:
        simulation = Simulation()
        job = loaded_job(simulation)
        simulation.at(0.5, lambda: simulation.die(0))
        job.run(100, lambda: None)
        (started,) = [call for call in simulation.calls if call[:2] == (2, "describe")]
        assert started
        assert [line.deaths for line in job.pool.state().workers] == [1, 0]

    def test_too_many_deaths_leave_the_rows_to_the_others(self) -> None:
        dies = Machine(fail={"exchange": died("broken card", node_lost=True)})
        simulation = Simulation(machines=dict.fromkeys([1, 2, 3], dies))
        job = loaded_job(simulation, 2, limits=PoolLimits(max_deaths=2)).run(50)
        assert job.indices == list(range(50))
        assert len(simulation.started) == 4
        assert job.log[-1] == "warning: worker 2 on node died (broken card); it is not replaced after 3 deaths"
        assert [line.state for line in job.pool.state().workers] == ["running", "lost"]

    def test_no_worker_left_is_an_error_after_the_finished_rows(self) -> None:
        simulation = Simulation()
        job = loaded_job(simulation, 2, limits=PoolLimits(max_deaths=0))
        simulation.at(1.0, lambda: simulation.die(0))
        simulation.at(1.1, lambda: simulation.die(0))
        with pytest.raises(SpecbatchError, match=r"no worker is left.*killed") as caught:
            job.run(1000)
        assert job.indices == sorted(simulation.delivered[0] + simulation.delivered[1])
        assert job.indices
        assert "finished rows are kept" in str(caught.value.hint)

    def test_workers_that_are_lost_after_the_last_row_are_no_error(self) -> None:
        simulation = Simulation(killers=[9])
        job = loaded_job(simulation, 1, limits=PoolLimits(max_deaths=2), quarantine=True).run(10)
        assert job.indices == list(range(10))
        assert job.pool.state().workers[0].state == "lost"

    def test_a_lost_node_blames_no_row(self) -> None:
        simulation = Simulation(batch=1, seconds_of=lambda index: 10.0)
        job = loaded_job(simulation, 1, limits=PoolLimits(max_deaths=10))
        for seconds in range(1, 20, 4):
            simulation.at(seconds, lambda: simulation.die(0, node_lost=True))
        job.run(1)
        assert job.indices == [0]
        assert job.finished.totals.ok == 1

    def test_a_stuck_worker_is_killed_and_its_rows_run_elsewhere(self) -> None:
        simulation = Simulation()
        job = loaded_job(simulation, limits=PoolLimits(stuck_seconds=60))
        simulation.at(0.5, lambda: simulation.get_stuck(0))
        began = simulation.now
        job.run(1000)
        assert job.indices == list(range(1000))
        assert simulation.killed == [0]
        assert job.log == ["warning: worker 1 on node died (no answer for 60 seconds); it is replaced"]
        assert simulation.now - began > 60

    def test_slow_exchanges_that_wait_for_each_other_are_not_stuck(self) -> None:
        """The time of an exchange begins when the one before it has answered."""
        simulation = Simulation()
        job = loaded_job(simulation, 1, limits=PoolLimits(slice_seconds=50, stuck_seconds=60)).run(2000)
        assert simulation.killed == []
        assert len(job.indices) == 2000

    def test_answers_that_came_while_this_process_was_away_count(self) -> None:
        simulation = Simulation()
        job = loaded_job(simulation, limits=PoolLimits(stuck_seconds=60))
        away = iter([0.0, 500.0])

        def stop() -> None:
            simulation.now += next(away, 0.0)

        job.run(100, stop)
        assert simulation.killed == []

    def test_a_replacement_of_another_job_is_left_out(self) -> None:
        simulation = Simulation(machines={2: Machine(description=description(node="old", date="today"))})
        job = loaded_job(simulation)
        simulation.at(0.5, lambda: simulation.die(0))
        job.run(100)
        assert job.indices == list(range(100))
        assert "warning: worker 1 on old is not used: its job differs" in job.log[1]
        assert simulation.killed == [2]
        assert [line.state for line in job.pool.state().workers] == ["lost", "running"]

    def test_a_replacement_that_cannot_do_the_job_is_an_error_if_it_is_the_only_one(self) -> None:
        simulation = Simulation(machines={1: Machine(fail={"load": refused("no memory", "more")})})
        job = loaded_job(simulation, 1)
        simulation.at(0.5, lambda: simulation.die(0))
        with pytest.raises(SpecbatchError, match="worker 1 on node: no memory"):
            job.run(100)
        assert job.indices == sorted(simulation.delivered[0])


class TestKillers:
    def test_a_row_that_kills_is_named(self) -> None:
        simulation = Simulation(killers=[17])
        job = loaded_job(simulation, 2)
        with pytest.raises(WorkerFailed, match="the row with index 17 ends the process each time") as caught:
            job.run(100)
        assert "--quarantine" in str(caught.value.hint)
        assert "row 17 killed it" in caught.value.message
        assert job.indices == [index for index in range(100) if index != 17], "all other rows have finished"
        assert job.left_out[17].times == 3

    def test_quarantine_makes_it_an_error_row(self) -> None:
        simulation = Simulation(batch=4, killers=[17, 18, 60])
        job = loaded_job(simulation, 3, quarantine=True).run(100)
        assert job.indices == list(range(100))
        bad = {row.index: json.loads(row.line) for row in job.finished.rows if b'"error"' in row.line}
        assert list(bad) == [17, 18, 60] or sorted(bad) == [17, 18, 60]
        assert bad[17]["error"]["type"] == "worker_died"
        assert bad[17]["id"] == "row-17"
        assert job.finished.totals.errors == {"worker_died": 3}
        assert job.finished.totals.ok == 97

    def test_a_suspect_runs_alone_and_last(self) -> None:
        simulation = Simulation(batch=4, killers=[5])
        job = loaded_job(simulation, 2, quarantine=True).run(60)
        third = simulation.deaths_with[2]
        assert third == [5], "the third worker had it alone"
        assert len(simulation.deaths_with) == 3
        assert set(range(60)) - {5} - set(job.indices) == set()

    def test_deaths_are_counted_over_sessions(self, tmp_path: Path) -> None:
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

    def test_suspects_do_not_keep_the_input_from_being_read(self) -> None:
        """All rows of the only worker are suspects after two deaths."""
        simulation = Simulation(batch=2, killers=[0])
        job = loaded_job(simulation, 1, quarantine=True).run(50)
        assert job.indices == list(range(50))


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

    def test_the_second_result_of_a_row_is_not_counted(self) -> None:
        """Both workers finish copies: the sums are those of each row once."""
        seconds = {0: 1.0, 1: 1.0, 2: 4.0, 3: 4.0}
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
        simulation = Simulation(machines={1: Machine(fail={"exchange": broken("Traceback: ZeroDivisionError")})})
        job = loaded_job(simulation, 2)
        with pytest.raises(WorkerFailed, match="worker 2 on node:\nTraceback: ZeroDivisionError"):
            job.run(100)
        assert job.indices == sorted(simulation.delivered[0]), "rows that had finished are kept"

    def test_slices_that_run_when_a_worker_fails_are_kept(self) -> None:
        """The failure comes at once, the rows of the other worker after 0.2 seconds."""
        machines = {1: Machine(fail={"exchange": broken("Traceback")})}
        simulation = Simulation(batch=4, machines=machines, seconds_of=lambda index: 0.2)
        job = loaded_job(simulation, 2)
        with pytest.raises(WorkerFailed):
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
        machines = {0: Machine(fail={"exchange": broken("first")}), 1: Machine(fail={"exchange": refused("second")})}
        with pytest.raises(WorkerFailed, match="first"):
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


def exchanges(simulation: Simulation) -> list[tuple[int, str, tuple[Any, ...]]]:
    return [call for call in simulation.calls if call[1] == "exchange"]


def indices(rows: list[RawRow]) -> list[int]:
    return [row.index for row in rows]
