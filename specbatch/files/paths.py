"""The files that a command reads and writes. They are checked before any work, so that no other file is lost.

An existing file is replaced only if its content shows that specbatch wrote it, or if the user named it and gave
--overwrite. Only regular files are replaced: no device, no FIFO, no link. If the output is a link, the file that it
points to is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.config import Config
from specbatch.config_load import LOCAL_NAME
from specbatch.errors import InputError
from specbatch.files.result_files import RESULT_SUFFIXES, first_line, is_torn_pack, result_suffix
from specbatch.files.stats_types import wrong_type
from specbatch.files.template_files import chat_template_file, prompt_template_file
from specbatch.files.urls import STORES, scheme_of, url_of

ELSEWHERE = "-o PATH writes elsewhere"
_MAX_BYTES = 64 << 20  # bytes of a result line and of statistics
# The beginnings of partial files, of this version and older ones.
_PARTIAL_MARKS = (b'{"check":"', b'{"specbatch_job":')
_RUNNING_MARK = b'{"specbatch_running":'
_RESULT_MARK = b'{"id": '
_SORTED = ".sorted"
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
_FORMATS = (
    *(".parquet", ".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".json", ".xlsx", ".xls", ".ods", ".xml"),
    *(".html", ".yaml", ".yml", ".toml", ".sqlite", ".db", ".npy", ".npz", ".pkl", ".h5", ".hdf5", ".tar", ".tgz"),
    *(".safetensors", ".gguf", ".bin", ".pt", ".pth"),
)
_MODEL_FILES = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja", ".txt")
_PIPE = "| specbatch generate - -o results.jsonl"
_FETCH = {"file": "name it without file://", "ftp": f"curl {{ref}} {_PIPE}"}


def partial_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def running_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial.running")


def sorted_path(output: Path) -> Path:
    return output.with_name(output.name + _SORTED)


def stats_path_of(output: Path) -> Path:
    """data.results.jsonl -> data.results.stats.json, and the same for the other formats of results"""
    suffix = result_suffix(output)
    stem = output.name[: -len(suffix)] if suffix else ""
    return output.with_name((stem or output.name) + ".stats.json")


@dataclass(frozen=True)
class Written:
    """A file that a command writes. `objection` reads an existing one: why it must not be replaced, or None."""

    what: str  # name for messages, such as "the statistics"
    path: Path
    objection: Callable[[Path], str | None]


def job_files(output: Path) -> list[Written]:
    """All files that a file job writes."""
    return [
        Written("the output", output, lambda path: None),  # the user named it; --overwrite decides
        Written("the unfinished results", partial_path(output), unless(is_partial)),
        Written("the table of running rows", running_path(output), unless(is_running_table)),
        Written("the sorted results", sorted_path(output), unless(_is_sorted)),
        Written("the statistics", stats_path_of(output), lambda path: _other_statistics(output, path)),
    ]


def unless(is_own: Callable[[Path], bool]) -> Callable[[Path], str | None]:
    """The objection to files that specbatch did not write."""
    return lambda path: None if is_own(path) else "was not written by specbatch"


def files_read(config: Config, config_file: Path | None, **others: Path | None) -> dict[str, Path]:
    """The files that a command reads, by their names in messages; in names of `others`, an underscore means a space.
    Left out: models of the hub and built-in ones, which are in caches, and files that do not exist."""
    local = Path(LOCAL_NAME)
    found = {f"the {name.replace('_', ' ')}": path for name, path in others.items() if path is not None}
    if os.path.isfile(used := config_file or local):
        found["the configuration"] = used
    templates = chat_template_file(config.data.chat_template), prompt_template_file(config.data.prompt_template)
    chat_template, prompt_template = (None if path is None else str(path) for path in templates)
    refs = {
        "the chat template (data.chat_template)": chat_template,
        "the prompt template (data.prompt_template)": prompt_template,
        "the model (model.target)": config.model.target,
        "the draft model (speculation.draft)": config.speculation.draft,
    }
    for name, ref in refs.items():
        if ref is None or len(ref) > 4096 or "\0" in ref:
            continue
        try:
            path = Path(ref).expanduser()
            if path.is_file():
                found[name] = path
            elif path.is_dir():
                files = sorted(file for file in path.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
                found |= {f"{file.name} of {name}": file for file in files}
        except (OSError, RuntimeError):  # not readable, no such home: opening the model reports it
            continue
    return found


def output_file(path: Path, formats: str = "results are JSON lines, parquet, CSV or TSV") -> Path:
    """`path`, or the file that it links to. Raises InputError if it is not a regular file and cannot become one.

    `formats`: what is written, for messages; "": any suffix is right.
    """
    if str(path) == "-":
        raise InputError(
            "results cannot go to standard output: they are sorted at the end, and a job can be resumed",
            "-o results.jsonl",
        )
    refuse_remote(path)
    with usable(path, "the output"):
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        mode = _mode(path)
        if path.name in ("", "..") or (mode is not None and stat.S_ISDIR(mode)):
            raise InputError(f"the output {path} is a folder", "-o PATH names a file")
        if mode is not None and not stat.S_ISREG(mode):
            raise InputError(f"the output {path} is {_kind(mode)}, and results need a file", "-o results.jsonl")
        if not target.parent.is_dir():
            raise InputError(f"the folder of the output, {target.parent}, does not exist", "make it, or use -o PATH")
    if formats and not result_suffix(target):
        for name in (path, target):
            _refuse_format(name, formats)
    return target


def refuse_remote(path: Path) -> None:
    """Raises InputError if the output is a URL."""
    if (scheme := scheme_of(path)) and not os.path.exists(path.parent):
        raise InputError(
            f"the output {path} is not on this machine: {scheme}: is not supported",
            "write to this machine, and copy the file when the job is finished",
        )


def _refuse_format(path: Path, formats: str) -> None:
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        plain = path.with_suffix("")
        named = {"": f"{plain}.jsonl.gz", ".jsonl": f"{plain}.gz"}.get(result_suffix(plain), str(plain))
        raise InputError(
            f"the output {path}: results are written as {', '.join(RESULT_SUFFIXES)}, not as other files in {suffix}",
            f"-o {named}",
        )
    if suffix in _FORMATS:
        known = suffix if suffix in RESULT_SUFFIXES else ".jsonl"  # .CSV: names are compared as they are
        raise InputError(f"the output {path}: {formats}, not {path.suffix}", f"-o {path.with_suffix(known)}")


def check_written(files: Sequence[Written], reads: Mapping[str, Path], hint: str = ELSEWHERE) -> None:
    """Check that no file to be written is one that is read, is in a folder that is read as a whole, or was written by
    something else. Raises InputError."""
    taken: dict[str, str] = {}
    inodes = {_inode(path): name for name, path in reads.items() if os.path.exists(path)}
    folders = {os.path.realpath(path): name for name, path in reads.items() if os.path.isdir(path)}
    for file in files:
        with usable(file.path, file.what):
            real = os.path.join(os.path.realpath(file.path.parent), file.path.name)
            around = next((name for folder, name in folders.items() if real.startswith(folder + os.sep)), None)
            problem = f"is in {around}" if around is not None else _problem(file, inodes)
            if real in taken:
                problem = f"is {taken[real]}"
            if problem is not None:
                raise InputError(f"{file.path} {problem}, so {file.what} cannot be written there", hint)
            taken[real] = file.what


def _problem(file: Written, inodes: Mapping[tuple[int, int], str]) -> str | None:
    """Return the reason why an existing file must not be replaced, or None."""
    try:
        mode = file.path.lstat().st_mode
    except FileNotFoundError:
        return None
    if (read := inodes.get(_inode(file.path))) is not None:
        return f"is {read}"
    return file.objection(file.path) if stat.S_ISREG(mode) else f"is {_kind(mode)}"


def check_can_write(files: Iterable[Written]) -> None:
    """Check that the files can be made, or replaced if they exist. Raises InputError."""
    files = list(files)
    for folder in dict.fromkeys(file.path.parent for file in files):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as exc:
            raise InputError(f"the folder {folder} cannot be written: {exc.strerror}", ELSEWHERE) from exc
    for file in files:
        if not os.path.exists(file.path):
            continue
        if not os.access(file.path, os.W_OK):
            raise InputError(f"{file.path} is write-protected, and {file.what} would replace it", ELSEWHERE)
        parent, user = file.path.parent.stat(), os.geteuid()
        # In such a folder (/tmp) only its owner can replace a file.
        if parent.st_mode & stat.S_ISVTX and user not in (0, parent.st_uid, file.path.stat().st_uid):
            raise InputError(f"{file.path} belongs to another user, and {file.what} would replace it", ELSEWHERE)


def is_partial(path: Path) -> bool:
    """Return whether `path` is the file of an unfinished job. Its first line can be torn."""
    return _begins_with(path, _PARTIAL_MARKS)


def is_running_table(path: Path) -> bool:
    """Return whether `path` is the file of `crashes.RunningRows`. Its first line can be torn."""
    return _begins_with(path, (_RUNNING_MARK,))


def _begins_with(path: Path, marks: Sequence[bytes]) -> bool:
    begin = _first_bytes(path, max(map(len, marks)))
    return any(begin.startswith(mark) or mark.startswith(begin) for mark in marks)


def holds_results(path: Path) -> bool:
    """Return whether `path` begins with a result line, or is empty: nothing is lost with an empty file. A torn
    compressed file or table counts as empty if nothing of it can be read."""
    line = first_line(path)
    if line is None:
        return path.name.endswith(_SORTED)
    row = _json(line)
    if not row and not line.endswith(b"\n"):  # torn
        return line.startswith(_RESULT_MARK[: len(line)])
    native = {"id", "index", "text", "finish_reason"} <= row.keys()
    return native or str(row.get("id")).startswith("batch_req_")


def _is_sorted(path: Path) -> bool:
    """Return whether `path` is a file that a session left before it became the output, or before it became the partial
    file of --retry-errors. A torn one can be as short as one byte."""
    return holds_results(path) or is_partial(path) or is_torn_pack(path)


def _other_statistics(output: Path, path: Path) -> str | None:
    report = _statistics(path)
    if report is None:
        return "was not written by specbatch"
    name = Path(str(report.get("output"))).name
    is_other = name != output.name and output.with_name(name).exists()  # else the output was renamed
    return f"has the statistics of {name}" if is_other else None


def read_stats(path: Path) -> dict[str, Any] | None:
    """The statistics of a finished job; None if the file has none. Raises InputError if a value in it has a wrong
    type."""
    report = _statistics(path)
    if report is not None and (name := wrong_type(report)) is not None:
        raise InputError(
            f"{path} is damaged, or of another version of specbatch: {name} has a value of a wrong type",
            "run the job again with --overwrite, or repair the file",
        )
    return report


def _statistics(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    report = _json(_first_bytes(path, _MAX_BYTES))
    job = report.get("job")
    return report if isinstance(job, dict) and "specbatch" in job else None


def check_input_name(ref: str) -> None:
    """Raises InputError for an empty name, and for a URL, with a command that reads it."""
    if not ref.strip():
        raise InputError("the name of the input is empty", "name a file, or - for standard input")
    scheme = scheme_of(ref)
    if scheme is None or url_of(ref) is not None:
        return
    how = _FETCH.get(scheme.lower(), "copy it to this machine, or pipe it: `specbatch generate -`")
    raise InputError(
        f"the input {ref[:200]}: {scheme}: is not supported. An input is a file on this machine, a URL "
        f"({', '.join(STORES)}), `-` for standard input, or the name of a data set of the hub",
        how.format(ref=ref),
    )


@contextlib.contextmanager
def usable(path: Path, what: str) -> Iterator[None]:
    """OSErrors become InputErrors: a name that is too long, a folder without permission, a loop of links."""
    try:
        yield
    except OSError as exc:
        raise InputError(
            f"cannot use {_clipped(path)} as {what.removeprefix('the ')}: {exc.strerror}", ELSEWHERE
        ) from exc


def _clipped(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 120 else f"{text[:50]}...{text[-50:]}"


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "not a regular file")


def _inode(path: Path) -> tuple[int, int]:
    """Return the device and inode of the file, or of the file that a link points to. If that does not exist, return
    those of the link itself."""
    found = path.stat() if os.path.exists(path) else path.lstat()
    return found.st_dev, found.st_ino


def _first_bytes(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _json(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; {} if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
