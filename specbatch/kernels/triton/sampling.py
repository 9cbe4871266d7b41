# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Random numbers, sampling and draws (Triton). `parts/filters.py` says how top-k and top-p are found without a sort.

Shape suffixes as in `kernels/torch/sampling.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.kernels.triton.parts.draws import block_sums, blocks_of, pick_block, pick_id, probabilities
from specbatch.kernels.triton.parts.filters import LOWEST, NO_ID, bar_of_filters, kept_weight, range_of
from specbatch.kernels.triton.parts.launch import launch

_NO_TOKEN = tl.constexpr(NO_TOKEN)
# The argmax of a row is found in the first of its *groups* that has the largest value. One load of a warp, of 16 bytes
# for each thread, is a group, so that no threads of two warps have to meet. A program has 16 groups.
_GROUP_BYTES, _GROUPS = 512, 16


# Argmax


@triton.jit
def _max_of_groups(
    logits_ptr, peak_ptr, stride, vocab, num_groups, num_chunks, GROUP: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Compute the largest values of some groups of a row. Per logit it has a conversion and two comparisons: with more
    work, such as a search for the index, it would take longer than the memory does."""
    row, chunk = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(peak_ptr.dtype.element_ty)
    x = tl.minimum(x, float("inf"))  # the smaller of NaN and +inf is +inf
    tl.store(peak_ptr + row * num_groups + groups, tl.max(x, 1), mask=groups < num_groups)


@triton.jit
def _argmax_of_groups(
    logits_ptr, peak_ptr, out_ptr, margin_ptr, stride, vocab, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, OTHERWISE: tl.constexpr, HAS_MARGIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    peaks = tl.load(peak_ptr + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    peak = tl.max(peaks)
    group = tl.min(tl.where(peaks == peak, groups, NO_ID))
    ids = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(peak_ptr.dtype.element_ty)
    best = tl.min(tl.where(x == peak, ids, NO_ID))
    finite = (peak > LOWEST) & (peak < float("inf"))
    tl.store(out_ptr + row, tl.where(finite, best, OTHERWISE).to(tl.int64))
    if HAS_MARGIN:
        # The second value of the whole row is that of the best group, or the best of another group.
        second = tl.maximum(
            tl.max(tl.where(groups == group, float("-inf"), peaks)), tl.max(tl.where(ids == best, float("-inf"), x))
        )
        margin = tl.where(finite & (second > LOWEST), peak - second, float("inf"))
        tl.store(margin_ptr + row, margin.to(tl.float32))


def argmax(logits_RV: Tensor, otherwise: int = 0) -> Tensor:
    """See `kernels/torch/sampling.py`. Parts of a row run in parallel. Rows need not be contiguous to each other."""
    return _argmax(logits_RV, otherwise, None)


def argmax_and_margin(logits_RV: Tensor, otherwise: int = 0) -> tuple[Tensor, Tensor]:
    """See `kernels/torch/sampling.py`. It makes one pass over the logits, as `argmax` does."""
    margin = torch.empty(logits_RV.shape[0], dtype=torch.float32, device=logits_RV.device)
    return _argmax(logits_RV, otherwise, margin), margin


def _argmax(logits_RV: Tensor, otherwise: int, margin_R: Tensor | None) -> Tensor:
    """Compute `argmax`. `margin_R`: a tensor for the margins, or None."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    group = _GROUP_BYTES // logits_RV.element_size()
    num_groups = triton.cdiv(vocab, group)
    num_chunks = triton.cdiv(num_groups, _GROUPS)
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    peaks = torch.empty((rows, num_groups), dtype=wide, device=logits_RV.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    launch(
        _max_of_groups, (rows * num_chunks,),
        logits_RV, peaks, logits_RV.stride(0), vocab, num_groups, num_chunks, GROUP=group, GROUPS=_GROUPS, num_warps=4,
    )  # fmt: skip
    launch(
        _argmax_of_groups, (rows,),
        logits_RV, peaks, out, out if margin_R is None else margin_R, logits_RV.stride(0), vocab, num_groups,
        GROUP=group, GROUPS=triton.next_power_of_2(num_groups), OTHERWISE=otherwise, HAS_MARGIN=margin_R is not None,
        num_warps=1,
    )  # fmt: skip
    return out


# Random numbers


@triton.jit
def _low32(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _philox_uniform(seed, stream, sample, position, purpose):
    """Compute Philox4x32-10 of int64 tensors, as float64 in [0, 1)."""
    c0, c1, c2, c3 = _low32(position), _low32(sample << 8 | purpose), _low32(stream), _low32(stream >> 32)
    k0, k1 = _low32(seed), _low32(seed >> 32)
    factor0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    factor1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(factor0, c0), factor0 * c0
        high1, low1 = tl.umulhi(factor1, c2), factor1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = _low32(k0.to(tl.int64) + 0x9E3779B9)
        k1 = _low32(k1.to(tl.int64) + 0xBB67AE85)
    bits = (c0.to(tl.int64) << 21) | (c1 >> 11).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit(do_not_specialize=["count", "purpose"])
def _uniform(seed_ptr, stream_ptr, sample_ptr, position_ptr, out_ptr, count, purpose, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    seed = tl.load(seed_ptr + at, mask=real, other=0)
    stream = tl.load(stream_ptr + at, mask=real, other=0)
    sample = tl.load(sample_ptr + at, mask=real, other=0)
    position = tl.load(position_ptr + at, mask=real, other=0)
    tl.store(out_ptr + at, _philox_uniform(seed, stream, sample, position, purpose), mask=real)


def uniform(seed_R: Tensor, stream_R: Tensor, sample_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """See `kernels/torch/sampling.py`."""
    keys = [x.contiguous() for x in torch.broadcast_tensors(seed_R, stream_R, sample_R, position_R)]
    out = torch.empty(keys[0].shape, dtype=torch.float64, device=seed_R.device)
    count = out.numel()
    launch(_uniform, (triton.cdiv(count, 128),), *keys, out, count, purpose, BLOCK=128)
    return out


@triton.jit
def _sample(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, out_ptr, stride, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    best, peak, least, finite = range_of(row_ptr, vocab, BLOCK)
    token = tl.where(finite, best, _NO_TOKEN)
    if (temperature > 0.0) & finite:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        bar, last_id = bar_of_filters(row_ptr, vocab, peak, least, temperature, top_k, top_p, BLOCK, BLOCKS)
        lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
        sums = tl.zeros((BLOCKS,), tl.float64)
        for i in range(0, tl.cdiv(vocab, BLOCK)):
            weight = kept_weight(row_ptr, i * BLOCK + lanes, vocab, peak, temperature, bar, last_id, min_p)
            sums = tl.where(blocks == i, tl.sum(weight.to(tl.float64)), sums)
        target = tl.load(uniform_ptr + row) * tl.sum(sums)
        block, before = pick_block(sums, target, blocks)
        ids = block * BLOCK + lanes
        weight = kept_weight(row_ptr, ids, vocab, peak, temperature, bar, last_id, min_p)
        token = pick_id(weight.to(tl.float64), before, target, ids)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """See `kernels/torch/sampling.py`. Weights are float32 and their sums float64; each row has one program. Rows of
    `logits_RV` need not be contiguous to each other. The other arguments have the types of the reference kernel."""
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    block, blocks, num_warps = blocks_of(logits_RV)
    launch(
        _sample, (rows,),
        logits_RV, temperature_R.contiguous(), top_k_R.contiguous(), top_p_R.contiguous(), min_p_R.contiguous(),
        uniform_R.contiguous(), out, logits_RV.stride(0), vocab, BLOCK=block, BLOCKS=blocks, num_warps=num_warps,
    )  # fmt: skip
    return out


@triton.jit
def _distribution(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, stride, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row_ptr = logits_ptr + row * stride, out_ptr + row * vocab
    temperature = tl.load(temperature_ptr + row)
    best, peak, least, finite = range_of(row_ptr, vocab, BLOCK)
    lanes = tl.arange(0, BLOCK)
    if (temperature > 0.0) & finite:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        bar, last_id = bar_of_filters(row_ptr, vocab, peak, least, temperature, top_k, top_p, BLOCK, BLOCKS)
        sums = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, vocab, BLOCK):
            sums += kept_weight(row_ptr, start + lanes, vocab, peak, temperature, bar, last_id, min_p)
        scale = (1.0 / tl.sum(sums)).to(tl.float32)
        for start in range(0, vocab, BLOCK):
            ids = start + lanes
            weight = kept_weight(row_ptr, ids, vocab, peak, temperature, bar, last_id, min_p)
            tl.store(out_row_ptr + ids, weight * scale, mask=ids < vocab)
    else:
        for start in range(0, vocab, BLOCK):
            ids = start + lanes
            one_hot = tl.where(ids == best, 1.0, 0.0)
            tl.store(out_row_ptr + ids, tl.where(finite, one_hot, float("nan")), mask=ids < vocab)


def distribution(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """See `kernels/torch/sampling.py`. `sample` draws from this distribution."""
    rows, vocab = logits_RV.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits_RV.device)
    block, blocks, num_warps = blocks_of(logits_RV)
    launch(
        _distribution, (rows,),
        logits_RV, temperature_R.contiguous(), top_k_R.contiguous(), top_p_R.contiguous(), min_p_R.contiguous(),
        out, logits_RV.stride(0), vocab, BLOCK=block, BLOCKS=blocks, num_warps=num_warps,
    )  # fmt: skip
    return out


@triton.jit
def _draw(p_ptr, uniform_ptr, out_ptr, stride, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = p_ptr + row * stride
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    sums = block_sums(row_ptr, row_ptr, row_ptr, vocab, vocab, False, False, BLOCK, BLOCKS)
    target = tl.load(uniform_ptr + row) * tl.sum(sums)
    block, before = pick_block(sums, target, blocks)
    ids = block * BLOCK + lanes
    p = probabilities(row_ptr, row_ptr, row_ptr, ids, vocab, vocab, False, False)
    tl.store(out_ptr + row, pick_id(p, before, target, ids).to(tl.int64))


def draw(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """See `kernels/torch/sampling.py`. Rows of `p_RV` need not be contiguous to each other."""
    rows, vocab = p_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=p_RV.device)
    block, blocks, num_warps = blocks_of(p_RV)
    launch(
        _draw,
        (rows,),
        p_RV,
        uniform_R.contiguous(),
        out,
        p_RV.stride(0),
        vocab,
        BLOCK=block,
        BLOCKS=blocks,
        num_warps=num_warps,
    )
    return out
