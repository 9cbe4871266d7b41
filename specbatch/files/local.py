"""Files on disk: what identifies their content, and writing them whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import InputError

_CHUNK = 1 << 20
# Inputs up to this size are hashed whole; a bigger one would delay the first row for too long.
WHOLE_HASH_BYTES = 4 << 30


class FileFacts:
    """Counts and hashes the parts of a file."""

    def __init__(self) -> None:
        self.num_bytes = self.num_newlines = 0
        self.ends_with_newline = True
        self._digest = hashlib.sha256()

    def add(self, part: bytes) -> None:
        self.num_bytes += len(part)
        self.num_newlines += part.count(b"\n")
        self.ends_with_newline = part.endswith(b"\n")
        self._digest.update(part)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def of_results(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "rows": self.num_newlines, "sha256": self.sha256}


def chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def file_facts(path: Path) -> FileFacts:
    """Return the facts of the whole file."""
    facts = FileFacts()
    for chunk in chunks(path):
        facts.add(chunk)
    return facts


def identify_input(path: Path) -> tuple[dict[str, Any], int | None]:
    """Return the facts that a resume compares, and the number of lines. The facts are size and sha256 of the content.
    Above WHOLE_HASH_BYTES they are size, mtime and sha256 of the first and last MiB, and the lines are None."""
    stat = path.stat()
    if stat.st_size > WHOLE_HASH_BYTES:
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_CHUNK))
            file.seek(-_CHUNK, io.SEEK_END)
            digest.update(file.read(_CHUNK))
        return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256_of_ends": digest.hexdigest()}, None
    facts = file_facts(path)
    return {"size": stat.st_size, "sha256": facts.sha256}, facts.num_newlines + (not facts.ends_with_newline)


def create_like(path: Path, *models: Path) -> BinaryIO:
    """A new file, open for writing, that as many users can read and write as the first of `models` that exists. None
    exists: the umask decides. FileExistsError if it exists: no link is followed."""
    model = next((found for found in map(_state_of, models) if found is not None), None)
    mode = 0o666 if model is None else stat.S_IMODE(model.st_mode) & 0o777
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    if model is not None:
        with contextlib.suppress(OSError):  # some file systems have no modes or no groups
            if os.fstat(opened).st_gid != model.st_gid:
                mode = _with_group(opened, model.st_gid, mode)
            os.fchmod(opened, mode)
    return os.fdopen(opened, "wb", _CHUNK)


def _with_group(opened: int, group: int, mode: int) -> int:
    """Give an open file to a group; returns the mode that it can have. Another group does not get the rights."""
    try:
        os.fchown(opened, -1, group)
    except OSError:
        return mode & ~0o070
    return mode


def narrow_mode(opened: int, model: Path) -> None:
    """Take the rights from an open file that `model` does not give, if that exists."""
    if (found := _state_of(model)) is not None:
        mode = stat.S_IMODE(os.fstat(opened).st_mode)
        if mode & ~found.st_mode:
            with contextlib.suppress(OSError):
                os.fchmod(opened, mode & found.st_mode)


def _state_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def open_locked(path: Path, flags: int) -> int | None:
    """Open a file, made if there is none, with a lock that no second process gets. None: another process has it.
    Raises OSError."""
    while True:
        opened = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            return None
        except BaseException:
            os.close(opened)
            raise
        # Another process can have removed the file between open and lock.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(opened).st_ino == path.stat().st_ino:
                return opened
        os.close(opened)


def write_whole(path: Path, content: bytes, like: Path | None = None) -> None:
    """Write a small file. A reader sees the old file or the new one; the folder is made. It has the mode of the old
    file, or else of `like`. Raises InputError for errors of the disk."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Short, and a name that no file has: "x" refuses one that exists.
        temporary = path.with_name(f".specbatch-{secrets.token_hex(6)}")
        try:
            with create_like(temporary, path, *([] if like is None else [like])) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            replace_durably(temporary, path)
        finally:
            unlink_quietly(temporary)


def unlink_quietly(path: Path) -> None:
    """Remove a temporary file, if it exists and the disk allows it. What went wrong before is the error to report."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns OSErrors, such as that of a full disk, into InputErrors: they are not errors of this program."""
    try:
        yield
    except OSError as exc:
        raise InputError(
            f"cannot write {path}: {exc.strerror or exc}",
            "finished rows are kept; run the same command again to continue",
        ) from exc


def replace_durably(source: Path, target: Path) -> None:
    """Rename over `target`, so that the rename itself survives a power cut."""
    os.replace(source, target)
    force_to_disk(target.parent)


def force_to_disk(path: Path) -> None:
    """A file's content, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
