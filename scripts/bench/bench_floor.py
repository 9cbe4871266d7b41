"""The least time that a round can take: the bytes that must be read over the measured copy bandwidth, or the operations
over the measured matrix rate, whichever is longer.

Counted are the weights of the target once a round and those of the draft once a pass (without embeddings, of which a
round reads a few rows), the keys and values of all running sequences, and the multiplications of all drafted rows. Of
experts, those count that the tokens of the round choose, as measured or uniformly; each is multiplied with its tokens.
Each rank has a part of the target and of a draft head, whose vocabulary is whole, and all of a draft model. Activations
are not counted, because they stay in caches on a GPU. A weight in FP8 is one byte, at twice the matrix rate of
bfloat16.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from specbatch.models.blocks.config import BlockConfig, expected_block_tensors
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.eagle_config import expected_eagle_tensors
from specbatch.models.formats.block_files import BlockCheckpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.models.linears.integer_quantization import IntegerQuantization
from specbatch.models.linears.layer_quantization import LayerQuantization
from specbatch.models.linears.sharded import part_of_head
from specbatch.models.pass_weights import ExpertCurve, PassWeights, round_bytes
from specbatch.setup.resolve import ResolvedRun

_NO_WEIGHTS = PassWeights(0)


@dataclass(frozen=True)
class DeviceRates:
    """The measured rates of the device."""

    copy_bytes_per_second: float  # bytes that are read and written
    matmul_flops_per_second: float


_CONTEXT = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")  # projections of a block drafter's past positions


@dataclass(frozen=True)
class Pass:
    """One forward pass of a network: `weights` are read once and multiplied with each row."""

    weights: PassWeights
    rows: float  # the rows of one sequence
    kv_parameters: int  # the numbers that are read for each token of the context
    attention_width: int  # heads * head_dim * layers
    in_fp8: PassWeights = _NO_WEIGHTS  # the weights in FP8: a byte each, at twice the arithmetic
    is_divided: bool = True  # True: ranks divide the weights, except `undivided` of them
    undivided: int = 0
    saved: int = 0  # the bytes that weights in whole numbers save, compared with 16 bits


def measure_device(device: torch.device) -> DeviceRates:
    """Measure the medians of a 4 GB copy and of an 8192^3 GEMM in bf16 (on a CPU: 64 MB, 1024^3 in float32)."""
    copy = _copy_rate(device)
    _give_back(device)  # before the library makes a workspace, which torch would put into the memory of the copy
    rates = DeviceRates(copy, _matmul_rate(device))
    _give_back(device)
    return rates


def _give_back(device: torch.device) -> None:
    """Free the device's memory, because an engine takes the free memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _copy_rate(device: torch.device) -> float:
    size = 4 << 30 if device.type == "cuda" else 64 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device) -> float:
    width, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.empty(width, width, dtype=dtype, device=device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * width**3 / _median_seconds(lambda: torch.mm(a, b, out=out), device)


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(31)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))


def round_passes(run: ResolvedRun, committed: float) -> list[Pass]:
    """Return the passes of one round: verify, draft-extend, and a draft pass for each further step. `committed`: the
    tokens that a round commits on average, over which draft-extend runs."""
    section = run.config.speculation
    nodes = 1 if section.method == "none" else section.num_draft_tokens or 1
    passes = [_decoder_pass(run.target.config, nodes, run.quantization)]
    steps, topk = section.num_steps or 0, section.topk
    if isinstance(run.draft, BlockCheckpoint):
        passes += _block_passes(run.draft.config, run.target.config, committed)
    elif isinstance(run.draft, EagleCheckpoint):
        extend = _head_pass(run.draft, run.target.config, committed, takes_target_features=True)
        if run.draft.config.mask_token_id is not None:  # one pass over all mask tokens
            topk, steps = steps - 1, min(steps, 2)
        step = _head_pass(run.draft, run.target.config, topk, takes_target_features=False)
        is_divided = part_of_head(run.draft.config.decoder, 0, run.config.engine.tensor_parallel) is not None
        passes += [replace(one, is_divided=is_divided) for one in (extend, *[step] * (steps - 1))]
    elif run.draft is not None:
        passes += [_decoder_pass(run.draft.config, n) for n in (committed, *[topk] * (steps - 1))]
        passes[1:] = [replace(one, is_divided=False) for one in passes[1:]]
    return passes


def round_floor(
    run: ResolvedRun,
    rates: DeviceRates,
    batch: float,
    context: float,
    committed: float,
    experts: ExpertCurve | None = None,
) -> float:
    """Return the least seconds of a round over `batch` sequences with `context` tokens each on average. With ranks it
    is the time of each rank. `experts`: the measured experts of a layer of the target; None: routing is uniform."""
    read, flops = 0.0, 0.0
    ranks = run.config.engine.tensor_parallel
    for i, p in enumerate(round_passes(run, committed)):
        curve, itemsize = (experts, run.expert_itemsize) if i == 0 else (None, None)  # the target comes first
        share = 1 / ranks if p.is_divided else 1
        kv_bytes = batch * context * p.kv_parameters * run.kv_dtype.itemsize
        bytes_ = round_bytes(p.weights, run.dtype.itemsize, batch * p.rows, kv_bytes, curve, itemsize)
        bytes_ -= p.in_fp8.read(batch * p.rows, curve) * (run.dtype.itemsize - 1) + p.saved
        read += share * bytes_ + (1 - share) * p.undivided * run.dtype.itemsize
        active = share * (p.weights.active - p.undivided) + p.undivided
        flops += batch * p.rows * (2 * active - share * p.in_fp8.active + share * 4 * context * p.attention_width)
    if (delta := run.target.config.delta) is not None:
        read += 2 * batch * delta.matrix_bytes  # states are read and written
    return max(read / rates.copy_bytes_per_second, flops / rates.matmul_flops_per_second)


def prefill_floor(run: ResolvedRun, rates: DeviceRates, lengths: list[int]) -> float:
    """Return the least seconds to compute prompts of these lengths by target and draft. Only last tokens need the LM
    head."""
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    target = run.target.config
    heads = len(lengths) * target.vocab_size * target.hidden_size
    whole = _decoder_pass(target, 1, run.quantization)
    embedded = target.vocab_size * target.hidden_size
    body = whole.weights.active - embedded
    width, drafting = target.num_heads * target.head_dim * len(target.cached_layers), 0
    if isinstance(run.draft, BlockCheckpoint):
        drafting = _block_passes(run.draft.config, target, 1)[1].weights.total
    elif isinstance(run.draft, EagleCheckpoint):
        head = run.draft.config
        last = head.draft_vocab_size if head.has_lm_head else target.vocab_size
        heads += len(lengths) * last * target.hidden_size
        head_weights = _head_pass(run.draft, target, 1, takes_target_features=True).weights.total
        drafting = head_weights - last * target.hidden_size
        width += head.decoder.num_heads * head.decoder.head_dim
    elif run.draft is not None:
        c = run.draft.config
        heads += len(lengths) * c.vocab_size * c.hidden_size
        drafting = _decoder_pass(c, 1).weights.active - c.vocab_size * c.hidden_size
        width += c.num_heads * c.head_dim * c.num_layers
    # Attention is causal, so it takes half of 4 * n^2.
    flops = tokens * (2 * (body + drafting) - whole.in_fp8.active) + 2 * heads + 2 * squares * width
    read = round_bytes(whole.weights, run.dtype.itemsize, tokens, 0, expert_itemsize=run.expert_itemsize)
    read += (drafting - embedded) * run.dtype.itemsize
    read -= whole.in_fp8.read(tokens) * (run.dtype.itemsize - 1) + whole.saved
    seconds = max(flops / rates.matmul_flops_per_second, read / rates.copy_bytes_per_second)
    return seconds / run.config.engine.tensor_parallel  # a draft model is not divided, but small


def _decoder_pass(config: ModelConfig, rows: float, quantization: LayerQuantization | None = None) -> Pass:
    # Without experts, whose bytes `expert_itemsize` counts and whose inputs are not in FP8.
    tensors = {name: shape for name, shape in expected_tensors(config).items() if ".experts." not in name}
    in_fp8, saved = {}, 0
    if isinstance(quantization, IntegerQuantization):
        saved = quantization.saved_bytes(tensors, 2)
    elif quantization is not None and quantization.is_kept:
        in_fp8 = {name: tensors[name] for name in tensors if quantization.covers(name.removesuffix(".weight"))}
    return Pass(
        PassWeights.of_model(config),
        rows,
        2 * len(config.cached_layers) * config.num_kv_heads * config.head_dim,
        config.num_heads * config.head_dim * len(config.cached_layers),
        PassWeights.of_tensors(in_fp8, config.moe),
        saved=saved,
    )


def _head_pass(draft: EagleCheckpoint, target: ModelConfig, rows: float, takes_target_features: bool) -> Pass:
    head = draft.config
    c = head.decoder
    shapes = {name: s for name, s in expected_eagle_tensors(head).items() if name != "embed_tokens.weight"}
    if head.kind == "eagle3" and not takes_target_features:
        del shapes["fc.weight"]  # further steps read the head's own features
    matrices = _num_matrix_parameters(shapes)
    if not head.has_lm_head:
        matrices += target.vocab_size * target.hidden_size
    own = head.draft_vocab_size * c.hidden_size if head.has_lm_head else 0
    cached, width = 2 * c.num_layers * c.num_kv_heads * c.head_dim, c.num_layers * c.num_heads * c.head_dim
    return Pass(PassWeights(matrices), rows, cached, width, undivided=own)


def _block_passes(block: BlockConfig, target: ModelConfig, committed: float) -> list[Pass]:
    """Return the pass over a block, and the one that writes the keys and values of committed tokens. Ranks do not
    divide them."""
    c, shapes = block.decoder, expected_block_tensors(block)
    layers = {name: shape for name, shape in shapes.items() if name.startswith("layers.")}
    context = {name: s for name, s in shapes.items() if name == "fc.weight" or name.endswith(_CONTEXT)}
    matrices = _num_matrix_parameters(layers)
    matrices += block.draft_vocab_size * c.hidden_size if block.has_lm_head else target.vocab_size * target.hidden_size
    cached = 2 * c.num_layers * c.num_kv_heads * c.head_dim
    width = c.num_layers * c.num_heads * c.head_dim
    drafting = Pass(PassWeights(matrices), block.block_size, cached, width, is_divided=False)
    return [drafting, Pass(PassWeights(_num_matrix_parameters(context)), committed, 0, 0, is_divided=False)]


def _num_matrix_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
