"""No file of somebody else is written over, and what cannot be written is found before the work."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from specbatch.config import Config, DataSection, ModelSection
from specbatch.errors import InputError
from specbatch.files.paths import (
    Written,
    check_can_write,
    check_input_name,
    check_written,
    files_read,
    holds_results,
    is_partial,
    job_files,
    output_file,
    partial_path,
    read_stats,
    running_path,
    sorted_path,
    stats_path_of,
    unless,
)

RESULT = b'{"id": 1, "index": 0, "text": "a", "finish_reason": "stop"}\n'
BATCH = b'{"id": "batch_req_000000000000", "custom_id": "a", "response": null, "error": {}}\n'
STATS = b'{"output": "out.jsonl", "job": {"specbatch": "0.1"}}'


def check(output: Path, reads: dict[str, Path] | None = None) -> None:
    check_written(job_files(output_file(output)), reads or {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("-", "standard output"),
        (".", "is a folder"),
        ("..", "is a folder"),
        ("folder", "is a folder"),
        ("no/out.jsonl", "does not exist"),
        ("file/out.jsonl", "Not a directory"),
        ("s3://bucket/out.jsonl", "s3: is not supported"),
        ("gs://bucket/out.jsonl", "gs: is not supported"),
        ("hf://org/name", "hf: is not supported"),
        ("out.gz", "results are written as .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .csv, .tsv, not as other files"),
        ("out.jsonl.bz2", "not as other files in .bz2"),
        ("out.CSV", "results are JSON lines, parquet, CSV or TSV, not .CSV"),
        ("out.Parquet", "results are JSON lines, parquet, CSV or TSV, not .Parquet"),
        ("out.json", "results are JSON lines, parquet, CSV or TSV, not .json"),
        ("weights.safetensors", "not .safetensors"),
        ("pipe", "is a pipe"),
        ("socket", "is a socket"),
        ("null", "is a device"),
        ("/dev/null", "is a device"),
        ("loop", "cannot use loop as output: "),
        ("to_ods", "not .ods"),
        ("nowhere", "does not exist"),
        ("x" * 250, "File name too long"),
        ("x" * 300, "File name too long"),
    ],
)
def test_outputs_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    os.mkfifo("pipe")
    for link, target in (("null", "/dev/null"), ("loop", "loop"), ("to_ods", "x.ods"), ("nowhere", "no/x")):
        os.symlink(target, link)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        before = sorted(os.listdir())
        with pytest.raises(InputError) as caught:
            check(Path(name))
    assert message in caught.value.message
    assert "--overwrite" not in f"{caught.value.message} {caught.value.hint}", "that would remove it"
    assert len(caught.value.message) < 300
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "name",
    [
        "out",
        "out.jsonl",
        "out.jsonl.gz",
        "out.parquet",
        "out.ndjson",
        "out.txt",
        "a b.jsonl",
        "s3:",
        "x.2026",
        "ü.jsonl",
    ],
)
def test_outputs_that_can_be(tmp_path: Path, name: str) -> None:
    check(tmp_path / name)
    assert output_file(tmp_path / name) == tmp_path / name


def test_a_link_is_followed_once(tmp_path: Path) -> None:
    """All files of the job lie beside the file that it points to, which need not exist yet."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out.jsonl").symlink_to("middle")
    (tmp_path / "middle").symlink_to("disk/far.jsonl")
    far = tmp_path.resolve() / "disk" / "far.jsonl"
    assert output_file(tmp_path / "out.jsonl") == far
    assert {file.path.parent for file in job_files(far)} == {far.parent}
    check(tmp_path / "out.jsonl")


DERIVED = [partial_path, running_path, sorted_path, stats_path_of]


@pytest.mark.parametrize("derive", DERIVED)
@pytest.mark.parametrize(
    "content", [b"precious", b"precious\n", b"{}", b'{"id": 1}\n', b'{"id": 1}', b"\x00\xff", b'{"a":' * 9999]
)
def test_files_of_others_are_refused_by_their_content(tmp_path: Path, derive: object, content: bytes) -> None:
    output = tmp_path / "out.jsonl"
    path = derive(output)  # type: ignore[operator]
    path.write_bytes(content)
    with pytest.raises(InputError, match="was not written by specbatch") as caught:
        check(output)
    assert "--overwrite" not in str(caught.value.hint)
    assert path.read_bytes() == content


@pytest.mark.parametrize("derive", DERIVED)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_derived_files_must_be_regular(tmp_path: Path, derive: object, kind: str) -> None:
    """A link may lead anywhere, and opening a pipe would wait for ever."""
    output = tmp_path / "out.jsonl"
    path = derive(output)  # type: ignore[operator]
    (tmp_path / "other").write_bytes(b"precious")
    {
        "link": lambda: path.symlink_to("other"),
        "dangling": lambda: path.symlink_to("new"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()
    with pytest.raises(InputError, match=r"is a (link|pipe|folder)"):
        check(output)
    assert (tmp_path / "other").read_bytes() == b"precious"


def test_our_own_files_are_known(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for content in (
        b"",
        b'{"specb',
        b'{"specbatch_job": {}}\n',
        b'{"check":"0123',
        b'{"check":"0", "specbatch_job":{}}\n',
    ):
        partial_path(output).write_bytes(content)
        assert is_partial(partial_path(output)), content
        check(output)
    for content in (b"", b'{"specbatch_r', b'{"specbatch_running": {}}\n'):
        running_path(output).write_bytes(content)
        check(output)
    for content in (b"", b'{"i', RESULT[:20], RESULT, RESULT * 3, BATCH):
        sorted_path(output).write_bytes(content)
        assert holds_results(sorted_path(output)), content
        check(output)
    stats_path_of(output).write_bytes(STATS)
    assert read_stats(stats_path_of(output)) == json.loads(STATS)
    check(output)
    assert read_stats(tmp_path) is None
    assert read_stats(tmp_path / "no") is None


def test_statistics_of_another_output_stay(tmp_path: Path) -> None:
    """`out` and `out.jsonl` share one name for theirs."""
    stats_path_of(tmp_path / "out.jsonl").write_bytes(STATS)
    check(tmp_path / "out")  # out.jsonl is gone: renamed, as it seems
    (tmp_path / "out.jsonl").write_bytes(RESULT)
    check(tmp_path / "out.jsonl")
    with pytest.raises(InputError, match=r"has the statistics of out\.jsonl"):
        check(tmp_path / "out")


@pytest.mark.parametrize("derive", [lambda output: output, *DERIVED])
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_what_is_read_is_never_written(tmp_path: Path, derive: object, link: object) -> None:
    """Under its own name, by a link to it, or by another name of the same file."""
    output = tmp_path / "out.jsonl"
    path = derive(output)  # type: ignore[operator]
    source = path
    if link is not None:
        source = tmp_path / "source"
        source.write_bytes(RESULT)
        link(source, path)  # type: ignore[operator]
    path.write_bytes(RESULT)
    with pytest.raises(InputError, match="is the input, so"):
        check(output, {"the input": source})


def test_names_of_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in (
        "model/config.json",
        "model/merges.txt",
        "model/results.jsonl",
        "chat.jinja",
        "specbatch.yaml",
        "c.yaml",
    ):
        Path(name).write_bytes(RESULT)
    config = Config(model=ModelSection(target="model"), data=DataSection(chat_template="chat.jinja"))
    reads = files_read(config, None, input=Path("d.jsonl"))
    assert [str(path) for path in reads.values()] == [
        "d.jsonl", "specbatch.yaml", "chat.jinja", "model/config.json", "model/merges.txt"
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"merges\.txt is merges\.txt of the model \(model\.target\)"):
        check(Path("model/merges.txt"), reads)
    check(Path("model/results.jsonl"), reads)
    assert files_read(config, Path("c.yaml"))["the configuration"] == Path("c.yaml")
    text = replace(
        config, model=ModelSection(target="~no-such-user/model"), data=DataSection(chat_template="{{ x }}" * 3000)
    )
    assert list(files_read(text, None)) == ["the configuration"]


def test_an_output_within_the_folder_that_is_read(tmp_path: Path) -> None:
    """It would be part of the input when the job is resumed."""
    (tmp_path / "data" / "deep").mkdir(parents=True)
    with pytest.raises(InputError, match="is in the input"):
        check(tmp_path / "data" / "deep" / "out.jsonl", {"the input": tmp_path / "data"})
    check(tmp_path / "data.jsonl", {"the input": tmp_path / "data"})


def test_no_file_is_written_twice(tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(".")
    never = unless(lambda path: True)
    files = [Written("one", tmp_path / "a", never), Written("two", tmp_path / "same" / "a", never)]
    with pytest.raises(InputError, match="a is one, so two cannot be"):
        check_written(files, {})


def test_write_protected_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    check_can_write(job_files(output))
    assert os.listdir(tmp_path) == []
    with pytest.raises(InputError, match=r"the folder .* cannot be written: No such file"):
        check_can_write(job_files(tmp_path / "no" / "out.jsonl"))
    output.write_bytes(RESULT)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != output)  # root may write all
    with pytest.raises(InputError, match=r"out\.jsonl is write-protected"):
        check_can_write(job_files(output))


def test_the_file_of_another_user_in_a_sticky_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(RESULT)
    tmp_path.chmod(0o1777)
    check_can_write(job_files(output))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match="belongs to another user"):
        check_can_write(job_files(output))


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("ftp://h/x.jsonl", "curl ftp://h/x.jsonl |"),
        ("file:///x.jsonl", "without file://"),
        ("azure://b/x", "copy it to this machine"),
    ],
)
def test_urls_as_input(ref: str, hint: str) -> None:
    with pytest.raises(InputError, match=r"is not supported\. An input is a file on this machine") as caught:
        check_input_name(ref)
    assert hint in str(caught.value.hint)


def test_an_input_without_a_name() -> None:
    with pytest.raises(InputError, match="the name of the input is empty"):
        check_input_name(" ")


@pytest.mark.parametrize(
    "ref", ["org/name", "x.jsonl", "/a/b", "-", "a:b", "c:/x", "a:b/c", "s3://b/x.jsonl", "https://h/x"]
)
def test_these_are_no_urls_or_can_be_read(ref: str) -> None:
    check_input_name(ref)
