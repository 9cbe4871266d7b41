"""Identity of a job: everything that the bytes of a result line depend on, and nothing else.

Small model files are hashed whole. Weights are too long for that at every start: blocks spread over each file are
hashed, and its time of modification is recorded. A job that runs for a minute hashes them whole, in a thread. If only
the time differs in a later session, the file is read whole and compared with that hash.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from specbatch import __version__
from specbatch.config import Config
from specbatch.config_load import config_to_dict
from specbatch.errors import InputError
from specbatch.files.flat_table import FlatColumns
from specbatch.files.local import chunks
from specbatch.rows.shard import Shard
from specbatch.schemas.column_kinds import answer_kind

# Capacity, scheduling and workers: results do not depend on them. `job_fingerprint` records kv_cache_tokens if it
# limits the length of a row. A name with a dot at its end is a whole section.
_NOT_IN_RESULTS = (
    "engine.cuda_graphs",
    "engine.compile",
    "engine.max_batch_size",
    "engine.page_size",
    "engine.kv_cache_tokens",
    "engine.memory_fraction",
    "engine.prefix_cache",
    "engine.cascade_attention",
    "engine.prefill_chunk_tokens",
    "engine.two_batch_overlap",
    "prefill.",
    "data.plan_rows",
    "speculation.suffix.",
    "speculation.corpus",
    "cluster.",
    "model.generation_config",  # what it decides is recorded as options of `sampling`
)
SHARD = "shard"  # the name of the shard; a job that runs the whole input has none
INPUT_FACTS = "input."  # prefix of the names that identify the input
INPUT_COLUMNS = "input.columns"  # kinds of the input's columns, if its file says them and results are flat


def job_fingerprint(
    config: Config,
    source: Mapping[str, Any],
    limit: int | None,
    *,
    shard: Shard | None = None,
    row_tokens: int | None = None,
    models: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Flat, JSON-ready. `config`: the resolved one with data.chat_template as text. `row_tokens`: the longest row that
    fits, if the user's kv_cache_tokens limits it, and not the model. (If memory limits it, the result file keeps what
    the first run allowed.) `models`: the digests of the models by option."""
    job: dict[str, Any] = {"specbatch": __version__, "limit": limit}
    if shard is not None:
        job[SHARD] = str(shard)
    for path, value in _flat(config_to_dict(config)):
        # Jobs of versions without model.backend were native, and have no such key.
        if not path.startswith(_NOT_IN_RESULTS) and (path, value) != ("model.backend", "native"):
            job[path] = value
    if row_tokens is not None:
        job["engine.kv_cache_tokens"] = row_tokens
    for name, digest in (models or {}).items():
        job[f"{name} (files)"] = digest
    job.update({INPUT_FACTS + name: value for name, value in source.items()})
    return job


def flat_columns(job: Mapping[str, Any]) -> FlatColumns | None:
    """Return the columns of a job's results that are known before its rows. None: they are not flat."""
    if job.get("output.columns") != "flat":
        return None
    answer = answer_kind(job.get("sampling.response_format"))
    return FlatColumns(job.get("data.id_column") or "id", job.get(INPUT_COLUMNS, {}), answer)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each key that differs: `sampling.temperature: 0.0 -> 0.7`."""
    keys = list(old) + [k for k in new if k not in old]
    # A file of an earlier version can lack options of today. Without them a job did what their defaults do.
    old = {**{k: default for k, default in _flat(config_to_dict(Config())) if k in new and k not in old}, **old}
    return [f"{k}: {_short(old.get(k))} -> {_short(new.get(k))}" for k in keys if old.get(k) != new.get(k)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.json", "*.model", "*.jinja", "merges.txt")
# size and number of the blocks of each file that are hashed; a shorter file is hashed whole
_BLOCK, _NUM_BLOCKS = 64 << 10, 128
_HEADER, _MAX_HEADER = 1 << 20, 100 << 20
_HASH_AFTER_SECONDS = 60.0  # a shorter job loses little if it has to start again


class ModelRecord(Protocol):
    """Record of the models' files that a result file keeps. See `ModelFiles`, which may be in another process."""

    def record(self) -> dict[str, Any]: ...

    def differences(self, recorded: Mapping[str, Any]) -> list[str]: ...


class ModelFiles:
    """The files of a job's models, as they are when this is constructed. `paths`: their folders or files by option."""

    def __init__(self, paths: Mapping[str, Path], log: Callable[[str], None] = lambda line: None) -> None:
        self.digests: dict[str, str] = {}  # digest of names, sizes and blocks, by option
        self._log = log
        self._times: dict[Path, int] = {}
        self._large: dict[str, Path] = {}  # files that `digests` do not cover whole
        self._hashes: dict[str, str] = {}  # known hashes of the files in `_large`
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
        """Return the record that `differences` compares later, ready for JSON. Hashes are added while the job runs."""
        return {
            name: {"mtime_ns": self._times[file], "sha256": self._hashes.get(name)}
            for name, file in self._large.items()
        }

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """One line for each large file that may not be the one of `recorded`. The `digests` are equal."""
        changed = []
        for name, file in self._large.items():
            old = recorded.get(name)
            if old is None:
                continue
            if old["mtime_ns"] != self._times[file]:
                if old["sha256"] is not None:
                    self._log(f"{file} has a new time of modification: it is read whole")
                if old["sha256"] is None or self._hash(file) != old["sha256"]:
                    changed.append(f"{name}: written {_time(old['mtime_ns'])} -> {_time(self._times[file])}")
                    continue
            if old["sha256"] is not None:
                self._hashes[name] = old["sha256"]
        return changed

    def check_loaded(self) -> None:
        """Check that no file has changed since it was hashed. Raises InputError."""
        if changed := [file for file in self._times if self._changed(file)]:
            raise InputError(f"{changed[0]} changed while it was loaded", "run the same command again")

    def hash_later(self, after_seconds: float = _HASH_AFTER_SECONDS) -> threading.Thread | None:
        """Hash the large files that have no hash yet, whole and in a thread, until `close`."""
        missing = {name: file for name, file in self._large.items() if name not in self._hashes}
        if not missing:
            return None

        def work() -> None:
            if self._stopped.wait(after_seconds):
                return
            with contextlib.suppress(OSError):  # not readable any more: no hash then
                for name, file in missing.items():
                    digest = self._hash(file)
                    if digest is not None and not self._changed(file):
                        self._hashes[name] = digest

        thread = threading.Thread(target=work, name="hash of the weights", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._stopped.set()

    def _hash(self, file: Path) -> str | None:
        """Hash the whole file. Returns None if `close` was called before the end."""
        digest = hashlib.sha256()
        for chunk in chunks(file):
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
    """Hash the file's header and blocks spread over it; True if that is the whole file."""
    with file.open("rb", buffering=0) as stream:
        if size <= _BLOCK * _NUM_BLOCKS:
            digest.update(stream.read())
            return True
        digest.update(stream.read(_header_size(stream, file)))
        for number in range(_NUM_BLOCKS):
            stream.seek(number * (size - _BLOCK) // (_NUM_BLOCKS - 1))
            digest.update(stream.read(_BLOCK))
    return False


def _header_size(stream: BinaryIO, file: Path) -> int:
    """Return the bytes of a file's header. The size is exact for safetensors, whose header names the tensors, their
    types and offsets."""
    if file.suffix != ".safetensors":
        return _HEADER
    size = 8 + int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    return min(size, _MAX_HEADER)


def _time(nanoseconds: int) -> str:
    return datetime.datetime.fromtimestamp(nanoseconds // 10**9).isoformat(" ")
