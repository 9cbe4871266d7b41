"""Inputs of the web, from a server that does what servers do wrong."""

from __future__ import annotations

import gzip
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.errors import InputError, SpecbatchError, without_secrets
from specbatch.files.remote import fetch
from specbatch.files.web import Patience
from specbatch.rows.sources import open_source
from tests.files.web import Server, private_cache, serving
from tests.job.test_changed_input import Meddling
from tests.job.test_generate import Run
from tests.stub_engine import StubEngine

CONTENT = b"".join(b'{"id": %d, "prompt": "row %d"}\n' % (i, i) for i in range(3000))
QUICK = Patience(silence_seconds=0.2, num_tries=3, first_wait=0.001, longest_wait=0.01)
SECRET = "s3cr3t"

__all__ = ["private_cache"]
pytestmark = pytest.mark.usefixtures("private_cache")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(CONTENT) as server:
        yield server


def content_of(url: str) -> bytes:
    return fetch(url, patience=QUICK).path.read_bytes()


def error_of(url: str) -> str:
    with pytest.raises(InputError) as caught:
        fetch(url, patience=QUICK)
    return f"{caught.value.message}\n{caught.value.hint}"


def test_what_is_missing_is_asked_for(server: Server) -> None:
    server.answer = lambda request: server.whole(request, cut=40_000)
    assert content_of(server.url()) == CONTENT
    assert server.ranges() == [None, "bytes=40000-", "bytes=80000-"]


def test_a_server_without_ranges_begins_again(server: Server) -> None:
    answers: list[int] = []

    def answer(request: Any) -> None:
        answers.append(1)
        server.send(request, CONTENT[: 500 if len(answers) == 2 else None], length=len(CONTENT))

    server.answer = answer
    assert content_of(server.url()) == CONTENT


def test_another_version_is_not_appended_to_the_first(server: Server) -> None:
    def answer(request: Any) -> None:
        if request.command == "GET" and len(server.ranges()) == 2:
            server.content, server.etag = CONTENT.upper(), '"b"'
        server.whole(request, cut=70_000 if len(server.ranges()) == 1 else None)

    server.answer = answer
    assert content_of(server.url()) == CONTENT.upper()


@pytest.mark.parametrize("announced", [True, False])
def test_an_answer_that_ends_early_is_no_file(server: Server, announced: bool) -> None:
    def answer(request: Any) -> None:
        is_head = request.command == "HEAD" and announced
        server.send(request, CONTENT[: None if is_head else 5000], length=None if is_head else -1)

    server.answer = answer
    expected = "5,000 bytes came of" if announced else "does not say how long the file is"
    assert expected in error_of(server.url())


def test_head_and_get_announce_different_sizes(server: Server) -> None:
    server.answer = lambda request: server.send(request, CONTENT[: None if request.command == "HEAD" else 5000])
    assert f"has {len(CONTENT):,} bytes, but 5,000 bytes came" in error_of(server.url())


def test_a_chunked_answer_has_an_end(server: Server) -> None:
    def answer(request: Any) -> None:
        end = b"400\r\nabc" if server.ranges() == ["bytes=0-0", None] else b"0\r\n\r\n"
        body = b"%x\r\n%s\r\n" % (len(CONTENT), CONTENT)
        server.send(request, body + end, length=-1, Transfer_Encoding="chunked")

    server.answer = answer
    assert content_of(server.url()) == CONTENT
    assert len(server.ranges()) == 4


def test_a_slow_download_has_no_deadline(server: Server) -> None:
    def answer(request: Any) -> None:
        server.send(request, b"", length=len(CONTENT))
        if request.command == "GET":
            for part in range(0, len(CONTENT), 5000):
                time.sleep(0.03)
                request.wfile.write(CONTENT[part : part + 5000])

    server.answer = answer
    seen: list[tuple[int, int | None]] = []
    began = time.monotonic()
    copy = fetch(server.url(), lambda done, total: seen.append((done, total)), QUICK)
    assert time.monotonic() - began > 2 * QUICK.silence_seconds
    assert copy.path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert len(server.ranges()) == 1


def test_a_silent_server_is_given_up(server: Server) -> None:
    def answer(request: Any) -> None:
        server.send(request, b"" if request.command == "HEAD" else CONTENT[:9], length=len(CONTENT))
        time.sleep(0.5)

    server.answer = answer
    assert "its server sent nothing for 0.2 seconds (3 times)" in error_of(server.url())


@pytest.mark.parametrize(
    ("status", "tries", "words"),
    [
        (401, 1, "refuses access (401 Unauthorized)"),
        (403, 1, "refuses access (403 Forbidden)"),
        (404, 1, "does not exist"),
        (400, 1, "its server answers 400 Bad Request"),
        (429, 3, "its server answers 429 Too Many Requests (3 times)"),
        (500, 3, "its server answers 500 Internal Server Error (3 times)"),
        (503, 3, "its server answers 503 Service Unavailable (3 times)"),
    ],
)
def test_a_refusal_is_named(server: Server, status: int, tries: int, words: str) -> None:
    server.answer = lambda request: server.send(request, b"no", status)
    assert words in error_of(server.url())
    assert len(server.ranges()) == tries


def test_a_server_that_is_busy_for_a_while(server: Server) -> None:
    def answer(request: Any) -> None:
        if len(server.ranges()) in (1, 3):
            server.send(request, b"busy", 503, Retry_After="1")
        else:
            server.whole(request, cut=50_000)

    server.answer = answer
    assert content_of(server.url()) == CONTENT


def test_redirects(server: Server) -> None:
    def answer(request: Any) -> None:
        if request.path == "/d.jsonl":
            server.send(request, b"", 302, Location="/there.jsonl")
        elif request.path == "/circle.jsonl":
            server.send(request, b"", 302, Location="/circle.jsonl")
        else:
            server.whole(request)

    server.answer = answer
    assert content_of(server.url()) == CONTENT
    assert "it redirects in a circle, or too often" in error_of(server.url("circle.jsonl"))


def test_a_signed_url_is_for_get_only(server: Server) -> None:
    def answer(request: Any) -> None:
        if request.command == "HEAD":
            server.send(request, b"", 403)
        else:
            server.whole(request)

    server.answer = answer
    assert content_of(server.url("d.jsonl?sig=1")) == CONTENT


def test_an_empty_file(server: Server) -> None:
    server.content = b""

    def answer(request: Any) -> None:
        if "Range" in request.headers:
            server.send(request, b"", 416, Content_Range="bytes */0")
        else:
            server.send(request, b"")

    server.answer = answer
    assert content_of(server.url()) == b""


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_compression_on_the_way(server: Server, name: str) -> None:
    packed = gzip.compress(CONTENT)
    server.answer = lambda request: server.send(request, packed, Content_Encoding="gzip")
    assert content_of(server.url(name)) == (packed if name.endswith(".gz") else CONTENT)


def test_hosts_that_do_not_answer() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "its host does not answer: Connection refused" in error_of(f"http://127.0.0.1:{port}/d.jsonl")
    assert "cannot be read: its host does not answer" in error_of("http://no-such-host.invalid/d.jsonl")


@pytest.mark.parametrize("url", ["http://h/a/..", "http://h/.", "http://h/a/", "http://h", "http://h/?x=/a.jsonl"])
def test_urls_without_a_name(url: str) -> None:
    assert "is a folder" in error_of(url)


@pytest.mark.parametrize("host", ["", "[h", "h:port", "a" * 70])
def test_urls_that_are_none(host: str) -> None:
    assert "cannot be read" in error_of(f"http://{host}/d.jsonl")


def test_a_name_that_is_too_long(server: Server) -> None:
    assert "the name of" in error_of(server.url(f"{'a' * 250}.jsonl"))


def test_urls_with_different_parameters_are_different_files(server: Server) -> None:
    def answer(request: Any) -> None:
        number = request.path.partition("=")[2]
        server.send(request, b'{"prompt": "%s"}\n' % number.encode())

    server.answer = answer
    copies = [fetch(server.url(f"d.jsonl?file={number}"), patience=QUICK) for number in (1, 2)]
    assert [copy.path.read_bytes() for copy in copies] == [b'{"prompt": "1"}\n', b'{"prompt": "2"}\n']
    assert copies[0].path != copies[1].path


def test_names_with_special_characters(server: Server) -> None:
    for path in ("a b.jsonl", "a%2Fb.jsonl", "ä%20ö.jsonl", "d.jsonl?x=a b", "d.jsonl#x"):
        assert [row.index for row in open_source(server.url(path), DataSection()).rows()][-1] == 2999
    assert [path for _, path, _ in server.requests if "2F" in path] == ["/a%2Fb.jsonl"] * 3


def test_a_copy_is_private_and_is_removed_with_its_last_user(server: Server, tmp_path: Path) -> None:
    first, second = (fetch(server.url(), patience=QUICK) for _ in range(2))
    assert first.path == second.path
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    first.remove()
    assert second.path.read_bytes() == CONTENT, "it is still in use"
    second.remove()
    assert not list((tmp_path / "cache").rglob("*.jsonl"))
    assert not second.path.parent.exists()
    assert content_of(server.url()) == CONTENT


def test_copies_of_killed_processes_are_removed(server: Server, tmp_path: Path) -> None:
    copy = fetch(server.url(), patience=QUICK)
    (copy.path.parent / ".specbatch-0123").write_bytes(b"half")
    folder = copy.path.parent
    del copy
    again = fetch(server.url(), patience=QUICK)
    assert {path.name for path in folder.iterdir()} == {"d.jsonl", ".d.jsonl.state"}
    del again
    os.utime(folder, (1, 1))
    fetch(server.url("other.jsonl"), patience=QUICK)
    assert not folder.exists()


@pytest.fixture
def run(tmp_path: Path, server: Server) -> Run:
    server.content = b"".join(CONTENT.splitlines(keepends=True)[:40]) + b"no JSON\n"
    return Run(tmp_path)


def test_secrets_of_a_url_are_nowhere(run: Run, server: Server, tmp_path: Path) -> None:
    url = server.url(f"d.jsonl?X-Amz-Signature={SECRET}&token={SECRET}").replace("//", f"//me:{SECRET}@")
    assert run(input=url, output=tmp_path / "o.jsonl") == 1
    stats = json.loads((tmp_path / "o.stats.json").read_text())
    assert stats["input"] == f"http://***@127.0.0.1:{server.port}/d.jsonl?X-Amz-Signature=***&token=***"
    server.answer = lambda request: server.send(request, b"", 403)
    with pytest.raises(SpecbatchError) as caught:
        run(input=url, output=tmp_path / "p.jsonl")
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert SECRET not in "".join([run.log, str(caught.value), caught.value.hint or "", *texts])
    assert all("Authorization" in headers for headers in server.headers)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "the copy is removed"


def test_the_same_file_at_another_signed_url_resumes(run: Run, server: Server, tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    with pytest.raises(RuntimeError):
        run(input=server.url("d.jsonl?sig=1"), output=output, engine=StubEngine(fail_at=3))
    assert run(input=server.url("d.jsonl?sig=2"), output=output) == 1
    assert "resuming" in run.log


def test_a_signed_url_that_expires_during_the_job(run: Run, server: Server, tmp_path: Path) -> None:
    def expire() -> None:
        server.answer = lambda request: server.send(request, b"", 403)

    assert run(input=server.url("d.jsonl?sig=1"), output=tmp_path / "o.jsonl", engine=Meddling({2: expire})) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@h/x", "http://***@h/x"),
        ("http://token@h/x?a", "http://***@h/x?***"),
        ("http://u:p/w#q?x@h/x", "http://***@h/x"),
        ("s3:/key:secret@b/x", "s3:/***@b/x"),
        ("of 'https://h/x?sig=a%2Fb==&n=1#t=2', and", "of 'https://h/x?sig=***&n=***#t=***', and"),
        ("https://h:80/a@b?x=c@d: gone", "https://h:80/a@b?x=***: gone"),
        ("s3://b/a@b/x.jsonl", "s3://b/a@b/x.jsonl"),
        ("no URL? a=b", "no URL? a=b"),
    ],
)
def test_texts_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert SpecbatchError(text, text).message == SpecbatchError(text, text).hint == shown
