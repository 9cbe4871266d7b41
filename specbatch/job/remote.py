"""Files in object stores and on the web, through fsspec: `s3://`, `gs://`, `hf://`, and `https://` to read.

An input is downloaded once, to the cache folder, and read there. Its identity is its content, as that of a local file.
A job whose output is a URL runs in the cache folder, where its partial file is. The finished file and its statistics
are uploaded at the end. `resume` works because the folder follows from the URL.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbatch.errors import InputError, SpecbatchError
from specbatch.job.files import write_whole
from specbatch.job.paths import partial_path, stats_path_of
from specbatch.job.urls import STORES, parent_url, url_name

# What stores report of a file, under the names of their fsspec implementations.
_VERSION = ("ETag", "etag", "generation", "md5Hash", "crc32c", "blob_id", "oid", "LastModified", "Last-Modified")
_TIMES = ("last_modified", "mtime", "updated", "modified", "created", "VersionId")
_AGAIN = "finished rows are kept; run the same command again"


def fetch(url: str) -> tuple[Path, dict[str, str]]:
    """(a copy of the file, as it is now, in the cache folder; its state). Raises InputError."""
    remote = RemoteFile(url)
    folder, name = _folder("in", parent_url(url)), _name(url)
    copy, record = folder / name, folder / f".{name}.state"
    for _ in range(3):
        state = remote.state()
        if state is None:
            unreachable = ", or its host does not answer" if url.startswith("http") else ""  # fsspec says the same
            raise InputError(f"{url} does not exist{unreachable}")
        if _recorded(record) == {"state": state, "copy": _local_state(copy)} and state.keys() - {"size"}:
            return copy, state
        remote.download(copy)
        if remote.state() == state:
            text = json.dumps({"state": state, "copy": _local_state(copy)})
            write_whole(record, text.encode())
            return copy, state
    raise InputError(f"{url} changes while it is downloaded", "run the same command when it is complete")


class RemoteFile:
    """One file of a store. Errors of the network and of rights are InputErrors."""

    def __init__(self, url: str) -> None:
        scheme = url.partition(":")[0]
        self.url = url
        self._store = STORES[scheme]
        if importlib.util.find_spec(self._store.package) is None:
            raise InputError(f"{url} needs the package {self._store.package}", f"pip install {self._store.package}")
        import fsspec

        with self._errors("opened"):
            # An instance of its own: others could have cached what the store said before.
            self._files, self._path = fsspec.core.url_to_fs(url, skip_instance_cache=True)

    def state(self) -> dict[str, str] | None:
        """What changes with the content; None: there is no such file."""
        with self._errors("read"):
            self._files.invalidate_cache()
            try:
                info = self._files.info(self._path)
            except FileNotFoundError:
                return None
        if info.get("type") == "directory":
            raise InputError(f"{self.url} is a folder", "name one file")
        return {name: str(info[name]) for name in ("size", *_VERSION, *_TIMES) if info.get(name) is not None}

    def download(self, to: Path) -> None:
        """`to` is replaced when the download is complete."""
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_name(f".specbatch-{secrets.token_hex(6)}")
        try:
            with self._errors("downloaded"):
                self._files.get_file(self._path, str(temporary))
            os.replace(temporary, to)
        finally:
            temporary.unlink(missing_ok=True)

    def upload(self, file: Path) -> None:
        """The store has the old file until it has all of the new one."""
        with self._errors("written", _AGAIN):
            self._files.put_file(str(file), self._path)

    def check_can_write(self) -> None:
        """Find missing rights and buckets before the work. In s3 and gs a multi-part upload is begun and aborted, which
        leaves nothing there. The hub is asked for the rights of the token."""
        if not self._store.writes:
            raise InputError(f"{self.url} cannot be written: it can only be read", "-o s3://BUCKET/NAME, or a file")
        with self._errors("written"):
            if self._store.check == "token":
                from huggingface_hub import HfApi

                resolved = self._files.resolve_path(self._path)
                HfApi().auth_check(resolved.repo_id, repo_type=resolved.repo_type, write=True)
            elif self._store.check == "upload":
                file = self._files.open(self._path, "wb", autocommit=False)
                try:
                    file._initiate_upload()  # nothing public begins an upload without data
                    file.discard()
                finally:
                    file.closed = True  # else it would be written when it is collected

    @contextlib.contextmanager
    def _errors(self, what: str, hint: str = "check the network") -> Iterator[None]:
        try:
            yield
        except SpecbatchError:
            raise
        except Exception as exc:  # each store has its own kinds
            text = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            if isinstance(exc, FileNotFoundError):
                hint = "check the name of the bucket or repository"
            elif isinstance(exc, PermissionError) or "credential" in f"{type(exc).__name__} {text}".lower():
                hint = self._store.login
            raise InputError(f"{self.url} cannot be {what}: {text}", hint) from exc


class RemoteOutput:
    """The output of a job at a URL. `path` is the local file that the job writes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.path = _folder("out", url) / _name(url)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.stats_url = f"{parent_url(url)}/{stats_path_of(self.path).name}"
        self._results, self._stats = RemoteFile(url), RemoteFile(self.stats_url)

    def prepare(self, *, overwrite: bool, will_write: bool = False) -> None:
        """Make the local files those of the store, unless an unfinished job is here. Check that the store can be
        written, unless the job is finished; `will_write`: also then."""
        is_unfinished = partial_path(self.path).exists()
        if not is_unfinished:
            self.remove_copies()
        is_new = is_unfinished or overwrite or self._results.state() is None
        if is_new or will_write:
            self._results.check_can_write()
        if is_new:
            return
        if self._stats.state() is not None:
            self._stats.download(stats_path_of(self.path))
        self._results.download(self.path)

    def upload(self) -> None:
        """The results, then the statistics: with those the job is finished."""
        self._results.upload(self.path)
        self._stats.upload(stats_path_of(self.path))

    def remove_copies(self) -> None:
        """Of finished files, which the store has."""
        self.path.unlink(missing_ok=True)
        stats_path_of(self.path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors name the URL, not the local file."""
        try:
            yield
        except InputError as exc:
            message = re.sub(rf"{re.escape(str(self.path))}(?!\.partial)", lambda _: self.url, exc.message)
            raise type(exc)(message, exc.hint) from exc


def _folder(kind: str, url: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "specbatch" / "remote" / f"{kind}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _name(url: str) -> str:
    name = url_name(url)
    if not name:
        raise InputError(f"{url} is a folder", "name one file")
    return name


def _recorded(record: Path) -> Any:
    try:
        return json.loads(record.read_bytes())
    except (OSError, ValueError):
        return None


def _local_state(copy: Path) -> list[int] | None:
    try:
        stat = copy.stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]
