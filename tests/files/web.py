"""A small web server for tests. What it does wrong is decided by one function for each request."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Server:
    """Serves `content` at every path. `answer`: is called with the request, and does what is to be tested."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.etag = '"a"'
        self.answer: Callable[[Any], None] = self.whole
        self.requests: list[tuple[str, str, str | None]] = []  # (method, path, Range)
        self.headers: list[dict[str, str]] = []
        self.port = 0

    def url(self, path: str = "d.jsonl") -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def ranges(self) -> list[str | None]:
        """Of the requests for the content."""
        return [text for method, _, text in self.requests if method == "GET"]

    def send(self, request: Any, body: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        """`length`: that is announced; -1: none."""
        request.send_response(status)
        request.send_header("ETag", self.etag)
        if length != -1:
            request.send_header("Content-Length", str(len(body) if length is None else length))
        for name, text in headers.items():
            request.send_header(name.replace("_", "-"), text)
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        if request.command == "GET":
            request.wfile.write(body)

    def whole(self, request: Any, cut: int | None = None, **headers: str) -> None:
        """As a server of files. `cut`: the connection ends after that number of bytes of an answer."""
        begin, body = 0, self.content
        found = request.headers.get("Range")
        if found and request.headers.get("If-Range", self.etag) == self.etag:
            first, _, last = found.removeprefix("bytes=").partition("-")
            begin, body = int(first), self.content[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {begin}-{begin + len(body) - 1}/{len(self.content)}"
        status = 206 if "Content-Range" in headers else 200
        self.send(request, body if request.command == "HEAD" else body[:cut], status, len(body), **headers)


@contextmanager
def serving(content: bytes) -> Iterator[Server]:
    state = Server(content)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def handle_request(self) -> None:
            state.requests.append((self.command, self.path, self.headers.get("Range")))
            state.headers.append(dict(self.headers))
            state.answer(self)

        do_GET = do_HEAD = handle_request

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield state
        server.shutdown()


@pytest.fixture
def private_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
