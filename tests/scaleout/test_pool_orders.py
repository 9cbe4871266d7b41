"""A pool under random orders of events: each row comes back once, and the job ends.

`Simulation` itself checks that no call goes to a killed worker, that no worker has more rows than its credit or more
than two exchanges, and that the number of waits is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specbatch.errors import SpecbatchError, WorkerFailed
from specbatch.results.finished import Finished
from specbatch.scaleout.worker_manager import PoolLimits
from tests.scaleout.job import Job
from tests.scaleout.simulation import Machine, Simulation, description, died, refused, result

quick = settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Fault:
    kind: str  # "dies", "node" or "stuck"
    at: float  # seconds after the engines are loaded
    which: int  # of the living workers


@dataclass(frozen=True)
class Scene:
    num_workers: int
    batch: int
    num_rows: int
    machines: dict[int, Machine]
    seconds: list[float]  # of rows, in turn
    faults: list[Fault]

    def simulation(self, **options: list[int]) -> Simulation:
        return Simulation(
            self.batch, machines=self.machines, seconds_of=lambda i: self.seconds[i % len(self.seconds)], **options
        )

    def start(self, simulation: Simulation, limits: PoolLimits | None = None, quarantine: bool = False) -> Job:
        job = Job(simulation, self.num_workers, limits or PoolLimits(max_deaths=100, stuck_seconds=20), quarantine)
        job.load()
        for fault in self.faults:
            simulation.at(fault.at, self.action(simulation, fault))
        return job

    def action(self, simulation: Simulation, fault: Fault) -> Callable[[], object]:
        if fault.kind == "stuck":
            return lambda: simulation.get_stuck(fault.which)
        return lambda: simulation.die(fault.which, node_lost=fault.kind == "node")


def machines() -> st.SearchStrategy[Machine]:
    return st.builds(
        Machine,
        speed=st.sampled_from([0.1, 0.5, 1.0, 4.0]),
        placed_after=st.sampled_from([0.0, 0.0, 0.3, 7.0]),
        load_seconds=st.sampled_from([0.0, 1.0, 6.0]),
        longest_row=st.integers(10, 20),
        fail=st.sampled_from([{}] * 6 + [{"describe": died("early")}, {"load": died("late", node_lost=True)}]),
    )


@st.composite
def scenes(draw: st.DrawFn, kinds: tuple[str, ...] = ("dies", "node", "stuck"), max_faults: int = 8) -> Scene:
    faults = st.builds(
        Fault, kind=st.sampled_from(kinds), at=st.floats(0, 30).map(lambda s: round(s, 2)), which=st.integers(0, 5)
    )
    numbers = st.integers(0, 12)
    return Scene(
        num_workers=draw(st.integers(1, 4)),
        batch=draw(st.integers(1, 4)),
        num_rows=draw(st.integers(0, 40)),
        machines=draw(st.dictionaries(numbers, machines(), max_size=6)),
        seconds=draw(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.3, 2.0]), min_size=1, max_size=5)),
        faults=draw(st.lists(faults, max_size=max_faults)) if kinds else [],
    )


def assert_right(job: Job, num_rows: int, failed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Each row once, with its line; the sums are those of these lines."""
    assert job.indices == list(range(num_rows))
    for row in job.finished.rows:
        line = json.loads(row.line)
        if row.index in failed:
            assert line["error"]["type"] == "worker_died"
        else:
            assert line == result(row.index)
    expected = Finished()
    for row in job.finished.rows:
        expected.add(row.index, row.digest, json.loads(row.line))
    assert job.finished.totals == expected.totals


def attempt(start: Callable[[], Job], num_rows: int) -> SpecbatchError | None:
    """Run a job to its end, or to an error that leaves no worker."""
    job = None
    try:
        job = start()
        assert_right(job.run(num_rows), num_rows, errors(job))
        return None
    except SpecbatchError as error:
        assert job is None or len(job.indices) == len(set(job.indices))
        return error


def errors(job: Job) -> set[int]:
    return {row.index for row in job.finished.rows if b'"error"' in row.line and json.loads(row.line).get("error")}


@given(scenes())
@quick
def test_each_row_comes_back_once(scene: Scene) -> None:
    """Deaths at random can meet a row three times. Then it is an error row, but only then."""
    simulation = scene.simulation()
    job = scene.start(simulation, quarantine=True).run(scene.num_rows)
    met = errors(job)
    assert_right(job, scene.num_rows, met)
    for index in met:
        deaths = [rows for rows in simulation.deaths_with if index in rows]
        stuck = len(simulation.killed)
        assert len(deaths) + stuck >= 3
        assert [index] in deaths or stuck


@given(scenes(kinds=("node",)))
@quick
def test_lost_nodes_harm_no_row(scene: Scene) -> None:
    simulation = scene.simulation()
    job = scene.start(simulation).run(scene.num_rows)
    assert_right(job, scene.num_rows)


@given(scenes(max_faults=2))
@quick
def test_two_faults_harm_no_row(scene: Scene) -> None:
    job = scene.start(scene.simulation()).run(scene.num_rows)
    assert_right(job, scene.num_rows)


@given(scenes(kinds=("node",), max_faults=3), st.sets(st.integers(0, 39), min_size=1, max_size=4))
@quick
def test_rows_that_kill_become_errors_and_no_others(scene: Scene, killers: set[int]) -> None:
    here = {index for index in killers if index < scene.num_rows}
    job = scene.start(scene.simulation(killers=sorted(killers)), quarantine=True).run(scene.num_rows)
    assert_right(job, scene.num_rows, here)


@given(scenes(kinds=("node",), max_faults=3), st.sets(st.integers(0, 39), min_size=1, max_size=4))
@quick
def test_all_rows_that_kill_are_named(scene: Scene, killers: set[int]) -> None:
    here = {index for index in killers if index < scene.num_rows}
    simulation = scene.simulation(killers=sorted(killers))
    job = scene.start(simulation)
    if not here:
        assert_right(job.run(scene.num_rows), scene.num_rows)
        return
    with pytest.raises(WorkerFailed) as caught:
        job.run(scene.num_rows)
    assert set(job.left_out) == here, caught.value.message
    assert job.indices == [index for index in range(scene.num_rows) if index not in here], "all others have finished"


@given(scenes(), st.integers(0, 2))
@quick
def test_with_few_replacements_the_job_ends(scene: Scene, max_deaths: int) -> None:
    """Either all rows, or an error after those that have finished."""
    simulation = scene.simulation()
    limits = PoolLimits(max_deaths=max_deaths, stuck_seconds=20)
    error = attempt(lambda: scene.start(simulation, limits, quarantine=True), scene.num_rows)
    assert error is None or "no worker is left" in error.message
    assert len(simulation.started) <= 2 * scene.num_workers * (1 + max_deaths)


@given(scenes(), st.integers(0, 12), st.sampled_from(["describe", "load", "limit_length", "differs"]))
@quick
def test_replacements_that_cannot_do_the_job(scene: Scene, number: int, method: str) -> None:
    """The others do it; if there are none, the error names the worker."""
    bad = (
        Machine(description=description(row_tokens=7))
        if method == "differs"
        else Machine(fail={method: refused("it cannot")})
    )
    scene.machines[scene.num_workers + number % 3] = bad
    simulation = scene.simulation()
    error = attempt(lambda: scene.start(simulation, quarantine=True), scene.num_rows)
    assert error is None or re.match("worker .*(it cannot|differs)", error.message)


@given(scenes(max_faults=4), st.integers(0, 30))
@quick
def test_drained_rows_and_the_rows_before_come_once(scene: Scene, collects: int) -> None:
    """A signal comes after some calls. What no call has returned can be computed by the next session."""
    simulation = scene.simulation()
    job = scene.start(simulation, quarantine=True)
    left = collects

    class Signal(Exception):
        pass

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Signal

    try:
        job.run(scene.num_rows, interrupt)
    except Signal:
        job.keep(job.pool.drain())
    assert len(job.indices) == len(set(job.indices))
    assert job.finished.totals.rows == len(job.indices)
    assert set(job.indices) == {index for rows in simulation.delivered.values() for index in rows} | errors(job)
