"""Sources of rows: files, standard input, folders of tables, and data sets of the hub.

Files are not read through `datasets`, which guesses types, and refuses a whole block for one malformed line. It only
says which files of a folder belong to a split, and reads other data sets.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.config import DataSection
from specbatch.errors import InputError, RowError, without_secrets
from specbatch.files.file_kind import check_text
from specbatch.files.input_file import SUFFIXES, RowData, first_line, has_json_lines, open_file, suffix_of
from specbatch.files.jsonl import BadRow, decode_line, encode_line, numbered_lines
from specbatch.files.local import FileFacts, identify_input
from specbatch.files.paths import check_input_name
from specbatch.files.remote import OnBytes, RemoteFile, fetch
from specbatch.files.urls import url_name, url_of
from specbatch.rows.data_set_files import files_of
from specbatch.schemas.column_kinds import Kind
from specbatch.types import SamplingParams

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_STDIN_HEAD = 1 << 16  # bytes of standard input that identify it


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row before parsing."""

    index: int  # 0-based line of the input (for tables: row)
    data: RowData
    sampling: SamplingParams | None = None  # defaults of the row's call; None: those of the configuration
    # The index that seeds and the result have, if it is not `index`: rows of several calls run at the same time.
    number: int | None = None

    def fields(self) -> dict[str, Any]:
        """The names of the row's fields and their values. Raises RowError."""
        if isinstance(self.data, BadRow):
            raise RowError(self.data.type, self.data.message)
        return decode_line(self.data) if isinstance(self.data, bytes) else self.data

    def digest(self) -> int:
        """64 bits. An answer counts only while its input row has the same digest."""
        data = self.data
        if isinstance(data, BadRow):
            data = {"type": data.type, "message": data.message}
        if not isinstance(data, bytes):
            data = encode_line(data)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")

    def __reduce__(self) -> tuple[type[RawRow], tuple[Any, ...]]:
        # Rows go to workers: this halves the time of pickling.
        return RawRow, (self.index, self.data, self.sampling, self.number)


@dataclass(frozen=True, slots=True)
class Source:
    """An input that can be iterated once, in constant memory."""

    name: str
    identity: dict[str, Any]  # what resume compares
    verifiable: bool  # False: `identity` covers only the beginning of the content (long standard input)
    total: int | None  # rows, if that is cheap to know; blank lines are counted
    path: Path | None  # path of a file; None for other inputs
    rows: Callable[[], Iterator[RawRow]]
    touched: Callable[[], bool] = lambda: False  # whether its files were written or replaced since it was opened
    # open the input as it is now; None: it cannot change or cannot be read again
    reopen: Callable[[], Source] | None = None
    stride: int = 1  # distance of the indices of its rows; above 1 for a shard
    # What identifies the rows that were read so far, if `identity` covers only their beginning.
    read_so_far: Callable[[], dict[str, Any]] = lambda: {}
    columns: Mapping[str, Kind] = field(default_factory=dict)  # kinds of the columns of a parquet or Arrow file
    remove_copy: Callable[[], None] = lambda: None  # remove the local copy of a remote file, when the job is finished


def open_source(
    ref: str,
    data: DataSection,
    stdin: BinaryIO | None = None,
    on_bytes: OnBytes = lambda done, total: None,
) -> Source:
    """The rows of `ref`: a file, a URL, `-`, a folder of tables, or `org/name` on the hub. `on_bytes`: the progress of
    a download. Raises InputError."""
    if ref == "-":
        return _stdin_source(stdin)
    check_input_name(ref)
    if (url := url_of(ref)) is not None:
        return _remote_source(url, on_bytes)
    path = Path(ref)
    try:
        if path.is_file():
            return _file_source(path)
        if path.is_dir():
            _refuse_folder_of_lines(path)
            return _dataset_source(ref, data, local=True)
        if path.exists():  # a pipe or a device: it could not be read twice, and has no size
            raise InputError(f"the input {ref} is not a regular file", f"specbatch generate - -o results.jsonl < {ref}")
        if _looks_like_a_file(ref):
            raise InputError(f"the input {ref} does not exist", _near_hint(path))
    except OSError as exc:  # not readable, a name that is too long
        raise InputError(f"the input {ref[:200]} cannot be read: {exc.strerror or exc}") from exc
    return _dataset_source(ref, data, local=False)


def input_stem(ref: str) -> str:
    """The name that outputs derive from: data.jsonl.gz -> data, org/name -> name."""
    url = url_of(ref)
    name = Path(ref).name if url is None else url_name(url)
    suffix = suffix_of(name)
    if suffix is not None and len(name) > len(suffix):
        return name[: -len(suffix)]
    return name or "data"


def _refuse_folder_of_lines(folder: Path) -> None:
    """`datasets` would read all files as one table, and fail at the first row with other fields."""
    lines = sorted(p.name for p in folder.iterdir() if has_json_lines(p.name))
    if lines:
        raise InputError(
            f"the input {folder} is a folder with JSON lines ({', '.join(lines[:3])}{', ...' * (len(lines) > 3)})",
            f"name one file; or: cat {folder}/*.jsonl | specbatch generate - -o results.jsonl",
        )


def _stdin_source(given: BinaryIO | None) -> Source:
    if given is None and sys.stdin is None:
        raise InputError("standard input is closed", "specbatch generate - -o results.jsonl < data.jsonl")
    stdin = given if given is not None else sys.stdin.buffer
    # Standard input cannot be read twice, so its beginning identifies it.
    try:
        head = stdin.read(_STDIN_HEAD)
    except (OSError, ValueError) as exc:  # a folder, or opened for writing only
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InputError(
            f"standard input cannot be read: {reason}", "specbatch generate - -o results.jsonl < data.jsonl"
        ) from exc
    check_text("standard input", head, ".jsonl")
    whole = len(head) < _STDIN_HEAD

    first = io.BytesIO(head)

    facts = FileFacts()

    def readline(size: int) -> bytes:
        line = first.readline(size)
        if not (line.endswith(b"\n") or len(line) == size):
            line += stdin.readline(size - len(line))
        if not whole:
            facts.add(line)
        return line

    def rows() -> Iterator[RawRow]:
        if whole:  # it is held, so it can be read again
            first.seek(0)
        for index, line in numbered_lines(readline, "standard input"):
            yield RawRow(index, line)

    identity = {"kind": "stdin", "sha256_of_head": hashlib.sha256(head).hexdigest(), "head_is_all": whole}

    def read_so_far() -> dict[str, Any]:
        return {} if whole else {"size": facts.num_bytes, "sha256": facts.sha256}

    return Source("standard input", identity, whole, None, None, rows, read_so_far=read_so_far)


def source_of_lines(name: str, lines: bytes) -> Source:
    """Open JSON lines in memory."""

    def rows() -> Iterator[RawRow]:
        for index, line in numbered_lines(io.BytesIO(lines).readline, name):
            yield RawRow(index, line)

    return Source(name, {}, True, None, None, rows, reopen=lambda: source_of_lines(name, lines))


def _remote_source(url: str, on_bytes: OnBytes) -> Source:
    """A copy in the cache folder is read. Its identity is its content, as that of a local file, so that a job goes on
    where the file is moved to or copied from a store."""
    copy = fetch(url, on_bytes)
    local = _file_source(copy.path, without_secrets(url))
    identity = local.identity
    # The file is not hashed whole, and the copy's time says nothing about the store's file.
    if identity.pop("mtime_ns", None) is not None:
        identity["state"] = copy.state
    remote = RemoteFile(url)
    return replace(
        local,
        path=None,
        touched=lambda: remote.has_changed(copy.state),
        reopen=lambda: _remote_source(url, on_bytes),
        remove_copy=copy.remove,
    )


def _file_source(path: Path, name: str = "") -> Source:
    """Make the source of a file. `name`: its name for messages, if it is not the path."""
    name = name or str(path)
    touched = _watch([path])
    identity, num_lines = identify_input(path)
    opened = open_file(path, name, num_lines)

    def rows() -> Iterator[RawRow]:
        return itertools.starmap(RawRow, opened.rows())

    identity = {"kind": "file", **identity}
    return Source(
        name, identity, True, opened.total, path, rows, touched, lambda: _file_source(path), columns=opened.columns
    )


def _watch(files: Sequence[Path]) -> Callable[[], bool]:
    """Return a function that says whether the files, or the files that their names link to, have been written, replaced
    or removed since this call."""

    before = [_state(file) for file in files]
    return lambda: [_state(file) for file in files] != before


def _state(file: Path) -> tuple[int, ...] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    # The time of change cannot be set back; the time of modification can.
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _dataset_source(ref: str, data: DataSection, local: bool) -> Source:
    import datasets

    if not local and not datasets.config.HF_HUB_OFFLINE:
        _check_hub(ref)
    try:
        builder = datasets.load_dataset_builder(ref, data.subset)
        splits = list(builder.info.splits or getattr(builder.config, "data_files", None) or ())
        if splits and data.split not in splits:
            raise InputError(
                f"the data set {ref} has no split {data.split!r}",
                f"its splits: {', '.join(map(str, splits))} (--set data.split=NAME)",
            )
    except InputError:
        raise
    except Exception as exc:  # `datasets` raises many kinds; all mean that it cannot be loaded
        what = f"the folder {ref}" if local else f"{ref} is not a file here. The data set {ref} of the hub"
        raise InputError(f"{what} cannot be loaded: {first_line(exc)}", _near_hint(Path(ref))) from exc
    identity = {
        "kind": "data set",
        "name": ref,
        "subset": data.subset,
        "split": data.split,
        "version": str(builder.hash),  # changes with the revision of the data set
    }
    info = (builder.info.splits or {}).get(data.split)
    total = getattr(info, "num_examples", None) or None
    files = files_of(builder, data.split, local=local)

    def rows() -> Iterator[RawRow]:
        if files is None:
            return _table_rows(ref, partial(builder.as_streaming_dataset, split=data.split))
        return itertools.starmap(RawRow, enumerate(files.rows()))

    if not local:  # a revision of the hub does not change
        return Source(ref, identity, True, total, None, rows)
    touched = _watch([Path(str(file)) for named in (builder.config.data_files or {}).values() for file in named])
    total = total if files is None else files.total
    return Source(ref, identity, True, total, None, rows, touched, lambda: _dataset_source(ref, data, local))


def _check_hub(ref: str) -> None:
    """One request, because `datasets` would retry for half a minute. Raises InputError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().dataset_info(ref, timeout=20)
    except RepositoryNotFoundError as exc:
        raise InputError(
            f"{ref} is not a file here, and the hub has no data set of this name", _near_hint(Path(ref))
        ) from exc
    except Exception as exc:  # network errors come in many kinds
        raise InputError(
            f"{ref} is not a file here, and the hub cannot be asked for a data set of this name: {first_line(exc)}",
            "HF_HUB_OFFLINE=1 uses what an earlier run has downloaded",
        ) from exc


def _table_rows(name: str, load: Callable[[], Any]) -> Iterator[RawRow]:
    index = -1
    try:
        for index, columns in enumerate(load()):
            # A value that is missing arrives as NaN in a column of numbers.
            yield RawRow(index, {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in columns.items()})
    except Exception as exc:  # readers raise many kinds; all mean that it cannot be read on
        raise InputError(f"{name} cannot be read past row {index + 1}: {first_line(exc)}") from exc


def _looks_like_a_file(ref: str) -> bool:
    return (
        ref.lower().endswith((*SUFFIXES, ".gz", ".zst", ".txt"))
        or not _HUB_NAME.fullmatch(ref)
        or ("/" in ref and Path(ref).parent.is_dir())
    )


def _near_hint(path: Path) -> str | None:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    near = difflib.get_close_matches(path.name, (p.name for p in folder.iterdir() if p.is_file()), n=3)
    return f"did you mean {' or '.join(str(folder / n) for n in near)}?" if near else None
