"""Puts the device engine together: weights, a trial run that measures working memory, the KV cache from what is left,
graphs. See `build.py`, which reads the weights, and `resolve.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from specbatch.cache.pages import PagePool
from specbatch.draft.method import DraftMethod
from specbatch.draft.schedule import ByBatch
from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.executor import GraphMode, RoundExecutor
from specbatch.engine.memory import (
    ENOUGH_ROW,
    GIB,
    CachePlan,
    Rows,
    bytes_for_cache,
    first_that_fits,
    given_cache,
    plan_cache,
)
from specbatch.engine.resolve_cache import row_notes
from specbatch.engine.trial import Trial, Trials
from specbatch.errors import ModelError
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.models.decoder import Decoder


def build_device_engine(
    target: Decoder,
    methods: ByBatch[DraftMethod],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    available: int,
    bound: CachePlan,
    rows: Rows,
    kv_cache_tokens: int | None,
    memory_fraction: float,
    sizes: Seq[tuple[int, int]],
    prefix_cache: bool,
    graphs: GraphMode,
    prompt_graphs: bool,
    sampled: bool,
    eos_token_ids: tuple[int, ...],
    simulate: float | None,
    say: Callable[[str], None],
    show: Callable[[str], None],
) -> DeviceEngine:
    """`methods`: of one draft network or of none. `available`: bytes of the device that were free before the weights
    were read. `bound`: no longer row than its capacity fits. `kv_cache_tokens` None: what `memory_fraction` of what was
    available leaves after everything else. `sizes`: batch sizes and prompt chunks, of which the first is taken that
    leaves room for rows. `prompt_graphs`: where whole rounds are graphs, prompts may be, too: their attention plans
    nothing on the host. `sampled`: requests will draw samples, so their graphs are captured too. `say` is told what was
    decided, a line each; `show` what is being done.

    Raises ModelError, with numbers, where the memory does not suffice.
    """
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    trials = Trials(
        target, methods, kv_dtype, dtype, device, bound.capacity, rows.page_size, graphs, prompt_graphs,
        eos_token_ids, simulate,
    )  # fmt: skip
    show("compiling kernels, trial run")

    def attempt(batch: int, chunk: int) -> tuple[CachePlan, _Measured] | None:
        try:
            trial = trials.run(batch, chunk)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            trial = None
        torch.cuda.empty_cache()
        if trial is None:
            return None
        free = torch.cuda.mem_get_info(device)[0]
        measured = _Measured(trial, free, max(0, available - free))
        if kv_cache_tokens is not None:
            return given_cache(kv_cache_tokens, rows), measured
        num_bytes = bytes_for_cache(available, memory_fraction, measured.in_use, trial.reserved)
        return plan_cache(num_bytes, replace(rows, max_batch_size=batch), most=bound.capacity), measured

    enough = min(ENOUGH_ROW, bound.longest_row) if kv_cache_tokens is None else 0
    found = first_that_fits(sizes, enough, attempt)
    plan, measured = found if found is not None else (None, None)
    if plan is None or measured is None or plan.longest_row < 2:
        raise _too_small(sizes[-1], plan, measured, rows, available)
    trial = measured.trial
    max_batch_size, prefill_chunk_tokens = trial.max_batch_size, trial.prefill_chunk_tokens
    seconds["trial run, kernels compiled"] = time.perf_counter() - began
    say(
        f"engine.kv_cache_tokens: {plan.num_pages * rows.page_size} ({plan.gib(rows):.1f} GiB; {available / GIB:.1f} "
        f"GiB were free, {measured.in_use / GIB:.1f} GiB are in use, {trial.reserved / GIB:.1f} GiB reserved for "
        f"rounds and prompts, memory_fraction {memory_fraction})"
    )
    if (max_batch_size, prefill_chunk_tokens) != sizes[0]:
        say(
            f"engine.max_batch_size: {max_batch_size}, engine.prefill_chunk_tokens: {prefill_chunk_tokens} (with the "
            f"usual {sizes[0][0]} and {sizes[0][1]} no row of {enough} tokens fits into memory)"
        )
    for note in row_notes(plan, rows):
        say(note)

    began = time.perf_counter()
    for cache in trial.caches:
        cache.resize((plan.num_pages + 1) * rows.page_size)
    seconds["KV cache"] = time.perf_counter() - began

    executor = RoundExecutor(trial.rounds, max_batch_size, device, graphs)
    if executor.runner is not None:
        with torch.inference_mode():
            for mode in [False, True] if sampled else [False]:
                executor.capture(mode, show)
        seconds["graphs captured"] = executor.runner.seconds
        say(
            f"engine.cuda_graphs: {executor.num_graphs} graphs ({graphs}) for up to {max_batch_size} rows, captured in "
            f"{executor.runner.seconds:.1f} s, {executor.runner.bytes / GIB:.2f} GiB of {trial.graph_bytes / GIB:.2f} "
            "reserved for all that may come up"
        )
    engine = DeviceEngine(
        executor,
        PagePool(plan.num_pages, rows.page_size),
        device,
        vocab_size=target.config.vocab_size,
        max_length=plan.capacity,
        longest_row=plan.longest_row,
        max_batch_size=max_batch_size,
        prefill_chunk_tokens=prefill_chunk_tokens,
        prefix_cache=prefix_cache,
        eos_token_ids=eos_token_ids,
        chunk_cost=trial.chunk_cost,
    )
    engine.start_seconds = seconds
    engine.start_bytes = {
        "available": available,
        "weights": measured.in_use,
        "cache": plan.num_pages * rows.page_size * rows.token_bytes,
        "eager": trial.eager_bytes,
        "graphs_reserved": trial.graph_bytes,
        "graphs": executor.runner.bytes if executor.runner is not None else 0,
    }
    return engine


@dataclass(frozen=True, slots=True)
class _Measured:
    """A trial, and the bytes of the device that are free and that this run uses after it."""

    trial: Trial
    free: int
    in_use: int


def _too_small(
    smallest: tuple[int, int], plan: CachePlan | None, measured: _Measured | None, rows: Rows, available: int
) -> ModelError:
    batch, chunk = smallest
    where = f"with engine.max_batch_size {batch} and engine.prefill_chunk_tokens {chunk}"
    hint = "lower these, raise engine.memory_fraction, free memory, or use a smaller model"
    if plan is None or measured is None:
        return ModelError(f"the GPU's memory does not hold one round and one prompt chunk {where}", hint=hint)
    return ModelError(
        f"the GPU's memory leaves a KV cache of {plan.num_pages * rows.page_size} tokens {where}: "
        f"{available / GIB:.1f} GiB were free, {measured.in_use / GIB:.1f} GiB are in use, and rounds and prompts need "
        f"{measured.trial.reserved / GIB:.1f} GiB",
        hint=hint,
    )
