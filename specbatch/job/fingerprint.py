"""What makes two runs the same job: everything that the bytes of a result line depend on, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbatch import __version__
from specbatch.config import Config
from specbatch.config_load import config_to_dict

# Capacity and scheduling: results do not depend on them. kv_cache_tokens is recorded by `job_fingerprint` where it
# is what limits the length of a row.
_NOT_IN_RESULTS = (
    "engine.cuda_graphs",
    "engine.max_batch_size",
    "engine.page_size",
    "engine.kv_cache_tokens",
    "engine.memory_fraction",
    "engine.prefix_cache",
    "engine.prefill_chunk_tokens",
)
INPUT_FACTS = "input."  # how the names of what identifies the input begin


def job_fingerprint(
    config: Config,
    source: Mapping[str, Any],
    limit: int | None,
    *,
    row_tokens: int | None = None,
    models: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Flat, JSON-ready. `config` is the resolved one with data.chat_template as text; `row_tokens` the longest row
    that fits where the user's own kv_cache_tokens, and not the model, limits it (where memory does, the result file
    keeps what the first run allowed); `models` the digests of the models by option."""
    job: dict[str, Any] = {"specbatch": __version__, "limit": limit}
    for path, value in _flat(config_to_dict(config)):
        if path not in _NOT_IN_RESULTS:
            job[path] = value
    if row_tokens is not None:
        job["engine.kv_cache_tokens"] = row_tokens
    for name, digest in (models or {}).items():
        job[f"{name} (files)"] = digest
    job.update({INPUT_FACTS + name: value for name, value in source.items()})
    return job


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each key that differs: `sampling.temperature: 0.0 -> 0.7`."""
    keys = list(old) + [k for k in new if k not in old]
    return [f"{k}: {_short(old.get(k))} -> {_short(new.get(k))}" for k in keys if old.get(k) != new.get(k)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
