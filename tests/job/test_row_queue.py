"""The thread that prepares rows: their order, its errors, rows that are dropped, and its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.config import DataSection
from specbatch.errors import RowError
from specbatch.job.row_queue import RowPreparer, RowQueue
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import EngineLimits, SamplingParams
from tests.stub_engine import StubTokenizer

LIMITS = EngineLimits(40, 300)
THREAD = "specbatch-rows"


def raw(index: int, **fields: object) -> RawRow:
    return RawRow(index, json.dumps(fields or {"prompt": f"p{index}"}).encode())


def prepare(raws: Sequence[RawRow]) -> list[Row]:
    """Rows 13 and 17 raise."""
    if any(row.index in (13, 17) for row in raws):
        raise KeyboardInterrupt if any(row.index == 17 for row in raws) else ZeroDivisionError
    return [Row(row.index, row.digest(), RowError("x", "y")) for row in raws]


@contextmanager
def queue(prepare: Callable[[Sequence[RawRow]], Sequence[Row]] = prepare) -> Iterator[RowQueue]:
    before = set(threading.enumerate())  # other tests may have left a queue open
    made = RowQueue(prepare)
    try:
        yield made
    finally:
        made.close()
    assert not any(thread.name == THREAD for thread in set(threading.enumerate()) - before)


def index_of(rows: RowQueue) -> int:
    """Of the next row."""
    prepared = rows.take()
    assert prepared is not None
    return prepared.index


def test_a_row_that_takes_long_is_waited_for_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with other rows goes on meanwhile; a job that ends does not wait at all."""
    monkeypatch.setattr("specbatch.job.row_queue._LOOK_SECONDS", 0.02)
    may_go_on = threading.Event()

    def wait(raws: Sequence[RawRow]) -> list[Row]:
        may_go_on.wait(10)
        return prepare(raws)

    with queue(wait) as rows:
        rows.add(raw(3))
        assert rows.take(0.01) is None
        threading.Timer(0.05, rows.stop_waiting).start()
        assert rows.take() is None
        assert len(rows) == 1
        may_go_on.set()
        while not rows.prepared():
            time.sleep(0.01)
        assert index_of(rows) == 3


def test_rows_come_in_their_order_and_errors_at_their_row() -> None:
    seen: list[int] = []
    with queue() as rows:
        for index in range(40):
            rows.add(raw(index))
        for index in range(40):
            assert len(rows) == 40 - index
            if index in (13, 17):  # an error that is no Exception, too, as those of tokenizers
                with pytest.raises(KeyboardInterrupt if index == 17 else ZeroDivisionError):
                    rows.take()
            else:
                seen.append(index_of(rows))
    assert seen == [index for index in range(40) if index not in (13, 17)]


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "drop"]), st.integers(0, 7)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_dropped_rows_do_not_come(actions: list[tuple[str, int]]) -> None:
    """Also if the thread has them in hand."""
    expected: list[int] = []
    num_added = 0
    with queue() as rows:
        for action, value in actions:
            if action == "add":
                for _ in range(value):
                    number = num_added + 20  # none of those that raise
                    rows.add(raw(number))
                    expected.append(number)
                    num_added += 1
            elif action == "take" and expected:
                assert index_of(rows) == expected.pop(0)
            elif action == "drop":
                gone = set(expected[::2][:value])
                rows.drop(gone)
                expected = [number for number in expected if number not in gone]
            assert len(rows) == len(expected)
        for number in expected:
            assert index_of(rows) == number


def test_the_queue_ends_while_the_thread_works() -> None:
    """A template that does not end is stopped then."""
    stopped, began = threading.Event(), threading.Event()

    def endless(raws: Sequence[RawRow]) -> list[Row]:
        began.set()
        stopped.wait()
        raise ZeroDivisionError

    before = set(threading.enumerate())
    rows = RowQueue(endless, stopped.set)
    for index in range(100):
        rows.add(raw(index))
    began.wait()
    rows.close()
    rows.close()
    assert not any(thread.name == THREAD for thread in set(threading.enumerate()) - before)


def test_a_closed_queue_does_not_wait() -> None:
    with queue() as rows:
        rows.add(raw(0))
        rows.take()
        rows.close()
        rows.add(raw(1))
        with pytest.raises(RuntimeError, match="closed"):
            rows.take()


def test_waiting_is_counted() -> None:
    def slow(raws: Sequence[RawRow]) -> list[Row]:
        time.sleep(0.05)
        return prepare(raws)

    with queue(slow) as rows:
        rows.add(raw(1))
        rows.take()
        assert rows.waited_seconds > 0.04
        rows.add(raw(2))
        time.sleep(0.2)
        before = rows.waited_seconds
        rows.take()
        assert rows.waited_seconds == before


def test_rows_that_are_prepared_together_are_as_each_alone() -> None:
    """Text with and without special tokens, token ids, and errors of each kind."""
    data = DataSection(chat_template="stub")
    prepared = RowPreparer(RowParser(SamplingParams(), data), TextProcessor(StubTokenizer(), data), LIMITS)
    rows = [
        raw(0, prompt="chat"),
        raw(1, prompt=""),
        raw(2, prompt_token_ids=[1, 2]),
        RawRow(3, b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "text"}}'),
        RawRow(4, b"broken"),
        raw(5, prompt="x" * 50),
        raw(6, messages=[{"role": "refused", "content": "x"}]),
        raw(7, prompt="a\ud800"),
        raw(8, prompt_token_ids=[300]),
        raw(9, prompt="more", stop_token_ids=[300]),
        raw(10, messages=[{"role": "user", "content": "last"}]),
        raw(11),
    ]
    together = prepared(rows)
    for row, found in zip(rows, together, strict=True):
        (alone,) = prepared([row])
        assert repr(found) == repr(alone)
    texts = [StubTokenizer().decode(found.token_ids, False, False) for found in together]
    assert texts[0] == "<user>chat<assistant>"
    assert texts[3] == "<s>text"
    assert texts[10] == "<user>last<assistant>"
    kinds = [found.error and found.error.type for found in together]
    assert kinds == [
        None, "empty_prompt", None, None, "invalid_json", "prompt_too_long", "chat_template_error", "invalid_text",
        "invalid_type", "invalid_type", None, None,
    ]  # fmt: skip
