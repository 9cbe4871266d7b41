"""What tells that a model's files are those of an earlier session.

Small files are hashed whole. Weights are too long for that at every start: blocks spread over the file are hashed, and
its time of modification is recorded. A job that has run for a minute hashes them whole, in a thread. Where only the
time is another one later, the file is read whole and compared with that.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import InputError

_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.json", "*.model", "*.jinja", "merges.txt")
_BLOCK, _BLOCKS = 64 << 10, 128  # of each file; a file that is not longer than all of them is hashed whole
_HEAD, _MOST_HEAD = 1 << 20, 100 << 20
_CHUNK = 1 << 20
_HASH_AFTER_SECONDS = 60.0  # shorter jobs lose little where they have to start again


class ModelFiles:
    """The files of a job's models, as they are when this is made; `paths`: their folders or files by option."""

    def __init__(self, paths: Mapping[str, Path], tell: Callable[[str], None] = lambda line: None) -> None:
        self.digests: dict[str, str] = {}  # by option: names, sizes and the blocks
        self._tell = tell
        self._times: dict[Path, int] = {}
        self._large: dict[str, Path] = {}  # files that `digests` do not cover whole
        self._hashes: dict[str, str] = {}  # of those, as far as they are known
        self._stopped = threading.Event()
        for option, path in paths.items():
            digest = hashlib.sha256()
            for file in _files(path):
                stat = file.stat()
                self._times[file] = stat.st_mtime_ns
                digest.update(f"{file.name}\0{stat.st_size}\0".encode())
                if not _add_blocks(digest, file, stat.st_size):
                    self._large[f"{option}/{file.name}"] = file
            self.digests[option] = digest.hexdigest()

    def record(self) -> dict[str, Any]:
        """What `differences` compares later, JSON-ready; more of it may be known after a while."""
        return {
            name: {"mtime_ns": self._times[file], "sha256": self._hashes.get(name)}
            for name, file in self._large.items()
        }

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """One line for each large file that is not, for certain, the one of `recorded`. Equal `digests` are given."""
        changed = []
        for name, file in self._large.items():
            old = recorded.get(name)
            if old is None:
                continue
            if old["mtime_ns"] != self._times[file]:
                if old["sha256"] is not None:
                    self._tell(f"{file} has a new time of modification: reading it whole")
                if old["sha256"] is None or self._hash(file) != old["sha256"]:
                    changed.append(f"{name}: written {_time(old['mtime_ns'])} -> {_time(self._times[file])}")
                    continue
            if old["sha256"] is not None:
                self._hashes[name] = old["sha256"]
        return changed

    def check_loaded(self) -> None:
        """That what was loaded is what was hashed. Raises InputError."""
        if changed := [file for file in self._times if self._changed(file)]:
            raise InputError(f"{changed[0]} was changed while it was loaded", "run the same command again")

    def hash_later(self, after_seconds: float = _HASH_AFTER_SECONDS) -> threading.Thread | None:
        """Hash the large files whole in a thread, where that is still to be done, until `stop`."""
        missing = {name: file for name, file in self._large.items() if name not in self._hashes}
        if not missing:
            return None

        def work() -> None:
            if self._stopped.wait(after_seconds):
                return
            with contextlib.suppress(OSError):  # unreadable by now: then it is not known
                for name, file in missing.items():
                    digest = self._hash(file)
                    if digest is not None and not self._changed(file):
                        self._hashes[name] = digest

        thread = threading.Thread(target=work, name="hash of the weights", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        self._stopped.set()

    def _hash(self, file: Path) -> str | None:
        """Of the whole file; None where `stop` came first."""
        digest = hashlib.sha256()
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK):
                if self._stopped.is_set():
                    return None
                digest.update(chunk)
        return digest.hexdigest()

    def _changed(self, file: Path) -> bool:
        try:
            return file.stat().st_mtime_ns != self._times[file]
        except OSError:
            return True


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted({file for pattern in _PATTERNS for file in path.glob(pattern) if file.is_file()})


def _add_blocks(digest: Any, file: Path, size: int) -> bool:
    """Hash the file's header and blocks spread over it; True where that is all of it."""
    with file.open("rb", buffering=0) as stream:
        if size <= _BLOCK * _BLOCKS:
            digest.update(stream.read())
            return True
        digest.update(stream.read(_header_size(stream, file)))
        for number in range(_BLOCKS):
            stream.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
            digest.update(stream.read(_BLOCK))
    return False


def _header_size(stream: BinaryIO, file: Path) -> int:
    """Of safetensors exactly: it names the tensors, their types and places."""
    if file.suffix != ".safetensors":
        return _HEAD
    size = 8 + int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    return min(size, _MOST_HEAD)


def _time(nanoseconds: int) -> str:
    return datetime.datetime.fromtimestamp(nanoseconds // 10**9).isoformat(" ")
