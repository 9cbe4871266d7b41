"""The composition root: Config -> ResolvedRun (everything checked and decided, no weights read) -> Engine."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from specbatch.attention.backend_paged import PagedAttention
from specbatch.attention.backend_torch import TorchAttention
from specbatch.attention.interface import AttentionBackend
from specbatch.cache.pages import PagePool
from specbatch.config import Config, DtypeName, EngineSection, SpeculationSection
from specbatch.engine.build_device import GIB, build_device_engine
from specbatch.engine.engine import Engine
from specbatch.engine.executor import GraphMode
from specbatch.engine.memory import CachedModel, auto_kv_tokens
from specbatch.errors import ConfigError, ModelError
from specbatch.kernels import ops_for
from specbatch.models.catalog import SHAPE_PREFIX, resolve_model
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, loader
from specbatch.models.eagle_head import EagleConfig, EagleHead, EagleKind, open_head
from specbatch.models.shapes import RANDOM_WEIGHTS, open_shape, open_shape_head
from specbatch.models.tokenizer import byte_tokenizer, describe_tokenizer_difference, load_tokenizer
from specbatch.models.weights import Checkpoint, TensorSource, open_checkpoint
from specbatch.speculation.drafters import Drafter, NeuralDrafter, NgramDrafter, NoDrafter
from specbatch.speculation.neural import DraftNet, EagleDraft, ModelDraft, NeuralProposer, num_lookahead
from specbatch.speculation.ngram import NgramProposer, NoProposer
from specbatch.speculation.proposer import Proposer
from specbatch.speculation.tree import DraftShape
from specbatch.types import BatchEngine

_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
NEURAL = ("draft_model", "eagle", "eagle3")
DEFAULT_NUM_STEPS = 3
DEFAULT_NGRAM_TOKENS = 6
DEFAULT_TREE_TOKENS = 8
MAX_TOPK, MAX_TREE_TOKENS = 16, 128  # of the device engine


@dataclass(frozen=True)
class HeadCheckpoint:
    """A validated EAGLE head."""

    head: EagleConfig
    tensors: TensorSource


@dataclass(frozen=True)
class EngineSettings:
    """What is decided for the options of `engine` that may be left open."""

    attention: Literal["torch", "triton"]
    graphs: GraphMode
    max_batch_size: int
    page_size: int
    prefill_chunk_tokens: int
    memory_fraction: float

    @property
    def on_device(self) -> bool:
        """Whether the device engine runs, which reads lengths and page tables on the device."""
        return self.attention != "torch"


@dataclass(frozen=True)
class ResolvedRun:
    """A run that can be built: files opened and checked, every `auto` decided. Weights are not read yet."""

    config: Config
    target: Checkpoint
    draft: Checkpoint | HeadCheckpoint | None
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    engine: EngineSettings
    model_max_tokens: int  # longest sequence, prompt and output, that model and cache hold
    num_kv_tokens: int  # slots of the cache
    description: dict[str, str]  # what the models are, for the statistics
    notes: list[str] = field(default_factory=list)  # how each `auto` was decided

    @property
    def cache_limits_rows(self) -> bool:
        return self.model_max_tokens < self.target.config.max_position_embeddings


def resolve(config: Config, progress: Callable[[str, int, int], None] | None = None) -> ResolvedRun:
    """Decide every `auto` and check all that can be checked without reading weights.

    Raises ConfigError or ModelError. Downloads the models where they are not there yet.
    """
    notes: list[str] = []
    speculation = _resolve_speculation(config.speculation)
    device = _resolve_device(config.engine.device, notes)
    dtype = _resolve_dtype(config.model.dtype, device, notes)
    engine = _resolve_engine(config.engine, device, dtype, notes)
    _check_simulation(speculation, engine)
    if speculation.simulate_acceptance is not None:
        notes.append("speculation.simulate_acceptance: drafts are accepted by lot; the texts are no answers")
    target, tokenizer = _open_model(config.model.target, dtype, device, progress)
    if target.path is None:
        notes.append(f"model.target: {RANDOM_WEIGHTS} of a known geometry; the texts are no answers")
    draft = _open_draft(speculation, target, tokenizer, dtype, device, progress)
    if speculation.topk > 1 and speculation.method in NEURAL:
        _check_topk(speculation.topk, draft)

    if engine.on_device and speculation.method in NEURAL:
        _check_device_shape(_shape(speculation))
    lookahead = _lookahead(speculation)
    given_kv_tokens = num_kv_tokens = config.engine.kv_cache_tokens
    if num_kv_tokens is None:
        models = [CachedModel(target.config, target.config.num_layers)]
        if isinstance(draft, HeadCheckpoint):
            models.append(CachedModel(draft.head.decoder, 1))
        elif draft is not None:
            models.append(CachedModel(draft.config, draft.config.num_layers))
        # More than the longest sequence for each request of a full batch is never used.
        usable = engine.max_batch_size * (target.config.max_position_embeddings + lookahead + engine.page_size)
        num_kv_tokens, note = auto_kv_tokens(models, dtype, device, engine.memory_fraction, usable, engine.page_size)
        if not engine.on_device:  # there it is measured when the engine is built
            given_kv_tokens = num_kv_tokens
            notes.append(note)
    num_pages = num_kv_tokens // engine.page_size
    max_length = min(target.config.max_position_embeddings, num_pages * engine.page_size - lookahead)
    if max_length < 2:
        raise ConfigError(
            f"a KV cache of {num_kv_tokens} tokens cannot hold one request: a round looks {lookahead} tokens ahead",
            hint="raise engine.kv_cache_tokens or engine.memory_fraction",
        )
    resolved = replace(
        config,
        model=replace(config.model, dtype=_DTYPE_NAMES[dtype]),
        speculation=speculation,
        engine=replace(
            config.engine,
            device=str(device),
            attention=engine.attention,
            cuda_graphs=engine.graphs,
            max_batch_size=engine.max_batch_size,
            page_size=engine.page_size,
            kv_cache_tokens=given_kv_tokens,
            memory_fraction=engine.memory_fraction,
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
        ),
    )
    description = {"target": f"{config.model.target} ({target.config.model_type}, {target.description})"}
    if draft is not None:
        description["draft"] = f"{speculation.draft} ({speculation.method}{_random_weights(speculation.draft)})"
    return ResolvedRun(
        resolved, target, draft, tokenizer, device, dtype, engine, max_length, num_kv_tokens, description, notes
    )


def build_engine(run: ResolvedRun) -> BatchEngine:
    """Read the weights and put the engine together; what is decided on the way is added to `run.notes`.

    Raises ModelError where the GPU's memory does not suffice.
    """
    try:
        return _build_engine(run)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(run.device)
        raise ModelError(
            f"the GPU's memory does not hold this run: {(total - free) / GIB:.1f} of {total / GIB:.1f} GiB are in use; "
            f"{str(error).split('. ', 1)[0]}",
            hint="lower engine.max_batch_size, engine.prefill_chunk_tokens or engine.kv_cache_tokens, or free the GPU",
        ) from error


def _build_engine(run: ResolvedRun) -> BatchEngine:
    engine = run.engine
    if run.device.index is not None:
        torch.cuda.set_device(run.device)  # Triton, graphs and events go to the current device
    began = time.perf_counter()
    num_positions = run.model_max_tokens + _lookahead(run.config.speculation) + 1
    target = build_decoder(
        run.target.config, run.target.tensors, num_positions, run.dtype, run.device, engine.on_device
    )
    if engine.on_device:
        return _build_device_engine(run, target, num_positions, began)
    pool = PagePool(run.num_kv_tokens // engine.page_size, engine.page_size)
    num_slots = pool.num_pages * pool.page_size
    proposer = _build_proposer(run, target, num_slots, num_positions)
    return Engine(
        target,
        proposer,
        target.new_cache(num_slots, run.dtype),
        pool,
        max_length=run.model_max_tokens,
        max_batch_size=engine.max_batch_size,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache=run.config.engine.prefix_cache,
        eos_token_ids=_eos_token_ids(run),
    )


def _build_device_engine(run: ResolvedRun, target: Decoder, num_positions: int, began: float) -> BatchEngine:
    engine, speculation = run.engine, run.config.speculation
    ops = ops_for(run.device, run.dtype)
    drafter: Drafter
    if speculation.method == "none":
        drafter = NoDrafter()
    elif speculation.method == "ngram":
        ngram = speculation.ngram
        drafter = NgramDrafter(_shape(speculation).num_draft_tokens, ngram.min_match, ngram.max_match, ops)
    else:
        drafter = NeuralDrafter(_build_net(run, target, engine.page_size, num_positions), _shape(speculation), ops)
    torch.cuda.synchronize(run.device)
    weights_seconds = time.perf_counter() - began
    built = build_device_engine(
        target,
        drafter,
        dtype=run.dtype,
        device=run.device,
        max_length=run.model_max_tokens,
        max_batch_size=engine.max_batch_size,
        page_size=engine.page_size,
        kv_cache_tokens=run.config.engine.kv_cache_tokens,
        memory_fraction=engine.memory_fraction,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache=run.config.engine.prefix_cache,
        graphs=engine.graphs,
        sampled=run.config.sampling.temperature > 0,
        keeps_tokens=speculation.method == "ngram",
        eos_token_ids=_eos_token_ids(run),
        simulate=speculation.simulate_acceptance,
        say=run.notes.append,
    )
    built.start_seconds = {"weights": weights_seconds} | built.start_seconds
    return built


def build_decoder(
    config: ModelConfig,
    tensors: TensorSource,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    paged: bool = False,
) -> Decoder:
    """A model with the weights of `tensors`; `paged`: for the device engine."""
    attention = _attention(config, dtype, device, paged)
    return Decoder(config, loader(tensors, dtype, device), attention, num_positions, dtype, device)


def _attention(config: ModelConfig, dtype: torch.dtype, device: torch.device, paged: bool) -> AttentionBackend:
    if paged:
        return PagedAttention(config.num_heads, config.num_kv_heads, config.head_dim, dtype, device)
    return TorchAttention(config.num_heads, config.num_kv_heads, config.head_dim, device)


def _build_proposer(run: ResolvedRun, target: Decoder, num_slots: int, num_positions: int) -> Proposer:
    speculation = run.config.speculation
    if speculation.method == "none":
        return NoProposer()
    shape = _shape(speculation)
    if speculation.method == "ngram":
        return NgramProposer(shape.num_draft_tokens, speculation.ngram.min_match, speculation.ngram.max_match)
    net = _build_net(run, target, num_slots, num_positions)
    return NeuralProposer(net, shape, run.target.config.vocab_size, run.engine.page_size, run.device)


def _build_net(run: ResolvedRun, target: Decoder, num_slots: int, num_positions: int) -> DraftNet:
    vocab_size, paged = run.target.config.vocab_size, run.engine.on_device
    if isinstance(run.draft, HeadCheckpoint):
        head, tensors = run.draft.head, run.draft.tensors
        load = loader(tensors, run.dtype, run.device)
        attention = _attention(head.decoder, run.dtype, run.device, paged)
        model = EagleHead(head, load, tensors.load, target, attention, num_positions, run.dtype, run.device)
        cache = model.new_cache(num_slots, run.dtype)
        return EagleDraft(model, cache, run.target.config.num_layers, head.kind == "eagle3")
    assert run.draft is not None, "resolve() opens the draft"
    draft = build_decoder(run.draft.config, run.draft.tensors, num_positions, run.dtype, run.device, paged)
    return ModelDraft(draft, draft.new_cache(num_slots, run.dtype), vocab_size)


def _eos_token_ids(run: ResolvedRun) -> tuple[int, ...]:
    ids = set(run.target.config.eos_token_ids)
    if isinstance(run.tokenizer.eos_token_id, int):
        ids.add(run.tokenizer.eos_token_id)
    return tuple(sorted(ids))


def _resolve_speculation(section: SpeculationSection) -> SpeculationSection:
    """Fill in num_steps and num_draft_tokens and check the shape."""
    if section.method == "none":
        return replace(section, num_steps=None, num_draft_tokens=None, topk=1, draft=None)
    if section.method in NEURAL and section.draft is None:
        raise ConfigError(
            f"speculation.method {section.method} needs speculation.draft",
            hint="name one (a directory, a hub id, a .gguf file or builtin:NAME), or use ngram, which needs none",
        )
    steps, tokens = section.num_steps, section.num_draft_tokens
    if section.method == "ngram":
        if section.topk != 1:
            raise ConfigError(f"speculation.topk must be 1 for ngram, which drafts chains, got {section.topk}")
        if steps is None and tokens is None:
            tokens = DEFAULT_NGRAM_TOKENS
    if steps is None:
        steps = tokens - 1 if tokens is not None and section.topk == 1 else DEFAULT_NUM_STEPS
    if tokens is None:
        tokens = (
            steps + 1
            if section.topk == 1
            else min(DEFAULT_TREE_TOKENS, DraftShape(steps, section.topk, 2).num_candidates + 1)
        )
    DraftShape(steps, section.topk, tokens).check()
    draft = section.draft if section.method in NEURAL else None
    return replace(section, num_steps=steps, num_draft_tokens=tokens, draft=draft)


def _check_simulation(speculation: SpeculationSection, engine: EngineSettings) -> None:
    simulated = speculation.simulate_acceptance
    if simulated is None:
        return
    option = "speculation.simulate_acceptance"
    if speculation.method == "none":
        raise ConfigError(
            f"{option} needs drafts to accept, and speculation.method is none",
            hint=f"set speculation.method, or {option} to null",
        )
    longest = _shape(speculation).num_steps + 1
    if simulated > longest:
        raise ConfigError(
            f"{option} is {simulated:g}, but a round of {longest - 1} steps commits at most {longest} tokens",
            hint="raise speculation.num_steps",
        )
    if not engine.on_device:
        raise ConfigError(
            f"{option} needs engine.device cuda, and not engine.attention torch",
            hint="elsewhere, acceptance is what the drafts are worth; set it to null",
        )


def _lookahead(speculation: SpeculationSection) -> int:
    """Slots past the committed ones that a round of this shape may write, in either cache."""
    if speculation.method == "none":
        return 1
    shape = _shape(speculation)
    if speculation.method == "ngram":
        return shape.num_draft_tokens
    return num_lookahead(shape, ModelDraft.lead if speculation.method == "draft_model" else EagleDraft.lead)


def _shape(speculation: SpeculationSection) -> DraftShape:
    assert speculation.num_steps is not None, "resolve() decides the shape"
    assert speculation.num_draft_tokens is not None, "resolve() decides the shape"
    return DraftShape(speculation.num_steps, speculation.topk, speculation.num_draft_tokens)


def _open_model(
    ref: str, dtype: torch.dtype, device: torch.device, progress: Callable[[str, int, int], None] | None
) -> tuple[Checkpoint, PreTrainedTokenizerBase]:
    if ref.startswith(SHAPE_PREFIX):
        shape = open_shape(ref, dtype, device)
        return shape, byte_tokenizer(shape.config.vocab_size, shape.config.eos_token_ids)
    path = resolve_model(ref, progress=progress)
    return open_checkpoint(path), load_tokenizer(path)


def _random_weights(ref: str | None) -> str:
    return f", {RANDOM_WEIGHTS}" if ref is not None and ref.startswith(SHAPE_PREFIX) else ""


def _open_draft(
    speculation: SpeculationSection,
    target: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None] | None,
) -> Checkpoint | HeadCheckpoint | None:
    if speculation.method not in NEURAL:
        return None
    assert speculation.draft is not None
    if speculation.method == "draft_model":
        draft, own_tokenizer = _open_model(speculation.draft, dtype, device, progress)
        difference = describe_tokenizer_difference(tokenizer, own_tokenizer)
        if difference is not None:
            raise ModelError(
                f"the draft model's tokenizer is not the target's: {difference}",
                hint="a draft model must come from the target's family; otherwise use method: ngram",
            )
        return draft
    kind: EagleKind = "eagle" if speculation.method == "eagle" else "eagle3"
    if speculation.draft.startswith(SHAPE_PREFIX):
        return HeadCheckpoint(*open_shape_head(speculation.draft, kind, target.config, dtype, device))
    return HeadCheckpoint(*open_head(resolve_model(speculation.draft, progress=progress), kind, target.config))


def _check_topk(topk: int, draft: Checkpoint | HeadCheckpoint | None) -> None:
    assert draft is not None
    width = draft.head.draft_vocab_size if isinstance(draft, HeadCheckpoint) else draft.config.vocab_size
    if topk > width:
        raise ConfigError(f"speculation.topk is {topk}, but the draft's vocabulary has only {width} tokens")


def _check_device_shape(shape: DraftShape) -> None:
    """The kernels of the device engine are built for trees of some size."""
    if shape.topk > MAX_TOPK or (shape.topk > 1 and shape.num_draft_tokens > MAX_TREE_TOKENS):
        raise ConfigError(
            f"engine.attention: triton drafts trees of at most topk {MAX_TOPK} and {MAX_TREE_TOKENS} num_draft_tokens, "
            f"not {shape}",
            hint="lower speculation.topk and num_draft_tokens, or use engine.attention: torch",
        )


def _resolve_device(name: str, notes: list[str]) -> torch.device:
    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        notes.append(f"engine.device: {device} ({'a' if device.type == 'cuda' else 'no'} CUDA device is there)")
        return device
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device: {name!r} is no device", hint="use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {name!r} is not supported", hint="use auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count() > 0:
        raise ConfigError(f"engine.device is {name}, but there are {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.device is cuda, but torch sees no CUDA device",
            hint="use engine.device: cpu, or install a CUDA build of torch",
        )
    return device


def _resolve_engine(
    section: EngineSection, device: torch.device, dtype: torch.dtype, notes: list[str]
) -> EngineSettings:
    """Decide what is left open, all but the size of the cache."""
    on_cuda = device.type == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    attention, graphs = section.attention, section.cuda_graphs
    if attention == "triton" and on_cuda and not has_triton:
        raise ConfigError(
            "engine.attention: triton needs the package triton, which is not installed",
            hint="pip install triton (CUDA builds of torch bring it along), or use engine.attention: torch",
        )
    if attention == "triton" and (not on_cuda or dtype == torch.float64):
        raise ConfigError(
            f"engine.attention: triton needs a CUDA device and at most 32 bits, not {device} and {_DTYPE_NAMES[dtype]}",
            hint="use engine.attention: torch",
        )
    if attention == "auto":
        attention = "triton" if on_cuda and has_triton and dtype != torch.float64 else "torch"
        why = "lengths are read on the device, so a round is one graph" if attention == "triton" else "the exact one"
        notes.append(f"engine.attention: {attention} ({why})")
    if attention == "torch" and graphs in ("round", "phases"):
        raise ConfigError(
            f"engine.cuda_graphs: {graphs} needs engine.attention triton, which plans nothing on the host",
            hint="leave engine.cuda_graphs out, or set it to none",
        )
    on_device = attention == "triton"
    batch, page, chunk, fraction = (256, 64, 8192, 0.9) if on_device else (16, 16, 512, 0.5)
    return EngineSettings(
        attention,
        graphs if graphs != "auto" else "round" if on_device else "none",
        section.max_batch_size or batch,
        section.page_size or page,
        section.prefill_chunk_tokens or chunk,
        section.memory_fraction or fraction,
    )


def _resolve_dtype(name: str, device: torch.device, notes: list[str]) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
        notes.append(f"model.dtype: {name} (the default on {device.type})")
    return next(dtype for dtype, known in _DTYPE_NAMES.items() if known == name)
