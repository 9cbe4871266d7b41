"""Puts the device engine together: weights, a trial run that measures working memory, the KV cache from what is left,
graphs. See `build.py`, which reads the weights, and `resolve.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from specbatch.cache.pages import PagePool
from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.executor import PHASES, GraphMode, RoundExecutor, padded_sizes
from specbatch.engine.gathering import ChunkCost
from specbatch.engine.round import PromptChunk, Round
from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.kernels.cublaslt import CublasLt
from specbatch.kernels.paged import PagedBatch, Selected
from specbatch.kernels.products import choose_products
from specbatch.models.decoder import Decoder
from specbatch.models.layers import GatedLinear, Linear
from specbatch.speculation.drafters import Drafter
from specbatch.speculation.schedule import ByBatch
from specbatch.speculation.slots import SlotState

GIB = 2**30
# Of each captured size: what the driver keeps for a graph's nodes. A guess on the safe side; what the captures took is
# reported.
_GRAPH_BYTES = 24 * 2**20
_PROMPT_GRAPHS = 16  # of a job, roughly
_SMALLEST_CHUNK = 32  # of the trial, tokens


def build_device_engine(
    target: Decoder,
    drafters: ByBatch[Drafter],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    max_length: int,
    max_batch_size: int,
    page_size: int,
    kv_cache_tokens: int | None,
    memory_fraction: float,
    prefill_chunk_tokens: int,
    prefix_cache: bool,
    graphs: GraphMode,
    prompt_graphs: bool,
    sampled: bool,
    keeps_tokens: bool,
    eos_token_ids: tuple[int, ...],
    simulate: float | None,
    products_folder: Path | None,
    say: Callable[[str], None],
    show: Callable[[str], None],
) -> DeviceEngine:
    """`drafters`: of one draft network or of none. `kv_cache_tokens` None: what `memory_fraction` of the device leaves
    beside everything else. `prompt_graphs`: where whole rounds are graphs, prompts may be, too: their attention plans
    nothing on the host. `sampled`: requests will draw samples, so their graphs are captured too. `products_folder`:
    where the library's fastest algorithms are remembered; None: torch's choice. `say` is told what was decided, a line
    each; `show` what is being done.

    Raises ModelError, with numbers, where the memory does not suffice.
    """
    seconds: dict[str, float] = {}
    began = time.perf_counter()
    net = drafters.items[0].net
    lookahead = max(drafter.num_lookahead for drafter in drafters.items)
    pages_per_slot = -(-(max_length + lookahead) // page_size)
    hidden = target.config.hidden_size if net is None else net.feature_size
    state = SlotState(max_batch_size, pages_per_slot, max_length + 1, hidden, keeps_tokens, dtype, device)
    ops = ops_for(device, dtype)
    # The trial's cache holds one prompt chunk; a page behind it is spare, as in the real one.
    trial_slots = (-(-prefill_chunk_tokens // page_size) + 2) * page_size
    caches = [target.new_cache(trial_slots, kv_dtype)]
    if net is not None:
        caches.append(net.cache)
        net.cache.resize(trial_slots)
    rounds = drafters.map(lambda d: Round(target, caches[0], d, state, page_size, eos_token_ids, ops, simulate))
    round_ = rounds.items[0]  # for prompts, which are nothing to drafters

    show("compiling kernels, trial run")
    prompt_bytes = _peak(device, lambda: _trial_prompt(round_, state, prefill_chunk_tokens, page_size, device))
    chunk_cost = ChunkCost.of_model(
        target.config.num_layers,
        sum(math.prod(one.shape) for one in target.linears),
        prefill_chunk_tokens,
        # With "none" too: whoever tunes captures rounds later, and is to gather prompts as the job will.
        prompt_graphs and graphs != "phases",
    )
    graph_tokens, graph_bytes = chunk_cost.graph_tokens, 0
    if graph_tokens:
        # Twice: they are captured as they come up. Where the small ones are first, each size doubles what the one
        # before took, and none fits into what that left in their pool.
        graph_bytes = 2 * _peak(device, lambda: _trial_prompt(round_, state, graph_tokens, page_size, device))
        graph_bytes += _PROMPT_GRAPHS * _GRAPH_BYTES
    num_tokens = _SMALLEST_CHUNK
    while num_tokens < prefill_chunk_tokens:  # compiles what chunks of other sizes need
        _trial_prompt(round_, state, num_tokens, page_size, device)
        num_tokens *= 2
    padding = torch.full((max_batch_size,), state.padding, dtype=torch.int64, device=device)
    round_bytes, eager_bytes = 0, prompt_bytes
    sizes = padded_sizes(drafters, max_batch_size)
    for i, size in {i: size for size, i in reversed(sizes)}.items():  # the largest of each
        one, rows_B = rounds.items[i], padding[:size]
        round_bytes = max(round_bytes, _round_peak(one, rows_B, device, logprobs=False))
        eager_bytes = max(eager_bytes, _round_peak(one, rows_B, device, logprobs=True))
    seconds["trial run, kernels compiled"] = time.perf_counter() - began
    if products_folder is not None:
        began = time.perf_counter()
        rows = {size * drafters.items[i].num_nodes for size, i in sizes}
        products: list[tuple[Seq[Linear | GatedLinear], set[int]]] = [([target.head], rows)]
        products.append((target.linears, rows | {prefill_chunk_tokens}))
        if net is not None:
            pairs = [(size, drafters.items[i]) for size, i in sizes]
            rows = {size * count for size, d in pairs for count in (1, d.branches, d.max_path)}
            heads = [] if net.head is None else [net.head]
            products += [(net.linears, rows | {prefill_chunk_tokens}), (heads, rows)]
        _choose_products(products, dtype, device, products_folder, say, show)
        seconds["products chosen"] = time.perf_counter() - began

    began = time.perf_counter()
    reserved = max(eager_bytes, round_bytes)  # of what runs eagerly: prompts, rounds with log-probabilities, warm-ups
    if graphs != "none":
        # And what the graphs keep to themselves. Rows may ask for samples at any time: twice as many graphs then.
        num_graphs = 2 * len(sizes) * (len(PHASES) if graphs == "phases" else 1)
        reserved += round_bytes * 5 // 4 + num_graphs * _GRAPH_BYTES
        reserved += graph_bytes
    per_token = sum(cache.slot_bytes for cache in caches)
    for cache in caches:
        cache.resize(0)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if kv_cache_tokens is None:
        kv_cache_tokens = _fitting_tokens(
            device, memory_fraction, reserved, per_token, max_batch_size * pages_per_slot * page_size, say
        )
    num_pages = kv_cache_tokens // page_size
    if num_pages * page_size < max_length + lookahead:
        raise ModelError(
            f"the GPU's memory leaves a KV cache of {num_pages * page_size} tokens, and the longest row needs "
            f"{max_length + lookahead}: {free / GIB:.1f} of {total / GIB:.1f} GiB were free beside the weights, and "
            f"rounds and prompts need {reserved / GIB:.1f} GiB",
            hint="lower engine.max_batch_size or engine.prefill_chunk_tokens, raise engine.memory_fraction, or set "
            "engine.kv_cache_tokens, which bounds the length of rows too",
        )
    for cache in caches:
        cache.resize((num_pages + 1) * page_size)
    seconds["KV cache"] = time.perf_counter() - began

    executor = RoundExecutor(rounds, max_batch_size, device, graphs)
    if executor.runner is not None:
        with torch.inference_mode():
            for mode in [False, True] if sampled else [False]:
                executor.capture(mode, show)
        seconds["graphs captured"] = executor.runner.seconds
        say(
            f"engine.cuda_graphs: {executor.num_graphs} graphs ({graphs}) for up to {max_batch_size} rows, captured in "
            f"{executor.runner.seconds:.1f} s, {executor.runner.bytes / GIB:.2f} GiB"
        )
    engine = DeviceEngine(
        executor,
        PagePool(num_pages, page_size),
        device,
        vocab_size=target.config.vocab_size,
        max_length=max_length,
        max_batch_size=max_batch_size,
        prefill_chunk_tokens=prefill_chunk_tokens,
        prefix_cache=prefix_cache,
        eos_token_ids=eos_token_ids,
        chunk_cost=chunk_cost,
    )
    engine.start_seconds = seconds
    return engine


@torch.inference_mode()
def _choose_products(
    products: Seq[tuple[Seq[Linear | GatedLinear], set[int]]],
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    say: Callable[[str], None],
    show: Callable[[str], None],
) -> None:
    """`products`: layers with the numbers of rows that they meet."""
    try:
        library = CublasLt(device, dtype)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"engine.tuned_products: cuBLASLt does not load: {error}", hint="leave engine.tuned_products out"
        ) from error
    gpu = torch.cuda.get_device_name(device).replace(" ", "-")
    path = folder / f"{gpu}-cublaslt-{library.version}.json"
    wanted: dict[tuple[int, int], set[int]] = {}
    linears = [(linear, rows) for group, rows in products for linear in group if not linear.has_bias]
    for linear, rows in linears:
        wanted.setdefault(linear.shape, set()).update(rows)
    chosen = choose_products(wanted, library, path, show)
    for linear, _ in linears:
        linear.choose(chosen[linear.shape])
    count = sum(map(len, chosen.values()))
    say(f"engine.tuned_products: {count} products are faster than torch's by another algorithm ({path})")


def _fitting_tokens(
    device: torch.device, fraction: float, reserved: int, per_token: int, usable: int, say: Callable[[str], None]
) -> int:
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * fraction) - (total - free) - reserved
    tokens = max(0, min(left // per_token, usable))
    say(
        f"engine.kv_cache_tokens: {tokens} ({tokens * per_token / GIB:.1f} GiB of {total / GIB:.0f}; "
        f"{(total - free) / GIB:.1f} GiB are in use, {reserved / GIB:.1f} GiB reserved for rounds and prompts, "
        f"memory_fraction {fraction})"
    )
    return tokens


def _peak(device: torch.device, function: Callable[[], None]) -> int:
    """Bytes that `function` needs beside what was allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _round_peak(round_: Round, rows_B: torch.Tensor, device: torch.device, logprobs: bool) -> int:
    return _peak(device, lambda: _trial_round(round_, rows_B, logprobs))


@torch.inference_mode()
def _trial_round(round_: Round, padding: torch.Tensor, logprobs: bool) -> None:
    """The largest round. All rows are padding: it computes everything and writes nothing. Rows may ask for samples and
    log-probabilities, which take the most memory."""
    round_(padding, sampled=False)
    round_(padding, sampled=True, logprobs=logprobs)


@torch.inference_mode()
def _trial_prompt(round_: Round, state: SlotState, num_tokens: int, page_size: int, device: torch.device) -> None:
    """A chunk filled by one prompt. As many of its tokens as slots are chosen behind, as if short prompts ended there;
    all in padding's slot, which stays done."""
    pages = -(-num_tokens // page_size)
    table = torch.arange(max(pages + 1, state.page_table_SP.shape[1]), dtype=torch.int32, device=device)[None]
    index = torch.arange(num_tokens, device=device)
    ends = np.array([0, num_tokens], dtype=np.int32)
    layout = PagedBatch(
        index,
        index % round_.num_positions,
        table,
        page_size,
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.from_numpy(ends).to(device),
        num_tokens,
        host_query_starts=ends,
    )
    last = index[-state.padding :]
    slots = torch.full_like(last, state.padding)
    zeros = torch.zeros_like(index)
    saved = state.ints_SF[state.padding].clone()
    selected = Selected.of(layout, last, last, table.repeat(last.shape[0], 1))
    chunk = PromptChunk(zeros, layout, slots, selected, last + 1, torch.full_like(last, -1), zeros, layout, selected)
    round_.prefill(chunk, sampled=True, logprobs=True)
    state.ints_SF[state.padding] = saved
