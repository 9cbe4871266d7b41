"""Inputs: formats, standard input, compression, and files that are not there."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from specbatch.config import DataSection
from specbatch.errors import InputError
from specbatch.rows.sources import Source, input_stem, open_source

LINES = b'{"prompt": "a"}\n\nbroken\n{"prompt": "b"}'
DATA = DataSection()


def rows(source: Source) -> list[tuple[int, Any]]:
    return [(r.index, r.data) for r in source.rows()]


EXPECTED = [(0, b'{"prompt": "a"}'), (2, b"broken"), (3, b'{"prompt": "b"}')]


@pytest.mark.parametrize("name", ["d.jsonl", "d.ndjson", "d.jsonl.gz", "d.jsonl.zst"])
def test_lines(tmp_path: Path, name: str) -> None:
    content = LINES
    if name.endswith(".gz"):
        content = gzip.compress(LINES)
    if name.endswith(".zst"):  # two frames, as `cat a.zst b.zst` makes
        content = zstandard.compress(LINES[:20]) + zstandard.compress(LINES[20:])
    (tmp_path / name).write_bytes(content)
    source = open_source(str(tmp_path / name), DATA)
    assert rows(source) == EXPECTED
    assert source.total == (4 if name in ("d.jsonl", "d.ndjson") else None)


def test_identity_is_the_content(tmp_path: Path) -> None:
    def identity(content: bytes) -> dict[str, Any]:
        (tmp_path / "d.jsonl").write_bytes(content)
        return open_source(str(tmp_path / "d.jsonl"), DATA).identity

    assert identity(b"a\n") == identity(b"a\n")
    assert identity(b"a\n") != identity(b"b\n")


@pytest.mark.parametrize("long", [False, True])
def test_standard_input(long: bool) -> None:
    filler = b'{"prompt": "' + b"x" * 1000 + b'"}\r\n'
    text = filler * (200 if long else 3) + b"\n" + LINES
    source = open_source("-", DATA, io.BytesIO(text))
    assert source.verifiable is not long
    found = rows(source)
    count = 200 if long else 3
    assert found == [(i, filler[:-2]) for i in range(count)] + [(count + 1 + i, data) for i, data in EXPECTED]


def test_empty_inputs(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"")
    source = open_source(str(tmp_path / "d.jsonl"), DATA)
    assert rows(source) == []
    assert source.total == 0
    assert rows(open_source("-", DATA, io.BytesIO(b""))) == []


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", None], "k": [1, 2], "f": [float("nan"), float("inf")], "l": [["x"], []]})
    pq.write_table(table, tmp_path / "d.parquet")
    assert rows(open_source(str(tmp_path / "d.parquet"), DATA)) == [
        (0, {"prompt": "a", "k": 1, "f": None, "l": ["x"]}),
        (1, {"prompt": None, "k": 2, "f": float("inf"), "l": []}),
    ]


def test_tables_without_rows(tmp_path: Path) -> None:
    """As a whole, and as the first row group."""
    for name, groups in (("a", [[]]), ("b", [[], ["x"] * 3])):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", pa.schema([("prompt", pa.string())])) as writer:
            for prompts in groups:
                writer.write_table(pa.table({"prompt": pa.array(prompts, pa.string())}))
        assert len(rows(open_source(str(tmp_path / f"{name}.parquet"), DATA))) == sum(map(len, groups))


def test_folder_of_tables(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "train.parquet")
    source = open_source(str(tmp_path), DATA)
    assert [d["prompt"] for _, d in rows(source)] == ["a", "b"]
    with pytest.raises(InputError, match="no split 'test'") as caught:
        open_source(str(tmp_path), DataSection(split="test"))
    assert "train" in (caught.value.hint or "")


def test_a_folder_of_csv_files_has_text_in_every_cell(tmp_path: Path) -> None:
    for name in ("train-1.csv", "train-2.csv"):
        (tmp_path / name).write_text("id,prompt\n001,a\n,b\n")
    source = open_source(str(tmp_path), DATA)
    assert rows(source) == [(i, {"id": ["001", ""][i % 2], "prompt": "ab"[i % 2]}) for i in range(4)]
    assert source.total == 4


def test_a_folder_that_declares_how_it_is_read_is_read_so(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("id;prompt\n1;a\n")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: ';'\n---\n"
    )
    assert rows(open_source(str(tmp_path), DATA)) == [(0, {"id": 1, "prompt": "a"})]


def test_rows_of_json_in_a_folder_are_columns(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('[{"prompt": "a", "stop": "x", "d": "2024-01-02T03:04:05+02:00"}, 7]')
    found = rows(open_source(str(tmp_path), DATA))
    assert found[0] == (0, {"prompt": "a", "stop": "x", "d": "2024-01-02T03:04:05+02:00"})
    assert found[1][1].type == "invalid_json"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", b"id,prompt\n001,a\n,b\n"),
        ("train.tsv.gz", gzip.compress(b"id\tprompt\n001\ta\n\tb\n", mtime=0)),
        ("train.json", b'[{"id": "001", "prompt": "a"},\n{"id": "", "prompt": "b"}]'),
        ("train.json", b'{"id": "001", "prompt": "a"}\n{"id": "", "prompt": "b"}'),
        ("train.jsonl", b'{"id": "001", "prompt": "a"}\n{"id": "", "prompt": "b"}'),
    ],
    ids=range(5),
)
def test_text_files_of_the_hub_keep_their_values(name: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a file system in memory here."""
    import datasets
    import fsspec
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    config = CsvConfig(sep="\t" if "tsv" in name else ",") if "sv" in name else JsonConfig()
    config.data_files = {"train": [f"hf://org/{name}"]}
    builder = SimpleNamespace(config=config, info=datasets.DatasetInfo(), hash="1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda ref, subset: builder)
    try:
        with fsspec.open(f"memory://org/{name}", "wb") as file:
            file.write(content)
        opened = fsspec.open
        monkeypatch.setattr(fsspec, "open", lambda url, mode: opened(url.replace("hf:", "memory:"), mode))
        assert rows(open_source("org/name", DATA)) == [
            (0, {"id": "001", "prompt": "a"}),
            (1, {"id": "", "prompt": "b"}),
        ]
    finally:
        MemoryFileSystem.store.clear()


def test_missing_files_and_unknown_formats(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(LINES)
    with pytest.raises(InputError, match="does not exist") as caught:
        open_source(str(tmp_path / "dta.jsonl"), DATA)
    assert "data.jsonl" in (caught.value.hint or "")
    with pytest.raises(InputError, match="does not exist") as caught:
        open_source(str(tmp_path / "no" / "dta.jsonl"), DATA)
    assert "folder" in (caught.value.hint or "")
    (tmp_path / "d.docx").write_bytes(b"")
    with pytest.raises(InputError, match="no known format"):
        open_source(str(tmp_path / "d.docx"), DATA)
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        open_source('{"prompt": "a row in place of a file"}' * 20, DATA)


def test_pipes_are_sent_to_standard_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file") as caught:
        open_source(str(tmp_path / "pipe"), DATA)
    assert "generate -" in (caught.value.hint or "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    (tmp_path / "d.jsonl").chmod(0)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        open_source(str(tmp_path / "d.jsonl"), DATA)


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst"])
@pytest.mark.parametrize("damage", ["torn", "garbage"])
def test_damaged_compression(tmp_path: Path, name: str, damage: str) -> None:
    import random

    text = b"".join(b'{"prompt": "%d"}\n' % random.Random(i).getrandbits(64) for i in range(20_000))
    content = gzip.compress(text) if name.endswith("gz") else zstandard.compress(text)
    (tmp_path / name).write_bytes(content[: len(content) // 2] if damage == "torn" else b"garbage")
    with pytest.raises(InputError, match="cannot be read past" if damage == "torn" else "as its name says"):
        rows(open_source(str(tmp_path / name), DATA))


def test_damaged_table(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"garbage")
    with pytest.raises(InputError, match="is not parquet"):
        open_source(str(tmp_path / "d.parquet"), DATA)
    pq.write_table(pa.table({"prompt": ["a"] * 1000}), tmp_path / "d.parquet")
    content = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(content[:-20])
    with pytest.raises(InputError, match="parquet cannot be read"):
        open_source(str(tmp_path / "d.parquet"), DATA)


@pytest.mark.parametrize(
    ("ref", "stem"),
    [
        ("a/data.jsonl", "data"),
        ("data.jsonl.gz", "data"),
        ("data.v2.parquet", "data.v2"),
        ("org/name", "name"),
        ("x.JSONL", "x"),
    ],
)
def test_input_stem(ref: str, stem: str) -> None:
    assert input_stem(ref) == stem


def test_folder_of_json_lines_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"JSON lines \(a\.jsonl\)") as caught:
        open_source(str(tmp_path), DATA)
    assert "generate -" in (caught.value.hint or "")
