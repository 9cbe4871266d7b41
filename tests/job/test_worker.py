"""A worker's exchanges over the stub engine: the engine stays full, and rows that have not begun can be dropped."""

from __future__ import annotations

import json

import pytest

from specbatch.config import Config, DataSection, EngineSection
from specbatch.job.worker import Runtime, Worker
from specbatch.rows.sources import RawRow
from specbatch.types import Completion
from tests.stub_engine import StubEngine, resolve


class Watched(StubEngine):
    """Notes how many requests run after each step."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.started: list[int] = []

    def step(self) -> list[Completion]:
        done = super().step()
        self.started.append(self.num_running + len(done))
        return done


def loaded(batch: int) -> tuple[Worker, Watched]:
    engine = Watched(batch)
    worker = Worker(Runtime(resolve, lambda run, show: engine, lambda config: {}))
    worker.describe(Config(engine=EngineSection(max_batch_size=batch), data=DataSection(prompts_as_chat=False)))
    worker.load()
    return worker, engine


def rows(count: int) -> list[RawRow]:
    return [RawRow(index, json.dumps({"prompt": f"p{index}"}).encode()) for index in range(count)]


def test_a_worker_closes_its_engine() -> None:
    worker, engine = loaded(2)
    worker.exchange(rows(3), [], seconds=60)
    assert not engine.is_closed
    worker.close()
    assert engine.is_closed


@pytest.mark.parametrize("batch", [2, 16])
def test_the_engine_is_full_while_there_are_rows(batch: int) -> None:
    worker, engine = loaded(batch)
    answer = worker.exchange(rows(10 * batch), [], seconds=60)
    assert sorted(row.index for row in answer.finished.rows) == list(range(10 * batch))
    assert set(engine.started[:15]) == {batch}


def test_most_rows_can_be_dropped_until_they_begin() -> None:
    worker, _ = loaded(16)
    first = worker.exchange(rows(48), [], seconds=0)
    assert sorted(first.started) == list(range(20)), "a batch, and a quarter that waits"
    dropped = list(range(10, 48))
    answer = worker.exchange([], dropped, seconds=60)
    assert sorted(row.index for row in answer.finished.rows) == list(range(20)), "10 to 19 had begun"
    assert answer.started == []
