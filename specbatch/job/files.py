"""Files on disk: what identifies their content, and writing them whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbatch.errors import InputError

_CHUNK = 1 << 20


class FileFacts:
    """Counts and hashes the parts of a file."""

    def __init__(self) -> None:
        self._bytes = self._rows = 0
        self._digest = hashlib.sha256()

    def add(self, part: bytes) -> None:
        self._bytes += len(part)
        self._rows += part.count(b"\n")
        self._digest.update(part)

    def found(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "rows": self._rows, "sha256": self._digest.hexdigest()}


def file_facts(path: Path) -> dict[str, Any]:
    """Bytes, rows and sha256 of an output file."""
    facts = FileFacts()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_CHUNK):
            facts.add(part)
    return facts.found()


def write_whole(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one; the folder is made. Raises InputError where the disk refuses."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Short, and a name that no file has: "x" refuses one that exists.
        temporary = path.with_name(f".specbatch-{secrets.token_hex(6)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            replace_durably(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full disk, for one, is no error of this program: OSErrors become InputErrors."""
    try:
        yield
    except OSError as exc:
        raise InputError(
            f"cannot write {path}: {exc.strerror or exc}", "finished rows are kept; run the same command again to go on"
        ) from exc


def replace_durably(source: Path, target: Path) -> None:
    """Rename over `target`, and make the rename itself survive a power cut."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
