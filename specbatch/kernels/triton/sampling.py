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
from specbatch.kernels.triton.parts.filters import LOWEST, bar_of_filters, is_finite, kept_weight, scale_of
from specbatch.kernels.triton.parts.groups import TILE, Groups, first_of_peak, ids_of, max_of_groups, tile_of
from specbatch.kernels.triton.parts.launch import launch

_NO_TOKEN = tl.constexpr(NO_TOKEN)
# The filters of a row have one program, which reads this number of groups at once. With more of them for each warp, its
# registers would leave room for fewer programs.
_FILTER_TILE, _FILTER_WARPS = 8, 8


# Argmax


@triton.jit
def _argmax_of_groups(
    logits_ptr, peak_ptr, out_ptr, margin_ptr, stride, vocab, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, OTHERWISE: tl.constexpr, HAS_MARGIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    peaks = tl.load(peak_ptr + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    peak, best, group, ids, x = first_of_peak(logits_ptr + row * stride, peaks, vocab, GROUP, GROUPS)
    finite = is_finite(peak)
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
    groups = max_of_groups(logits_RV)
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    launch(
        _argmax_of_groups, (rows,),
        logits_RV, groups.peaks_RG, out, out if margin_R is None else margin_R, logits_RV.stride(0), vocab,
        groups.number, GROUP=groups.size, GROUPS=groups.padded, OTHERWISE=otherwise, HAS_MARGIN=margin_R is not None,
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


# Sampling


@triton.jit
def _filters(
    logits_ptr, peaks_ptr, temperature_ptr, top_k_ptr, top_p_ptr, list_ptr, peak_ptr, bar_ptr, last_id_ptr,
    stride, vocab, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute what the kernels after this one need of a row: its peak, and the bar of its filters."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, peaks_row_ptr, groups = logits_ptr + row * stride, peaks_ptr + row * num_groups, tl.arange(0, GROUPS)
    peak = tl.max(tl.load(peaks_row_ptr + groups, mask=groups < num_groups, other=float("-inf")).to(tl.float32))
    tl.store(peak_ptr + row, peak)
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0.0) & is_finite(peak):
        bar, last_id = bar_of_filters(
            row_ptr, peaks_row_ptr, list_ptr + row * num_groups, vocab, num_groups, peak, temperature,
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), GROUP, GROUPS, TILE, TILES,
        )  # fmt: skip
        tl.store(bar_ptr + row, bar)
        tl.store(last_id_ptr + row, last_id)


@triton.jit
def _row_weights(
    row_ptr, row, ids, vocab, temperature, min_p_ptr, peak_ptr, bar_ptr, last_id_ptr,
):  # fmt: skip
    """Return `kept_weight` of some tokens of a row, by what `_filters` has computed."""
    bar, last_id, min_p = tl.load(bar_ptr + row), tl.load(last_id_ptr + row), tl.load(min_p_ptr + row)
    return kept_weight(row_ptr, ids, vocab, tl.load(peak_ptr + row), scale_of(temperature), bar, last_id, min_p)


@triton.jit
def _sum_weights(
    logits_ptr, temperature_ptr, min_p_ptr, peak_ptr, bar_ptr, last_id_ptr, sum_ptr, stride, vocab, num_groups,
    num_chunks, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the weights of each group. Rows that are not finite have any sums."""
    row, groups = tile_of(num_chunks, TILE)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        weight = _row_weights(
            logits_ptr + row * stride, row, ids_of(groups, GROUP), vocab, temperature, min_p_ptr, peak_ptr, bar_ptr,
            last_id_ptr,
        )  # fmt: skip
        tl.store(sum_ptr + row * num_groups + groups, tl.sum(weight.to(tl.float64), 1), mask=groups < num_groups)


@triton.jit
def _sample(
    logits_ptr, peaks_ptr, sum_ptr, temperature_ptr, min_p_ptr, peak_ptr, bar_ptr, last_id_ptr, uniform_ptr, out_ptr,
    stride, vocab, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr, groups = logits_ptr + row * stride, tl.arange(0, GROUPS)
    at, real = row * num_groups + groups, groups < num_groups
    temperature, finite = tl.load(temperature_ptr + row), is_finite(tl.load(peak_ptr + row))
    token = tl.full((), _NO_TOKEN, tl.int32)
    if (temperature > 0.0) & finite:
        sums = tl.load(sum_ptr + at, mask=real, other=0.0)
        target = tl.load(uniform_ptr + row) * tl.sum(sums)
        group, before = pick_block(sums, target, groups)
        ids = group * GROUP + tl.arange(0, GROUP)
        weight = _row_weights(
            row_ptr, row, ids, vocab, temperature, min_p_ptr, peak_ptr, bar_ptr, last_id_ptr
        )  # fmt: skip
        token = pick_id(weight.to(tl.float64), before, target, ids)
    elif finite:
        peaks = tl.load(peaks_ptr + at, mask=real, other=float("-inf"))
        _, token, _, _, _ = first_of_peak(row_ptr, peaks, vocab, GROUP, GROUPS)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def _distribution(
    logits_ptr, peaks_ptr, sum_ptr, temperature_ptr, min_p_ptr, peak_ptr, bar_ptr, last_id_ptr, out_ptr, stride,
    vocab, num_groups, num_chunks, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, own_groups = tile_of(num_chunks, TILE)
    row_ptr, ids, groups = logits_ptr + row * stride, ids_of(own_groups, GROUP), tl.arange(0, GROUPS)
    at, real = row * num_groups + groups, groups < num_groups
    temperature, finite = tl.load(temperature_ptr + row), is_finite(tl.load(peak_ptr + row))
    if (temperature > 0.0) & finite:
        scale = (1.0 / tl.sum(tl.load(sum_ptr + at, mask=real, other=0.0))).to(tl.float32)
        weight = _row_weights(
            row_ptr, row, ids, vocab, temperature, min_p_ptr, peak_ptr, bar_ptr, last_id_ptr
        )  # fmt: skip
        tl.store(out_ptr + row * vocab + ids, weight * scale, mask=ids < vocab)
    else:
        peaks = tl.load(peaks_ptr + at, mask=real, other=float("-inf"))
        _, best, _, _, _ = first_of_peak(row_ptr, peaks, vocab, GROUP, GROUPS)
        one_hot = tl.where(finite, tl.where(ids == best, 1.0, 0.0), float("nan"))
        tl.store(out_ptr + row * vocab + ids, one_hot, mask=ids < vocab)


def _weights(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> tuple[Groups, tuple[Tensor, ...]]:
    """Return the groups of the logits, and what `_sample` and `_distribution` take first, up to the last ids."""
    (rows, vocab), device, stride = logits_RV.shape, logits_RV.device, logits_RV.stride(0)
    groups = max_of_groups(logits_RV)
    temperature_R, min_p_R = temperature_R.contiguous(), min_p_R.contiguous()
    # Each tensor is aligned. Otherwise Triton would compile the kernels again.
    peak_R, bar_R = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    last_id_R = torch.empty(rows, dtype=torch.int32, device=device)
    list_RG = torch.empty((rows, groups.number), dtype=torch.int32, device=device)
    sum_RG = torch.empty((rows, groups.number), dtype=torch.float64, device=device)
    launch(
        _filters, (rows,),
        logits_RV, groups.peaks_RG, temperature_R, top_k_R.contiguous(), top_p_R.contiguous(), list_RG, peak_R, bar_R,
        last_id_R, stride, vocab, groups.number,
        GROUP=groups.size, GROUPS=groups.padded, TILE=_FILTER_TILE, TILES=triton.cdiv(groups.padded, _FILTER_TILE),
        num_warps=_FILTER_WARPS,
    )  # fmt: skip
    launch(
        _sum_weights, (rows * groups.num_chunks,),
        logits_RV, temperature_R, min_p_R, peak_R, bar_R, last_id_R, sum_RG, stride, vocab, groups.number,
        groups.num_chunks, GROUP=groups.size, TILE=TILE,
    )  # fmt: skip
    return groups, (logits_RV, groups.peaks_RG, sum_RG, temperature_R, min_p_R, peak_R, bar_R, last_id_R)


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """See `kernels/torch/sampling.py`. Weights are float32 and their sums float64. Rows of `logits_RV` need not be
    contiguous to each other. The other arguments have the types of the reference kernel."""
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    groups, weights = _weights(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    launch(
        _sample, (rows,),
        *weights, uniform_R.contiguous(), out, logits_RV.stride(0), vocab, groups.number,
        GROUP=groups.size, GROUPS=groups.padded, num_warps=1,
    )  # fmt: skip
    return out


def distribution(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """See `kernels/torch/sampling.py`. `sample` draws from this distribution."""
    rows, vocab = logits_RV.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits_RV.device)
    groups, weights = _weights(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    launch(
        _distribution, (rows * groups.num_chunks,),
        *weights, out, logits_RV.stride(0), vocab, groups.number, groups.num_chunks,
        GROUP=groups.size, GROUPS=groups.padded, TILE=TILE,
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
