"""How many tokens of keys and values fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from specbatch.cache.pages import KVCache
from specbatch.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that shares the cache's pages: the target, a draft model, or the one layer of a draft head."""

    config: ModelConfig
    num_layers: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return KVCache.bytes_per_slot(self.num_layers, self.config.num_kv_heads, self.config.head_dim, dtype)

    def num_parameters(self) -> int:
        """Roughly, for what the weights will take: tied embeddings count twice, since the LM head keeps a packed
        copy."""
        c = self.config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
        return (
            self.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + 2 * c.vocab_size * c.hidden_size
        )


def auto_kv_tokens(
    models: Sequence[CachedModel],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    memory_fraction: float,
    usable: int,
    page_size: int,
) -> tuple[int, str]:
    """Tokens that memory_fraction of the memory free after the weights holds, `usable` at most, in whole pages; and a
    line that says so. `dtype`: of the weights."""
    per_token = sum(model.bytes_per_token(kv_dtype) for model in models)
    weights = sum(model.num_parameters() for model in models) * dtype.itemsize
    available = _available_memory(device)
    budget = int((available - weights) * memory_fraction)
    tokens = max(0, min(budget // per_token, usable))
    if tokens < usable:
        # A power of two, so that what fits does not change with every few megabytes that other programs take: where the
        # cache limits the length of a row, a job can be resumed only under the same limit.
        tokens = 1 << (tokens.bit_length() - 1) if tokens else 0
    tokens = tokens // page_size * page_size
    gib = 2**30
    return tokens, (
        f"engine.kv_cache_tokens: {tokens} ({tokens * per_token / gib:.2f} GiB; {available / gib:.1f} GiB available,"
        f" {weights / gib:.2f} GiB of weights, memory_fraction {memory_fraction})"
    )


def _available_memory(device: torch.device) -> int:
    """Bytes free for this process, of the GPU or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _container_limit())


def _container_limit() -> int:
    """Bytes that this process's control group leaves (cgroup v2); a very large number without one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text().strip()
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no cgroup, or "max"
        return 1 << 62
