"""Files in object stores and on the web: `s3://`, `gs://` and `hf://` through fsspec, and `https://` to read.

An input is downloaded once, to the cache folder, and read there. Its identity is its content, as that of a local file.
So the same file at another URL, such as one that was signed again, is the same input. The copy is removed when the job
is finished. A copy that no process has used for a week is removed by the next download.

A job whose output is a URL runs in the cache folder, where its partial file is. The finished file and its statistics
are uploaded at the end. `resume` works because the folder follows from the URL.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specbatch.errors import InputError, SpecbatchError, without_secrets
from specbatch.files.local import disk_errors, unlink_quietly, write_whole
from specbatch.files.paths import partial_path, stats_path_of
from specbatch.files.urls import STORES, parent_url, url_name
from specbatch.files.web import Patience, WebFile

# What stores report of a file, under the names of their fsspec implementations.
_VERSION = ("ETag", "etag", "generation", "md5Hash", "crc32c", "blob_id", "oid", "LastModified", "Last-Modified")
_TIMES = ("last_modified", "mtime", "updated", "modified", "created", "VersionId")
_AGAIN = "finished rows are kept; run the same command again"
_TRIES = 3
_UNUSED_SECONDS = 7 * 24 * 3600.0
_TEMPORARY = ".specbatch-"  # the beginning of the names of unfinished copies
_MAX_NAME = 200  # bytes; file systems allow 255, and temporary and partial files add some

OnBytes = Callable[[int, int | None], None]  # (bytes so far, bytes in total)


def fetch(url: str, on_bytes: OnBytes = lambda done, total: None, patience: Patience | None = None) -> RemoteCopy:
    """A copy of the file, as it is now, in the cache folder. Raises InputError."""
    remote = RemoteFile(url, patience)
    folder = _folder("in", url)
    with disk_errors(folder):
        _remove_unused(folder.parent)
        held = _HeldFolder(folder)
    copy, record = folder / _name(url), folder / f".{_name(url)}.state"
    problem = ""
    for _ in range(_TRIES):
        state = remote.state()
        if state is None:
            raise InputError(f"{remote.shown} does not exist")
        if _recorded(record) == {"state": state, "copy": _local_state(copy)} and state.keys() - {"size"}:
            return RemoteCopy(copy, state, held)
        num_bytes = remote.download(copy, state, on_bytes)
        if remote.state() != state:
            problem = "changes while it is downloaded"
        elif num_bytes is not None and state.get("size", str(num_bytes)) != str(num_bytes):
            problem = f"has {int(state['size']):,} bytes, but {num_bytes:,} bytes came"
        else:
            text = json.dumps({"state": state, "copy": _local_state(copy)})
            write_whole(record, text.encode())
            return RemoteCopy(copy, state, held)
    raise InputError(f"{remote.shown} {problem}", "run the same command again when it is complete")


class RemoteCopy:
    """A copy of a remote file. While a process has it, no other one removes it."""

    def __init__(self, path: Path, state: dict[str, str], held: _HeldFolder) -> None:
        self.path = path
        self.state = state
        self._held = held

    def remove(self) -> None:
        """Remove the copy, unless another process has it."""
        self._held.remove()


class _HeldFolder:
    """A folder with one copy, and a lock that all processes share that use the copy. Only its owner can read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        while True:
            _make_private(folder)
            self._lock = os.open(folder, os.O_RDONLY)
            if _locked(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                for left in folder.glob(f"{_TEMPORARY}*"):  # A process that was killed can leave these.
                    left.unlink(missing_ok=True)
            _locked(self._lock, fcntl.LOCK_SH)
            # Another process can have removed the folder between open and lock.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(self._lock).st_ino == folder.stat().st_ino:
                    os.utime(folder)
                    break
            os.close(self._lock)
        self._close = weakref.finalize(self, os.close, self._lock)

    def remove(self) -> None:
        if self._close.alive:
            _remove_folder(self._folder, self._lock)
            self._close()


class RemoteFile:
    """One file of a store. Errors of the network and of rights are InputErrors."""

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        scheme = url.partition(":")[0]
        self.url = url
        self.shown = without_secrets(url)
        self._store = STORES[scheme]
        self._web: WebFile | None = None
        if importlib.util.find_spec(self._store.package) is None:
            raise InputError(
                f"{self.shown} needs the package {self._store.package}", f"pip install {self._store.package}"
            )
        if scheme in ("http", "https"):
            self._web = WebFile(url, patience or Patience())
            return
        import fsspec

        with self._errors("opened"):
            # An instance of its own: others could have cached what the store said before.
            self._files, self._path = fsspec.core.url_to_fs(url, skip_instance_cache=True)

    def state(self) -> dict[str, str] | None:
        """Return values that change with the content. Returns None if there is no such file."""
        if self._web is not None:
            return self._web.state()
        with self._errors("read"):
            self._files.invalidate_cache()
            try:
                info = self._files.info(self._path)
            except FileNotFoundError:
                return None
        if info.get("type") == "directory":
            raise InputError(f"{self.shown} is a folder", "name one file")
        # A store that unpacks a file on the way announces its packed size.
        names = ("size", *_VERSION, *_TIMES)[1 if info.get("contentEncoding") else 0 :]
        return {name: str(info[name]) for name in names if info.get(name) is not None}

    def has_changed(self, state: dict[str, str]) -> bool:
        """Return whether the store has another version. If the store cannot be asked any more, such as with a signed
        URL that has expired, the copy counts as current."""
        try:
            return self.state() != state
        except InputError:
            return False

    def download(self, to: Path, state: dict[str, str], on_bytes: OnBytes = lambda done, total: None) -> int | None:
        """Write a file that only its owner can read; returns how many bytes came, or None if they were packed on the
        way. `to` is replaced when the download is complete."""
        size = int(state["size"]) if "size" in state else None
        with disk_errors(to):
            temporary = to.with_name(f"{_TEMPORARY}{secrets.token_hex(6)}")
            try:
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                if self._web is not None:
                    num_bytes = self._web.download(temporary, size, on_bytes)
                else:
                    with self._errors("downloaded"):
                        self._files.get_file(self._path, str(temporary), callback=_callback(on_bytes))
                    num_bytes = temporary.stat().st_size
                os.replace(temporary, to)
            finally:
                unlink_quietly(temporary)
        return num_bytes

    def upload(self, file: Path) -> None:
        """The store has the old file until it has all of the new one."""
        with self._errors("written", _AGAIN):
            self._files.put_file(str(file), self._path)

    def refuse_read_only(self) -> None:
        """Raises InputError if no file of the store can be written."""
        if not self._store.writes:
            raise InputError(f"{self.shown} cannot be written: it can only be read", "-o s3://BUCKET/NAME, or a file")

    def check_can_write(self) -> None:
        """Find missing rights and buckets before the work. In s3 and gs a multi-part upload is begun and aborted, which
        leaves nothing there. The hub is asked for the rights of the token."""
        self.refuse_read_only()
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
            raise InputError(f"{self.shown} cannot be {what}: {without_secrets(text)}", hint) from exc


class RemoteOutput:
    """The output of a job at a URL. `path` is the local file that the job writes."""

    def __init__(self, url: str) -> None:
        self.shown = without_secrets(url)
        self.path = _folder("out", url) / _name(url)
        with disk_errors(self.path):
            _make_private(self.path.parent)
        self.stats_url = f"{parent_url(url)}/{stats_path_of(self.path).name}"
        self._results, self._stats = RemoteFile(url), RemoteFile(self.stats_url)

    def prepare(self, *, overwrite: bool, will_write: bool = False) -> None:
        """Make the local files those of the store, unless an unfinished job is here. Check that the store can be
        written, unless the job is finished; `will_write`: also then."""
        self._results.refuse_read_only()
        is_unfinished = partial_path(self.path).exists()
        if not is_unfinished:
            self.remove_copies()
        is_new = is_unfinished or overwrite or self._results.state() is None
        if is_new or will_write:
            self._results.check_can_write()
        if is_new:
            return
        for remote, path in ((self._stats, stats_path_of(self.path)), (self._results, self.path)):
            if (state := remote.state()) is not None:
                remote.download(path, state)

    def upload(self) -> None:
        """The results, then the statistics: with those the job is finished."""
        self._results.upload(self.path)
        self._stats.upload(stats_path_of(self.path))

    def remove_copies(self) -> None:
        """Remove the local copies of finished files, which the store has."""
        with disk_errors(self.path):
            self.path.unlink(missing_ok=True)
            stats_path_of(self.path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors name the URL, not the local file."""
        try:
            yield
        except InputError as exc:
            message = re.sub(rf"{re.escape(str(self.path))}(?!\.partial)", lambda _: self.shown, exc.message)
            raise type(exc)(message, exc.hint) from exc


def _folder(kind: str, url: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "specbatch" / "remote" / f"{kind}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _name(url: str) -> str:
    name = url_name(url)
    if name in ("", ".", ".."):
        raise InputError(f"{without_secrets(url)} is a folder", "name one file")
    if "\0" in name or len(os.fsencode(name)) > _MAX_NAME:
        raise InputError(f"the name of {without_secrets(url)[:200]} is too long, or has a zero byte", "rename the file")
    return name


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:  # An earlier version made the folder.
        folder.chmod(0o700)


def _locked(lock: int, kind: int) -> bool:
    """Return whether the lock was taken. Some network file systems have no locks."""
    try:
        fcntl.flock(lock, kind)
    except OSError:
        return False
    return True


def _remove_folder(folder: Path, lock: int) -> None:
    """Remove a folder and its files, unless another process has it."""
    if _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
        with contextlib.suppress(OSError):  # it is a cache
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            folder.rmdir()


def _remove_unused(root: Path) -> None:
    for folder in root.glob("in-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                lock = os.open(folder, os.O_RDONLY)
                try:
                    _remove_folder(folder, lock)
                finally:
                    os.close(lock)


def _callback(on_bytes: OnBytes) -> Any:
    from fsspec.callbacks import Callback

    class Report(Callback):  # type: ignore[misc]
        def call(self, *arguments: Any, **options: Any) -> None:
            on_bytes(self.value, self.size)

    return Report()


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
