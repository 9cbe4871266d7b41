"""The row index of an encoded result line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specbatch.files.jsonl import encode_line
from specbatch.files.line_types import index_of, line_index
from tests.job.shards import Shards, native, openai

IDS: list[Any] = [None, True, 0, -1, 1e300, "", '"', "\\", '\\"', '", "index": 9, "', "batch_req_3", "\ud800", "é" * 99]


@pytest.mark.parametrize("id", [*IDS, {"a": [1]}, [1, {"index": 8}]])
def test_the_index_of_an_encoded_line(id: Any) -> None:
    for line in (
        {"id": id, "index": 5, "text": "t", "finish_reason": "stop"},
        {"id": id, "index": 12_345_678_901, "text": None, "metadata": {"index": 3}},
        {"id": "batch_req_000000000017", "custom_id": id, "response": None},
        {"text": "other order", "id": id, "index": 4},
    ):
        assert line_index(encode_line(line)) == index_of(line)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"x", b'{"id": 1}\n', b'{"id": "batch_req_x", "custom_id": 1}\n', b"[1]\n"]
)
def test_other_lines_have_no_index(line: bytes) -> None:
    with pytest.raises((LookupError, ValueError, TypeError, AttributeError)):
        line_index(line)


def test_the_beginning_of_usual_lines_is_enough(tmp_path: Path) -> None:
    """So that no line is decoded: these end in the middle."""
    run = Shards(tmp_path)
    run.write([*native(30), *openai(20)])
    run()
    for line in run.output.read_bytes().splitlines():
        text = re.search(rb'"(text|custom_id)": ', line)
        assert text is not None
        assert line_index(line[: text.end()]) == index_of(json.loads(line))
