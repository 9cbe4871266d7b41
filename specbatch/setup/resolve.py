"""Decides a run: opens and checks the files, resolves every `auto`. No weights are read; see `build.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from specbatch.cache.cascade_costs import CascadeCosts
from specbatch.config import Config, SpeculationSection
from specbatch.draft.earlier_results import read_texts
from specbatch.engine.round import MAX_FORCED
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.errors import ConfigError, ModelError
from specbatch.kernels.mxfp4 import MXFP4_BYTES
from specbatch.models.catalog import builtin_head, random_name
from specbatch.models.checks import first_names
from specbatch.models.config import BackendName, ModelConfig
from specbatch.models.download import resolve_model
from specbatch.models.eagle_config import EagleKind
from specbatch.models.formats.block_files import BlockCheckpoint, open_block_drafter
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint, with_adapter
from specbatch.models.formats.eagle_files import EagleCheckpoint, open_eagle_head
from specbatch.models.formats.mtp_files import has_mtp, open_mtp
from specbatch.models.formats.tensor_files import PackedReader
from specbatch.models.formats.tokenizer import byte_tokenizer, describe_tokenizer_difference, load_tokenizer
from specbatch.models.linears.layer_quantization import LayerQuantization
from specbatch.models.linears.sharded import part_of_head
from specbatch.models.pass_weights import PassWeights
from specbatch.models.random_weights import (
    RANDOM_WEIGHTS,
    open_random_block_drafter,
    open_random_eagle_head,
    open_random_model,
    open_random_mtp,
)
from specbatch.parallel.shares import Division
from specbatch.setup.backend import LACKS, engine_of_transformers
from specbatch.setup.cache import (
    KV_DTYPE_NAMES,
    CacheRequest,
    check_flashinfer,
    resolve_cache,
    resolve_kv_dtype,
    with_default_batch,
)
from specbatch.setup.cascade import resolve_cascade
from specbatch.setup.deterministic import bits_depend_on, check_kv_dtype
from specbatch.setup.device import DTYPE_NAMES, resolve_device, resolve_dtype
from specbatch.setup.engine import EngineSettings, resolve_engine
from specbatch.setup.expert_parallel import chunk_of_requests, engine_of_requests, resolve_division
from specbatch.setup.lanes import Job as LaneJob
from specbatch.setup.lanes import lane_limits
from specbatch.setup.memory import CachedModel, CachePlan, Rows
from specbatch.setup.model import (
    check_chains,
    check_draft_is_no_hybrid,
    check_experts,
    check_norms,
    engine_of_hybrid,
    for_rows,
    part_of_a_rank,
    quantization_name,
    quantization_of_draft,
    resolve_mxfp4,
    resolve_quantization,
    saved_by_mxfp4,
    saved_bytes,
    saved_of_experts,
)
from specbatch.setup.sampling import note_on_prompts, resolve_sampling, runs_prompts_as_chat
from specbatch.setup.speculation import (
    CORPUS_METHODS,
    Speculation,
    check_device_shape,
    check_mask_size,
    check_simulation,
    low_acceptance,
    resolve_budget,
    resolve_speculation,
    with_block,
    with_sizes_of_batches,
)

HeadCheckpoint = EagleCheckpoint | BlockCheckpoint  # a drafter that reads the target's hidden states


@dataclass(frozen=True)
class ResolvedRun:
    """A run that can be built: files opened and checked, every `auto` decided. Weights are not read yet."""

    config: Config
    speculation: Speculation
    target: Checkpoint
    draft: Checkpoint | HeadCheckpoint | None
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # data type of cached keys and values
    engine: EngineSettings
    cache: CachePlan  # on a GPU an upper bound: the memory is measured when the engine is built
    rows: Rows
    # How the layers of the target, and of a draft model, are quantised when they are loaded.
    quantization: LayerQuantization | None
    draft_quantization: LayerQuantization | None
    mxfp4: PackedReader | None  # the reader of the target's experts that stay in MXFP4; None: they do not
    division: Division  # the division of the target among ranks
    corpus: list[list[int]]  # the tokens of speculation.corpus
    row_tokens: int | None  # longest row if the user's engine.kv_cache_tokens limits it; None: the model limits it
    description: dict[str, str]  # description of the models, for the statistics
    low_acceptance: str | None  # likely reason if drafts are hardly ever right; None: there is no warning
    # The facts that the bits of a deterministic run depend on and that do not identify the job.
    bits_depend_on: dict[str, str]
    notes: list[str] = field(default_factory=list)  # notes on how each `auto` was decided
    num_checkpoints: int = 0  # checkpoints of states, of a hybrid
    verify_budget: VerifyBudget | None = None  # the nodes that rounds verify; None: all

    @property
    def expert_itemsize(self) -> float:
        """The bytes of an element of one of the target's experts, with its part of the scales."""
        if self.mxfp4 is not None:
            return MXFP4_BYTES
        return self.dtype.itemsize - saved_of_experts(self.quantization, self.target.config, self.device, self.dtype)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"


def resolve(config: Config, progress: Callable[[str, int, int], None] | None = None) -> ResolvedRun:
    """Decide every `auto` and check all that can be checked without reading weights.

    Raises ConfigError or ModelError. Downloads the models where they are not there yet.
    """
    notes: list[str] = []
    wanted_method, coupled = config.speculation, config.engine.deterministic
    # The target's checkpoint decides if `auto` has no head of its own: it is opened first.
    is_open = wanted_method.method == "auto" and wanted_method.draft is None
    is_open = is_open and builtin_head(config.model.target, "eagle3") is None
    earlier: list[tuple[str, bool]] = []
    notes_of_device: list[str] = []
    device = resolve_device(config.engine.device, notes_of_device)
    on_cuda = device.type == "cuda"
    if not is_open:
        takes_block = on_cuda and config.engine.attention != "flashinfer"
        speculation = resolve_speculation(wanted_method, config.model.target, notes, coupled, takes_block=takes_block)
        earlier = _earlier_texts(speculation.section)
    notes += notes_of_device
    dtype = resolve_dtype(config.model.dtype, device, notes)
    engine = resolve_engine(config, device, dtype, notes)
    kv_dtype = resolve_kv_dtype(config.engine.kv_dtype, engine.attention, device, dtype, notes)
    if config.engine.deterministic:
        check_kv_dtype(device, kv_dtype)
    if not is_open:
        check_simulation(speculation, on_cuda)
    backend = config.model.backend
    target, tokenizer = _open_model(config.model.target, backend, dtype, device, progress)
    if is_open:
        found = has_mtp(target)
        speculation = resolve_speculation(wanted_method, config.model.target, notes, coupled, has_mtp=found)
        check_simulation(speculation, on_cuda)
    if on_cuda:
        speculation = with_sizes_of_batches(speculation, wanted_method)
    if speculation.section.simulate_acceptance is not None:
        notes.append("speculation.simulate_acceptance: drafts are accepted by lot; the texts are no answers")
    if not target.config.is_native:
        engine = engine_of_transformers(config, engine)
        notes.append(f"model.backend: transformers ({target.config.model_type}; {target.description}); {LACKS}")
    elif backend == "auto":
        notes.append(f"model.backend: native ({target.config.model_type})")
    if config.model.adapter is not None:
        target = with_adapter(target, resolve_model(config.model.adapter, progress=progress))
    if target.config.delta is not None:
        engine = engine_of_hybrid(config, engine, target)
    target = for_rows(target, config.model.max_model_len, notes)
    config = replace(config, sampling=resolve_sampling(config, target, notes))
    as_chat = runs_prompts_as_chat(config.data, tokenizer)
    if config.data.prompts_as_chat is None:
        notes.append(note_on_prompts(as_chat))
    if target.path is None:
        notes.append(f"model.target: {RANDOM_WEIGHTS} of a known geometry; the texts are no answers")
    if target.text_of is not None:
        notes.append(f"model.target: the text part of a {target.text_of} model; it reads no images, sounds and videos")
    if target.ignored:
        notes.append(f"model.target: it has keys that specbatch ignores: {first_names(target.ignored, limit=20)}")
    if (stretched := target.config.rope.stretching()) is not None:
        notes.append(f"model.target: rows of up to {target.config.max_position_embeddings} tokens ({stretched})")
    division = resolve_division(config, target, device, dtype, notes)
    if division == "requests":
        engine = engine_of_requests(config, engine)
    check_norms("model.target", target, config, division)
    if (moe := target.config.moe) is not None:
        weights = PassWeights.of_all(target.config)
        notes.append(
            f"model.target: {_in_words(weights.total)} parameters, of which a token uses {_in_words(weights.active)} "
            f"({moe.top_k} of {moe.num_experts} experts)"
        )
    check_experts("model.target", target, config, device, division)
    held = part_of_a_rank(target.config, config.engine.tensor_parallel, device, notes, division)
    quantization = resolve_quantization(config, target, device, dtype, notes, division)
    mxfp4 = resolve_mxfp4(config, target, device, dtype, notes, division)
    draft = _open_draft(speculation.section, backend, target, tokenizer, dtype, device, progress)
    if isinstance(draft, HeadCheckpoint):
        notes += draft.notes
    if isinstance(draft, EagleCheckpoint):
        section = replace(speculation.section, aux_layers=draft.config.aux_layers or None)
        speculation = replace(speculation, section=section)
    elif isinstance(draft, BlockCheckpoint):
        speculation = with_block(speculation, wanted_method, draft.config, notes, coupled, on_cuda=on_cuda)
        check_simulation(speculation, on_cuda)
        if engine.attention == "flashinfer":
            raise ConfigError(
                "engine.attention: flashinfer does not run block drafters", hint="use engine.attention: triton"
            )
    elif draft is not None:
        check_experts("speculation.draft", draft, config, device)
        check_draft_is_no_hybrid(draft)
        if draft.config.is_native != target.config.is_native:
            whose = "native" if draft.config.is_native else "transformers"
            notes.append(f"model.backend: {whose} for speculation.draft ({draft.config.model_type})")
        if not draft.config.is_native:  # pieces and kernels ahead are for all models of a run, or for none
            engine = engine_of_transformers(config, engine)
    corpus = _encode(earlier, tokenizer, speculation.section, target.config.vocab_size, notes)
    draft_quantization = quantization_of_draft(draft, config, device)
    shapes = speculation.shapes
    topk = max((shape.topk for shape in shapes), default=1)
    if topk > 1:
        _check_topk(topk, draft)
        check_chains(target, topk)

    if engine.attention == "flashinfer":
        check_flashinfer(target.config, kv_dtype, target.kv_scales)
        if isinstance(draft, HeadCheckpoint):
            check_flashinfer(draft.config.decoder, kv_dtype)
        elif draft is not None:
            check_flashinfer(draft.config, kv_dtype, draft.kv_scales)
    if kv_dtype == torch.float8_e4m3fn and target.kv_scales:
        notes.append("engine.kv_dtype: keys and values have the checkpoint's scales")
    if on_cuda:
        for shape in shapes:
            check_device_shape(shape)
    can_measure = on_cuda and engine.graphs == "round" and division != "requests"
    deterministic = config.engine.deterministic
    budget = resolve_budget(speculation, engine.attention, notes, deterministic=deterministic, can_measure=can_measure)
    lookahead = speculation.num_lookahead
    given = config.engine.kv_cache_tokens
    models = _cached_models(
        held,
        draft,
        1 if division == "requests" else config.engine.tensor_parallel,
        is_packed=device.type == "cpu" and dtype == torch.float32,
    )
    rows = Rows(
        sum(model.bytes_per_token(kv_dtype) for model in models),
        engine.page_size,
        lookahead,
        target.config.max_position_embeddings,
        engine.max_batch_size,
        spare_pages=1,
    )
    num_nodes = max((shape.num_draft_tokens for shape in shapes), default=1)
    measured = (num_nodes, engine.prefill_chunk_tokens) if on_cuda else None
    num_ranks, fraction = config.engine.tensor_parallel, engine.memory_fraction
    saved = saved_bytes(quantization, held, device, dtype)
    saved += 0 if mxfp4 is None else saved_by_mxfp4(held, dtype)
    state_bytes = 0
    if (delta := target.config.delta) is not None:
        max_nodes = max((shape.num_draft_tokens for shape in shapes), default=1) + (0 if on_cuda else MAX_FORCED)
        state_bytes = delta.state_sizes(max_nodes).line_bytes(dtype)
    keeps_states = config.engine.prefix_cache
    nodes = speculation.schedule.map(lambda shape: 1 if shape is None else shape.num_draft_tokens)
    wanted = CacheRequest(
        models,
        rows,
        dtype,
        device,
        given,
        fraction,
        measured,
        nodes if on_cuda else None,
        speculation.method in CORPUS_METHODS,
        num_ranks,
        saved,
        state_bytes,
        keeps_states,
    )
    if division == "requests" and on_cuda:
        left = int(wanted.available * fraction) - wanted.weights - wanted.states
        chunk = chunk_of_requests(engine, target.config, num_ranks, dtype.itemsize, left)
        engine, wanted = replace(engine, prefill_chunk_tokens=chunk), replace(wanted, measured=(num_nodes, chunk))
    # FlashInfer's masks grow with the batch, and rounds that are no graphs are bound by the host.
    if engine.attention == "triton" and "max_batch_size" in engine.left_open:
        wanted = with_default_batch(wanted, config.sampling.max_tokens, notes)
        engine = replace(engine, max_batch_size=wanted.rows.max_batch_size)
    cache = resolve_cache(wanted, notes)
    max_length, num_checkpoints = cache.capacity, wanted.num_checkpoints
    heads = target.config
    costs = CascadeCosts(heads.num_heads, heads.head_dim, 2 * heads.num_kv_heads * heads.head_dim * kv_dtype.itemsize)
    limits = resolve_cascade(
        config.engine, engine.attention, costs, heads.sliding_windows, num_nodes, engine.max_batch_size, notes
    )
    target_bytes = models[0].num_parameters() * dtype.itemsize
    job = LaneJob(
        engine.max_batch_size,
        num_nodes,
        target_bytes,
        engine.prefill_chunk_tokens,
        has_groups=limits is not None,
        experts=None if target.config.moe is None else division,
        has_budget=budget is not None,
    )
    engine = replace(engine, cascade=limits, lanes=lane_limits(engine.lane_mode, num_ranks, device, job, notes))
    if engine.attention == "flashinfer":
        for shape in shapes:
            check_mask_size(shape, engine.max_batch_size, max_length + lookahead + engine.page_size)
    resolved = replace(
        config,
        model=replace(
            config.model,
            dtype=DTYPE_NAMES[dtype],
            backend="native" if target.config.is_native else "transformers",
            quantization=quantization_name(config, quantization, draft_quantization, keeps_mxfp4=mxfp4 is not None),
        ),
        speculation=speculation.section,
        engine=replace(
            config.engine,
            device=str(device),
            attention=engine.attention,
            cuda_graphs=engine.graphs,
            max_batch_size=engine.max_batch_size,
            page_size=engine.page_size,
            kv_dtype=KV_DTYPE_NAMES[kv_dtype],
            # On a GPU it is known when the engine is built.
            kv_cache_tokens=given if given is not None or on_cuda else cache.num_pages * engine.page_size,
            memory_fraction=engine.memory_fraction,
            cascade_attention="off" if engine.cascade is None else "on",
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
            two_batch_overlap="off" if engine.lanes is None else engine.lane_mode,
            expert_parallel="off" if division == "tensors" else "on",
            dp_attention="on" if division == "requests" else "off",
        ),
        prefill=replace(config.prefill, graphs=engine.prompt_graphs),
        data=replace(config.data, prompts_as_chat=as_chat),
    )
    weights_as = target.description
    if quantization is not None and quantization.is_kept:  # weights of a GGUF file can stay as they are
        weights_as = weights_as.removesuffix(" dequantised")
    description = {"target": f"{config.model.target} ({target.config.model_type}, {weights_as})"}
    if draft is not None:
        ref = speculation.section.draft or config.model.target
        description["draft"] = f"{ref} ({speculation.method}{_random_weights(ref)})"
    return ResolvedRun(
        resolved,
        speculation,
        target,
        draft,
        tokenizer,
        device,
        dtype,
        kv_dtype,
        engine,
        cache,
        wanted.rows,
        quantization,
        draft_quantization,
        mxfp4,
        division,
        corpus,
        max_length if given is not None and max_length < rows.max_positions else None,
        description,
        low_acceptance(speculation.section, draft),
        bits_depend_on(device) if config.engine.deterministic else {},
        notes,
        num_checkpoints,
        budget,
    )


def _in_words(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _cached_models(
    target: ModelConfig, draft: Checkpoint | HeadCheckpoint | None, num_ranks: int, is_packed: bool
) -> list[CachedModel]:
    """Roughly what a rank holds. `target`: the first one's part."""
    models = [CachedModel.whole(target, is_packed)]
    if isinstance(draft, BlockCheckpoint):  # each rank has all of it
        block = draft.config
        rows = block.has_embedding * block.decoder.vocab_size + block.has_lm_head * block.draft_vocab_size
        models.append(CachedModel(block.decoder, block.decoder.num_layers, rows))
    elif isinstance(draft, EagleCheckpoint):
        part = part_of_head(draft.config.decoder, 0, num_ranks) or draft.config.decoder
        models.append(CachedModel(part, part.num_layers, draft.config.draft_vocab_size))
    elif draft is not None:
        models.append(CachedModel.whole(draft.config, is_packed))
    return models


def _open_model(
    ref: str,
    backend: BackendName,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[Checkpoint, PreTrainedTokenizerBase]:
    if random_name(ref) is not None:
        model = open_random_model(ref, dtype, device, backend)
        return model, byte_tokenizer(model.config.vocab_size, model.config.eos_token_ids)
    path = resolve_model(ref, progress=progress)
    return open_checkpoint(path, backend), load_tokenizer(path)


def _random_weights(ref: str | None) -> str:
    return f", {RANDOM_WEIGHTS}" if random_name(ref) is not None else ""


def _open_draft(
    speculation: SpeculationSection,
    backend: BackendName,
    target: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None] | None,
) -> Checkpoint | HeadCheckpoint | None:
    if speculation.method == "mtp":
        if speculation.draft is not None and random_name(speculation.draft) is None:
            return open_mtp(target, resolve_model(speculation.draft, progress=progress))
        if speculation.draft is not None:
            raise ConfigError(
                f"speculation.draft is {speculation.draft}, and speculation.method mtp drafts with a layer of the "
                "target",
                hint="leave speculation.draft out, or name a folder that speculators has saved",
            )
        return open_random_mtp(target.config, dtype, device) if target.path is None else open_mtp(target)
    if speculation.draft is None:
        return None
    if speculation.method == "draft_model":
        draft, own_tokenizer = _open_model(speculation.draft, backend, dtype, device, progress)
        draft = replace(draft, config=draft.config.for_rows(target.config.max_position_embeddings))
        difference = describe_tokenizer_difference(tokenizer, own_tokenizer)
        if difference is not None:
            raise ModelError(
                f"the draft model's tokenizer is not the target's: {difference}",
                hint="a draft model must come from the target's family; otherwise use method: ngram",
            )
        return draft
    if speculation.method == "block":
        if random_name(speculation.draft) is not None:
            return open_random_block_drafter(speculation.draft, target.config, dtype, device)
        return open_block_drafter(resolve_model(speculation.draft, progress=progress), target)
    kind: EagleKind = "eagle" if speculation.method == "eagle" else "eagle3"
    parallel, layers = speculation.method == "peagle", speculation.aux_layers
    if random_name(speculation.draft) is not None:
        return open_random_eagle_head(speculation.draft, kind, target.config, dtype, device, layers, parallel=parallel)
    path = resolve_model(speculation.draft, progress=progress)
    return open_eagle_head(path, kind, target, layers, parallel=parallel)


def _earlier_texts(speculation: SpeculationSection) -> list[tuple[str, bool]]:
    if speculation.corpus is None:
        return []
    return read_texts(Path(speculation.corpus).expanduser(), speculation.suffix.corpus_tokens)


def _encode(
    texts: list[tuple[str, bool]],
    tokenizer: PreTrainedTokenizerBase,
    speculation: SpeculationSection,
    vocab_size: int,
    notes: list[str],
) -> list[list[int]]:
    """Encode the texts of speculation.corpus with the target's tokenizer, whatever model they are of. A text that ended
    by itself has an end-of-sequence token, which is drafted, too."""
    if speculation.corpus is None:
        return []
    eos = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    encoded = tokenizer([text for text, _ in texts], add_special_tokens=False)["input_ids"] if texts else []
    corpus = [[*ids, *(eos if is_whole else [])] for ids, (_, is_whole) in zip(encoded, texts, strict=True)]
    corpus = [ids for ids in corpus if max(ids, default=vocab_size) < vocab_size]
    notes.append(f"speculation.corpus: {len(corpus):,} texts, {sum(map(len, corpus)):,} tokens")
    return corpus


def _check_topk(topk: int, draft: Checkpoint | HeadCheckpoint | None) -> None:
    if draft is None:  # a host method: its trees have tokens of the target's vocabulary
        return
    width = draft.config.draft_vocab_size if isinstance(draft, HeadCheckpoint) else draft.config.vocab_size
    if topk > width:
        raise ConfigError(f"speculation.topk is {topk}, but the draft's vocabulary has only {width} tokens")
