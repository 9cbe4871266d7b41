"""Inputs and outputs in object stores, on fsspec's store in memory; test_s3.py has a server."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from specbatch.config import DataSection
from specbatch.errors import InputError
from specbatch.files.paths import partial_path
from specbatch.files.remote import RemoteOutput, fetch
from specbatch.files.urls import STORES, Store, url_of
from specbatch.job.command import GenerateOptions
from specbatch.rows.shard import Shard
from specbatch.rows.sources import input_stem, open_source
from tests.job.shards import Shards, native
from tests.job.test_changed_input import Meddling
from tests.job.test_generate import Run
from tests.stub_engine import StubEngine

INPUT, OUTPUT = "memory://bucket/d.jsonl", "memory://bucket/d.results.jsonl"
STATS = "/bucket/d.results.stats.json"


class Bucket:
    """The files of the store, and what fails there."""

    def __init__(self) -> None:
        self.files = fsspec.filesystem("memory", skip_instance_cache=True)

    def __getitem__(self, name: str) -> bytes:
        return self.files.cat_file(f"/bucket/{name}")

    def __setitem__(self, name: str, content: bytes) -> None:
        self.files.pipe_file(f"/bucket/{name}", content)

    def names(self) -> set[str]:
        return {Path(path).name for path in self.files.find("/bucket")}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setitem(STORES, "memory", Store("fsspec", True, "ask"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = Bucket()
    bucket.files.store.clear()
    yield bucket
    bucket.files.store.clear()


@pytest.fixture
def run(tmp_path: Path, bucket: Bucket) -> Run:
    run = Run(tmp_path)
    run.write(native(60))
    bucket["d.jsonl"] = run.input.read_bytes()
    run()
    return run


def remotely(run: Run, **options: Any) -> int:
    return run(**{"input": INPUT, "output": Path(OUTPUT), **options})


@pytest.mark.parametrize("name", ["d.results.jsonl", "d.results.parquet"])
def test_a_job_from_store_to_store(run: Run, bucket: Bucket, name: str) -> None:
    (run.folder / "local").mkdir()
    local = run.folder / "local" / name
    run(output=local)
    assert remotely(run, output=Path(f"memory://bucket/{name}")) == 1
    assert bucket[name] == local.read_bytes()
    stats = json.loads(bucket["d.results.stats.json"])
    assert (stats["input"], stats["output"]) == (INPUT, f"memory://bucket/{name}")
    assert stats["job"] == run.stats()["job"], "the input is the same one, wherever it is"
    assert bucket.names() == {"d.jsonl", name, "d.results.stats.json"}
    assert not [path for path in (run.folder / "cache").rglob("*") if path.is_file()]
    engines = len(run.engines)
    assert remotely(run, output=Path(f"memory://bucket/{name}")) == 1
    assert f"memory://bucket/{name} is finished already" in run.log
    assert len(run.engines) == engines


def test_the_default_output_of_a_remote_input_is_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run.output.read_bytes()
    (run.folder / "here").mkdir()
    monkeypatch.chdir(run.folder / "here")
    run(input=INPUT)
    assert (run.folder / "here" / "d.results.jsonl").read_bytes() == whole
    assert input_stem("https://h/a/d.jsonl.gz?x=/y") == "d"


def test_a_killed_job_resumes(run: Run, bucket: Bucket) -> None:
    for step in (3, 5):
        with pytest.raises(RuntimeError):
            remotely(run, engine=StubEngine(fail_at=step))
    assert bucket.names() == {"d.jsonl"}
    assert remotely(run) == 1
    assert "resuming" in run.log
    assert bucket["d.results.jsonl"] == run.output.read_bytes()


@pytest.mark.parametrize("ends_with", ["d.results.jsonl", "d.results.stats.json"])
def test_a_failed_upload_is_made_up_for(
    run: Run, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, ends_with: str
) -> None:
    put = type(bucket.files).put_file

    def refuse(self: Any, file: str, to: str, **options: Any) -> None:
        if to.endswith(ends_with):
            raise OSError("connection lost")
        put(self, file, to, **options)

    with monkeypatch.context() as broken:
        broken.setattr(type(bucket.files), "put_file", refuse)
        with pytest.raises(InputError, match=r"cannot be written: connection lost") as caught:
            remotely(run)
    assert "run the same command again" in (caught.value.hint or "")
    engines = len(run.engines)
    assert remotely(run) == 1
    assert len(run.engines) == engines, "nothing is computed again"
    assert bucket["d.results.jsonl"] == run.output.read_bytes()
    assert "d.results.stats.json" in bucket.names()


def test_a_changed_input_is_found(run: Run, bucket: Bucket) -> None:
    content = bucket["d.jsonl"]

    def change() -> None:
        bucket["d.jsonl"] = content + b'{"prompt": "one more"}\n'

    with pytest.raises(InputError, match=rf"the input {INPUT} changed while the job was running"):
        remotely(run, engine=Meddling({2: change}))
    remotely(run)
    assert json.loads(bucket["d.results.stats.json"])["rows"]["total"] == len(run.results()) + 1
    change()  # written again, with the same content
    assert remotely(run) == 1
    assert "finished already" in run.log
    bucket["d.jsonl"] = content
    with pytest.raises(InputError, match=rf"{OUTPUT} is the result of a different job: input\.size"):
        remotely(run)


def test_an_input_is_downloaded_once(run: Run, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(INPUT).path
    monkeypatch.setattr(type(bucket.files), "get_file", None)  # a download would be an error
    assert fetch(INPUT).path == path
    assert [row.index for row in open_source(INPUT, DataSection()).rows()][:2] == [0, 1]
    path.write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot be downloaded"):
        fetch(INPUT)


def test_a_file_of_the_web(run: Run, tmp_path: Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    served = tmp_path / "served"
    served.mkdir()
    (served / "d.jsonl.gz").write_bytes(gzip.compress(run.input.read_bytes()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/d.jsonl.gz"
        run(input=f"{url}?token=x/y", output=tmp_path / "web.jsonl")
        assert (tmp_path / "web.jsonl").read_bytes() == run.output.read_bytes()
        with pytest.raises(InputError, match=r"no\.jsonl does not exist"):
            open_source(f"http://127.0.0.1:{server.server_port}/no.jsonl", DataSection())
        server.shutdown()


def test_results_of_other_jobs_and_inputs_are_not_written_over(run: Run, bucket: Bucket) -> None:
    bucket["d.results.jsonl"] = b"precious"
    with pytest.raises(InputError, match=rf"{OUTPUT} exists without d\.results\.stats\.json"):
        remotely(run)
    assert bucket["d.results.jsonl"] == b"precious"
    with pytest.raises(InputError, match="is the input, so it cannot be written"):
        remotely(run, output=Path(INPUT))
    assert remotely(run, overwrite=True) == 1
    assert bucket["d.results.jsonl"] == run.output.read_bytes()


def test_what_is_missing_is_found_before_the_model(run: Run, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = len(run.engines)
    with pytest.raises(InputError, match=r"memory://bucket/no\.jsonl does not exist"):
        run(input="memory://bucket/no.jsonl")
    with pytest.raises(InputError, match="can only be read"):
        run(output=Path("https://host/x.jsonl"))
    with pytest.raises(InputError, match="is a folder"):
        run(input="memory://bucket")

    def refuse(self: Any, path: str, mode: str = "rb", **options: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(bucket.files), "open", refuse)
    monkeypatch.setitem(STORES, "memory", Store("fsspec", True, "ask", "upload"))
    with pytest.raises(InputError, match=r"cannot be written: Access Denied") as caught:
        remotely(run)
    assert caught.value.hint == "ask"
    monkeypatch.setitem(STORES, "gs", Store("no_such_package", True, ""))
    with pytest.raises(InputError, match=r"gs://b/x\.jsonl needs the package no_such_package") as caught:
        run(input="gs://b/x.jsonl")
    assert caught.value.hint == "pip install no_such_package"
    assert len(run.engines) == engines


def test_shards_in_a_store(run: Run, bucket: Bucket) -> None:
    shards = Shards(run.folder)
    urls = [Shard(i, 3).path(Path(OUTPUT)) for i in range(3)]
    for number, url in enumerate(urls):
        shards(input=INPUT, output=url, shard=Shard(number, 3))
    assert shards.merge(*urls) == 1
    assert bucket["d.results.jsonl"] == run.output.read_bytes()
    assert shards.merge(*urls) == 1
    assert "finished already" in shards.log
    merged = json.loads(bucket["d.results.stats.json"])
    assert merged["shards"][1]["output"] == "memory://bucket/d.results.1-of-3.jsonl"
    with pytest.raises(InputError, match=r"d\.results\.3-of-4\.jsonl does not exist"):
        shards.merge(Path("memory://bucket/d.results.3-of-4.jsonl"), overwrite=True)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("s3://b/x", "s3://b/x"),
        (Path("s3://b/a/x.jsonl"), "s3://b/a/x.jsonl"),
        ("HF://datasets/o/n/x", "hf://datasets/o/n/x"),
        ("ftp://h/x", None),
        ("c:/x", None),
        ("s3:x", None),
        ("data.jsonl", None),
    ],
)
def test_names_that_are_urls(name: Any, url: str | None) -> None:
    assert url_of(name) == url


def test_two_outputs_have_two_folders(bucket: Bucket) -> None:
    one, other = RemoteOutput("memory://a/x.jsonl"), RemoteOutput("memory://b/x.jsonl")
    assert one.path != other.path
    assert one.path.name == partial_path(other.path).name.removesuffix(".partial")
    assert GenerateOptions("a", Path("memory://a/x.jsonl")).output == Path("memory:/a/x.jsonl")
