"""A disk that fails and kills at any operation, in a job, in `--retry-errors` and in a merge: the next start works."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import InputError
from specbatch.rows.shard import Shard
from tests.job.shards import Shards
from tests.job.test_failures import Broken, rows

OPERATIONS = ("write", "fsync", "replace", "link", "unlink", "ftruncate")
COMMANDS = ("generate", "overwrite", "retry", "merge", "merge again")


class Killed(BaseException):
    """Ends a job as kill -9 does: nothing is cleaned up."""


@contextmanager
def failing_at(number: int, cause: int | None, rng: random.Random) -> Iterator[list[str]]:
    """The disk operation of that number fails with the error `cause`, and so do later ones of the same kind in half of
    the cases. None: it is the last one of the process. Yields the names of all operations."""
    done: list[str] = []
    lasts = rng.random() < 0.5

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            done.append(name)
            if len(done) < number:
                return real(*arguments, **named)
            is_first = len(done) == number
            if cause is None:
                if is_first and rng.random() < 0.5:
                    real(*arguments, **named)
                raise Killed
            if is_first or (lasts and name == done[number - 1]):
                if name == "write" and rng.random() < 0.5:
                    real(arguments[0], bytes(arguments[1])[: rng.randrange(len(arguments[1]) + 1)])
                raise OSError(cause, os.strerror(cause))
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, failing(name, getattr(os, name)))
        yield done


class Commands:
    """A folder in which one command fails once."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run = Shards(folder)
        self.name = name

    def prepare(self) -> None:
        self.run.write(rows(24, 6))
        if self.name in ("overwrite", "retry"):
            self.run(engine=Broken())
        if self.name.startswith("merge"):
            self.run.compute(2)
        if self.name == "merge again":
            self.run.merge()

    def files(self) -> set[str]:
        return {path.name for path in self.run.folder.iterdir()}

    def __call__(self) -> int:
        if self.name.startswith("merge"):
            return self.run.merge(overwrite=self.name == "merge again")
        return self.run(overwrite=self.name == "overwrite", retry_errors=self.name == "retry")


@pytest.mark.wide
@pytest.mark.parametrize("cause", [errno.EIO, errno.ENOSPC, None])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_next_start_works_after_any_fault(tmp_path: Path, name: str, cause: int | None) -> None:
    fail_at(tmp_path, name, cause, step=1)


@pytest.mark.parametrize(("name", "cause"), [("retry", None), ("merge", errno.EIO)])
def test_the_next_start_works(tmp_path: Path, name: str, cause: int | None) -> None:
    fail_at(tmp_path, name, cause, step=9)


def fail_at(tmp_path: Path, name: str, cause: int | None, step: int) -> None:
    """One of `step` operations fails, in a folder of its own."""
    first = Commands(tmp_path / "first", name)
    first.run.folder.mkdir()
    first.prepare()
    shutil.copytree(first.run.folder, tmp_path / "before")
    before = first.files()
    first()
    expected = first.run.output.read_bytes()
    rng = random.Random(f"{name} {cause}")
    number = rng.randint(1, step)
    while True:
        shutil.copytree(tmp_path / "before", tmp_path / str(number))
        command = Commands(tmp_path / str(number), name)
        with failing_at(number, cause, rng) as done:
            try:
                command()
            except (InputError, Killed) as exc:
                said = str(exc)
            else:
                said = ""
        assert not said or (cause is not None and os.strerror(cause) in said), said
        gc.collect()  # closes files, as the end of a process does
        if len(done) < number:
            break
        failed = done[number - 1]
        assert command() == 0, (number, failed)
        assert command.run.output.read_bytes() == expected
        left = command.files() - before - {"d.results.jsonl", "d.results.stats.json"}
        if cause is None:  # a small file has a random name while it is written
            assert all(file.startswith(".specbatch-") for file in left), (number, failed)
        else:
            assert failed == "unlink" or not left, (number, failed)
        number += step
    assert number > 10


def test_a_retry_that_another_process_has_begun(tmp_path: Path) -> None:
    command = Commands(tmp_path, "retry")
    command.prepare()
    before = command.files()
    with (tmp_path / "d.results.jsonl.sorted").open("wb") as other:
        other.write(b'{"check":"')
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is writing"):
            command()
    assert command() == 0
    assert command.files() == before


@pytest.mark.parametrize("begin", [b"", b"{", b'{"check":"01', b"\x1f", b"\x28\xb5", b"PA", b'{"id": 3, "in'])
def test_a_torn_temporary_file_is_no_obstacle(tmp_path: Path, begin: bytes) -> None:
    command = Commands(tmp_path, "retry")
    command.prepare()
    before = command.files()
    (tmp_path / "d.results.jsonl.sorted").write_bytes(begin)
    assert command() == 0
    assert command.files() == before


def test_a_foreign_file_with_the_name_of_a_temporary_one(tmp_path: Path) -> None:
    run = Shards(tmp_path)
    run.write(rows(4, 9))
    (tmp_path / "d.results.jsonl.sorted").write_text("mine")
    with pytest.raises(InputError, match="was not written by specbatch"):
        run(shard=None)
    run(shard=Shard(0, 2))
    assert (tmp_path / "d.results.jsonl.sorted").read_text() == "mine"
