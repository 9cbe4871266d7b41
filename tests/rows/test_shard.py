"""`generate --shard i/n`: which rows a shard has, what they become, and how the shard is named, resumed and checked."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbatch.config import Config, DataSection
from specbatch.errors import InputError
from specbatch.results.fingerprint import job_fingerprint
from specbatch.rows.shard import Shard, part_of, whole_path
from specbatch.rows.sources import Source, open_source
from specbatch.types import Completion
from tests.job.test_generate import CONFIG, Run
from tests.stub_engine import StubEngine

LINES = b"".join(b'{"prompt": "p%d"}\n' % i if i % 5 else b"\n" for i in range(1, 31))  # every fifth line is blank


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.input.write_bytes(LINES)
    return run


def source_of(run: Run) -> Source:
    return open_source(str(run.input), DataSection())


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_the_text_of_a_shard() -> None:
    assert Shard.parse("3/16") == Shard(3, 16)
    assert str(Shard.parse("0/1")) == "0/1"
    for text in ("", "3", "a/4", "-1/4", "1/-4", "1 / 4", "1/4/4", "\u0663/16", "9999999999/99999999999"):
        with pytest.raises(InputError, match="is not a shard"):
            Shard.parse(text)
    with pytest.raises(InputError) as caught:
        Shard.parse("16/16")
    assert caught.value.hint == "shards are numbered from 0: the last of 16 is 15/16"
    with pytest.raises(InputError):
        Shard.parse("0/0")


@pytest.mark.parametrize("count", [1, 9, 10, 11, 100, 1000])
def test_names_are_listed_in_the_order_of_the_shards(count: int) -> None:
    whole = Path("folder/data.v1.results.jsonl")
    names = [str(Shard(number, count).path(whole)) for number in range(count)]
    assert names == sorted(names)
    assert len({len(name) for name in names}) == 1
    assert {whole_path(Path(name)) for name in names} == {whole}


def test_names_of_a_shard() -> None:
    assert Shard(3, 16).path(Path("data.results.jsonl")) == Path("data.results.03-of-16.jsonl")
    for name in (
        "data.results.jsonl",
        "data.3-of-16.json",
        "3-of-16.jsonl",
        "data.a-of-16.jsonl",
        "data.3-of-16.jsonl.x",
    ):
        assert whole_path(Path(name)) is None


@pytest.mark.parametrize("limit", [None, 1, 7, 24, 1000])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_shards_share_the_first_rows_of_the_file(run: Run, limit: int | None, count: int) -> None:
    source = source_of(run)
    whole = list(source.rows())[:limit]
    found = []
    for number in range(count):
        part = part_of(source, limit, Shard(number, count))
        rows = list(part.rows())
        assert all(row.index % count == number for row in rows)
        assert part.total is not None
        assert abs(len(rows) - part.total) <= 30 / 5, "blank lines are counted"
        assert part.identity == source.identity
        found += rows
    assert sorted(found, key=lambda row: row.index) == whole
    totals = [part_of(source, limit, Shard(number, count)).total for number in range(count)]
    assert sum(total or 0 for total in totals) == min(30, limit or 30)
    assert max(total or 0 for total in totals) == -(-min(30, limit or 30) // count)


def test_a_source_of_unknown_length_stays_so() -> None:
    source = open_source("-", DataSection(), io.BytesIO(LINES))
    part = part_of(source, 10, Shard(1, 4))
    assert part.total is None
    assert part.reopen is None
    assert [row.index for row in part.rows()] == [1, 5]  # 9, a blank line, and 13, which is after the limit, are not


def test_the_job_names_the_shard_only_if_there_is_one() -> None:
    whole = job_fingerprint(CONFIG, {"size": 1}, None)
    assert "shard" not in whole
    assert job_fingerprint(CONFIG, {"size": 1}, None, shard=Shard(3, 16)) == {**whole, "shard": "3/16"}


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv"])
def test_a_row_becomes_the_same_line_in_a_shard(run: Run, kind: str) -> None:
    run.input = run.folder / f"d.{kind}"
    if kind == "csv":
        run.input.write_text("prompt\n" + "".join(f"p{i}\n" for i in range(30)))
    else:
        run.input.write_bytes(gzip.compress(LINES) if kind == "jsonl.gz" else LINES)
    assert run() == 0
    whole = [line for line in lines(run.output) if json.loads(line)["index"] % 4 == 2]
    assert run(shard=Shard(2, 4)) == 0
    assert lines(run.folder / "d.results.2-of-4.jsonl") == whole
    stats = json.loads((run.folder / "d.results.2-of-4.stats.json").read_text())
    assert stats["job"]["shard"] == "2/4"
    assert stats["rows"]["total"] == len(whole)
    assert len(whole) > 5


def test_standard_input_has_shards(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == 0
    whole = [line for line in lines(run.output) if json.loads(line)["index"] % 4 == 2]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LINES)))
    output = run.folder / "any.jsonl"
    assert run(input="-", output=output, shard=Shard(2, 4)) == 0
    assert lines(output) == whole


def test_a_finished_shard_runs_once_and_no_other_shard_takes_its_place(run: Run) -> None:
    output = run.folder / "d.results.1-of-4.jsonl"
    assert run(shard=Shard(1, 4)) == 0
    before = output.read_bytes()
    assert run(shard=Shard(1, 4)) == 0
    assert "is finished already" in run.log
    assert len(run.engines) == 1
    with pytest.raises(InputError, match="different job: shard: 1/4 -> 2/4"):
        run(shard=Shard(2, 4), output=output)
    with pytest.raises(InputError, match="different job: shard: 1/4 -> none"):
        run(output=output)
    assert output.read_bytes() == before
    assert run(shard=Shard(2, 4), output=output, overwrite=True) == 0
    assert [json.loads(line)["index"] % 4 for line in lines(output)] == [2] * len(lines(output))


def test_an_interrupted_shard_resumes(run: Run) -> None:
    class Broken(StubEngine):
        def step(self) -> list[Completion]:
            if self._steps == 2:
                raise RuntimeError("broken")
            return super().step()

    run.input.write_bytes(LINES * 20)
    assert run(shard=Shard(1, 4)) == 0
    output = run.folder / "d.results.1-of-4.jsonl"
    undisturbed = output.read_bytes()
    with pytest.raises(RuntimeError, match="broken"):
        run(shard=Shard(1, 4), overwrite=True, engine=Broken(), output=(again := run.folder / "again.jsonl"))
    with pytest.raises(InputError, match="unfinished run of a different job: shard: 1/4 -> 3/4"):
        run(shard=Shard(3, 4), output=again)
    assert run(shard=Shard(1, 4), output=again) == 0
    assert "resuming: " in run.log
    assert again.read_bytes() == undisturbed


def test_an_input_that_changes_is_found_in_every_shard(run: Run) -> None:
    """Also if none of the shard's own rows has changed: the shards must be of one input."""
    other = LINES.replace(b"p1\n", b"p9\n").replace(b'"p1"', b'"q1"')
    assert other != LINES

    class Meddling(StubEngine):
        def step(self) -> list[Completion]:
            run.input.write_bytes(other)
            return super().step()

    with pytest.raises(InputError, match="changed while the job was running"):
        run(shard=Shard(1, 4), engine=Meddling())
    assert run(shard=Shard(1, 4)) == 0
    assert "rows that are still the same are kept" in run.log


def test_an_input_that_is_written_again_without_a_change_is_the_same(run: Run) -> None:
    class Touching(StubEngine):
        def step(self) -> list[Completion]:
            run.input.write_bytes(LINES)
            return super().step()

    assert run(shard=Shard(1, 4), limit=11, engine=Touching()) == 0


def test_fields_are_checked_on_the_first_rows_of_the_file(run: Run) -> None:
    """The same in all shards: a shard can have no row."""
    rows: list[Any] = [{"text": "x"}]
    run.write(rows)
    config = replace(CONFIG, data=DataSection(prompt_column="prompt"))
    for number in (0, 1):
        with pytest.raises(InputError, match="has no"):
            run(config, shard=Shard(number, 2))
    assert isinstance(config, Config)
