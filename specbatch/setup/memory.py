"""The number of tokens whose keys and values fit into memory, and the longest row.

The rule is here once, as functions of plain numbers. `resolve.py` asks before the weights are read, with estimates;
`sizing.py` asks again with what it has measured. On the host there is nothing to measure.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from specbatch.cache.pages import KVCache
from specbatch.models.config import ModelConfig

GIB = 2**30
MEMORY_FRACTION = {"cpu": 0.5, "cuda": 0.9}  # engine.memory_fraction: null
# Where the cache holds a row of this length (or the model's longest), batches and prompt chunks stay as large as they
# are by default.
ENOUGH_ROW = 4096
_SMALLEST_BATCH, _SMALLEST_CHUNK = 16, 512  # smallest sizes that are chosen to make room


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that shares the cache's pages: the target, a draft model, or the one layer of a draft head. `vocab_rows`:
    the rows of its own embedding and LM head together; 0: it has none."""

    config: ModelConfig
    num_layers: int
    vocab_rows: int

    @staticmethod
    def whole(config: ModelConfig, packs: bool) -> CachedModel:
        """Return the model with all its layers. `packs`: the LM head is kept in a separate layout, so that tied
        embeddings take their memory twice."""
        copies = 1 if config.tie_word_embeddings and not packs else 2
        return CachedModel(config, config.num_layers, copies * config.vocab_size)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        num_layers = self.num_layers if self.config.delta is None else len(self.config.cached_layers)
        return KVCache.bytes_per_slot(num_layers, self.config.num_kv_heads, self.config.head_dim, dtype)

    def num_parameters(self) -> int:
        """Roughly: without biases, norms and the routers of experts. All experts count, not only those of a token."""
        c = self.config
        if c.tensors is not None:  # with the embedding and the LM head
            return sum(math.prod(shape) for _, shape in c.tensors)
        attention = self.num_layers * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
        if c.delta is not None:  # gated queries, and layers without attention
            num_deltas = sum(c.delta.layers)
            attention = (self.num_layers - num_deltas) * c.head_dim * (3 * c.num_heads + 2 * c.num_kv_heads)
            attention += num_deltas * (sum(c.delta.parts.values()) + c.delta.values_size)
        inner = self.num_layers * c.intermediate_size
        if (moe := c.moe) is not None:
            of_experts = moe.num_experts * moe.expert_size + moe.shared_size
            inner = sum(of_experts if has_experts else c.intermediate_size for has_experts in moe.layers)
        return c.hidden_size * (attention + 3 * inner + self.vocab_rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """The facts that the size of a cache depends on, in addition to memory."""

    token_bytes: int  # bytes of keys and values of one token, in all caches together
    page_size: int
    lookahead: int  # slots past the committed ones that a round may write
    max_positions: int  # tokens of the model's longest sequence
    max_batch_size: int
    spare_pages: int = 0  # pages of each cache that hold no row

    @property
    def usable_pages(self) -> int:
        """More than the longest sequence for each request of a full batch is never used."""
        return self.max_batch_size * -(-(self.max_positions + self.lookahead) // self.page_size)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of a cache. `capacity`: the tokens of the longest row (prompt and output) that fits. `longest_row`: the
    tokens of the longest row that a new job allows."""

    num_pages: int
    capacity: int
    longest_row: int

    def gib(self, rows: Rows) -> float:
        return self.num_pages * rows.page_size * rows.token_bytes / GIB


def bytes_for_cache(available: int, fraction: float, weights: int, reserved: int) -> int:
    """Return the bytes for the cache. `available`: the free memory before this run. `weights`: all memory that the run
    holds already, or will hold. `reserved`: working memory and graphs. A `fraction` of the available memory is for
    weights, the reserve and the cache."""
    return max(0, int(available * fraction) - weights - reserved)


def plan_cache(num_bytes: int, rows: Rows, most: int | None = None) -> CachePlan:
    """Plan the largest cache that takes `num_bytes`. `most`: no row is longer than this; None: there is no such limit.

    Where it is the cache that limits rows, their length is a power of two, so that it does not change with every few
    megabytes that other programs take: it decides which rows are errors.
    """
    num_pages = min(num_bytes // (rows.token_bytes * rows.page_size) - rows.spare_pages, rows.usable_pages)
    capacity = _capacity(max(0, num_pages), rows)
    capacity = capacity if most is None else min(capacity, most)
    longest = capacity if capacity == rows.max_positions else 1 << (capacity.bit_length() - 1) if capacity else 0
    return CachePlan(max(0, num_pages), capacity, longest)


def given_cache(num_tokens: int, rows: Rows) -> CachePlan:
    """Plan a cache whose size the user has set: all of it is for rows."""
    capacity = _capacity(num_tokens // rows.page_size, rows)
    return CachePlan(num_tokens // rows.page_size, capacity, capacity)


def _capacity(num_pages: int, rows: Rows) -> int:
    return max(0, min(rows.max_positions, num_pages * rows.page_size - rows.lookahead))


def sizes_to_try(batch: int, chunk: int, *, open_batch: bool, open_chunk: bool) -> list[tuple[int, int]]:
    """Batch sizes and prompt chunks, the wanted ones first: working memory grows with both. `open_batch`,
    `open_chunk`: the user has not set it, so it may be halved."""
    sizes = [(batch, chunk)]
    while True:
        if open_batch:
            batch = max(min(batch, _SMALLEST_BATCH), batch // 2)
        if open_chunk:
            chunk = max(min(chunk, _SMALLEST_CHUNK), chunk // 2)
        if (batch, chunk) == sizes[-1]:
            return sizes
        sizes.append((batch, chunk))


Tried = TypeVar("Tried")


def first_that_fits(
    sizes: Sequence[tuple[int, int]], enough: int, attempt: Callable[[int, int], tuple[CachePlan, Tried] | None]
) -> tuple[CachePlan, Tried] | None:
    """Return the result of `attempt` for the first size whose cache holds a row of `enough` tokens, otherwise for the
    last size that works. An attempt that runs out of memory returns None. If all attempts do, so does this function."""
    found = None
    for batch, chunk in sizes:
        found = attempt(batch, chunk) or found
        if found is not None and found[0].longest_row >= enough:
            break
    return found


def estimated_working_bytes(model: ModelConfig, batch: int, num_nodes: int, chunk: int, itemsize: int) -> int:
    """Roughly what rounds and prompts on a GPU need, graphs included, before it can be measured:
    activations of a prompt chunk, and of a round with its logits, once run eagerly and once as a graph. `num_nodes`:
    of a row in a round."""
    moe = model.moe
    inner, outputs = (0 if moe is not None and all(moe.layers) else model.intermediate_size), 1
    if moe is not None:  # each expert of a token has an output of its own
        inner, outputs = max(inner, moe.top_k * moe.expert_size + moe.shared_size), moe.top_k
    layer = 3 * inner * itemsize
    if model.delta is not None:  # it ends before the MLP begins
        layer = max(layer, model.delta.token_bytes(itemsize))
    activations = layer + (5 + outputs) * model.hidden_size * itemsize
    prompt = chunk * activations + batch * model.vocab_size * itemsize
    round_ = batch * num_nodes * (activations + model.vocab_size * itemsize)
    return max(prompt, round_) + round_ * 5 // 4 + GIB // 2


def available_memory(device: torch.device) -> int:
    """Return the bytes that are free for this process, on the GPU or on the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _container_limit(), _address_space())


def _container_limit() -> int:
    """Return the bytes that this process's control group leaves (cgroup v2), or a very large number without a
    limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text().strip()
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no cgroup, or "max"
        return 1 << 62


def _address_space() -> int:
    """Return the bytes that `ulimit -v` leaves, or a very large number without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    return max(0, limit - int(psutil.Process().memory_info().vms))
