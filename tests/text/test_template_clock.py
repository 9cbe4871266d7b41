"""A chat template that prints the current day: all sessions and workers of a job print its first day."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specbatch.config import Config, DataSection
from specbatch.config_load import load_config
from specbatch.errors import FieldError, InputError
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.pool import LocalPool, WorkerPool
from specbatch.job.worker import Runtime, Worker
from specbatch.scaleout.pool import Pool
from specbatch.scaleout.transport import Event, Placed, Reply, WorkerId
from specbatch.types import SamplingParams
from tests.stub_engine import PRINTS_TODAY, StubEngine, resolve

FIRST, LATER = date(2001, 2, 3), date(2001, 2, 10)
NUM_ROWS = 60


class Calls:
    """A transport whose workers are in this process."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self._events: list[Event] = []

    def start(self, worker: WorkerId) -> None:
        self.workers[worker] = made()
        self._events.append(Placed(worker, "node"))

    def call(self, worker: WorkerId, method: str, *arguments: Any) -> None:
        self._events.append(Reply(worker, getattr(self.workers[worker], method)(*arguments)))

    def wait(self, seconds: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def kill(self, worker: WorkerId) -> None:
        raise AssertionError(worker)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def made(fail_at: int = 0) -> Worker:
    return Worker(Runtime(resolve, lambda run, show: StubEngine(4, fail_at=fail_at), lambda config: {}))


def local(fail_at: int = 0) -> WorkerPool:
    return LocalPool(made(fail_at))


def two_workers() -> WorkerPool:
    return Pool(Calls(), 2)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., bytes]:
    rows = "".join(json.dumps({"prompt": f"p{index}"}) + "\n" for index in range(NUM_ROWS))
    (tmp_path / "d.jsonl").write_text(rows)

    def run(name: str, today: date, pool: WorkerPool, template: str = PRINTS_TODAY, **options: Any) -> bytes:
        """The results of a session on the day `today`."""
        day = options.pop("day", None)
        data = DataSection(chat_template=template, chat_template_date=day)
        config = Config(sampling=SamplingParams(temperature=1.0), data=data)
        output = tmp_path / name
        given = GenerateOptions(str(tmp_path / "d.jsonl"), output, today=lambda: today, **options)
        run_file_job(given, config, pool, Console(file=StringIO()), began=time.perf_counter())
        return output.read_bytes()

    return run


@pytest.mark.parametrize("pool", [local, two_workers])
def test_a_job_that_resumes_on_another_day_prints_the_first_one(
    run: Callable[..., bytes], pool: Callable[[], WorkerPool], tmp_path: Path
) -> None:
    whole = run("whole", FIRST, local())
    assert run("given", LATER, pool(), day="2001-02-03") == whole
    assert run("later", LATER, pool()) != whole
    with pytest.raises(RuntimeError, match="stub engine broke"):
        run("resumed", FIRST, local(fail_at=9))
    assert 5 < len((tmp_path / "resumed.partial").read_bytes().splitlines()) < NUM_ROWS
    with pytest.raises(InputError, match="chat_template_date: 2001-02-03 -> 2001-02-10"):
        run("resumed", FIRST, pool(), day="2001-02-10")
    assert run("resumed", LATER, pool()) == whole
    assert run("resumed", LATER, pool()) == whole, "it is finished, and of the same job"
    assert run("resumed", LATER, pool(), overwrite=True) != whole


def test_a_job_whose_template_prints_no_day_has_none(run: Callable[..., bytes], tmp_path: Path) -> None:
    results = run("plain", FIRST, local(), template="{{ messages }}")
    assert json.loads((tmp_path / "plain.stats.json").read_text())["job"]["data.chat_template_date"] is None
    assert run("plain", LATER, local(), template="{{ messages }}") == results


@pytest.mark.parametrize("day", ["tomorrow", "20010203", "2001-02-30"])
def test_days_that_are_none(day: str) -> None:
    with pytest.raises(FieldError, match="chat_template_date must be a day such as 2026-11-23"):
        load_config(None, [f"data.chat_template_date='{day}'"])
    assert load_config(None, ["data.chat_template_date=2001-02-03"]).data.chat_template_date == "2001-02-03"
