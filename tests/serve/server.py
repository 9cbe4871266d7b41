"""A server of batches in a forked process, and OpenAI's client for it. By default it has the stub engine."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch

from tests import stub_engine
from tests.processes import Command

OPTIONS = ["engine.device=cpu", "engine.kv_cache_tokens=2048", "engine.max_batch_size=4"]
_ENDS = ("completed", "failed", "cancelled", "expired")


class Server:
    """A server that listens. `log`: the file with what it prints."""

    def __init__(self, process: Command, log: Path, key: str | None) -> None:
        self._process = process
        self._log = log
        while (found := re.search(r"batches at (\S+)", log.read_text())) is None:
            assert process.returncode is None, log.read_text()
            time.sleep(0.01)
        self.url = found[1]
        self.client = OpenAI(base_url=self.url, api_key=key or "none", max_retries=0)

    @property
    def log(self) -> str:
        """What the server has printed."""
        return self._log.read_text()

    def end(self, number: signal.Signals) -> int | None:
        """End the server by a signal. Return its exit code."""
        self._process.send_signal(number)
        self._process.communicate()
        return self._process.returncode


@contextlib.contextmanager
def serving(
    folder: Path,
    *arguments: str,
    options: Sequence[str] = OPTIONS,
    key: str | None = None,
    main: Callable[[], None] = stub_engine.main,
    seconds: float = 0.0,
) -> Iterator[Server]:
    """Start a server whose files are in `folder`. `seconds`: the duration of a step of the stub engine."""
    log = folder.with_name(f"{folder.name}.log")
    log.touch()
    command = ["serve-batches", "--dir", str(folder), "--port", "0", *arguments]
    command += [part for option in options for part in ("--set", option)]
    extra = {"STUB_SLEEP": str(seconds), **({} if key is None else {"SPECBATCH_API_KEY": key})}
    process = Command(folder.parent, *command, main=main, stderr=str(log), **extra)
    try:
        yield Server(process, log, key)
    finally:
        process.kill()
        process.communicate()


def request(custom_id: str, content: Any = "What is the capital of France?", **body: Any) -> dict[str, Any]:
    """A line of a batch."""
    chat = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": chat}


def upload(client: OpenAI, lines: Sequence[Any]) -> str:
    """Upload a file. Return its id."""
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    content = b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in texts)
    return client.files.create(file=("requests.jsonl", content), purpose="batch").id


def create(client: OpenAI, file: str, window: Any = "24h", **metadata: str) -> Batch:
    return client.batches.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window=window, metadata=metadata
    )


def ended(client: OpenAI, batch: Batch, seconds: float = 120) -> Batch:
    """Wait for the end of a batch."""
    deadline = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch.id)).status not in _ENDS:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def begun(client: OpenAI, batch: Batch, more_than: int = 0) -> int:
    """Wait until more than this number of requests are finished. Return their number."""
    while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed <= more_than:
        time.sleep(0.01)
    return counts.completed


def lines_of(client: OpenAI, file: str | None) -> list[dict[str, Any]]:
    """Download a file."""
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]
