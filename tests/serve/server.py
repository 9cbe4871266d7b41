"""A server of batches in a process of its own, and OpenAI's client for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch

OPTIONS = ["engine.device=cpu", "engine.kv_cache_tokens=2048", "engine.max_batch_size=4"]
_ENDS = ("completed", "failed", "cancelled", "expired")


class Server:
    """A server that listens. `log`: the file with what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, key: str | None) -> None:
        self._process = process
        self._log = log
        while (found := re.search(r"batches at (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        self.url = found[1]
        self.client = OpenAI(base_url=self.url, api_key=key or "none", max_retries=0)

    @property
    def log(self) -> str:
        """What the server has printed."""
        return self._log.read_text()

    def end(self, number: signal.Signals) -> int:
        """End the server by a signal. Return its exit code."""
        self._process.send_signal(number)
        return self._process.wait(60)


@contextlib.contextmanager
def serving(
    folder: Path, *arguments: str, options: Sequence[str] = OPTIONS, key: str | None = None
) -> Iterator[Server]:
    """Start a server whose files are in `folder`."""
    log = folder.with_name(f"{folder.name}.log")
    command = [sys.executable, "-m", "specbatch", "serve-batches", "--dir", str(folder), "--port", "0", *arguments]
    command += [part for option in options for part in ("--set", option)]
    environment = {**os.environ, **({} if key is None else {"SPECBATCH_API_KEY": key})}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out, stdout=out, env=environment)
    try:
        yield Server(process, log, key)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def request(custom_id: str, content: Any = "What is the capital of France?", **body: Any) -> dict[str, Any]:
    """A line of a batch."""
    chat = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": chat}


def upload(client: OpenAI, lines: Sequence[Any]) -> str:
    """Upload a file. Return its id."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    return client.files.create(file=("requests.jsonl", text.encode()), purpose="batch").id


def create(client: OpenAI, file: str, window: Any = "24h", **metadata: str) -> Batch:
    return client.batches.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window=window, metadata=metadata
    )


def ended(client: OpenAI, batch: Batch, seconds: float = 120) -> Batch:
    """Wait for the end of a batch."""
    deadline = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch.id)).status not in _ENDS:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def lines_of(client: OpenAI, file: str | None) -> list[dict[str, Any]]:
    """Download a file."""
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]
