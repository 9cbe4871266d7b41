"""Jobs whose results have the input's own columns: resume, retries, shards and their merge, and other templates."""

from __future__ import annotations

import csv
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config import Config, DataSection, OutputSection
from specbatch.errors import InputError
from specbatch.files.result_files import result_rows
from specbatch.rows.shard import Shard
from tests.job.shards import Shards
from tests.job.test_failures import Broken
from tests.job.test_generate import CONFIG
from tests.stub_engine import StubEngine

SUFFIXES = (".parquet", ".csv")
DATA = DataSection(prompts_as_chat=False, prompt_template="{{ body }}", id_column="ticket")


def flat(template: str = "{{ body }}") -> Config:
    return replace(CONFIG, data=replace(DATA, prompt_template=template), output=OutputSection(columns="flat"))


@pytest.fixture
def run(tmp_path: Path) -> Shards:
    """30 tickets; every fifth has no body, and the logits of every seventh are not finite in a broken engine."""
    run = Shards(tmp_path)
    run.input = tmp_path / "d.csv"
    with run.input.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["subject", "ticket", "body", "temperature"])
        for i in range(30):
            body = "" if i % 5 == 0 else f"{'x' if i % 7 == 0 else 'p'}{i}, =1"
            writer.writerow([f"s{i}", f"{i:03d}", body, "hot"])
    return run


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_file_has_the_columns_of_the_input(run: Shards, suffix: str) -> None:
    output = run.folder / f"d.results{suffix}"
    assert run(config=flat(), output=output) == 1
    frame = pq.read_table(output).to_pandas() if suffix == ".parquet" else pandas.read_csv(output, dtype=str)
    assert list(frame.columns) == [
        *("ticket", "subject", "body", "temperature", "text", "finish_reason", "error", "specbatch")
    ]
    assert frame["ticket"].tolist() == [f"{i:03d}" for i in range(30)]
    assert frame["subject"].tolist() == [f"s{i}" for i in range(30)]
    assert frame["finish_reason"].value_counts()["error"] == 6
    assert frame["error"].dropna().unique().tolist() == ["missing_prompt: the row has no content in body"]
    before = output.read_bytes()
    assert run(config=flat(), output=output) == 1
    assert "finished already" in run.log
    assert output.read_bytes() == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_killed_job_a_retry_and_merged_shards_have_the_same_bytes(run: Shards, suffix: str) -> None:
    output = run.folder / f"d.results{suffix}"
    run(config=flat(), output=output)
    whole = output.read_bytes()
    with pytest.raises(RuntimeError):
        run(config=flat(), output=output, overwrite=True, engine=StubEngine(fail_at=4))
    run(config=flat(), output=output)
    assert "resuming" in run.log
    assert output.read_bytes() == whole
    run(config=flat(), output=output, overwrite=True, engine=Broken())
    assert output.read_bytes() != whole
    run(config=flat(), output=output, retry_errors=True)
    assert run.stats()["session"]["rows"] == 6 + 4
    assert output.read_bytes() == whole
    paths = [Shard(i, 4).path(run.folder / f"s{suffix}") for i in range(4)]
    for number, path in enumerate(paths):
        run(config=flat(), output=path, shard=Shard(number, 4))
    merged = run.folder / f"s{suffix}"
    run.merge(*paths)
    assert merged.read_bytes() == whole
    said = run.refused(*paths, output=run.folder / "m.jsonl")
    assert "has flat columns (output.columns), so the merged file must be a table, too" in said


def test_types_of_a_parquet_file_are_those_of_each_shard(run: Shards) -> None:
    day = datetime.date(2024, 1, 2)
    run.input = run.folder / "d.parquet"
    days = pa.array([day if i == 3 else None for i in range(8)])
    pq.write_table(pa.table({"ticket": range(8), "body": ["b"] * 8, "day": days}), run.input)
    paths = [Shard(i, 2).path(run.folder / "d.results.parquet") for i in range(2)]
    for number, path in enumerate(paths):
        run(config=flat(), output=path, shard=Shard(number, 2))
        assert pq.read_schema(path).field("day").type == pa.date32()
        assert pq.read_schema(path).field("ticket").type == pa.int64()
    run.merge(*paths, output=run.folder / "m.parquet")
    assert pq.read_table(run.folder / "m.parquet").column("day").to_pylist()[3] == day


def test_all_fields_of_json_lines_are_columns(run: Shards) -> None:
    run.input = run.folder / "d.jsonl"
    run.write([
        {"prompt": "a", "max_tokens": 3, "id": 7, "metadata": {"k": 1}},
        {"messages": [{"role": "user", "content": "b"}], "id": "x", "n": 2, "logprobs": 1},
        b"no json",
    ])  # fmt: skip
    config = replace(CONFIG, output=OutputSection(columns="flat"))
    assert run(config=config) == 1
    table = pq.read_table(run.folder / "d.results.parquet")
    assert table.column_names == [
        *("id", "prompt", "max_tokens", "metadata", "messages", "n", "logprobs"),
        *("text", "finish_reason", "error", "choices", "logprobs_answer", "specbatch"),
    ]
    assert table.column("id").to_pylist() == ["7", "x", None]
    assert table.column("metadata").to_pylist() == ['{"k": 1}', None, None]
    note = "columns whose names the input has, too, got a suffix: logprobs_answer"
    assert note in run.log
    assert note in run.stats()["notes"]


def test_formats_without_columns_are_refused(run: Shards) -> None:
    with pytest.raises(InputError, match=r"output\.columns is flat, which r\.jsonl\.gz cannot have") as caught:
        run(config=flat(), output=run.folder / "r.jsonl.gz")
    assert f"-o {run.folder}/r.parquet" in (caught.value.hint or "")
    run(config=replace(flat(), output=OutputSection()), output=run.folder / "r.csv")
    (run.folder / "r.csv").rename(run.folder / "r.parquet")
    with pytest.raises(InputError, match=r"different job: output.columns: flat -> results"):
        run(config=replace(flat(), output=OutputSection()), output=run.folder / "r.parquet")
    paths = [Shard(i, 2).path(run.folder / "s.jsonl") for i in range(2)]
    for number, path in enumerate(paths):
        run(config=replace(flat(), output=OutputSection()), output=path, shard=Shard(number, 2))
    said = run.refused(*paths, output=run.folder / "m.csv")
    assert "s.0-of-2.jsonl does not have flat columns, so m.csv cannot be made of it" in said


@pytest.mark.parametrize("suffix", [".jsonl", *SUFFIXES])
def test_a_retry_with_another_template_runs_only_the_rows_that_failed(run: Shards, suffix: str) -> None:
    output = run.folder / f"d.results{suffix}"
    old, new = flat(), flat('{{ body or "-" }} {{ subject }}')
    if suffix == ".jsonl":
        old, new = replace(old, output=OutputSection()), replace(new, output=OutputSection())
    assert run(config=old, output=output) == 1
    before = {row["id"]: row for row in result_rows(output)}
    with pytest.raises(InputError, match=r"different job: data.prompt_template"):
        run(config=new, output=output)
    with pytest.raises(InputError, match=r"different job: sampling.top_k"):
        run(config=replace(new, sampling=replace(new.sampling, top_k=3)), output=output, retry_errors=True)
    with pytest.raises(RuntimeError):
        run(config=new, output=output, retry_errors=True, engine=StubEngine(fail_at=2))
    assert run(config=new, output=output) == 0, "it resumes"
    after = {row["id"]: row for row in result_rows(output)}
    assert [row_id for row_id in after if after[row_id] != before[row_id]] == [f"{i:03d}" for i in range(0, 30, 5)]
    kept = [{"prompt_template": "{{ body }}", "rows": 24}]
    assert run.stats()["earlier_templates"] == kept
    assert "24 rows keep their answers to an earlier data.prompt_template" in run.log
    assert run(config=new, output=output) == 0
    assert "finished already" in run.log
    with pytest.raises(InputError, match=r"different job: data.prompt_template"):
        run(config=old, output=output)
    third = replace(new, data=replace(new.data, prompt_template="{{ subject }}"))
    assert run(config=third, output=output, retry_errors=True) == 0, "nothing failed: all rows are kept"
    assert {row["id"]: row for row in result_rows(output)} == after
    kept.append({"prompt_template": new.data.prompt_template or "", "rows": 6})
    assert run.stats()["earlier_templates"] == kept


def test_labels_of_tickets_are_counted_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a CSV file with empty cells to value_counts, with the command line and a model."""
    monkeypatch.chdir(tmp_path)
    with Path("tickets.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ticket_id", "subject", "body", "urgent"])
        for i in range(30):
            writer.writerow([f"{i:03d}", "" if i % 4 == 0 else f'No. "{i}"', f"It, is\nbroken {i}", "yes" * (i % 2)])
    schema = "label: one of billing, bug, other; urgent: bool; score: int 1 to 5"
    made = CliRunner().invoke(app, ["init", "--for", "tickets.csv", "--schema", schema])
    assert made.exit_code == 0, made.output
    sets = ["model.target=random:tiny", "speculation.method=none", "engine.device=cpu", "sampling.temperature=1"]
    sets += ["engine.kv_cache_tokens=16384"]
    options = [part for one in sets for part in ("--set", one)]
    ran = CliRunner().invoke(app, ["generate", "tickets.csv", *options])
    assert ran.exit_code == 0, ran.output
    frame = pandas.read_parquet("tickets.results.parquet")
    assert frame["label"].value_counts().sum() == 30
    assert set(frame["label"]) == {"billing", "bug", "other"}
    assert frame["urgent_answer"].dtype == bool
    assert frame["score"].dtype == "int64"
    assert frame["score"].between(1, 5).all()
    assert frame["ticket_id"].tolist() == [f"{i:03d}" for i in range(30)]
    assert frame["subject"].tolist()[:2] == ["", 'No. "1"']
    assert json.loads(frame["specbatch"][3])["index"] == 3


def test_other_rows_than_tables(run: Shards) -> None:
    """A row that is no valid row of its file has no columns."""
    run.input.write_text("ticket,body\n1,a\n2,b,c\n3,c\n")
    run(config=flat())
    rows: list[Any] = pq.read_table(run.folder / "d.results.parquet").to_pylist()
    assert [(row["ticket"], row["body"]) for row in rows] == [("1", "a"), (None, None), ("3", "c")]
    assert rows[1]["error"] == "invalid_csv: line 3 has 3 fields, but the header has 2"
