"""Results as compressed lines and as parquet: the same rows, the same bytes each time, readable by others."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import psutil
import pyarrow.parquet as pq
import pytest
import zstandard

from specbatch.errors import InputError
from specbatch.files import result_files
from specbatch.files.flat_table import DELIMITERS
from specbatch.files.parquet import read_parquet, schema
from specbatch.files.paths import holds_results, stats_path_of
from specbatch.files.result_files import RESULT_SUFFIXES, open_results, result_rows, write_lines
from specbatch.rows.shard import Shard
from tests.job.shards import Shards, native, openai
from tests.job.test_generate import Run
from tests.stub_engine import StubEngine

PACKED = RESULT_SUFFIXES[1:]


def computed(folder: Path, rows: list[Any], suffix: str = ".jsonl") -> Run:
    folder.mkdir()
    run = Run(folder)
    run.write(rows)
    run.output = folder / f"d.results{suffix}"
    run(output=run.output)
    return run


def lines_of(path: Path) -> bytes:
    with open_results(path) as lines:
        return b"".join(lines)


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("rows", [native(60), openai(40)], ids=["native", "openai"])
def test_every_format_has_the_same_rows_and_the_same_bytes_each_time(
    tmp_path: Path, suffix: str, rows: list[Any]
) -> None:
    is_flat = suffix in DELIMITERS
    plain = computed(tmp_path / "plain", rows)
    packed = computed(tmp_path / "packed", rows, suffix)
    again = computed(tmp_path / "again", rows, suffix)
    assert packed.output.read_bytes() == again.output.read_bytes()
    if is_flat:  # with all fields of the input as metadata
        found, expected = list(result_rows(packed.output)), list(result_rows(plain.output))
        for line in found + expected:
            line.pop("metadata", None)
        assert found == expected
    elif suffix != ".parquet":
        assert lines_of(packed.output) == plain.output.read_bytes()
    else:
        expected = [json.loads(line) for line in plain.output.read_bytes().splitlines()]
        for row in expected:
            for name in {"id", "custom_id"} & row.keys():  # text in a table
                if row[name] is not None and not isinstance(row[name], str):
                    row[name] = json.dumps(row[name], ensure_ascii=False)
                elif row[name] == "\ud800":
                    row[name] = "\\ud800"
        assert list(result_rows(packed.output)) == expected
    written = packed.stats()["output_file"]
    assert written["rows"] == packed.stats()["rows"]["total"]
    assert written["bytes"] == packed.output.stat().st_size
    assert holds_results(packed.output)
    assert {path.name for path in packed.folder.iterdir()} == {"d.jsonl", packed.output.name, "d.results.stats.json"}


def test_the_usual_tools_read_the_compressed_files(tmp_path: Path) -> None:
    rows = native(9)
    plain = computed(tmp_path / "plain", rows).output.read_bytes()
    assert gzip.decompress(computed(tmp_path / "gz", rows, ".jsonl.gz").output.read_bytes()) == plain
    packed = computed(tmp_path / "zst", rows, ".jsonl.zst").output.read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed) == plain


def test_pandas_and_datasets_read_the_table(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": f"p{i}", "id": f"r{i}", "topic": i, "logprobs": 1} for i in range(30)] + [{"no": "prompt"}]
    run = computed(tmp_path / "a", rows, ".parquet")
    frame = pandas.read_parquet(run.output)
    table = datasets.load_dataset(
        "parquet", data_files=str(run.output), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert frame["id"].tolist()[:3] == ["r0", "r1", "r2"]
    assert frame["usage"][0]["prompt_tokens"] == table[0]["usage"]["prompt_tokens"] > 0
    assert json.loads(frame["metadata"][7]) == {"topic": 7} == json.loads(table[7]["metadata"])
    assert json.loads(table[7]["logprobs"])[0]["logprob"] == -0.5
    assert frame["finish_reason"].tolist()[-1] == table[30]["finish_reason"] == "error"
    assert table[30]["error"]["type"] == "missing_prompt"
    assert table.features["choices"].dtype == "string"  # null in all rows, and typed all the same


def test_the_types_of_columns_do_not_depend_on_the_values(tmp_path: Path) -> None:
    all_null = computed(tmp_path / "errors", [{"prompt": ""}], ".parquet").output
    full = computed(tmp_path / "full", [{"prompt": "p", "n": 2, "logprobs": 1, "k": [1, {"a": None}]}], ".parquet")
    assert pq.read_schema(all_null).equals(pq.read_schema(full.output), check_metadata=True)
    assert pq.read_schema(all_null).equals(schema(), check_metadata=True)
    empty = computed(tmp_path / "empty", [], ".parquet").output
    assert pq.read_table(empty).num_rows == 0
    assert pq.read_schema(empty).equals(schema())


def test_fields_without_a_column_are_kept(tmp_path: Path) -> None:
    line = b'{"id": 1, "index": 0, "text": "a", "finish_reason": "stop", "new": {"b": [1]}}\n'
    write_lines(tmp_path / "a.parquet", [line], ".parquet")
    (row,) = map(json.loads, read_parquet(tmp_path / "a.parquet"))
    assert row["new"] == {"b": [1]}


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet", ".csv"])
def test_an_interrupted_job_has_the_bytes_of_one_that_was_not(tmp_path: Path, suffix: str) -> None:
    rows = native(60)
    whole = computed(tmp_path / "whole", rows, suffix)
    run = Run(tmp_path)
    run.write(rows)
    run.output = tmp_path / f"d.results{suffix}"
    for step in (3, 6):
        with pytest.raises(RuntimeError):
            run(output=run.output, engine=StubEngine(fail_at=step))
    run.output.with_name(f"{run.output.name}.sorted").write_bytes(whole.output.read_bytes()[:2000])  # A kill leaves it.
    run(output=run.output)
    assert run.output.read_bytes() == whole.output.read_bytes()
    assert run(output=run.output) == 1
    assert "finished already" in run.log
    run.output.write_bytes(run.output.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"was changed after it was finished: sha256"):
        run(output=run.output)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet", ".tsv"])
def test_shards_and_their_merge(tmp_path: Path, suffix: str) -> None:
    rows = native(40)
    whole = computed(tmp_path / "whole", rows, suffix)
    shards = Shards(tmp_path)
    shards.write(rows)
    paths = [Shard(i, 3).path(tmp_path / f"d.results{suffix}") for i in range(3)]
    for number, path in enumerate(paths):
        shards(shard=Shard(number, 3), output=path)
    shards.merge(*paths)
    merged = tmp_path / f"d.results{suffix}"
    assert merged.read_bytes() == whole.output.read_bytes()
    if suffix in (".parquet", ".tsv"):
        with pytest.raises(InputError, match="so the merged file must be"):
            shards.merge(*paths, output=tmp_path / "m.jsonl")
    else:
        shards.merge(*paths, output=tmp_path / "m.jsonl")
        assert (tmp_path / "m.jsonl").read_bytes() == lines_of(merged)


@pytest.mark.parametrize("damage", [lambda data: data[:-30], lambda data: data[:40] + b"?" * 9 + data[49:]])
@pytest.mark.parametrize("suffix", PACKED)
def test_a_damaged_shard_is_refused(tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes]) -> None:
    shards = Shards(tmp_path)
    shards.write(native(40))
    paths = [Shard(i, 2).path(tmp_path / f"d.results{suffix}") for i in range(2)]
    for number, path in enumerate(paths):
        shards(shard=Shard(number, 2), output=path)
    paths[1].write_bytes(damage(paths[1].read_bytes()))
    with pytest.raises(InputError, match=r"changed|cannot be read"):
        shards.merge(*paths)
    assert not (tmp_path / f"d.results{suffix}").exists()


@pytest.mark.parametrize(
    ("name", "stats"),
    [
        ("a.results.jsonl.gz", "a.results.stats.json"),
        ("a.results.parquet", "a.results.stats.json"),
        ("a.ndjson", "a.ndjson.stats.json"),
        (".jsonl", ".jsonl.stats.json"),
    ],
)
def test_names_of_statistics(tmp_path: Path, name: str, stats: str) -> None:
    assert stats_path_of(tmp_path / name) == tmp_path / stats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "flat"), [*((suffix, suffix in DELIMITERS) for suffix in PACKED), (".parquet", True)]
)
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, suffix: str, flat: bool) -> None:
    """In a process of its own: what other tests have freed would hide growth."""
    code = (
        "import psutil, sys\nfrom pathlib import Path\nfrom specbatch.files.result_files import write_lines\n"
        "from specbatch.files.flat_table import FlatColumns, FlatTable\n"
        'line = b\'{"id": 1, "index": %d, "text": "\' + b"x" * 2000 + b\'", "finish_reason": "stop"}\\n\'\n'
        "def write(rows):\n    path = Path(sys.argv[1] + str(rows) + sys.argv[2])\n"
        "    def lines():\n        return (line % i for i in range(rows))\n"
        "    table = FlatTable(FlatColumns(), lines()) if sys.argv[3] else None\n"
        "    write_lines(path, lines(), sys.argv[2], table=table)\n"
        "    return psutil.Process().memory_info().rss\n"
        "before = write(40_000)\nprint(write(400_000) - before)\n"
    )
    grown = subprocess.run(
        [sys.executable, "-c", code, f"{tmp_path}/x", suffix, "x" * flat], capture_output=True, check=True, text=True
    )
    assert int(grown.stdout) < 100 << 20 < psutil.virtual_memory().total
    assert result_files._ROW_GROUP_ROWS == 10_000
