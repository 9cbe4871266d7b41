"""Files whose content is not what their name says: refused, with what they are and what to do, before a model."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from specbatch.config import DataSection
from specbatch.errors import InputError
from specbatch.rows.sources import open_source
from tests.job.test_generate import Run

LINES = b'{"prompt": "a"}\n{"prompt": "b"}\n'
ARRAY = b'[{"prompt": "a"}, {"prompt": "b"}]'
CSV = b"prompt\na\n"


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a"]}), file)
    return file.getvalue()


def arrow() -> bytes:
    file = io.BytesIO()
    table = pa.table({"prompt": ["a"]})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("d.jsonl", LINES)
    return file.getvalue()


FILES = [
    ("d.jsonl", gzip.compress(LINES), "is gzip, not JSON lines", "add .gz"),
    ("d.csv", gzip.compress(CSV), "is gzip, not CSV", "add .gz"),
    ("d.json", zstandard.compress(ARRAY), "is zstd, not JSON", ".zst"),
    ("d.jsonl", bz2.compress(LINES), "is bzip2", "bzcat"),
    ("d.jsonl", lzma.compress(LINES), "is xz", "xzcat"),
    ("d.tsv", archive(), "is a zip archive or an Excel workbook, not TSV", "CSV"),
    ("d.xlsx", archive(), "has no known format: it is a zip archive or an Excel workbook", "CSV"),
    ("d.jsonl.bz2", bz2.compress(LINES), "has no known format: it is bzip2", "bzcat"),
    ("d.jsonl", parquet(), "is parquet", ".parquet"),
    ("d.parquet", arrow(), "is an Arrow file, not parquet", ".arrow"),
    ("d.arrow", parquet(), "is parquet, not ARROW", ".parquet"),
    ("d.parquet", LINES, "is not parquet", "made"),
    ("d.parquet", b"", "is not parquet", "made"),
    ("d.jsonl.gz", LINES, "is not gzip", "made"),
    ("d.jsonl.gz", b"", "is not gzip", "made"),
    ("d.csv.zst", CSV, "is not zstd", "made"),
    ("d.jsonl.gz", gzip.compress(gzip.compress(LINES, mtime=0), mtime=0), "the content of", ".gz"),
    ("d.jsonl.gz", gzip.compress(ARRAY), "is a JSON array", ".json"),
    ("d.jsonl", ARRAY, "is a JSON array", "jq"),
    ("d.ndjson", b"\xef\xbb\xbf[\n  {\n", "is a JSON array", "jq"),
    ("d.jsonl", b'{\n  "prompt": "a"\n}\n', "has JSON over several lines", "jq"),
    ("d.csv", LINES, "is JSON, not CSV", ".jsonl"),
    ("d.jsonl", LINES.decode().encode("utf-16"), "is UTF-16 text, not JSON lines", "iconv -f UTF-16 "),
    ("d.csv", CSV.decode().encode("utf-16-le"), "is UTF-16LE text", "iconv -f UTF-16LE "),
    ("d.json", ARRAY.decode().encode("utf-16-be"), "is UTF-16BE text", "iconv -f UTF-16BE "),
    ("d.jsonl", LINES.decode().encode("utf-32"), "is UTF-32 text", "iconv -f UTF-32 "),
    ("d.jsonl", b"<!DOCTYPE html>\n<html>", "is a page of HTML or XML", "login"),
    ("d.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "the pointer of Git LFS", "git lfs pull"),
    ("d.jsonl", pickle.dumps([{"prompt": "a"}], protocol=4), "is a Python pickle", "JSON lines"),
]


@pytest.mark.parametrize(("name", "content", "words", "hint"), FILES, ids=[f"{f[0]} {f[2]}" for f in FILES])
def test_content_of_another_kind(tmp_path: Path, name: str, content: bytes, words: str, hint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        open_source(str(tmp_path / name), DataSection())
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", b"[1]\n" + LINES),  # one row that is no row
        ("d.jsonl", b'["x"]\n' + LINES),
        ("d.jsonl", b'[{"role": "user"}]\n' + LINES),
        ("d.jsonl", b"[]\n" + LINES),
        ("d.jsonl", b"\n" + LINES),
        ("d.JSONL.GZ", gzip.compress(LINES)),
        ("d.csv", b"PAR1,prompt\na,b\n"),
        ("d.csv", b"BZhang,prompt\na,b\n"),
        ("d.csv", b"[x],prompt\na,b\n"),
        ("d.csv", b"a,b\n"),
        ("d.json", b"[1]"),
        ("d.jsonl", b"{"),
    ],
    ids=range(12),
)
def test_content_that_only_looks_like_another_kind(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    list(open_source(str(tmp_path / name), DataSection()).rows())


@pytest.mark.parametrize("content", [gzip.compress(LINES), ARRAY, LINES.decode().encode("utf-16")], ids=range(3))
def test_standard_input_of_another_kind(content: bytes) -> None:
    with pytest.raises(InputError, match="standard input is "):
        open_source("-", DataSection(), io.BytesIO(content))


def test_it_is_refused_before_a_model_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.input.write_bytes(gzip.compress(LINES))
    monkeypatch.setattr("tests.job.test_generate.resolve", lambda config: pytest.fail("resolved"))
    with pytest.raises(InputError, match="is gzip"):
        run()
