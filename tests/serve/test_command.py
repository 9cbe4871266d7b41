"""Mistakes in the command line of `serve-batches`, and the client of the docs."""

from __future__ import annotations

import fcntl
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from specbatch import cli
from specbatch.cli import app
from tests.serve.server import OPTIONS, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
SETS = [part for option in OPTIONS for part in ("--set", option)]


def refusal(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve-batches", "--dir", str(folder), "--port", "0", *arguments, *SETS])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.0.2.1"])
def test_other_addresses_than_loopback_need_a_key(tmp_path: Path, host: str) -> None:
    text = refusal(tmp_path, "--host", host)
    assert f"--host {host} lets other machines in, and there is no API key" in text
    assert "SPECBATCH_API_KEY" in text
    assert not any(tmp_path.iterdir())


def test_an_empty_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the API key is empty" in refusal(tmp_path, "--api-key", " ")


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "python_multipart"])
def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    text = refusal(tmp_path)
    assert f"serve-batches needs the package {name.replace('_', '-')}" in text
    assert "pip install 'specbatch[serve]'" in text


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        text = refusal(tmp_path, "--port", port)
    assert f"cannot listen at 127.0.0.1 port {port}" in text
    assert "--port names another port" in text


def test_a_folder_that_another_server_has(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"another server uses {tmp_path}" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"id": "batch_1"}', '{"request_counts": {}, "unknown": 1}'])
def test_a_damaged_folder(tmp_path: Path, content: str) -> None:
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "batch_1.json").write_text(content)
    assert "batch_1.json is damaged" in refusal(tmp_path)


@pytest.mark.wide
def test_the_client_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.partition("## A server for OpenAI's client")[2]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    sleep, plain = time.sleep, [*OPTIONS, "speculation.method=none"]  # a head need not be read
    with serving(tmp_path / "state", options=plain, key="my key", main=cli.main) as server:
        real = openai.OpenAI

        def client(base_url: str, api_key: str) -> Any:
            assert (base_url, api_key) == ("http://127.0.0.1:8000/v1", "any text")
            return real(base_url=server.url, api_key="my key")

        monkeypatch.setattr(openai, "OpenAI", client)
        monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 20))
        exec(code)
    assert "Paris" in capsys.readouterr().out
