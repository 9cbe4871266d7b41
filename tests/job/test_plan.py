"""The order in which rows start: groups by prefix, long rows first; bounded, and without effect on the output."""

from __future__ import annotations

import datetime
import io
import json
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.errors import InputError
from specbatch.job.plan import RowPlan, prefix_of, shared_tokens, start_order, with_shared_tokens
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import RawRow, open_source
from specbatch.types import Request, SamplingParams
from tests.job.test_generate import CONFIG, Run
from tests.stub_engine import StubEngine
from tests.tiny_models import random_prompts, run, tiny_engine

PARSER = RowParser(SamplingParams(max_tokens=100), DataSection())
BLOCK = 256  # bytes of a prompt that are compared at once
IN_FILE_ORDER = replace(CONFIG, data=replace(CONFIG.data, plan_rows=0))


def raw(index: int, prompt: Any = "", **fields: Any) -> RawRow:
    return RawRow(index, json.dumps({"prompt": prompt, **fields}).encode())


def planned(rows: Sequence[RawRow], num_last: int = 1000) -> list[int]:
    return [row.index for row in RowPlan(iter(rows), PARSER, 1000, num_last)]


def naive_order(texts: Sequence[str], lengths: Sequence[int]) -> list[int]:
    """By recursion: at each block, the rows that go on alike are one branch; a row that ends is one, too."""

    def walk(rows: list[int], depth: int) -> list[int]:
        branches: dict[Any, list[int]] = {}
        for row in rows:
            branches.setdefault(texts[row][depth] if depth < len(texts[row]) else (row,), []).append(row)
        if len(branches) == 1 and depth < len(texts[rows[0]]):
            return walk(rows, depth + 1)
        parts = [part if len(part) == 1 else walk(part, depth + 1) for part in branches.values()]
        parts.sort(key=lambda part: (-max(lengths[row] for row in part), min(part)))
        return [row for part in parts for row in part]

    return walk(list(range(len(texts))), 0) if texts else []


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_that_of_the_tree_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choices("ab", k=rng.randrange(6))) for _ in range(rng.randrange(30))]
    lengths = [rng.randrange(4) for _ in texts]
    prefixes = [prefix_of("".join(letter * BLOCK for letter in text).encode()) for text in texts]
    grouped, num_first = naive_order(texts, [0] * len(texts)), rng.randrange(len(texts) + 1)
    first, last = grouped[:num_first], grouped[num_first:]
    by_length = [last[i] for i in naive_order([texts[row] for row in last], [lengths[row] for row in last])]
    assert start_order(prefixes, lengths, len(last)) == first + by_length


def test_rows_that_are_alike_start_in_input_order() -> None:
    assert planned([raw(i, f"question {i}") for i in range(50)]) == list(range(50))


@pytest.mark.parametrize(
    ("num_last", "order"), [(0, [0, 1, 2, 3, 4]), (3, [0, 1, 3, 2, 4]), (5, [3, 2, 4, 0, 1]), (9, [3, 2, 4, 0, 1])]
)
def test_of_the_last_rows_the_longest_starts_first(num_last: int, order: list[int]) -> None:
    """An error takes no time."""
    rows = [raw(0, "a", max_tokens=5), raw(1, 7), raw(2, "b"), raw(3, "c", max_tokens=300), raw(4, "d")]
    assert planned(rows, num_last) == order


@pytest.mark.parametrize("kind", ["prompt", "messages", "ids", "system"])
def test_rows_that_begin_alike_start_together(kind: str) -> None:
    texts = [f"text {number}: " + str(number) * 400 for number in range(3)]

    def fields(i: int) -> dict[str, Any]:
        text = texts[i % 3]
        if kind == "messages":
            return {"messages": [{"role": "user", "content": f"{text} question {i}"}]}
        if kind == "system":
            return {"messages": [{"role": "system", "content": text}, {"role": "user", "content": f"{i}"}]}
        return {"prompt_token_ids": [*text.encode(), i]} if kind == "ids" else {"prompt": f"{text} question {i}"}

    rows = [RawRow(i, json.dumps({**fields(i), "max_tokens": 10 + i}).encode()) for i in range(12)]
    assert planned(rows) == [11, 8, 5, 2, 10, 7, 4, 1, 9, 6, 3, 0]
    assert planned(rows, num_last=0) == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


def test_numbers_that_are_no_tokens_and_broken_text_do_not_end_the_plan() -> None:
    rows = [RawRow(0, b"\xff"), RawRow(1, b'{"prompt_token_ids": [99999999999999999999]}'), raw(2, "\ud800" * 300)]
    assert sorted(planned(rows)) == [0, 1, 2]


def test_messages_of_a_table_can_have_values_that_json_lacks() -> None:
    time = datetime.datetime(2024, 5, 17)
    rows = [RawRow(i, {"messages": [{"role": "user", "content": f"{i}", "timestamp": time}]}) for i in range(3)]
    assert sorted(planned(rows)) == [0, 1, 2]


@pytest.mark.parametrize("max_rows", [1, 7, 3000, 100_000])
def test_each_row_starts_once_and_few_are_held(max_rows: int) -> None:
    rng = random.Random(max_rows)
    num_read = 0

    def rows() -> Iterator[RawRow]:
        nonlocal num_read
        for num_read in range(1, 8001):
            yield raw(num_read, "x", max_tokens=rng.randrange(1, 900))

    started = []
    for row in RowPlan(rows(), PARSER, max_rows, 20):
        started.append(row.index)
        assert num_read - len(started) < max_rows
        assert num_read <= 1024 + 4 * len(started), "the first rows do not wait for the file to be read"
    num_first = 8000 - min(max_rows, 20)
    assert started[:num_first] == list(range(1, num_first + 1)), "only the last rows of the input are sorted"
    assert sorted(started[num_first:]) == list(range(num_first + 1, 8001))


def test_a_group_that_has_begun_goes_on_when_the_order_is_decided_again() -> None:
    text = "shared " * 100
    rows = [raw(i, text if i % 2 else f"{i}") for i in range(8000)]
    started = [row.index for row in RowPlan(iter(rows), PARSER, 100_000, 0)]
    assert started == [0, *range(1, 8000, 2), *range(2, 8000, 2)]


@pytest.mark.parametrize("is_table", [False, True])
def test_large_rows_are_held_in_small_numbers(is_table: bool) -> None:
    text = "x" * (1 << 20)
    line = {"messages": [{"role": "user", "content": text}]} if is_table else raw(0, text).data
    held = 0

    def rows() -> Iterator[RawRow]:
        nonlocal held
        for i in range(100):
            held += 1
            yield RawRow(i, line)

    for number, _ in enumerate(RowPlan(rows(), PARSER, 1000, 1000)):
        held -= 1
        assert held <= 64
        assert held > 50 or number > 40, "rows that have started make room for others"


def test_rows_before_a_fault_of_the_input_start() -> None:
    def rows() -> Iterator[RawRow]:
        yield from (raw(i, "x", max_tokens=i + 1) for i in range(5))
        raise InputError("damaged")

    plan = RowPlan(rows(), PARSER, 1000, 1000)
    started = [next(plan).index for _ in range(5)]
    with pytest.raises(InputError, match="damaged"):
        next(plan)
    assert started == [4, 3, 2, 1, 0]


def test_limits_are_those_of_the_requests_that_have_not_started() -> None:
    rows = [raw(0, "x", n=3, temperature=1), raw(1, "x", max_tokens=7), raw(2), raw(3, 7), raw(4, "x", max_tokens=200)]
    plan = RowPlan(iter(rows), PARSER, 1000, 1000)
    assert plan.limits() == []
    assert next(plan).index == 4
    assert plan.limits() == [100, 100, 100, 100, 7]


class Recorded(StubEngine):
    """Keeps the limits of its requests in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.limits_seen: list[int] = []

    def submit(self, request: Request) -> None:
        self.limits_seen.append(request.params.max_tokens)
        super().submit(request)


def test_a_file_job_follows_the_plan_and_its_output_is_the_same(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows = [{"prompt": f"row {i}", "max_tokens": rng.randrange(1, 30)} for i in range(300)]
    outputs, engines = [], [Recorded(), Recorded()]
    for name, config, engine in zip("ab", (CONFIG, IN_FILE_ORDER), engines, strict=True):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name)
        run.write(rows)
        assert run(config, engine) == 0
        outputs.append(run.output.read_bytes())
    assert outputs[0] == outputs[1]
    by_plan, in_order = engines[0].limits_seen, engines[1].limits_seen
    assert by_plan == in_order[:-16] + sorted(in_order[-16:], reverse=True) != in_order


def test_rows_of_standard_input_start_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"".join(b'{"prompt": "x", "max_tokens": %d}\n' % (1 + i % 30) for i in range(100))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    engine = Recorded()
    assert Run(tmp_path)(engine=engine, input="-", output=tmp_path / "out.jsonl") == 0
    assert engine.limits_seen == [1 + i % 30 for i in range(100)]


def test_a_job_goes_on_with_another_plan(tmp_path: Path) -> None:
    run, whole = Run(tmp_path), Run(tmp_path / "whole")
    whole.folder.mkdir()
    for each in (run, whole):
        each.write([{"prompt": f"row {i}", "max_tokens": 1 + i % 30} for i in range(300)])
    assert whole() == 0
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=9))
    assert run(IN_FILE_ORDER) == 0
    assert run.stats()["session"]["resumed_rows"] > 20
    assert run.output.read_bytes() == whole.output.read_bytes()


def test_rows_in_the_order_of_a_plan_compute_what_they_share_once() -> None:
    """Questions about several texts, in a cache that holds one text: the order of a file computes each text again and
    again. Requests that start together do not compute it twice."""
    texts = [[1 + number] * 68 for number in range(3)]
    prompts = [texts[i % 3] + question for i, question in enumerate(random_prompts(12, longest=6))]
    order = start_order([prefix_of(array("i", prompt).tobytes()) for prompt in prompts], [9] * 12, num_last=12)
    computed, outputs = [], []
    for rows in (range(12), order):
        engine = tiny_engine(num_pages=40, max_batch_size=3, prefill_chunk_tokens=64)
        done = run(engine, [prompts[row] for row in rows], SamplingParams(max_tokens=2), check=False)
        outputs.append({row: completion.token_ids for row, completion in zip(rows, done, strict=True)})
        computed.append(engine.stats.prefill_tokens)
    assert outputs[0] == outputs[1]
    num_distinct = 3 * 68 + sum(len(prompt) - 68 for prompt in prompts)  # 68 tokens are whole pages
    assert computed[1] == num_distinct < computed[0] / 2


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ([], 0),
        ([(prefix_of(b"a" * 5 * BLOCK), 1)] * 3, 0),  # too few
        ([(prefix_of(b"a" * 5 * BLOCK), 1)] * 4, 320),
        ([(prefix_of(b"a" * 5 * BLOCK), 8)], 320),  # eight completions of one row
        ([(prefix_of(b"a" * 5 * BLOCK), 1)] * 4 + [(prefix_of(bytes([i]) * BLOCK), 1) for i in range(4)], 128),
    ],
)
def test_tokens_that_prompts_share(prompts: list[tuple[bytes, int]], tokens: int) -> None:
    assert shared_tokens(prompts) == tokens


def test_shared_tokens_are_counted_in_a_file_where_they_decide_something(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt_token_ids": [*range(200), i]}) for i in range(8)]
    path.write_text("\n".join([*rows, "no row"]))
    source = open_source(str(path), DataSection())

    def counted(**options: Any) -> int | None:
        config = replace(CONFIG, engine=replace(CONFIG.engine, **options))
        return with_shared_tokens(config, source, PARSER).engine.shared_tokens

    assert counted() == 192
    assert counted(cascade_attention="on") is None
    assert counted(prefix_cache=False) is None
    assert counted(device="cpu") is None
    source = replace(source, path=None)  # a copy of a remote file
    assert counted() == 192
    source = replace(source, reopen=None)  # standard input
    assert counted() is None
