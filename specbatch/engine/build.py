"""The composition root: a resolved run (`resolve.py`) -> Engine. Weights are read here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbatch.attention.cpu import TorchAttention
from specbatch.attention.flashinfer import FlashInferAttention
from specbatch.attention.interface import AttentionBackend
from specbatch.attention.triton import PagedAttention
from specbatch.cache.pages import PagePool
from specbatch.draft import DraftParts, make_method
from specbatch.draft.network import DraftNet, EagleDraft, ModelDraft
from specbatch.engine.build_device import build_device_engine
from specbatch.engine.cpu_threads import ThreadGovernor, limit_threads, new_governor
from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.memory import GIB, available_memory, sizes_to_try
from specbatch.engine.resolve import AttentionName, ResolvedRun
from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.models.formats.tensor_files import TensorSource
from specbatch.models.packed import is_packable
from specbatch.models.weight_loader import WeightLoader
from specbatch.oracle.engine import Engine
from specbatch.oracle.factory import proposer_of
from specbatch.types import BatchEngine


@dataclass(frozen=True)
class Built:
    """An engine, its draft method, and what other draft shapes of this method are made of."""

    engine: Engine | DeviceEngine
    method: str
    parts: DraftParts


def build_engine(run: ResolvedRun, show: Callable[[str], None] = lambda progress: None) -> BatchEngine:
    """Read the weights and put the engine together; what is decided on the way is added to `run.notes`, and `show` is
    told what is being done.

    Raises ModelError where the memory does not suffice.
    """
    return build(run, show).engine


def build(run: ResolvedRun, show: Callable[[str], None] = lambda progress: None) -> Built:
    """As `build_engine`."""
    try:
        return _build(run, show)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where = "GPU's" if run.device.type == "cuda" else "machine's"
        raise ModelError(
            f"the {where} memory does not hold this run: {available_memory(run.device) / GIB:.1f} GiB are free; "
            f"{str(error).split('. ', 1)[0].strip()}",
            hint="lower engine.kv_cache_tokens, engine.memory_fraction, engine.max_batch_size or "
            "engine.prefill_chunk_tokens, free memory, or use a smaller model",
        ) from error


def _build(run: ResolvedRun, show: Callable[[str], None]) -> Built:
    engine, speculation = run.engine, run.config.speculation
    if run.device.index is not None:
        torch.cuda.set_device(run.device)  # Triton, graphs and events go to the current device
    threads: ThreadGovernor | None = None
    if run.device.type == "cpu":
        limit_threads()
        if is_packable(torch.empty(0, dtype=run.dtype)):  # of other products nobody checks the bits
            threads = new_governor(_configs(run))
    if engine.on_device:
        torch.cuda.empty_cache()  # of an engine before this one
    available = available_memory(run.device)
    began = time.perf_counter()
    num_positions = run.cache.capacity + run.speculation.num_lookahead + 1
    target = build_decoder(
        run.target.config, run.target.tensors, num_positions, run.dtype, run.device, engine.attention, run.kv_dtype
    )
    # The device engine measures how large its caches may be.
    num_pages = 1 if engine.on_device else run.cache.num_pages
    num_slots = num_pages * engine.page_size
    net = _build_net(run, target, num_slots, num_positions) if run.draft is not None else None
    ngram_match = speculation.ngram.min_match, speculation.ngram.max_match
    parts, method = DraftParts(run.device, ops_for(run.device, run.dtype), net, ngram_match), speculation.method
    if engine.on_device:
        torch.cuda.synchronize(run.device)
        device_engine = _device_engine(run, target, parts, available, time.perf_counter() - began, show)
        return Built(device_engine, method, parts)
    oracle = Engine(
        target,
        proposer_of(method, run.speculation.schedule, parts, target.config.vocab_size, engine.page_size),
        target.new_cache(num_slots, run.kv_dtype),
        PagePool(num_pages, engine.page_size),
        max_length=run.cache.capacity,
        longest_row=run.cache.longest_row,
        max_batch_size=engine.max_batch_size,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache=run.config.engine.prefix_cache,
        eos_token_ids=_eos_token_ids(run),
        threads=threads,
    )
    return Built(oracle, method, parts)


def _device_engine(
    run: ResolvedRun,
    target: Decoder,
    parts: DraftParts,
    available: int,
    weights_seconds: float,
    show: Callable[[str], None],
) -> DeviceEngine:
    engine, speculation = run.engine, run.config.speculation
    built = build_device_engine(
        target,
        run.speculation.schedule.map(lambda shape: make_method(speculation.method, shape, parts)),
        dtype=run.dtype,
        kv_dtype=run.kv_dtype,
        device=run.device,
        available=available,
        bound=run.cache,
        rows=run.rows,
        kv_cache_tokens=run.config.engine.kv_cache_tokens,
        memory_fraction=engine.memory_fraction,
        sizes=sizes_to_try(
            engine.max_batch_size,
            engine.prefill_chunk_tokens,
            open_batch="max_batch_size" in engine.left_open,
            open_chunk="prefill_chunk_tokens" in engine.left_open,
        ),
        prefix_cache=run.config.engine.prefix_cache,
        graphs=engine.graphs,
        prompt_graphs=engine.attention == "triton",
        sampled=run.config.sampling.temperature > 0,
        eos_token_ids=_eos_token_ids(run),
        simulate=speculation.simulate_acceptance,
        say=run.notes.append,
        show=show,
    )
    built.start_seconds = seconds = {"weights": weights_seconds} | built.start_seconds
    times = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    run.notes.append(f"engine: ready in {sum(seconds.values()):.1f} s ({times})")
    return built


def build_decoder(
    config: ModelConfig,
    tensors: TensorSource,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionName = "torch",
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """A model with the weights of `tensors`. `kv_dtype`: of the cache it will read; None: `dtype`."""
    backend = _attention(config, dtype, device, attention, kv_dtype)
    return Decoder(config, WeightLoader(tensors, dtype, device), backend, num_positions)


def _attention(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, name: AttentionName, kv_dtype: torch.dtype | None
) -> AttentionBackend:
    sizes, scale = (config.num_heads, config.num_kv_heads, config.head_dim), config.attention_scale
    if name == "triton":
        return PagedAttention(*sizes, dtype, device, scale=scale)
    if name == "flashinfer":
        return FlashInferAttention(*sizes, dtype, device, kv_dtype, scale=scale)
    return TorchAttention(*sizes, device, scale=scale)


def _build_net(run: ResolvedRun, target: Decoder, num_slots: int, num_positions: int) -> DraftNet:
    vocab_size, name = run.target.config.vocab_size, run.engine.attention
    if isinstance(run.draft, EagleCheckpoint):
        head, tensors = run.draft.config, run.draft.tensors
        weights = WeightLoader(tensors, run.dtype, run.device)
        attention = _attention(head.decoder, run.dtype, run.device, name, run.kv_dtype)
        model = EagleHead(head, weights, target, attention, num_positions)
        cache = model.new_cache(num_slots, run.kv_dtype)
        return EagleDraft(model, cache)
    assert run.draft is not None, "resolve() opens the draft"
    draft = build_decoder(run.draft.config, run.draft.tensors, num_positions, run.dtype, run.device, name, run.kv_dtype)
    return ModelDraft(draft, draft.new_cache(num_slots, run.kv_dtype), vocab_size)


def _configs(run: ResolvedRun) -> list[ModelConfig]:
    """Of the target and of what drafts: sampled texts depend on the bits of both."""
    if run.draft is None:
        return [run.target.config]
    return [run.target.config, run.draft.config.decoder if isinstance(run.draft, EagleCheckpoint) else run.draft.config]


def _eos_token_ids(run: ResolvedRun) -> tuple[int, ...]:
    ids = set(run.target.config.eos_token_ids)
    if isinstance(run.tokenizer.eos_token_id, int):
        ids.add(run.tokenizer.eos_token_id)
    return tuple(sorted(ids))
