"""Decides the KV cache as far as it can be known before weights are read: its size (see `memory.py`) and its dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specbatch.attention.flashinfer import HEAD_DIMS
from specbatch.cache.pages import KVScales
from specbatch.config import KVDtypeName
from specbatch.draft.schedule import ByBatch
from specbatch.errors import ConfigError
from specbatch.models.config import ModelConfig
from specbatch.setup.device import DTYPE_NAMES
from specbatch.setup.memory import (
    ENOUGH_ROW,
    GIB,
    CachedModel,
    CachePlan,
    Rows,
    available_memory,
    bytes_for_cache,
    estimated_working_bytes,
    given_cache,
    plan_cache,
)

KV_DTYPE_NAMES: dict[torch.dtype, KVDtypeName] = {**DTYPE_NAMES, torch.float8_e4m3fn: "fp8_e4m3"}
DEFAULT_BATCH = {"cpu": 16, "cuda": 256}  # used if engine.max_batch_size is null
_LARGE_BATCHES = (1024, 768, 512)  # sizes that CUDA uses if the cache is large enough
# largest number of tokens in a round of a large batch: with more, the fixed cost of a round is next to nothing
_MAX_VERIFY_TOKENS = 4096
# The same for small models: launches of many short layers are their fixed cost, and GEMMs of more tokens are short.
_SMALL_PARAMETERS, _LARGE_BATCHES_OF_SMALL, _MAX_VERIFY_TOKENS_OF_SMALL = 1_000_000_000, (2048, 1536), 12288
_USUAL_NODES = 4  # nodes of a request, where rounds choose their number
_PROMPT_TOKENS = 1024  # assumed length of a row's prompt before any was read
_ENOUGH_ROWS, _MAX_CARDS = 16, 8  # used to advise a number of GPUs for a model


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """The use of the cache, and what the user has set for it."""

    models: Sequence[CachedModel]  # the target first
    rows: Rows
    dtype: torch.dtype  # data type of the weights
    device: torch.device
    given_tokens: int | None  # engine.kv_cache_tokens, or None if it is not set
    memory_fraction: float
    # On a GPU, whose memory is measured when the engine is built: (nodes of a request in a round, tokens of a prompt
    # chunk). None: on a CPU, where the size is decided here.
    measured: tuple[int, int] | None
    nodes: ByBatch[int] | None = None  # nodes of a request by the batch size; None: see `measured`
    chooses_nodes: bool = False  # rounds choose fewer nodes
    num_ranks: int = 1  # processes that each hold such a part of the target
    saved: int = 0  # bytes that the weights take less, where layers are quantised
    state_bytes: int = 0  # bytes of the state of one request of a hybrid; 0: it has none
    keeps_states: bool = True  # the prefix cache has checkpoints of states, for a hybrid

    def num_nodes(self, batch_size: int) -> int:
        """Return the nodes of a request in a round of a GPU."""
        assert self.measured is not None, "of a GPU"
        return self.measured[0] if self.nodes is None else self.nodes.at(batch_size)

    @property
    def weights(self) -> int:
        return sum(model.num_parameters() for model in self.models) * self.dtype.itemsize - self.saved

    @property
    def available(self) -> int:
        """Bytes free for one rank. A rank on CUDA has a GPU of its own; on a CPU they share the memory."""
        free = available_memory(self.device)
        return free if self.device.type == "cuda" else free // self.num_ranks

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints of states: at most one for each request, and a tenth of what weights and requests' states leave
        of the memory."""
        if not self.state_bytes or not self.keeps_states:
            return 0
        left = int(self.available * self.memory_fraction) - self.weights - self._states_of_requests
        return max(0, min(self.rows.max_batch_size, left // 10 // self.state_bytes))

    @property
    def states(self) -> int:
        """Bytes of all states: those of requests, padding's and the checkpoints."""
        return self._states_of_requests + self.num_checkpoints * self.state_bytes

    @property
    def _states_of_requests(self) -> int:
        return (self.rows.max_batch_size + 1) * self.state_bytes

    def of_batch(self, max_batch_size: int) -> CacheRequest:
        return replace(self, rows=replace(self.rows, max_batch_size=max_batch_size))


def default_batch_size(wanted: CacheRequest, available: int, max_tokens: int) -> int:
    """Return the batch size for engine.max_batch_size: null. `available`: the free bytes. `max_tokens`: the longest
    output of a row.

    The fixed cost of a round is shared by its rows, and a file ends with fewer rounds of few rows, so more rows at once
    take less time. But rows that the cache does not hold are preempted and computed again. While a row runs, it holds
    its prompt and half of its output, on average. On a CPU a round of more rows takes as much longer.
    """
    if wanted.measured is None:
        return DEFAULT_BATCH["cpu"]
    row_tokens = min(_PROMPT_TOKENS + max_tokens // 2, wanted.rows.max_positions)
    is_small = wanted.models[0].num_parameters() <= _SMALL_PARAMETERS
    most = _MAX_VERIFY_TOKENS_OF_SMALL if is_small else _MAX_VERIFY_TOKENS
    for batch in (*(_LARGE_BATCHES_OF_SMALL if is_small else ()), *_LARGE_BATCHES):
        num_nodes = wanted.num_nodes(batch)
        num_nodes = min(_USUAL_NODES, num_nodes) if wanted.chooses_nodes else num_nodes
        tokens = wanted.given_tokens
        if tokens is None:
            plan, _ = _likely(wanted.of_batch(batch), available)
            tokens = plan.num_pages * wanted.rows.page_size
        if tokens >= batch * row_tokens and batch * num_nodes <= most:
            return batch
    batch, left = DEFAULT_BATCH["cuda"], int(available * wanted.memory_fraction) - wanted.weights
    while wanted.state_bytes and batch > _ENOUGH_ROWS and 2 * (batch + 1) * wanted.state_bytes > left:
        batch //= 2  # states take at most half of what weights leave
    return batch


def with_default_batch(wanted: CacheRequest, max_tokens: int, notes: list[str]) -> CacheRequest:
    """`wanted` with `default_batch_size`."""
    batch = default_batch_size(wanted, wanted.available, max_tokens)
    notes.append(f"engine.max_batch_size: {batch} (by what the KV cache holds)")
    return wanted.of_batch(batch)


def resolve_cache(wanted: CacheRequest, notes: list[str]) -> CachePlan:
    """The cache's size; on a GPU an upper bound, and an estimate in `notes`.

    Raises ConfigError where it does not fit into memory, or does not hold one request.
    """
    available, weights, rows = wanted.available, wanted.weights + wanted.states, wanted.rows
    if wanted.state_bytes:
        count, mib = wanted.num_checkpoints, wanted.state_bytes / 2**20
        notes.append(
            f"model.target: a hybrid, whose state takes {mib:.3g} MiB a row: {(rows.max_batch_size + 1) * mib:,.0f} "
            f"MiB for {rows.max_batch_size} rows and padding, and {count * mib:,.0f} MiB for {count} checkpoints of "
            "states of the prefix cache; they count as weights"
        )
    kib = f"{rows.token_bytes / 1024:g}"
    if wanted.given_tokens is not None:
        plan = given_cache(wanted.given_tokens, rows)
        _check_given(wanted.given_tokens, available, weights, rows)
    elif wanted.measured is None:
        plan = plan_cache(bytes_for_cache(max(0, available - weights), wanted.memory_fraction, 0, 0), rows)
        notes.append(
            f"engine.kv_cache_tokens: {plan.num_pages * rows.page_size} ({plan.gib(rows):.2f} GiB; "
            f"{available / GIB:.1f} GiB available, {weights / GIB:.2f} GiB of weights, {kib} KiB "
            f"a token, memory_fraction {wanted.memory_fraction})"
        )
        notes += row_notes(plan, rows)
    else:
        plan = plan_cache(bytes_for_cache(available, wanted.memory_fraction, weights, 0), rows)
        likely, working = _likely(wanted, available)
        notes.append(
            f"engine.kv_cache_tokens: about {likely.num_pages * rows.page_size} ({likely.gib(rows):.1f} GiB; "
            f"{available / GIB:.1f} GiB are free, {weights / GIB:.1f} GiB of weights, {kib} KiB "
            f"a token, about {working / GIB:.1f} GiB for rounds and prompts, memory_fraction "
            f"{wanted.memory_fraction}); measured when the model is loaded"
        )
    if plan.capacity < 2:
        _refuse(wanted, plan, available)
    return plan


def _likely(wanted: CacheRequest, available: int) -> tuple[CachePlan, int]:
    """Estimate the cache of a GPU: return its plan, and the bytes of working memory and graphs."""
    assert wanted.measured is not None, "of a GPU"
    chunk, rows = wanted.measured[1], wanted.rows
    nodes = wanted.num_nodes(rows.max_batch_size)
    working = estimated_working_bytes(wanted.models[0].config, rows.max_batch_size, nodes, chunk, wanted.dtype.itemsize)
    held = wanted.weights + wanted.states
    return plan_cache(bytes_for_cache(available, wanted.memory_fraction, held, working), rows), working


def row_notes(plan: CachePlan, rows: Rows) -> list[str]:
    """A note on the length of the job's rows; None where the model sets it."""
    if plan.longest_row == rows.max_positions:
        return []
    return [
        f"longest row: {plan.longest_row} tokens, prompt and output together (the model's {rows.max_positions} do not "
        "fit the KV cache; longer prompts are error rows)"
    ]


def _check_given(num_tokens: int, available: int, weights: int, rows: Rows) -> None:
    num_bytes = num_tokens * rows.token_bytes
    if num_bytes + weights <= available:
        return
    fitting = max(0, available - weights) // rows.token_bytes // rows.page_size * rows.page_size
    raise ConfigError(
        f"engine.kv_cache_tokens: {num_tokens} tokens take {num_bytes / GIB:,.1f} GiB, and {available / GIB:.1f} GiB "
        f"of memory are available, {weights / GIB:.1f} GiB of them for the weights",
        hint=f"leave engine.kv_cache_tokens out, or set it to less than {fitting}"
        if fitting > rows.lookahead + 1
        else "free memory, or use a smaller model",
    )


def _refuse(wanted: CacheRequest, plan: CachePlan, available: int) -> None:
    allowed = available * wanted.memory_fraction
    if wanted.given_tokens is None and wanted.weights < allowed <= wanted.weights + wanted.states:
        raise ConfigError(
            f"the states of {wanted.rows.max_batch_size} rows take {wanted.states / GIB:.1f} GiB, and the weights "
            f"leave {(allowed - wanted.weights) / GIB:.1f} GiB",
            hint="lower engine.max_batch_size",
        )
    if wanted.given_tokens is not None or wanted.weights < available * wanted.memory_fraction:
        tokens = wanted.given_tokens if wanted.given_tokens is not None else plan.num_pages * wanted.rows.page_size
        raise ConfigError(
            f"a KV cache of {tokens} tokens cannot hold one request: a round looks {wanted.rows.lookahead} tokens "
            "ahead",
            hint="raise engine.kv_cache_tokens or engine.memory_fraction",
        )
    hint = "free memory, use a smaller model or a smaller model.dtype, or raise engine.memory_fraction"
    num_cards = None if wanted.measured is None else cards_for(wanted, available)
    if num_cards is not None:
        hint += f"; {num_cards} GPUs like this one hold it: set engine.tensor_parallel to {num_cards}"
    raise ConfigError(
        f"the weights take {wanted.weights / GIB:.1f} GiB, a token {wanted.rows.token_bytes / 1024:g} KiB, and "
        f"{available / GIB:.1f} GiB of memory are available, of which engine.memory_fraction allows "
        f"{wanted.memory_fraction:g}",
        hint=hint,
    )


def cards_for(wanted: CacheRequest, available: int) -> int | None:
    """Return how many GPUs with this much free memory hold the model (or the part of it that a rank has) and
    _ENOUGH_ROWS rows; None: more than _MAX_CARDS, or more than can divide the model."""
    heads, tokens = wanted.models[0].config.num_heads, _ENOUGH_ROWS * min(ENOUGH_ROW, wanted.rows.max_positions)
    for count in range(1, _MAX_CARDS // wanted.num_ranks + 1):
        part = (wanted.weights + tokens * wanted.rows.token_bytes) / count
        if heads % count == 0 and part <= available * wanted.memory_fraction:
            return count * wanted.num_ranks
    return None


def resolve_kv_dtype(
    name: KVDtypeName, attention: str, device: torch.device, dtype: torch.dtype, notes: list[str]
) -> torch.dtype:
    """The dtype of cached keys and values: the model's own `dtype`, or float8 where kernels and card know it."""
    if name in ("auto", DTYPE_NAMES[dtype]):
        return dtype
    if name != "fp8_e4m3":
        raise ConfigError(
            f"engine.kv_dtype is {name}, but the model runs in {DTYPE_NAMES[dtype]}",
            hint="use engine.kv_dtype: auto (like the model) or fp8_e4m3, or change model.dtype",
        )
    if attention == "torch" and device.type == "cuda":
        raise ConfigError(
            f"engine.kv_dtype: fp8_e4m3 on CUDA needs engine.attention triton or flashinfer, not {attention}",
            hint="use engine.kv_dtype: auto, or engine.attention: triton",
        )
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ConfigError(
            f"engine.kv_dtype: fp8_e4m3 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, and {device} has "
            f"{capability[0]}.{capability[1]}",
            hint="use engine.kv_dtype: auto",
        )
    notes.append("engine.kv_dtype: fp8_e4m3 (keys and values are rounded: texts differ from an unrounded cache's)")
    return torch.float8_e4m3fn


def check_flashinfer(model: ModelConfig, kv_dtype: torch.dtype, kv_scales: Sequence[KVScales] = ()) -> None:
    """Raise ConfigError if FlashInfer has no kernels for this model and cache."""
    hint = "use engine.attention: triton"
    if any(window is not None for window in model.sliding_windows):
        raise ConfigError(f"engine.attention: flashinfer has no sliding windows; {model.model_type} has", hint=hint)
    if model.attention_soft_cap is not None:
        raise ConfigError(f"engine.attention: flashinfer has no soft caps here; {model.model_type} has", hint=hint)
    if model.attention_sinks:
        raise ConfigError(f"engine.attention: flashinfer has no attention sinks; {model.model_type} has", hint=hint)
    if model.head_dim not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"engine.attention: flashinfer needs heads of {dims}, not {model.head_dim}", hint=hint)
    if kv_dtype == torch.float8_e4m3fn and model.head_dim == 64:
        raise ConfigError("engine.attention: flashinfer reads no fp8_e4m3 cache with heads of 64", hint=hint)
    if kv_dtype == torch.float8_e4m3fn and any(scales != KVScales() for scales in kv_scales):
        what = "an fp8_e4m3 cache with the scales of the checkpoint"
        raise ConfigError(f"engine.attention: flashinfer does not read {what}", hint=hint)
