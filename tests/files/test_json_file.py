"""JSON files: the rows are those of the same JSON lines, and no value changes."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from specbatch.config import DataSection
from specbatch.errors import InputError, RowError
from specbatch.files import json_file, jsonl
from specbatch.files.json_file import json_rows
from specbatch.rows.sources import Source, open_source
from tests.job.test_generate import Run

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}], "date": "2024-05-02T03:04:05+02:00"},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": 'é\u2028 ] , " \\'}]}],
        "id": 12345678901234567890,
    },
    {"prompt": "2024-01-02", "stop": "x", "id": "two", "nested": {"a": None, "b": [1, 2.0, "c"]}},
    {"prompt": "b", "stop": ["y", "z"], "id": 3, "temperature": 0},
]


def source(folder: Path, content: str | bytes, name: str = "d.json") -> Source:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source(str(folder / name), DataSection())


def rows(folder: Path, content: str | bytes, name: str = "d.json") -> list[Any]:
    return [row.fields() for row in source(folder, content, name).rows()]


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2, ensure_ascii=False),
        "\ufeff" + json.dumps(ROWS),
        LINES,
        "\ufeff" + LINES,
        LINES.replace("\n", ""),
        "".join(json.dumps(row, indent=1) for row in ROWS),
    ],
)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_values_are_those_of_the_file(
    tmp_path: Path, content: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "_CHUNK", chunk)
    assert rows(tmp_path, content) == ROWS
    assert rows(tmp_path, gzip.compress(content.encode()), "d.json.gz") == ROWS
    assert source(tmp_path, content).total == len(ROWS)


def test_results_are_those_of_json_lines(tmp_path: Path) -> None:
    run = Run(tmp_path)
    mixed = [*ROWS, {"prompt": ["a"]}, 7, "text", {"prompt": "p", "temperature": "0.5"}]
    run.write(mixed)
    assert run() == 1
    expected = run.results()
    run.input = tmp_path / "d.json"
    run.input.write_text(json.dumps(mixed))
    assert run(overwrite=True) == 1
    assert run.results() == expected


@pytest.mark.parametrize(
    "content",
    ['{"data": [{"prompt": "a"}]}', '{"prompt": "a",\n "id": 1}', '{"r1": {"prompt": "a"}, "r2": {"prompt": "b"}}'],
)
def test_one_object_is_one_row(tmp_path: Path, content: str) -> None:
    assert rows(tmp_path, content) == [json.loads(content)]


def test_a_row_that_is_no_row_is_an_error_of_its_own(tmp_path: Path) -> None:
    content = b'[{"prompt": NaN}, {"prompt": "\xff"}, {"prompt": "a\nb"}, [1], 99999, {"prompt": "x"}]'
    found = []
    for row in source(tmp_path, content).rows():
        try:
            found.append(row.fields()["prompt"])
        except RowError as exc:
            found.append(exc.type)
    assert found == ["invalid_json", "invalid_text", "invalid_json", "invalid_json", "invalid_json", "x"]
    assert rows(tmp_path, "[]") == rows(tmp_path, " [ ] \n") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ('[{"prompt": "a"},]', "in row 1, which begins at line 1: Expecting value"),
        ('[\n{"prompt": "a"},\n{"prompt": "b"', "in row 1, which begins at line 3"),
        ('[{"prompt": "a"} {"prompt": "b"}]', "a comma or the end of the array is missing"),
        ('[{"prompt": "a"}] x', "there is text after the end of the array"),
        ('[{"a": ' + "[" * 100_000, "is not valid JSON"),
        ("prompt,id\na,1\n", "is not valid JSON in row 0"),
    ],
)
def test_files_of_wrong_syntax_are_refused_at_once(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        source(tmp_path, content)


def test_a_number_at_the_end_of_a_part_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "_CHUNK", 3)
    assert list(json_rows(io.BytesIO(b"[12345, 6.75, 8]"), "x")) == [b"12345", b"6.75", b"8"]
    assert list(json_rows(io.BytesIO(b"12345 678"), "x")) == [b"12345", b"678"]


def test_a_row_that_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(json_file, "_CHUNK", 1 << 16)
    file = io.BytesIO(b'[{"prompt": "a"}, {"prompt": "' + b"x" * (9 << 20))
    with pytest.raises(InputError, match="is not valid JSON in row 1"):
        list(json_rows(file, "x"))
    assert file.tell() < 3 << 20


@pytest.mark.wide
def test_a_long_array_is_not_held(tmp_path: Path) -> None:
    with (tmp_path / "d.json").open("w") as file:
        file.write("[" + ",\n".join(json.dumps({"prompt": "x" * 1000}) for _ in range(100)))
        for _ in range(2000):
            file.write("," + ",\n".join(json.dumps({"prompt": "x" * 1000}) for _ in range(100)))
        file.write("]")
    before = psutil.Process().memory_info().rss
    opened = open_source(str(tmp_path / "d.json"), DataSection())
    assert sum(1 for _ in opened.rows()) == opened.total == 200_100
    assert psutil.Process().memory_info().rss - before < 50 << 20
