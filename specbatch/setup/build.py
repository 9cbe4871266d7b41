"""The composition root: a resolved run (`resolve.py`) -> Engine. Weights are read here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch

from specbatch.attention.cpu import TorchAttention
from specbatch.attention.flashinfer import FlashInferAttention
from specbatch.attention.interface import AttentionBackend
from specbatch.attention.invariant import InvariantAttention
from specbatch.attention.triton import PagedAttention
from specbatch.cache.pages import KVScales
from specbatch.config import AttentionName
from specbatch.draft import DraftParts, make_method
from specbatch.draft.corpus import num_words_of
from specbatch.draft.network import BlockNet, DraftNet, EagleNet, ModelNet
from specbatch.draft.suffix import SharedTexts
from specbatch.engine.cpu_threads import ThreadGovernor, limit_threads, new_governor
from specbatch.engine.engine import Engine
from specbatch.engine.executor import RoundExecutor
from specbatch.engine.lockstep import Lockstep
from specbatch.engine.logprobs import num_top_of
from specbatch.engine.node_chooser import RoundCosts, costs_of, measured_costs
from specbatch.engine.prefill.models import EAGER, PromptPieces, PromptTrunks, piecewise_trunks, token_sizes
from specbatch.engine.round import Wanted
from specbatch.engine.verify_budget import RoundTimes, SharedTimes, TimeCurve, VerifyBudget
from specbatch.errors import ConfigError, ModelError
from specbatch.graphs.runner import GraphRunner
from specbatch.kernels import ops_for
from specbatch.kernels.card_checks import CardChecks
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.models.blocks.drafter import BlockDrafter
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import CausalModel, Decoder
from specbatch.models.eagle_head import EagleHead
from specbatch.models.formats.block_files import BlockCheckpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.models.formats.tensor_files import PackedReader, TensorSource
from specbatch.models.hybrids.mtp_head import MtpHead
from specbatch.models.linears.invariant import InvariantGemm
from specbatch.models.linears.layer_quantization import LayerQuantization
from specbatch.models.linears.packed import is_packable
from specbatch.models.linears.sharded import ModelShard, local_config
from specbatch.models.weight_loader import WeightLoader
from specbatch.parallel.group import Group
from specbatch.setup.autotune_lanes import with_lanes_that_gain
from specbatch.setup.backend import without_graphs
from specbatch.setup.compile_ahead import compile_kernels, identity_of
from specbatch.setup.memory import GIB, available_memory, sizes_to_try
from specbatch.setup.resolve import ResolvedRun
from specbatch.setup.round_parts import RoundParts
from specbatch.setup.sizing import CardBudget, Sized, measured, planned
from specbatch.setup.speculation import CORPUS_METHODS
from specbatch.setup.trial import TrialRunner
from specbatch.types import BatchEngine

_CACHED_BYTES_PER_MS = 2.5e9  # bytes of keys and values that attention of a round reads in a millisecond


@dataclass(frozen=True)
class Built:
    """An engine, its draft method, and what other draft shapes of this method are made of."""

    engine: Engine
    method: str
    parts: DraftParts


def build_engine(run: ResolvedRun, on_progress: Callable[[str], None] = lambda progress: None) -> BatchEngine:
    """Read the weights and put the engine together. Decisions on the way are added to `run.notes`; `on_progress` gets
    the name of each step.

    Raises ModelError where the memory does not suffice.
    """
    return build(run, on_progress).engine


def build(
    run: ResolvedRun, on_progress: Callable[[str], None] = lambda progress: None, group: Group | None = None
) -> Built:
    """Build the engine (`build_engine`) and return its parts, too. `group`: the ranks that share the target; None: this
    process holds all of it."""
    num_ranks = run.config.engine.tensor_parallel
    if num_ranks != (1 if group is None else group.size):
        raise ConfigError(
            f"engine.tensor_parallel: {num_ranks} is for generate and eval; this runs one process", "leave it out"
        )
    try:
        return _build(run, on_progress, group)
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


def _build(run: ResolvedRun, on_progress: Callable[[str], None], group: Group | None) -> Built:
    on_cuda, clock = run.device.type == "cuda", StartClock()
    threads = None if on_cuda else _prepare_cpu(run, group)
    if on_cuda:
        if run.device.index is not None:
            torch.cuda.set_device(run.device)  # Triton, graphs and events go to the current device
        torch.cuda.empty_cache()  # frees the memory of an engine before this one
    available = available_memory(run.device)
    parts, rounds = read_models(run, group)
    if on_cuda:
        others = [model for model in _models(rounds.target, parts.net) if not model.config.is_native]
        run = replace(run, engine=without_graphs(run.engine, others, run.kv_dtype, run.notes))
        torch.cuda.synchronize(run.device)
    clock.passed("weights")
    pieces = None
    if on_cuda:
        if run.engine.prompt_graphs in ("piecewise", "both"):
            compiled = run.engine.compiles
            pieces = PromptPieces.of_models(rounds.target, parts.net, compiled=compiled, on_progress=on_progress)
            if compiled:
                clock.passed("pieces of prompts compiled")
        if run.engine.compiles_ahead:
            on_progress("compiling kernels ahead")
            sizes = run.engine.max_batch_size, run.engine.prefill_chunk_tokens
            identity = identity_of(run, 0 if group is None else group.rank)
            # Lanes have streams, which fake tensors have not, and nearly the same kernels.
            run.notes.append(compile_kernels(replace(rounds, lanes=None), *sizes, run.cache.capacity, identity))
            clock.passed("kernels compiled ahead")
        if run.config.engine.deterministic:
            rounds.checks.run()
            clock.passed("bits checked")
        on_progress("compiling kernels, trial run")
        sized = _measured(run, rounds, pieces, available, group)
        pieces = pieces if sized.in_pieces else None
        clock.passed("trial run, kernels compiled")
    else:
        sized = planned(rounds, run.cache, run.engine.max_batch_size, run.engine.prefill_chunk_tokens)

    def engine_of(
        executor: RoundExecutor,
        trunks: PromptTrunks = EAGER,
        costs: RoundCosts | None = None,
        *,
        prefix_cache: bool = False,
    ) -> Engine:
        return Engine(
            executor,
            sized.engine_sizes(run.engine.page_size),
            prefix_cache=prefix_cache,
            chunk_cost=sized.chunk_cost,
            threads=threads,
            trunks=trunks,
            deterministic=run.config.engine.deterministic,
            lockstep=Lockstep(group) if group is not None and run.division == "requests" else None,
            costs=costs,
        )

    if run.engine.lanes is not None and run.engine.lane_mode == "auto":
        on_progress("measuring two lanes")
        made, batch = sized.rounds, sized.max_batch_size
        probe = engine_of(RoundExecutor(made.items, batch, run.device, "none", made.lanes, shrinks=group is None))
        sized, notes = with_lanes_that_gain(sized, probe, group)
        run.notes.extend(notes)
        del probe
        clock.passed("lanes measured")
    executor = _executor(run, sized, on_progress, rounds.budget, group)
    if executor.runner is not None:
        clock.passed("graphs captured")
    costs, token_us = None, 1e3 * run.rows.token_bytes / _CACHED_BYTES_PER_MS
    if executor.budget is None:
        costs = measured_costs(executor, sized.max_batch_size, token_us, group)
    elif executor.budget.times is not None:  # some rounds cannot share a budget
        costs = costs_of(executor.budget.times, executor.rounds.at(sized.max_batch_size).method, sized.max_batch_size)
    if costs is not None and executor.budget is None:
        run.notes.append(
            f"speculation.num_draft_tokens: rounds choose from {list(executor.rounds.items[0].method.sizes)} by the "
            f"acceptance of the last rounds; a round takes {costs.fixed:.0f} us and {costs.per_token:.2f} us a node, "
            f"at least {costs.least:.0f} us"
        )
        clock.passed("rounds measured")
    piece_runner = None if pieces is None else GraphRunner(run.device)
    trunks = EAGER
    if pieces is not None and piece_runner is not None:
        trunks = _trunks(run, sized, pieces, piece_runner, on_progress)
    engine = engine_of(executor, trunks, costs, prefix_cache=run.config.engine.prefix_cache)
    engine.start_bytes = sized.bytes or {}
    if executor.runner is not None:
        engine.start_bytes["graphs"] = executor.runner.bytes
    if piece_runner is not None:
        clock.passed("graphs of prompts captured")
        engine.start_bytes["prompt_graphs"] = piece_runner.bytes
    engine.start_seconds = clock.seconds
    if on_cuda:
        run.notes.append(f"engine: {clock.in_words()}")
    return Built(engine, run.config.speculation.method, parts)


def _prepare_cpu(run: ResolvedRun, group: Group | None) -> ThreadGovernor | None:
    limit_threads()
    if group is not None:  # each rank has its share of the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // group.size))
        return None
    # Of products that are not packed nobody checks the bits.
    return new_governor(_configs(run)) if is_packable(torch.empty(0, dtype=run.dtype)) else None


def read_models(run: ResolvedRun, group: Group | None = None) -> tuple[DraftParts, RoundParts]:
    """Reads the weights of the target, or this rank's part of them, and of the draft network. Each rank has a part of a
    draft head, too, and all of a draft model, whose layers are small and many: each would add two sums."""
    speculation = run.config.speculation
    num_positions = run.cache.capacity + run.speculation.num_lookahead + 1
    attention = run.engine.attention
    is_invariant = run.config.engine.deterministic and run.on_cuda
    gemm = InvariantGemm(run.device, run.dtype) if is_invariant else None
    shard = None if group is None else ModelShard.of(run.target.config, group, run.division)
    target = build_decoder(
        run.target.config,
        run.target.tensors,
        num_positions,
        run.dtype,
        run.device,
        attention,
        run.kv_dtype,
        gemm,
        shard,
        run.quantization,
        run.target.kv_scales,
        mxfp4=run.mxfp4,
        two_lanes=run.engine.lanes is not None,
    )
    net = _build_net(run, target, num_positions, gemm, group) if run.draft is not None else None
    ngram_match = speculation.ngram.min_match, speculation.ngram.max_match
    coupled = run.config.engine.deterministic
    shared = None
    if speculation.method in CORPUS_METHODS:
        _check_corpus(speculation.suffix.corpus_tokens, available_memory(run.device))
        ops = ops_for(run.device, run.dtype)
        with_network = run.speculation.method == "hybrid"
        shared = SharedTexts(speculation.suffix.corpus_tokens, run.corpus, run.device, ops, with_network=with_network)
    parts = DraftParts(
        run.device,
        ops_for(run.device, run.dtype),
        net,
        ngram_match,
        coupled,
        run.target.config.delta is not None,
        shared,
        scored=run.verify_budget is not None,
        min_probability=speculation.suffix.min_probability,
    )
    methods = run.speculation.schedule.map(lambda shape: make_method(speculation.method, shape, parts))
    page_size, eos = run.engine.page_size, _eos_token_ids(run)
    return parts, RoundParts(
        target,
        methods,
        run.kv_dtype,
        page_size,
        eos,
        speculation.simulate_acceptance,
        lanes=run.engine.lanes,
        cascade=run.engine.cascade,
        group=group,
        first_part=None if group is None else local_config(run.target.config, 0, group.size, run.division),
        num_checkpoints=run.num_checkpoints,
        budget=run.verify_budget,
        checks=CardChecks() if gemm is None else gemm.checks,
    )


def _check_corpus(max_tokens: int, available: int) -> None:
    """Refuse a corpus that does not fit, before the memory for it is taken."""
    if (size := 8 * num_words_of(max_tokens)) > available:
        raise ConfigError(
            f"speculation.suffix.corpus_tokens: {max_tokens:,} tokens take {size / GIB:.1f} GiB, and "
            f"{available / GIB:.1f} GiB are free",
            hint="lower speculation.suffix.corpus_tokens",
        )


def _measured(
    run: ResolvedRun, rounds: RoundParts, pieces: PromptPieces | None, available: int, group: Group | None
) -> Sized:
    engine = run.engine
    sizes = sizes_to_try(
        engine.max_batch_size,
        engine.prefill_chunk_tokens,
        open_batch="max_batch_size" in engine.left_open,
        open_chunk="prefill_chunk_tokens" in engine.left_open,
    )
    given = run.config.engine.kv_cache_tokens
    budget = CardBudget(available, run.cache, run.rows, given, engine.memory_fraction, sizes, group)
    whole_prompts = engine.prompt_graphs in ("whole", "both")
    trials = TrialRunner(rounds, run.cache.capacity, engine.graphs, whole_prompts, pieces, shrinks=group is None)
    return measured(trials, budget, run.notes.append)


def _executor(
    run: ResolvedRun,
    sized: Sized,
    on_progress: Callable[[str], None],
    budget: VerifyBudget | None,
    group: Group | None,
) -> RoundExecutor:
    """Make the executor, with the graphs that the configuration's sampling needs. Rows may need others, which are
    captured later."""
    shrinks = group is None
    graphs, batch = run.engine.graphs, sized.max_batch_size
    executor = RoundExecutor(sized.rounds.items, batch, run.device, graphs, sized.rounds.lanes, shrinks=shrinks)
    if budget is not None and not budget.changes:
        executor.budget = budget
    if executor.runner is not None:
        with torch.inference_mode():
            num_top = num_top_of([run.config.sampling.logprobs])
            for sampled in [False, True] if run.config.sampling.temperature > 0 else [False]:
                executor.capture(sampled, on_progress, num_top)
        run.notes.append(
            f"engine.cuda_graphs: {executor.num_graphs} graphs ({graphs}) for up to {batch} rows, captured in "
            f"{executor.runner.seconds:.1f} s, {executor.runner.bytes / GIB:.2f} GiB of "
            f"{sized.graph_bytes / GIB:.2f} reserved for all that may come up"
        )
        if budget is not None and budget.changes:
            wanted = Wanted(run.config.sampling.temperature > 0, num_top)
            run.notes.append(measure_budget(executor, budget, wanted, run.rows.token_bytes, group))
    return executor


@torch.inference_mode()
def measure_budget(
    executor: RoundExecutor, budget: VerifyBudget, wanted: Wanted, token_bytes: int, group: Group | None
) -> str:
    """Measure the captured rounds, capture some that verify fewer nodes, and have rounds follow the budget; return a
    note. `wanted`: what most requests want. `token_bytes`: the keys and values of a token. All ranks decide by the
    times of rank 0."""
    option, measured = "speculation.verify_budget", executor.measure(wanted)
    if not measured:
        return f"{option}: auto, all nodes (no round was captured that could be timed)"
    assert executor.runner is not None
    num_graphs, seconds = executor.num_graphs, executor.runner.seconds
    whole = TimeCurve.of_points([(nodes, ms) for _, nodes, ms in _of_first(measured, group)])
    shared = SharedTimes.of_points(_of_first(executor.measure_sharing(wanted), group), whole)
    executor.budget, budget.times = budget, RoundTimes(whole, shared, token_bytes / _CACHED_BYTES_PER_MS)
    executor.capture_for_budget(wanted)
    size, most, _ = max(measured)
    shown = [nodes for nodes in (1, 1.5, 2, 3, 4) if nodes * size < most]
    words = ", ".join(f"{shared.curves[-1].of(nodes * size):.2f} with {nodes}" for nodes in shown)
    return (
        f"{option}: auto, {executor.num_graphs - num_graphs} graphs of fewer nodes, captured in "
        f"{executor.runner.seconds - seconds:.1f} s; milliseconds of rounds of {size} rows by nodes for each: {words}"
    )


def _of_first(measured: list[tuple[int, int, float]], group: Group | None) -> list[tuple[int, int, float]]:
    """Return measured rounds (batch size, nodes, milliseconds) with the times of rank 0."""
    if group is None or not measured:
        return measured
    times = group.of_first([ms for _, _, ms in measured])
    return [(size, nodes, ms) for (size, nodes, _), ms in zip(measured, times, strict=True)]


def _trunks(
    run: ResolvedRun, sized: Sized, pieces: PromptPieces, runner: GraphRunner, on_progress: Callable[[str], None]
) -> PromptTrunks:
    """Make the prompt trunks with CUDA graphs, and add a note on them."""
    sizes, net = token_sizes(pieces.target.model, sized.prefill_chunk_tokens), sized.rounds.items.items[0].method.net
    trunks = piecewise_trunks(pieces, sized.rounds.caches[0], net, sizes, runner, on_progress=on_progress)
    run.notes.append(
        f"prefill.graphs: {run.engine.prompt_graphs}, {len(runner)} graphs of pieces for {len(sizes)} sizes of up to "
        f"{sizes[-1]} tokens, captured in {runner.seconds:.1f} s, {runner.bytes / GIB:.2f} GiB"
        + (", compiled" if run.engine.compiles else "")
    )
    return trunks


def build_decoder(
    config: ModelConfig,
    tensors: TensorSource,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionName = "torch",
    kv_dtype: torch.dtype | None = None,
    gemm: InvariantGemm | None = None,
    shard: ModelShard | None = None,
    quantization: LayerQuantization | None = None,
    kv_scales: Sequence[KVScales] = (),
    *,
    mxfp4: PackedReader | None = None,
    two_lanes: bool = False,
) -> CausalModel:
    """Build a model with the weights of `tensors`. `kv_dtype`: the data type of the cache that it will read; None:
    `dtype`. `gemm`: the GEMM of a deterministic run on CUDA. `shard`: the part to load; None: all. `quantization`: the
    quantization of the linear layers. `kv_scales`: the scales of an FP8 cache for each layer; empty: all are 1.
    `mxfp4`: the reader of experts that stay in MXFP4; None: they do not. `two_lanes`: two passes may run at the same
    time."""
    if not config.is_native:
        from specbatch.models.fallback.decoder import transformers_decoder  # its imports take a second

        backend = _attention(config, dtype, device, attention, kv_dtype)
        return transformers_decoder(config, tensors, dtype, device, backend, num_positions)
    config = config if shard is None else shard.config
    weights = WeightLoader(tensors, dtype, device, gemm, shard, quantization, mxfp4=mxfp4)
    backends = [_attention(config, dtype, device, attention, kv_dtype, gemm) for _ in range(1 + two_lanes)]
    return Decoder(config, weights, backends[0], num_positions, backends[-1], kv_scales)


def _attention(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    name: AttentionName,
    kv_dtype: torch.dtype | None,
    gemm: InvariantGemm | None = None,
) -> AttentionBackend:
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    scale, soft_cap = config.attention_scale, config.attention_soft_cap
    if name == "triton" and gemm is not None:
        backend = InvariantAttention(*sizes, dtype, device, kv_dtype, scale=scale, soft_cap=soft_cap)
        backend.check_later(gemm.checks)
        return backend
    if name == "triton":
        return PagedAttention(*sizes, dtype, device, scale=scale, soft_cap=soft_cap)
    if name == "flashinfer":
        return FlashInferAttention(*sizes, dtype, device, kv_dtype, scale=scale)
    if name == "torch":
        return TorchAttention(*sizes, device, scale=scale, soft_cap=soft_cap)
    assert_never(name)


def _build_net(
    run: ResolvedRun, target: CausalModel, num_positions: int, gemm: InvariantGemm | None, group: Group | None
) -> DraftNet:
    """Build the draft network with a cache of one page. The size of its cache is decided later."""
    vocab_size, name = run.target.config.vocab_size, run.engine.attention
    if isinstance(run.draft, EagleCheckpoint):
        head, tensors = run.draft.config, run.draft.tensors
        of_head = None if run.division == "requests" else group
        if (shard := ModelShard.of_head(head.decoder, of_head)) is not None:
            head = replace(head, decoder=shard.config)
        weights = WeightLoader(tensors, run.dtype, run.device, gemm, shard)
        attention = _attention(head.decoder, run.dtype, run.device, name, run.kv_dtype, gemm)
        made = MtpHead if head.kind == "mtp" else EagleHead
        model = made(head, weights, target, attention, num_positions)
        return EagleNet(model, model.new_cache(run.engine.page_size, run.kv_dtype))
    if isinstance(run.draft, BlockCheckpoint):  # all of it on each rank
        block = run.draft.config
        weights = WeightLoader(run.draft.tensors, run.dtype, run.device, gemm)
        attention = _attention(block.decoder, run.dtype, run.device, name, run.kv_dtype, gemm)
        drafter = BlockDrafter(block, weights, target, attention, num_positions)
        return BlockNet(drafter, drafter.new_cache(run.engine.page_size, run.kv_dtype))
    assert run.draft is not None, "resolve() opens the draft"
    draft = build_decoder(
        run.draft.config, run.draft.tensors, num_positions, run.dtype, run.device, name, run.kv_dtype, gemm,
        quantization=run.draft_quantization, kv_scales=run.draft.kv_scales,
    )  # fmt: skip
    return ModelNet(draft, draft.new_cache(run.engine.page_size, run.kv_dtype), vocab_size)


def _models(target: CausalModel, net: DraftNet | None) -> list[CausalModel]:
    """Return the target and a draft model."""
    return [target] if net is None or net.decoder is None else [target, net.decoder]


def _configs(run: ResolvedRun) -> list[ModelConfig]:
    """Return the configurations of the target and of the draft network: sampled texts depend on the bits of both."""
    if run.draft is None:
        return [run.target.config]
    if isinstance(run.draft, EagleCheckpoint | BlockCheckpoint):
        return [run.target.config, run.draft.config.decoder]
    return [run.target.config, run.draft.config]


def _eos_token_ids(run: ResolvedRun) -> tuple[int, ...]:
    ids = set(run.target.config.eos_token_ids)
    if isinstance(run.tokenizer.eos_token_id, int):
        ids.add(run.tokenizer.eos_token_id)
    return tuple(sorted(ids))


class StartClock:
    """The seconds that each part of a start took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def passed(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now

    def in_words(self) -> str:
        times = ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())
        return f"ready in {sum(self.seconds.values()):.1f} s ({times})"
