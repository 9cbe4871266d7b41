"""The real client of OpenAI, and a server of batches with the stub engine."""

from __future__ import annotations

import json
import resource
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from specbatch import cli
from tests import stub_engine
from tests.serve.server import OPTIONS, Server, begun, create, ended, lines_of, request, serving, upload

KEY = "secret key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve") / "state", key=KEY, seconds=0.005) as server:
        yield server


def test_upload_create_poll_and_download(server: Server) -> None:
    client = server.client
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "builtin:smollm2-135m-instruct"
    rows = [request("a"), request("b", "Count to ten.", logprobs=True), request("bad", temperature=-1), request("c")]
    file = upload(client, rows)
    kept = client.files.retrieve(file)
    assert (kept.filename, kept.purpose, kept.bytes) == (
        "requests.jsonl",
        "batch",
        len(client.files.content(file).read()),
    )
    batch = create(client, file, job="labels")
    assert (batch.status, batch.metadata, batch.input_file_id) == ("validating", {"job": "labels"}, file)
    assert batch.expires_at == batch.created_at + 86400
    batch = ended(client, batch)
    assert batch.status == "completed", batch.errors
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    for moment in (batch.in_progress_at, batch.finalizing_at, batch.completed_at):
        assert moment is not None
        assert moment >= batch.created_at
    lines = lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == ["a", "b", "c"]
    for line in lines:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        answer = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"])
        assert answer.choices[0].message.content
    [failed] = lines_of(client, batch.error_file_id)
    assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("bad", None, 400)
    error = failed["response"]["body"]["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert "temperature must be >= 0" in error["message"]
    output = client.files.retrieve(str(batch.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_lists_and_pages(server: Server) -> None:
    client = server.client
    files = [upload(client, [request("a")]) for _ in range(3)]
    listed = [file.id for file in client.files.list(limit=2)]  # the client reads all pages
    assert listed[:3] == files[::-1]
    assert [file.id for file in client.files.list(order="asc", purpose="batch")][-3:] == files
    batches = [create(client, file).id for file in files]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == batches[::-1]
    for batch in client.batches.list(limit=3).data:
        assert ended(client, batch).status == "completed"
    assert client.files.delete(files[0]).deleted
    assert files[0] not in [file.id for file in client.files.list()]
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.content(files[0])
    assert caught.value.code == "not_found"


@pytest.mark.parametrize(
    ("line", "code", "param", "message"),
    [
        ("{not json", "invalid_json_line", None, "not valid JSON"),
        ("[1]", "invalid_json_line", None, "must be a JSON object"),
        # The job refuses these, too, although Python's json reads them.
        (json.dumps(request("x", temperature=float("nan"))), "invalid_json_line", None, "NaN is not JSON"),
        (json.dumps(request("x", "?")).encode().replace(b"?", b"\xed\xa0\x80"), "invalid_json_line", None, "not UTF-8"),
        (b"\xef\xbb\xbf" + json.dumps(request("x")).encode(), "invalid_json_line", None, "not valid JSON"),
        (
            json.dumps(request("x", tools=1)).replace("1", "[" * 150 + "]" * 150),
            "invalid_json_line",
            None,
            "too deeply",
        ),
        ({**request("x"), "custom_id": 3}, "invalid_type", "custom_id", "must be text"),
        ({k: v for k, v in request("x").items() if k != "body"}, "missing_required_parameter", "body", "'body'"),
        ({**request("x"), "method": "GET"}, "invalid_method", "method", "POST"),
        ({**request("x"), "url": "/v1/completions"}, "mismatched_endpoint", "url", "/v1/completions"),
        (request("first"), "duplicate_custom_id", "custom_id", "line 1"),
    ],
)
def test_a_bad_file(server: Server, line: Any, code: str, param: str | None, message: str) -> None:
    batch = create(server.client, upload(server.client, [request("first"), "", line]))
    batch = ended(server.client, batch)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.output_file_id is None
    assert batch.errors is not None
    [error] = batch.errors.data or []
    assert (error.code, error.line, error.param) == (code, 3, param)
    assert message in str(error.message)


def test_an_empty_file(server: Server) -> None:
    batch = ended(server.client, create(server.client, upload(server.client, [""])))
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["empty_file"]


def test_requests_that_are_refused(server: Server) -> None:
    client = server.client
    file = upload(client, [request("a")])
    batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for changes, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"extra_body": {"priority": 1}}, "priority"),
    ):
        wanted: dict[str, Any] = {**batch, **changes}
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**wanted)
        assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.create(**{**batch, "input_file_id": "file-../../lock"})  # type: ignore[arg-type]
    assert missing.value.param == "input_file_id"
    for wrong in (client.batches.retrieve, client.batches.cancel, client.files.retrieve, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            wrong("nothing")
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=b"x", purpose="fine-tune")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.NotFoundError, match="create a batch"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="nothing")
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(default_headers={"Origin": "https://example.org"}).models.list()
    with pytest.raises(openai.PermissionDeniedError, match="The name of this host"):
        client.with_options(default_headers={"Host": "example.org"}).models.list()


def test_texts_that_are_none(server: Server) -> None:
    """Half of a surrogate pair, which JSON can hold."""
    client = server.client
    fields = {"input_file_id": upload(client, [request("\ud800")]), "endpoint": "/v1/chat/completions"}
    body = json.dumps({**fields, "completion_window": "24h", "metadata": {"a": "\ud800"}}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/batches", body, headers)) as answer:
        batch = json.load(answer)
    found = ended(client, client.batches.retrieve(batch["id"]))
    assert found.status == "completed"
    assert found.metadata == {"a": "\ud800"}
    assert lines_of(client, found.output_file_id)[0]["custom_id"] == "\ud800"
    assert client.batches.list(limit=1).data[0].id == found.id
    for broken in (b"{", b"[1]", b"\xff", b'{"a": ' + b"1" * (1 << 20) + b"}"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/batches", broken, headers))
        assert caught.value.code == (413 if len(broken) > 9 else 400)
        assert json.load(caught.value)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("key", ["wrong", "secret keys", "ü"])
def test_a_wrong_key(server: Server, key: str) -> None:
    client = server.client.with_options(api_key=key if key.isascii() else "x")
    with pytest.raises(openai.AuthenticationError) as caught:
        client.files.list()
    assert caught.value.code == "invalid_api_key"
    for call in (lambda: client.files.create(file=b"{}", purpose="batch"), client.batches.list, client.models.list):
        with pytest.raises(openai.AuthenticationError):
            call()


def test_cancel(server: Server) -> None:
    client = server.client
    long = [request(str(i), f"Write a story about the number {i}.") for i in range(600)]
    running, waiting = (create(client, upload(client, long)) for _ in range(2))
    num_finished = begun(client, running)
    assert client.batches.cancel(waiting.id).status == "cancelling"
    with pytest.raises(openai.ConflictError):
        client.files.delete(running.input_file_id)
    batch = client.batches.cancel(running.id)
    assert batch.status == "cancelling"
    assert batch.cancelling_at is not None
    assert batch.request_counts is not None
    assert batch.request_counts.completed >= num_finished
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    counts = batch.request_counts
    assert counts is not None
    assert 0 < counts.completed < counts.total == 600
    lines = lines_of(client, batch.output_file_id)
    assert len(lines) == counts.completed
    assert all(line["response"]["status_code"] == 200 for line in lines)
    batch = ended(client, waiting)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", None, None)
    with pytest.raises(openai.ConflictError, match="status 'cancelled'"):
        client.batches.cancel(waiting.id)
    # The engine is idle after that, and runs the next batch.
    assert ended(client, create(client, upload(client, [request("a")]))).status == "completed"


@pytest.mark.parametrize("main", [stub_engine.main, pytest.param(cli.main, marks=pytest.mark.wide)])
def test_a_batch_goes_on_after_a_kill_and_after_an_interrupt(tmp_path: Path, main: Callable[[], None]) -> None:
    count = 100 if main is stub_engine.main else 16
    rows = [request(str(i), f"Write a story about the number {i}.", max_tokens=12) for i in range(count)]
    with serving(tmp_path / "other", main=main) as server:
        whole = ended(server.client, create(server.client, upload(server.client, rows)))
        expected = lines_of(server.client, whole.output_file_id)
    state = tmp_path / "state"
    done = 0
    batch = None
    for number in (signal.SIGKILL, signal.SIGINT):
        with serving(state, main=main, seconds=0.02) as server:
            batch = batch or create(server.client, upload(server.client, rows))
            done = begun(server.client, batch, done) + 2
            code = server.end(number)
            assert code == (-9 if number == signal.SIGKILL else 130), server.log
    assert batch is not None
    with serving(state, main=main) as server:
        found = ended(server.client, batch)
        assert found.status == "completed"
        assert "resuming" in server.log
        assert found.request_counts is not None
        assert found.request_counts.completed == len(rows)
        assert lines_of(server.client, found.output_file_id) == expected
        assert sorted(path.name for path in (state / "batches").iterdir()) == [
            f"{batch.id}.json",
            f"{batch.id}.results.stats.json",
        ]


def killed(state: Path, count: int = 400) -> Batch:
    """Start a batch, and kill the server while it runs."""
    rows = [request(str(i), f"Write a story about the number {i}.") for i in range(count)]
    with serving(state, seconds=0.01) as server:
        batch = create(server.client, upload(server.client, rows), window="1h")
        begun(server.client, batch)
        server.end(signal.SIGKILL)
    return batch


def change(state: Path, batch: Batch, **fields: Any) -> None:
    """Change the stored state of a batch."""
    path = state / "batches" / f"{batch.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_an_expired_batch(tmp_path: Path) -> None:
    """One that is found expired after a restart."""
    state = tmp_path / "state"
    batch = killed(state)
    change(state, batch, expires_at=int(time.time()) - 1)
    with serving(state) as server:
        found = ended(server.client, batch)
        assert found.status == "expired"
        assert found.expired_at is not None
        output = lines_of(server.client, found.output_file_id)
        errors = lines_of(server.client, found.error_file_id)
    assert len(output) >= 1
    assert len(errors) >= 1
    assert len(output) + len(errors) == 400
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert {line["response"] for line in errors} == {None}


def test_a_batch_that_was_cancelled_before_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    batch = killed(state)
    change(state, batch, status="cancelling", cancelling_at=int(time.time()))
    with serving(state) as server:
        found = ended(server.client, batch)
        assert found.status == "cancelled"
        assert found.request_counts is not None
        assert 0 < found.request_counts.completed < 400
        assert len(lines_of(server.client, found.output_file_id)) == found.request_counts.completed
        assert found.error_file_id is None


def test_a_batch_of_another_configuration_is_not_mixed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    batch = killed(state)
    with serving(state, options=[*OPTIONS, "data.system_prompt=Be brief."]) as server:
        found = ended(server.client, batch)
    assert found.status == "failed"
    assert found.errors is not None
    [error] = found.errors.data or []
    assert "data.system_prompt" in str(error.message)


def test_a_batch_whose_rows_are_finished_needs_no_engine(tmp_path: Path) -> None:
    """The process ended while it wrote the output file. Another configuration changes nothing then."""
    state = tmp_path / "state"
    with serving(state) as server:
        batch = ended(server.client, create(server.client, upload(server.client, [request("a"), request("b")])))
        lines = lines_of(server.client, batch.output_file_id)
    (state / "files" / f"{batch.output_file_id}.json").unlink()
    results = (state / "files" / f"{batch.output_file_id}.jsonl").rename(
        state / "batches" / f"{batch.id}.results.jsonl"
    )
    change(state, batch, status="finalizing", completed_at=None, output_file_id=None)
    with serving(state, options=[*OPTIONS, "data.system_prompt=Be brief."]) as server:
        found = ended(server.client, batch)
        assert found.status == "completed", found.errors
        assert lines_of(server.client, found.output_file_id) == lines
    assert not results.exists()


def test_lists_have_the_same_order_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as server:
        files = [upload(server.client, [request("a")]) for _ in range(9)]
        batches = [create(server.client, file).id for file in files]
        server.end(signal.SIGKILL)
    with serving(tmp_path / "state") as server:
        assert [batch.id for batch in server.client.batches.list(limit=4)] == batches[::-1]
        listed = [file.id for file in server.client.files.list(order="asc", limit=4)]
        assert [file for file in listed if file in files] == files


def test_an_upload_that_a_crash_ended_is_removed(tmp_path: Path) -> None:
    files = tmp_path / "state" / "files"
    files.mkdir(parents=True)
    (files / "file-1.jsonl").write_text("a part")
    with serving(tmp_path / "state") as server:
        kept = upload(server.client, [request("a")])
    with serving(tmp_path / "state") as server:
        assert server.client.files.content(kept).text == json.dumps(request("a")) + "\n"
    assert sorted(path.name for path in files.iterdir()) == [f"{kept}.json", f"{kept}.jsonl"]


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    stub_engine.main()


@pytest.mark.parametrize("size", [200_000, 3_000_000])  # one in memory, and one that passes through a temporary file
def test_a_full_disk_during_an_upload(tmp_path: Path, size: int) -> None:
    with serving(tmp_path / "state", main=_small_files) as server:
        with pytest.raises(openai.InternalServerError, match="cannot be stored: File too large") as caught:
            server.client.files.create(file=b"x" * size, purpose="batch")
        assert (caught.value.status_code, caught.value.type) == (507, "server_error")
        assert server.client.files.list().data == []
        assert "Traceback" not in server.log
        assert not list((tmp_path / "state" / "files").iterdir())


def test_a_full_disk_at_the_end_of_a_batch(tmp_path: Path) -> None:
    """That batch fails, and the next one runs."""
    folder = tmp_path / "state" / "batches"
    with serving(tmp_path / "state", seconds=0.02) as server:
        file = upload(server.client, [request(str(i)) for i in range(20)])
        batch = create(server.client, file)
        begun(server.client, batch)
        folder.rename(tmp_path / "moved")
        folder.touch()  # a file, in which no file can be made
        found = ended(server.client, batch)
        assert found.status == "failed"
        assert found.errors is not None
        [error] = found.errors.data or []
        assert "cannot write" in str(error.message)
        folder.unlink()
        (tmp_path / "moved").rename(folder)
        assert ended(server.client, create(server.client, file)).status == "completed"


def test_many_clients_at_once(server: Server) -> None:
    def run(number: int) -> Batch:
        return create(server.client, upload(server.client, [request(f"{number}")]))

    with ThreadPoolExecutor(16) as threads:
        batches = list(threads.map(run, range(16)))
    for number, batch in enumerate(batches):
        found = ended(server.client, batch)
        assert [line["custom_id"] for line in lines_of(server.client, found.output_file_id)] == [f"{number}"]


def test_a_form_that_is_none(server: Server) -> None:
    """What is not a file would be held in memory."""
    for kind, body, message in (
        ("application/x-www-form-urlencoded", b"purpose=batch&file=x", "multipart/form-data"),
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"x", "boundary"),
        ("multipart/form-data; boundary=x", b"x", "Invalid multipart"),
    ):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/files", body, headers))
        assert caught.value.code == 400
        assert message in json.load(caught.value)["error"]["message"]


def test_a_client_that_goes_away_during_an_upload(server: Server) -> None:
    parts = urllib.parse.urlsplit(server.url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 0)) as client:
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n"
        client.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
        time.sleep(0.1)
    time.sleep(0.1)
    server.client.models.list()
    assert "Traceback" not in server.log


def test_a_key_with_white_space_and_another_loopback_address(tmp_path: Path) -> None:
    with serving(tmp_path / "state", "--host", "127.0.0.2", key=" a key\n") as server:
        assert server.url.startswith("http://127.0.0.2:")
        assert server.client.with_options(api_key="a key").models.list().data
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="another").models.list()
