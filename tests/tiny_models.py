"""Tiny random models for tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbatch.attention.cpu import TorchAttention
from specbatch.attention.interface import AttentionBackend
from specbatch.attention.triton import PagedAttention
from specbatch.cache.pages import PagePool
from specbatch.cache.prefix_groups import GroupLimits
from specbatch.draft import METHODS, DraftParts, make_method
from specbatch.draft.hybrid import HybridDraft
from specbatch.draft.network import BlockNet, DraftNet, EagleNet, ModelNet
from specbatch.draft.none import MAX_ROOM
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.draft.suffix import SharedTexts
from specbatch.engine.cpu_threads import ThreadGovernor
from specbatch.engine.engine import Engine, EngineSizes
from specbatch.engine.executor import GraphMode, RoundExecutor
from specbatch.engine.lockstep import Lockstep
from specbatch.engine.node_chooser import RoundCosts
from specbatch.engine.overlap.lanes import LaneLimits
from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.engine.prefill.models import EAGER, PromptPieces, piecewise_trunks
from specbatch.engine.round import Round
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.kernels import ops_for
from specbatch.kernels.chains import FORECAST, NETWORK
from specbatch.models.blocks.config import BlockConfig, expected_block_tensors
from specbatch.models.blocks.drafter import BlockDrafter
from specbatch.models.config import DeltaConfig, ModelConfig, MoeConfig, QueryGrowth
from specbatch.models.config import expected_tensors as decoder_tensors
from specbatch.models.decoder import Decoder
from specbatch.models.eagle_config import EagleConfig, expected_eagle_tensors
from specbatch.models.eagle_head import EagleHead
from specbatch.models.linears.sharded import ModelShard
from specbatch.models.rope import RopeConfig
from specbatch.models.weight_loader import WeightLoader
from specbatch.parallel.group import Group
from specbatch.parallel.shares import Division
from specbatch.setup.round_parts import RoundParts
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.oracle.engine import OracleEngine
from tests.oracle.factory import proposer_of

CPU = torch.device("cpu")
MAX_LENGTH = 160  # attention's reference kernel takes time in proportion to it
CHUNK = 64  # keys of a chunk, so that some texts have several chunks
VOCAB = 61


class RandomTensors:
    """A checkpoint of random weights. A tensor depends on its name and the seed alone. So a model with fewer layers has
    the first layers of a deeper one, and its drafts are often right."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int, scale: float = 0.25) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            rng = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            self._tensors[name] = 1.0 + rng if "norm" in name and name.endswith("weight") else rng

    def load(self, name: str) -> Tensor:
        return self._tensors[name]


def tiny_config(num_layers: int = 2, hidden: int = 32, vocab: int = VOCAB, **changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0, scaling="none"),
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_windows": (None,) * num_layers,
        "eos_token_ids": (0,),
    } | changes
    return ModelConfig(**values)  # type: ignore[arg-type]


# Traits of the target by family. Windows are shorter than the prompts, and caps are small enough to bind.
_GEMMA2: dict[str, object] = {
    "model_type": "gemma2",
    "norms": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "embedding_scale": 32**0.5,
    "attention_scale": 0.3,
    "attention_soft_cap": 2.0,
    "logits_soft_cap": 4.0,
    "tie_word_embeddings": True,
}
FAMILY_TRAITS: dict[str, dict[str, object]] = {
    "llama": {},
    "gemma2": _GEMMA2,
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "qk_norm": True,
        "moe": MoeConfig(6, 2, 16, norm_topk_prob=True, layers=(True,) * 3, shared_size=8),
    },
    "glm4-moe": {
        "model_type": "glm4_moe",
        "rope": RopeConfig(theta=10000.0, partial=0.5),
        "qkv_bias": True,
        "qk_norm": True,
        "moe": MoeConfig(
            8,
            3,
            16,
            norm_topk_prob=True,
            layers=(False, *(True,) * 9),
            shared_size=8,
            shared_gate=False,
            shared_name="shared_experts",
            scoring="sigmoid",
            num_groups=4,
            topk_groups=2,
            scale=1.5,
            wide_router=True,
            correction_bias="gate.e_score_correction_bias",
        ),
    },
    "flex-olmo": {
        "model_type": "flex_olmo",
        "norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "wide_norms": True,
        "qk_norm": True,
        "qk_norm_whole": True,
        "moe": MoeConfig(6, 2, 16, norm_topk_prob=False, layers=(True,) * 9),
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "qkv_bias": True,
        "output_bias": True,
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "rope": RopeConfig(1000.0, "yarn", factor=4.0, original_max_position=32, truncate=False),
        "moe": MoeConfig(
            *(6, 2, 16),
            norm_topk_prob=False,
            layers=(True,) * 4,
            scoring="softmax_of_chosen",
            router="router",
            router_bias=True,
            expert_bias=True,
        ),
    },
    # All traits of the families that have Llama's norms.
    "pre-norms": {
        "model_type": "smollm3",
        "qk_norm": True,
        "qk_norm_last": True,
        "wide_norms": True,
        "nope_layers": (False, True) * 5,
        "query_growth": QueryGrowth(0.5, 8),
        "gated_mlp": False,
        "activation": "relu2",
        "mlp_bias": True,
        "embedding_scale": 2.5,
        "residual_scale": 0.6,
        "logits_scale": 1.7,
    },
    "cohere2": {
        "model_type": "cohere2",
        "norms": ("input_layernorm",),
        "layer_norms": True,
        "is_parallel": True,
        "nope_layers": (False, True) * 5,
        "logits_scale": 1.3,
        "tie_word_embeddings": True,
    },
    "gpt-neox": {
        "model_type": "gpt_neox",
        "rope": RopeConfig(theta=10000.0, partial=0.5),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "activation": "gelu",
        "layer_norms": True,
        "norm_bias": True,
        "is_parallel": True,
        "lm_head_bias": True,
        "learned_positions": MAX_LENGTH,
    },
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "rope": RopeConfig(theta=10000.0, partial=0.5),
        "norm_offset": 1.0,
        "qk_norm": True,
        "gated_attention": True,
        "delta": DeltaConfig((True, False, True) * 3, 2, 4, 8, 6, 3),
    },
    "gemma3": {
        **_GEMMA2,
        "model_type": "gemma3_text",
        "qk_norm": True,
        "attention_soft_cap": None,
        "logits_soft_cap": None,
        "window_rope": RopeConfig(theta=100.0),
    },
}


def target_config(family: str, num_layers: int, hidden: int, vocab: int, head_dim: int = 8) -> ModelConfig:
    has_windows = family.startswith(("gemma", "gpt-oss", "cohere2"))
    windows = tuple((9, None)[i % 2] if has_windows else None for i in range(num_layers))
    traits = FAMILY_TRAITS[family]
    return tiny_config(num_layers, hidden, vocab, head_dim=head_dim, sliding_windows=windows, **traits)


def score_traits(config: ModelConfig) -> dict[str, float | None]:
    """Return the traits of a model that attention backends take."""
    traits = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}
    return {name: value for name, value in traits.items() if value is not None}


def attention_of(config: ModelConfig, device: torch.device = CPU) -> TorchAttention:
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    return TorchAttention(*sizes, device, chunk=CHUNK, **score_traits(config))  # type: ignore[arg-type]


def num_target_layers(method: str) -> int:
    """Return the number of layers of the tiny target for a draft method. EAGLE-3 reads the inputs of three of them, see
    `AUX_LAYERS`."""
    return 3 if method in ("eagle3", "peagle", "block", "hybrid") else 2


AUX_LAYERS = (0, 1, 2)
BLOCK_SIZE = 6
HEAD_SEED = 20  # with this seed random EAGLE heads are sometimes right

Spoil = Callable[[dict[str, Tensor]], None]  # a function that changes a checkpoint's tensors


def paged_of(config: ModelConfig, device: torch.device = CPU) -> PagedAttention:
    """Return the attention of the device engine, with the reference kernel in float64."""
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    return PagedAttention(*sizes, torch.float64, device, **score_traits(config))  # type: ignore[arg-type]


AttentionOf = Callable[[ModelConfig, torch.device], AttentionBackend]
Backend = Callable[..., AttentionBackend]  # takes the three sizes, the dtype, the device and `score_traits`


def tiny_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    scale: float = 0.25,
    device: torch.device = CPU,
    attention: AttentionOf = attention_of,
    num_positions: int = MAX_LENGTH + 128,
    spoil: Spoil | None = None,
    group: Group | None = None,
    division: Division = "tensors",
) -> Decoder:
    """Make a tiny target. `group`: the ranks that share the model. `division`: their division of it."""
    tensors = RandomTensors(decoder_tensors(config), seed, scale)
    if spoil is not None:
        spoil(tensors._tensors)
    shard = None if group is None else ModelShard.of(config, group, division)
    own = config if shard is None else shard.config
    weights = WeightLoader(tensors, dtype, device, shard=shard)
    return Decoder(own, weights, attention(own, device), num_positions, attention(own, device))


def tiny_draft_net(
    method: str,
    target: Decoder,
    num_slots: int,
    kv_dtype: torch.dtype,
    *,
    draft_vocab: int | None,
    draft_seed: int,
    scale: float,
    attention: AttentionOf = attention_of,
    spoil: Spoil | None = None,
    group: Group | None = None,
    whole: ModelConfig | None = None,
    **traits: Any,
) -> DraftNet:
    """Make the draft network of `target`, with its hidden size and dtype. `traits`: fields of an EAGLE head's
    `EagleConfig`. `group`: the ranks that share a head. `whole`: the configuration of the whole target, if this process
    has a part of it."""
    hidden, vocab, head_dim = target.config.hidden_size, target.config.vocab_size, target.config.head_dim
    dtype, device, num_positions = target.embedding_VE.dtype, target.device, target.num_positions
    if method == "draft_model":
        draft_config = tiny_config(1, hidden, vocab, head_dim=head_dim)
        whole = whole or target.config
        if whole.model_type != "llama":  # the target without its later layers
            draft_config = replace(whole, num_layers=1, sliding_windows=whole.sliding_windows[:1])
        draft = tiny_decoder(draft_config, dtype, draft_seed, scale, device, attention, num_positions, spoil)
        return ModelNet(draft, draft.new_cache(num_slots, kv_dtype), vocab)
    if method == "block":
        return _tiny_block_net(target, num_slots, kv_dtype, draft_vocab or vocab, draft_seed, scale, attention, traits)
    head_config = tiny_config(1, hidden, vocab, head_dim=head_dim)
    kind = "eagle3" if method in ("eagle3", "peagle", "hybrid") else "eagle"
    if method == "peagle":
        traits = {"mask_token_id": vocab - 1, **traits}
    width = draft_vocab or vocab
    layers = AUX_LAYERS if kind == "eagle3" else ()
    head = EagleConfig(kind, head_config, hidden, width, False, False, width != vocab, layers)  # type: ignore[arg-type]
    head = replace(head, **traits)
    assert max(head.aux_layers, default=0) <= target.config.num_layers, "as files of heads are checked"
    tensors = RandomTensors(
        {n: s for n, s in expected_eagle_tensors(head).items() if n not in ("d2t", "t2d")},
        HEAD_SEED + draft_seed,
        scale,
    )
    if spoil is not None:
        spoil(tensors._tensors)
    _add_maps(tensors, vocab, width)
    if (shard := ModelShard.of_head(head.decoder, group)) is not None:
        head = replace(head, decoder=shard.config)
    weights = WeightLoader(tensors, dtype, device, shard=shard)
    model = EagleHead(head, weights, target, attention(head.decoder, device), num_positions)
    return EagleNet(model, model.new_cache(num_slots, kv_dtype))


def _tiny_block_net(
    target: Decoder, num_slots: int, kv_dtype: torch.dtype, width: int, seed: int, scale: float,
    attention: AttentionOf, traits: dict[str, Any],
) -> BlockNet:  # fmt: skip
    """Make a block drafter of two layers. `traits`: fields of its `BlockConfig`."""
    c = target.config
    layers = tiny_config(2, c.hidden_size, c.vocab_size, head_dim=c.head_dim, qk_norm=True)
    block = BlockConfig(layers, BLOCK_SIZE, c.vocab_size - 1, AUX_LAYERS, c.hidden_size, width, has_lm_head=True)
    block = replace(block, has_vocab_map=width != c.vocab_size, **traits)
    shapes = {name: shape for name, shape in expected_block_tensors(block).items() if name not in ("d2t", "t2d")}
    tensors = RandomTensors(shapes, HEAD_SEED + seed, scale)
    _add_maps(tensors, c.vocab_size, width)
    weights = WeightLoader(tensors, target.embedding_VE.dtype, target.device)
    backend = attention(block.decoder, target.device)
    model = BlockDrafter(block, weights, target, backend, target.num_positions)
    return BlockNet(model, model.new_cache(num_slots, kv_dtype))


def _add_maps(tensors: RandomTensors, vocab: int, width: int) -> None:
    """Add the maps of a reduced vocabulary. It has every second token, so that the offsets are not constant."""
    ids = torch.tensor([min(2 * i, vocab - width + i) for i in range(width)])
    tensors._tensors["d2t"] = ids - torch.arange(width)
    tensors._tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)


def as_schedule(shape: DraftShape | Schedule | None) -> Schedule:
    return shape if isinstance(shape, ByBatch) else ByBatch.always(shape)


def tiny_oracle(
    method: str = "none",
    shape: DraftShape | Schedule | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    num_pages: int = 64,
    page_size: int = 4,
    max_batch_size: int = 4,
    prefill_chunk_tokens: int = 32,
    prefix_cache: bool = True,
    vocab: int = VOCAB,
    draft_vocab: int | None = None,
    draft_seed: int = 0,
    scale: float = 0.25,
    hidden: int = 32,
    eos: tuple[int, ...] = (),
    device: torch.device = CPU,
    num_layers: int | None = None,
    spoil: Spoil | None = None,
    spoil_draft: Spoil | None = None,
    coupled: bool = False,
    family: str = "llama",
    **traits: Any,
) -> OracleEngine:
    """Make the oracle, which computes one sequence after the other in plain Python. `draft_seed` 0 makes a draft that
    often agrees with the target (draft_model: the target itself with one layer less). `coupled`: see `DraftParts`.
    `traits`: fields of an EAGLE head's `EagleConfig`."""
    config = target_config(family, num_layers or num_target_layers(method), hidden, vocab)
    target = tiny_decoder(config, dtype, scale=scale, device=device, spoil=spoil)
    pool = PagePool(num_pages, page_size)
    num_slots = num_pages * page_size
    net = None
    if METHODS[method].net is not None:
        net = tiny_draft_net(
            method,
            target,
            num_slots,
            dtype,
            draft_vocab=draft_vocab,
            draft_seed=draft_seed,
            scale=scale,
            spoil=spoil_draft,
            **traits,
        )

    parts = DraftParts(device, ops_for(device, dtype), net, (1, 3), coupled, shared=None)
    proposer = proposer_of(method, as_schedule(shape), parts, vocab, page_size)
    max_length = min(MAX_LENGTH, num_slots - proposer.num_lookahead)
    return OracleEngine(
        target,
        proposer,
        target.new_cache(num_slots, dtype),
        pool,
        max_length=max_length,
        max_batch_size=max_batch_size,
        prefill_chunk_tokens=prefill_chunk_tokens,
        prefix_cache=prefix_cache,
        eos_token_ids=eos,
    )


def tiny_device_engine(
    method: str = "none",
    shape: DraftShape | Schedule | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    kv_dtype: torch.dtype | None = None,
    num_pages: int = 64,
    page_size: int = 4,
    max_batch_size: int = 4,
    prefill_chunk_tokens: int = 32,
    prefix_cache: bool = True,
    vocab: int = VOCAB,
    draft_vocab: int | None = None,
    draft_seed: int = 0,
    scale: float = 0.25,
    hidden: int = 32,
    num_layers: int | None = None,
    eos: tuple[int, ...] = (),
    device: torch.device = CPU,
    graphs: GraphMode = "none",
    simulate: float | None = None,
    backend: Backend = PagedAttention,
    fixed_shapes: bool = True,
    threads: ThreadGovernor | None = None,
    head_dim: int = 8,
    graph_tokens: int = 0,
    piece_sizes: Sequence[int] = (),
    piece_runner: Any = None,
    compiled: bool = False,
    chunk_cost: ChunkCost | None = None,
    spoil: Spoil | None = None,
    spoil_draft: Spoil | None = None,
    coupled: bool = False,
    group: Group | None = None,
    min_lane: int | None = None,
    cascade: GroupLimits | None = None,
    deterministic: bool = False,
    family: str = "llama",
    division: Division = "tensors",
    num_checkpoints: int = 3,
    costs: RoundCosts | None = None,
    budget: VerifyBudget | None = None,
    **traits: Any,
) -> Engine:
    """Make the engine as it runs on a GPU, with the oracle's weights; on a CPU it has the reference kernels. `kv_dtype`
    None: `dtype`. `num_layers`: the layers of the target; None: the number that `method` needs. `chunk_cost`: the cost
    of chunks where shapes are fixed. `min_lane`: the least requests of a lane; None: there is one lane. `piece_sizes`:
    the sizes of prompts in pieces, captured by `piece_runner`; empty: prompts are computed as a whole. `deterministic`:
    see `Grammars`. `division`: the ranks' division of the target. `num_checkpoints`: checkpoints of states, if the
    family is a hybrid. `costs`: see `Engine`. `budget`: the nodes that rounds verify; None: all."""

    def paged(config: ModelConfig, device: torch.device) -> AttentionBackend:
        return backend(config.num_heads, config.num_kv_heads, config.head_dim, dtype, device, **score_traits(config))

    config = target_config(family, num_layers or num_target_layers(method), hidden, vocab, head_dim)
    schedule, kind = as_schedule(shape), METHODS[method].net
    offset = None if kind is None or method == "block" else kind.draft_kv_offset
    lookahead = MAX_ROOM if method == "none" else max(num_lookahead(one, offset) for one in schedule.items)
    if method == "block":
        lookahead = max(lookahead, BLOCK_SIZE)
    max_length = min(MAX_LENGTH, num_pages * page_size - lookahead)
    # The tables have the same size as in real runs, so that a read past them fails.
    target = tiny_decoder(config, dtype, 0, scale, device, paged, max_length + lookahead + 1, spoil, group, division)
    has_own_requests = division == "requests" and group is not None
    num_slots = (num_pages + 1) * page_size  # the last page is spare
    ops = ops_for(device, dtype)
    net = None
    if METHODS[method].net is not None:
        net = tiny_draft_net(
            method, target, num_slots, kv_dtype or dtype, draft_vocab=draft_vocab, draft_seed=draft_seed,
            scale=scale, attention=paged, spoil=spoil_draft, group=None if has_own_requests else group,
            whole=config, **traits,
        )  # fmt: skip
    shared, scored = SharedTexts(4096, [], device, ops, with_network=method == "hybrid"), budget is not None
    parts = DraftParts(device, ops, net, (1, 3), coupled, config.delta is not None, shared, scored=scored)
    methods = schedule.map(lambda one: make_method(method, one, parts))
    assert max(one.num_lookahead for one in methods.items) == lookahead or config.delta is not None
    parts_of_rounds = RoundParts(
        target, methods, kv_dtype or dtype, page_size, eos, simulate, fixed_shapes,
        None if min_lane is None else LaneLimits(min_lane, 16 * min_lane), cascade, group,
        num_checkpoints=num_checkpoints, budget=budget,
    )  # fmt: skip
    rounds, trunks = parts_of_rounds.make(max_batch_size, max_length, num_slots), EAGER
    if piece_sizes:
        pieces = PromptPieces.of_models(target, net, compiled=compiled)
        trunks = piecewise_trunks(pieces, rounds.caches[0], net, piece_sizes, piece_runner)
    executor = RoundExecutor(rounds.items, max_batch_size, device, graphs, rounds.lanes, budget=budget)
    chunk_cost = chunk_cost or ChunkCost(1.0, prefill_chunk_tokens // 4, graph_tokens)
    engine = Engine(
        executor,
        EngineSizes(num_pages, page_size, max_length, max_batch_size, prefill_chunk_tokens),
        prefix_cache=prefix_cache,
        chunk_cost=chunk_cost if fixed_shapes else None,
        threads=threads,
        trunks=trunks,
        deterministic=deterministic,
        lockstep=Lockstep(group) if has_own_requests and group is not None else None,
        costs=costs,
    )
    return engine


def tiny_engine(method: str = "none", shape: DraftShape | Schedule | None = None, **settings: Any) -> Engine:
    """Make the engine as it runs on a CPU, with the oracle's weights. `settings`: those of `tiny_device_engine`."""
    return tiny_device_engine(method, shape, backend=_torch_attention, fixed_shapes=False, **settings)


def round_of(engine: Engine) -> Round:
    """Return the engine's round for the smallest batch, which also computes prompts."""
    return engine.executor.rounds.items[0]


def _torch_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, **traits: Any
) -> TorchAttention:
    return TorchAttention(num_heads, num_kv_heads, head_dim, device, chunk=CHUNK, **traits)


def steps_until(done: Mapping[int, Completion], count: int) -> Iterator[int]:
    """Count steps until `done` has `count` results. An engine without progress fails a test, and does not hang."""
    for step in range(10_000):
        if len(done) == count:
            return
        yield step
    raise AssertionError("the engine makes no progress")


def run(
    engine: Engine | OracleEngine,
    prompts: list[list[int]],
    params: SamplingParams,
    check: bool = True,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> list[Completion]:
    """Run all prompts to the end, and return results in their order. Page counts are checked after every step."""
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, params, RngKey(params.seed or 0, i, 0), bad_words=bad_words))
    done: dict[int, Completion] = {}
    for _ in steps_until(done, len(prompts)):
        for completion in engine.step():
            done[completion.request_id] = completion
        if check:
            engine.check_integrity()
    return [done[i] for i in range(len(prompts))]


def run_requests(engine: Any, wanted: list[Request]) -> list[Completion]:
    """Run all requests to the end, and return results in their order. Page counts are checked after every step."""
    for request in wanted:
        engine.submit(request)
    done: dict[int, Completion] = {}
    for _ in steps_until(done, len(wanted)):
        done |= {completion.request_id: completion for completion in engine.step()}
        engine.check_integrity()
    return [done[request.request_id] for request in wanted]


def random_prompts(
    count: int, seed: int = 0, vocab: int = VOCAB, longest: int = 40, shared: int = 0
) -> list[list[int]]:
    """Draw prompts of 1 to `longest` tokens after `shared` common ones. Token 0 (end of sequence) does not occur."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(size: int) -> list[int]:
        return torch.randint(1, vocab, (size,), generator=generator).tolist()

    prefix = tokens(shared)
    return [prefix + tokens(int(torch.randint(1, longest + 1, (1,), generator=generator))) for _ in range(count)]


def trust_network(engine: Engine, right: float) -> None:
    """Have an engine of `hybrid` remember how many drafts of the network were right, of 100 that were expected to be:
    the tiny network has small probabilities."""
    method = engine.executor.rounds.items[0].method
    assert isinstance(method, HybridDraft)
    sums = method.shared.calibration.sums_2Q.view(2, FORECAST + 1, -1)[:, NETWORK:]
    sums[0], sums[1] = 100.0, right
