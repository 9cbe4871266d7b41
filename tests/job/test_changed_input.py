"""An input that is damaged, or that changes while it is read: nothing is finished under a false name, and what is done
is kept for rows that are still the same."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from specbatch.config import DataSection
from specbatch.errors import InputError
from specbatch.files import jsonl
from specbatch.files.jsonl import BadRow
from specbatch.rows.sources import open_source
from specbatch.types import Completion
from tests.job.test_generate import CONFIG, Run
from tests.stub_engine import StubEngine

ROWS = [{"prompt": f"row {i}", "note": "x" * 3000} for i in range(800)]  # more than is read at once


class Meddling(StubEngine):
    """Calls each of `acts` before the step of its number."""

    def __init__(self, acts: dict[int, Callable[[], Any]]) -> None:
        super().__init__(batch=16)
        self._acts = acts

    def step(self) -> list[Completion]:
        if act := self._acts.get(self._steps + 1):
            act()
        return super().step()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.write(ROWS)
    return run


def undisturbed(folder: Path, content: bytes, name: str = "d.jsonl") -> bytes:
    """The output for an input with this content."""
    folder.mkdir()
    run = Run(folder)
    run.input = folder / name
    run.input.write_bytes(content)
    run()
    return run.output.read_bytes()


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"prompt": "one more"}\n')


def cut(path: Path) -> None:
    os.truncate(path, 1_500_000)


def replace_by_another(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"row 700", b"new 700"))
    os.replace(other, path)


def edit_and_set_the_time_back(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(file.read().index(b"row 3"))
        file.write(b"RAW 3")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [append, cut, replace_by_another, edit_and_set_the_time_back])
@pytest.mark.parametrize("step", [1, 40])
def test_a_changed_input_is_not_finished(run: Run, change: Callable[[Path], None], step: int) -> None:
    with pytest.raises(InputError, match=r"the input .*d\.jsonl changed while the job was running") as caught:
        run(engine=Meddling({step: lambda: change(run.input)}))
    assert "run the same command again" in (caught.value.hint or "")
    assert not run.output.exists()
    assert run() == (change is cut)  # the last line is torn then
    assert "rows that are still the same are kept" in run.log
    session = run.stats()["session"]
    assert session["rows"] <= 1 + (change is cut)
    assert session["rows"] + session["resumed_rows"] == run.stats()["rows"]["total"]
    assert run.output.read_bytes() == undisturbed(run.folder / "fresh", run.input.read_bytes())
    assert run.stats()["rows"]["total"] == len(run.results())


def test_an_input_that_is_gone_at_the_end(run: Run) -> None:
    content = run.input.read_bytes()
    with pytest.raises(InputError, match="changed while"):
        run(engine=Meddling({5: run.input.unlink}))
    run.input.write_bytes(content)
    assert run() == 0
    assert len(run.engines) == 1  # nothing was left to compute
    assert run.output.read_bytes() == undisturbed(run.folder / "fresh", content)


def test_a_change_that_is_taken_back_before_the_end(run: Run) -> None:
    """The input has its old content again, but some rows were answered as they were in between."""
    content = run.input.read_bytes()
    before = run.input.stat()

    def restore() -> None:
        run.input.write_bytes(content)
        os.utime(run.input, ns=(before.st_atime_ns, before.st_mtime_ns))

    acts = {1: lambda: run.input.write_bytes(content.replace(b"row 7", b"RAW 7")), 95: restore}
    in_file_order = replace(CONFIG, data=replace(CONFIG.data, plan_rows=0))  # so that not all rows are read at once
    with pytest.raises(InputError, match="changed while"):
        run(in_file_order, Meddling(acts))
    assert run() == 0
    assert run.stats()["session"]["rows"] > 50
    assert run.output.read_bytes() == undisturbed(run.folder / "fresh", content)


def test_what_a_job_goes_on_with_is_its_input_from_then_on(run: Run) -> None:
    with pytest.raises(InputError, match="changed while"):
        run(engine=Meddling({1: lambda: replace_by_another(run.input)}))
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=1))
    append(run.input)
    with pytest.raises(InputError, match=r"different job: input\.size"):
        run()


def test_a_touched_input_is_finished(run: Run) -> None:
    assert run(engine=Meddling({5: lambda: os.utime(run.input)})) == 0


def test_the_changed_input_of_a_killed_job_is_refused_as_before(run: Run) -> None:
    """Nothing has seen the change happen: it may as well be another file, given by mistake."""
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=9))
    append(run.input)
    with pytest.raises(InputError, match=r"different job: input\.size"):
        run()


def test_tables_and_folders_of_tables_are_watched(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    table = pa.table({"prompt": [f"p{i}" for i in range(50)]})
    pq.write_table(table, folder / "train.parquet")
    other = pa.table({"prompt": [f"q{i}" for i in range(50)]})
    run = Run(tmp_path)
    for name in (folder / "train.parquet", folder):
        run.output = tmp_path / f"{name.name}.results.jsonl"
        with pytest.raises(InputError, match="changed while"):
            run(engine=Meddling({3: lambda: pq.write_table(other, folder / "train.parquet")}), input=str(name))
        assert not run.output.exists()
        pq.write_table(table, folder / "train.parquet")
    assert open_source("-", DataSection(), io.BytesIO(b"{}")).touched() is False


def compressed(name: str, content: bytes) -> bytes:
    return (
        gzip.compress(content, mtime=0)
        if name.endswith("gz")
        else zstandard.ZstdCompressor(write_checksum=True).compress(content)
    )


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst"])
def test_rows_before_the_damage_are_kept_when_the_file_is_repaired(tmp_path: Path, name: str) -> None:
    rng = random.Random(0)  # such text does not compress well: many blocks
    content = b"".join(b'{"prompt": "%d", "note": "%x"}\n' % (i, rng.getrandbits(16000)) for i in range(1000))
    run = Run(tmp_path)
    run.input = tmp_path / name
    whole = compressed(name, content)
    damaged = bytearray(whole)
    damaged[len(whole) * 3 // 4 : len(whole) * 3 // 4 + 100] = bytes(100)
    for broken in (bytes(damaged), whole[: len(whole) // 2]):
        run.input.write_bytes(broken)
        with pytest.raises(InputError, match=r"cannot be read past line \d\d\d") as caught:
            run()
        assert "repair it, and run the same command again" in (caught.value.hint or "")
    run.input.write_bytes(whole)
    assert run() == 0
    assert run.stats()["session"]["rows"] < 450  # rows: the 250 after the damage, and some that it made unreadable
    assert run.output.read_bytes() == undisturbed(tmp_path / "fresh", content)


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst"])
def test_no_corruption_is_a_traceback(tmp_path: Path, name: str) -> None:
    rng = random.Random(0)
    whole = compressed(name, b"".join(b'{"prompt": "%x"}\n' % rng.getrandbits(400) for i in range(500)))
    messages = set()
    for _ in range(60):
        damaged = bytearray(whole)
        for at in rng.sample(range(len(damaged)), rng.randrange(1, 4)):
            damaged[at] = rng.randrange(256)
        (tmp_path / name).write_bytes(damaged)
        try:
            for row in open_source(str(tmp_path / name), DataSection()).rows():
                assert isinstance(row.data, bytes)
        except InputError as exc:
            messages.add(exc.message)
    assert len(messages) > 1
    assert all("cannot be read past line" in message for message in messages)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """A smaller limit of a line, in bytes."""
    assert jsonl.MAX_LINE_BYTES == 64 << 20
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2 << 20)
    return 2 << 20


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "-"])
def test_a_line_that_would_fill_the_memory(tmp_path: Path, name: str, limit: int) -> None:
    bomb = b'{"prompt": "a"}\n{"prompt": "' + b"x" * 3 * limit + b'"}\n{"prompt": "b"}\n'
    if name == "-":
        source = open_source(name, DataSection(), io.BytesIO(bomb))
    else:
        (tmp_path / name).write_bytes(bomb if name == "d.jsonl" else compressed(name, bomb))
        source = open_source(str(tmp_path / name), DataSection())
    found = [(row.index, row.data) for row in source.rows()]
    too_long = BadRow("invalid_json", "the line is longer than 2 MiB")
    assert found == [(0, b'{"prompt": "a"}'), (1, too_long), (2, b'{"prompt": "b"}')]


def test_a_line_that_is_too_long_is_an_error_row(run: Run, limit: int) -> None:
    run.write([{"prompt": "a"}, {"prompt": "x" * limit}, {"prompt": "b"}])
    assert run() == 1
    errors = [row.get("error", {}).get("message") for row in run.results()]
    assert errors == [None, "the line is longer than 2 MiB", None]


def test_a_long_line_is_no_bomb(tmp_path: Path, limit: int) -> None:
    line = b'{"prompt": "' + b"x" * (limit - 15) + b'"}'
    (tmp_path / "d.jsonl").write_bytes(line + b"\n" + line)
    assert [len(row.data) for row in open_source(str(tmp_path / "d.jsonl"), DataSection()).rows()] == [len(line)] * 2


@pytest.mark.slow
def test_a_bomb_of_3_gb_costs_little_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "d.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(json.dumps({"prompt": "a"}).encode() + b"\n")
        for _ in range(3000):
            file.write(bytes(1 << 20))
    before = psutil.Process().memory_info().rss
    rows = list(open_source(str(tmp_path / "d.jsonl.gz"), DataSection()).rows())
    assert rows[1].data == BadRow("invalid_json", "the line is longer than 64 MiB")
    assert psutil.Process().memory_info().rss - before < 200 << 20
