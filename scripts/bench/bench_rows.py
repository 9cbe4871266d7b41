"""A benchmark of rows per second through one worker without a model: how long an engine waits for the job's own work.

    python scripts/bench/bench_rows.py --rows 20000 --batch 128 --step-ms 2

The rows are chats of about `--words` words, tokenized with the built-in model's tokenizer and chat template. The engine
only sleeps, as a host does that waits for a GPU: each request takes `--rounds` steps. Printed are the share of the time
between the first and the last step in which no step runs, and the share that is `input_wait`: rows that are not
tokenized yet. The rest (results, new requests) overlaps a round that a real GPU computes. `--write` keeps the rows.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specbatch.config import DataSection
from specbatch.config_load import load_config
from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.job.pool import LocalPool
from specbatch.job.worker import Runtime, Worker
from specbatch.models.download import resolve_model
from specbatch.models.formats.tokenizer import load_tokenizer
from specbatch.rows.sources import open_source
from specbatch.types import Completion, EngineLimits, FinishReason, Request

MODEL = "builtin:smollm2-135m-instruct"
WORDS = "the report of a small harbour town says that each boat carries seven crates and why it matters".split()  # noqa: SIM905


def chat_rows(count: int, words: int) -> Iterator[str]:
    """Make JSON lines with chats that differ from their first words on."""
    draw = random.Random(0)
    for number in range(count):
        text = " ".join(draw.choices(WORDS, k=max(1, words + draw.randint(-words // 3, words // 3))))
        yield json.dumps({"id": number, "messages": [{"role": "user", "content": f"{number}: {text}?"}]}) + "\n"


class SleepingEngine:
    """A `BatchEngine` that computes nothing."""

    def __init__(self, batch: int, rounds: int, step_seconds: float) -> None:
        self.limits = EngineLimits(8000, 49152)
        self.stats = EngineStats()
        self.first: float | None = None
        self.last = self.busy = 0.0
        self._batch, self._rounds, self._step_seconds = batch, rounds, step_seconds
        self._waiting: deque[Request] = deque()
        self._running: dict[int, tuple[Request, int]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def tokens_so_far(self) -> dict[int, int]:
        return {number: self._rounds - left for number, (_, left) in self._running.items()}

    def limit_length(self, tokens: int | None) -> int:
        return 8001

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def close(self) -> None:
        pass

    def step(self) -> list[Completion]:
        began = time.perf_counter()
        self.first = self.first or began
        while self._waiting and len(self._running) < self._batch:
            request = self._waiting.popleft()
            self._running[request.request_id] = (request, 1 + hash(request.request_id) % (2 * self._rounds))
        time.sleep(self._step_seconds)
        done = [number for number, (_, left) in self._running.items() if left == 1]
        self._running = {n: (request, left - 1) for n, (request, left) in self._running.items() if left > 1}
        self.last = time.perf_counter()
        self.busy += self.last - began
        tokens = list(range(1000, 1000 + self._rounds))
        return [Completion(n, tokens, FinishReason.LENGTH, None, SpeculationCounts(rounds=1)) for n in done]


def run(path: Path, args: argparse.Namespace) -> None:
    sets = ["engine.device=cpu", f"engine.max_batch_size={args.batch}", f"model.target={MODEL}"]
    config = load_config(None, sets)
    tokenizer = load_tokenizer(resolve_model(MODEL, allow_download=True))
    engine = SleepingEngine(args.batch, args.rounds, args.step_ms / 1000)

    def resolve(config: Any) -> Any:
        return SimpleNamespace(
            config=config, tokenizer=tokenizer, row_tokens=None, description={}, low_acceptance=None, notes=[],
            bits_depend_on={},
        )  # fmt: skip

    pool = LocalPool(Worker(Runtime(resolve, lambda run, log: engine, lambda config: {})))
    pool.describe(config)
    pool.load(lambda tokens: tokens, lambda step: None)
    rows = open_source(str(path), DataSection()).rows()
    exhausted = False
    finished = 0
    while not (exhausted and pool.is_idle):
        while not exhausted and pool.has_room:
            row = next(rows, None)
            exhausted = row is None
            if row is not None:
                pool.submit(row)
        finished += len(pool.collect(exhausted).rows)
    pool.close()
    assert finished == args.rows, finished
    assert engine.first is not None
    seconds = engine.last - engine.first
    print(
        f"{args.rows / seconds:,.0f} rows/s, no step runs in {1 - engine.busy / seconds:.1%} of {seconds:.1f} s; "
        f"{pool.stats.input_wait_seconds / seconds:.2%} of the time waits for rows that are not tokenized yet"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=64, help="mean steps of a request")
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--write", type=Path, help="keep the rows in this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.write or Path(folder) / "rows.jsonl"
        path.write_text("".join(chat_rows(args.rows, args.words)))
        run(path, args)


if __name__ == "__main__":
    main()
