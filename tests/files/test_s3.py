"""A real S3 protocol: moto's server in this process, s3fs in another, which is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import InputError
from specbatch.files.remote import RemoteFile
from tests.job.shards import native
from tests.job.test_generate import Run

pytestmark = pytest.mark.slow
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


class Proxy:
    """Between a client and the server. `act` is called once, when `on` begins to be written, and ends that
    connection."""

    def __init__(self, port: int) -> None:
        self.on: bytes | None = None
        self.act: Callable[[], None] = lambda: None
        self._server = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            server = socket.create_connection(("127.0.0.1", self._server))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(*ends, ends[0] is client), daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket, is_request: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                if is_request and self.on is not None and data.startswith(self.on):
                    to.sendall(data[: len(data) // 2])
                    self.on = None
                    self.act()
                    break
                to.sendall(data)
        except OSError:
            pass
        for end in (source, to):
            end.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield proxy
    reset = urllib.request.Request(f"http://127.0.0.1:{server.get_host_and_port()[1]}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # all servers of a process have the same buckets
    server.stop()


@pytest.fixture
def bucket(proxy: Proxy) -> Any:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    return client


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stub_engine", "generate", *arguments]
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, **paths, **environment}, stderr=subprocess.PIPE, text=True
    )


def names(bucket: Any) -> list[str]:
    return [entry["Key"] for entry in bucket.list_objects_v2(Bucket="bucket").get("Contents", [])]


@pytest.mark.parametrize("name", ["d.results.jsonl", "d.results.parquet"])
def test_kills_in_the_job_and_in_the_upload(tmp_path: Path, bucket: Any, proxy: Proxy, name: str) -> None:
    run = Run(tmp_path)
    run.write(native(200))
    bucket.put_object(Bucket="bucket", Key="d.jsonl", Body=run.input.read_bytes())
    command = ("s3://bucket/d.jsonl", "-o", f"s3://bucket/{name}", "--set", "data.prompts_as_chat=false")
    local = start(tmp_path, "d.jsonl", "-o", name, *command[3:])
    assert local.wait() == 1

    first = start(tmp_path, *command, STUB_SLEEP="0.05")
    partial = None
    while partial is None or partial.read_bytes().count(b'"row":') < 20:
        time.sleep(0.02)
        partial = next((tmp_path / "cache").rglob("*.partial"), None)
        assert first.poll() is None, first.stderr.read()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert names(bucket) == ["d.jsonl"]

    proxy.on = f"PUT /bucket/{name}".encode()
    second = start(tmp_path, *command)
    proxy.act = lambda: second.send_signal(signal.SIGKILL)
    assert second.wait() == -signal.SIGKILL
    assert names(bucket) == ["d.jsonl"], "half of an upload is no object"

    third = start(tmp_path, *command, STUB_FAIL_AT="1")
    assert third.wait() == 1, third.stderr.read()  # no row runs
    assert bucket.get_object(Bucket="bucket", Key=name)["Body"].read() == (tmp_path / name).read_bytes()
    assert names(bucket) == ["d.jsonl", name, "d.results.stats.json"]
    assert not bucket.list_multipart_uploads(Bucket="bucket").get("Uploads")
    again = start(tmp_path, *command)
    assert again.wait() == 1
    assert "is finished already" in again.stderr.read()


def test_the_check_leaves_nothing(bucket: Any) -> None:
    RemoteFile("s3://bucket/x.jsonl").check_can_write()
    assert names(bucket) == []
    assert not bucket.list_multipart_uploads(Bucket="bucket").get("Uploads")
    bucket.put_object(Bucket="bucket", Key="x.jsonl", Body=b"old")
    before = RemoteFile("s3://bucket/x.jsonl").state()
    bucket.put_object(Bucket="bucket", Key="x.jsonl", Body=b"new")
    assert before is not None
    assert RemoteFile("s3://bucket/x.jsonl").state() != before


def test_errors_before_the_model(bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written: .*bucket does not exist") as caught:
        RemoteFile("s3://no-such-bucket/x.jsonl").check_can_write()
    assert "name of the bucket" in (caught.value.hint or "")
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"cannot be read: .*credentials") as caught:
        RemoteFile("s3://bucket/x.jsonl").state()
    assert "AWS_ACCESS_KEY_ID" in (caught.value.hint or "")
