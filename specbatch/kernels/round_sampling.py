# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Noise, sampling and chain acceptance on the device (Triton); the twins in `torch_round` say what each does.

Nothing is sorted. What top-k and top-p keep is everything above a logit, the *bar*, and the first few by id of those
that equal it. The bar is found by cutting an interval of logits at several pivots per pass over the row and narrowing
it to the values that occur in it (after FlashInfer's sorting-free sampling). It ends at one logit of the row, so that
ties are exact: equal probabilities are equal logits. With g = 1 and target k (top-k), or g the token's weight and
target p of the total (top-p), the bar is the lowest logit of the row above which the sum of g stays below the target.

A token's *weight* is exp((logit - peak) / temperature) in float32, 1 at the peak. Sums that decide between tokens are
made in a fixed order, so a row's token does not depend on what else is in the batch.

A NaN is read as +inf in what looks for a row's peak, so that the peak alone says whether the row is finite (see
`torch_round.finite_peak`): no maximum is relied on to carry a NaN along.

Shape suffixes as in `torch_round`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.torch_round import LOWEST_LOGIT, NO_TOKEN

_MAX_PASSES = tl.constexpr(128)  # each leaves a quarter of the interval: about 10 suffice, unless logits are contrived
_NO_ID = tl.constexpr(0x7FFFFFFF)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LOWEST = tl.constexpr(LOWEST_LOGIT)


# Argmax


@triton.jit
def _argmax_of_chunk(logits_ptr, value_ptr, id_ptr, stride, vocab, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(value_ptr.dtype.element_ty)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x)
    tl.store(value_ptr + row * tl.num_programs(1) + chunk, best)
    tl.store(id_ptr + row * tl.num_programs(1) + chunk, tl.min(tl.where(x == best, ids, _NO_ID)))


@triton.jit
def _argmax_of_chunks(value_ptr, id_ptr, out_ptr, num_chunks, CHUNKS: tl.constexpr, OTHERWISE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunks
    value = tl.load(value_ptr + at, mask=chunks < num_chunks, other=float("-inf"))
    ids = tl.load(id_ptr + at, mask=chunks < num_chunks, other=_NO_ID)
    peak = tl.max(value)
    best = tl.min(tl.where(value == peak, ids, _NO_ID))
    finite = (peak > _LOWEST) & (peak < float("inf"))
    tl.store(out_ptr + row, tl.where(finite, best, OTHERWISE).to(tl.int64))


def argmax(logits_RV: Tensor, otherwise: int = 0) -> Tensor:
    """`torch_round.argmax`, in chunks of a row side by side. Rows may lie apart."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    chunk = min(4096, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    value = torch.empty((rows, num_chunks), dtype=wide, device=logits_RV.device)
    ids = torch.empty((rows, num_chunks), dtype=torch.int32, device=logits_RV.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    _argmax_of_chunk[(rows, num_chunks)](logits_RV, value, ids, logits_RV.stride(0), vocab, CHUNK=chunk)
    _argmax_of_chunks[(rows,)](
        value, ids, out, num_chunks, CHUNKS=triton.next_power_of_2(num_chunks), OTHERWISE=otherwise, num_warps=1
    )
    return out


# Noise


@triton.jit
def _low32(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _philox_uniform(seed, stream, sample, position, purpose):
    """Philox4x32-10 of int64 tensors; a float64 in [0, 1)."""
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
    """`torch_round.uniform`."""
    keys = [x.contiguous() for x in torch.broadcast_tensors(seed_R, stream_R, sample_R, position_R)]
    out = torch.empty(keys[0].shape, dtype=torch.float64, device=seed_R.device)
    count = out.numel()
    _uniform[(triton.cdiv(count, 128),)](*keys, out, count, purpose, BLOCK=128)
    return out


# What a row's filters keep


@triton.jit
def _logits(row_ptr, ids, vocab):
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    # What masks write for "never" (the lowest finite number) is -inf here: differences of such numbers overflow.
    return tl.where(x > _LOWEST, x, float("-inf"))


@triton.jit
def _weight(x, peak, temperature):
    return tl.where(x == peak, 1.0, tl.exp((x - peak) / temperature))


@triton.jit
def _range(row_ptr, vocab, BLOCK: tl.constexpr):
    """Argmax, largest and least finite logit of a row, and whether it is finite."""
    lanes = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    best_id = lanes
    for start in range(0, vocab, BLOCK):
        x = tl.load(row_ptr + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        best_id = tl.where(x > most, start + lanes, best_id)
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(x > _LOWEST, x, float("inf")))
    peak = tl.max(most)
    finite = (peak > _LOWEST) & (peak < float("inf"))
    return tl.min(tl.where(most == peak, best_id, _NO_ID)), peak, tl.min(least), finite


@triton.jit
def _find_bar(row_ptr, vocab, peak, temperature, floor, low, target, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest logit above which the sum of g stays below `target`, and that sum; logits below `floor` do not exist.
    `low` is any number at which the sum reaches `target`."""
    lanes = tl.arange(0, BLOCK)
    high = peak
    above = tl.full((), 0.0, tl.float64)  # the sum above `high`
    # Always: sum above low >= target > sum above high, so the bar is in (low, high].
    passes = tl.where(low < high, _MAX_PASSES, 0)
    while passes > 0:
        quarter = (high - low) * 0.25
        pivot1, pivot2, pivot3 = low + quarter, low + (high - low) * 0.5, high - quarter
        sum1 = tl.zeros((BLOCK,), tl.float32)
        sum2 = tl.zeros((BLOCK,), tl.float32)
        sum3 = tl.zeros((BLOCK,), tl.float32)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _logits(row_ptr, start + lanes, vocab)
            x = tl.where(x >= floor, x, float("-inf"))
            g = _weight(x, peak, temperature) if BY_WEIGHT else tl.full((BLOCK,), 1.0, tl.float32)
            sum1 += tl.where(x > pivot1, g, 0.0)
            sum2 += tl.where(x > pivot2, g, 0.0)
            sum3 += tl.where(x > pivot3, g, 0.0)
            least = tl.minimum(least, tl.where(x > low, x, float("inf")))
            most = tl.maximum(most, tl.where(x <= high, x, float("-inf")))
        above1 = tl.sum(sum1.to(tl.float64))
        above2 = tl.sum(sum2.to(tl.float64))
        above3 = tl.sum(sum3.to(tl.float64))
        first, last = tl.min(least), tl.max(most)  # of the logits in (low, high]
        found = first >= last
        below1 = (above1 < target) & (found == 0)
        below2 = (above2 < target) & (found == 0)
        below3 = (above3 < target) & (found == 0)
        # Down to the lowest pivot above which the sum is below the target, up to the one under it.
        high = tl.where(below1, pivot1, tl.where(below2, pivot2, tl.where(below3, pivot3, last)))
        above = tl.where(below1, above1, tl.where(below2, above2, tl.where(below3, above3, above)))
        low = tl.where(below1 | found, low, tl.where(below2, pivot1, tl.where(below3, pivot2, pivot3)))
        passes = tl.where(found, 0, passes - 1)
    return high, above


@triton.jit
def _last_tie(row_ptr, vocab, bar, num_ties, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Id of the `num_ties`-th token by id whose logit is the bar; `vocab` if they are fewer."""
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    counts = tl.zeros((BLOCKS,), tl.int32)
    for i in range(0, tl.cdiv(vocab, BLOCK)):
        ids = i * BLOCK + lanes
        equal = (_logits(row_ptr, ids, vocab) == bar) & (ids < vocab)
        counts = tl.where(blocks == i, tl.sum(equal.to(tl.int32)), counts)
    block = tl.min(tl.where(tl.cumsum(counts, 0) >= num_ties, blocks, BLOCKS))
    wanted = num_ties - tl.sum(tl.where(blocks < block, counts, 0))
    ids = block * BLOCK + lanes
    equal = (_logits(row_ptr, ids, vocab) == bar) & (ids < vocab)
    return tl.min(tl.where(equal & (tl.cumsum(equal.to(tl.int32), 0) == wanted), ids, vocab))


@triton.jit
def _filters(row_ptr, vocab, peak, least, temperature, top_k, top_p, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The bar of top-k and top-p, and the last id that is kept of those that equal it."""
    bar = tl.full((), float("-inf"), tl.float32)
    last_id = tl.full((), 0, tl.int32) + vocab
    if (top_k > 0) & (top_k < vocab):
        low = least - tl.abs(least) * 0.01 - 1.0
        bar, _ = _find_bar(row_ptr, vocab, peak, temperature, bar, low, top_k.to(tl.float64), False, BLOCK)
    if top_p < 1.0:
        lanes = tl.arange(0, BLOCK)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _logits(row_ptr, start + lanes, vocab)
            sums += tl.where((x >= bar) & (x > float("-inf")), _weight(x, peak, temperature), 0.0)
        total = tl.sum(sums.to(tl.float64))
        target = top_p.to(tl.float64) * total
        # Where a weight is so low that all V tokens of such a weight together weigh less than what top-p may drop, the
        # sum above reaches the target; some room for roundings.
        drop = tl.maximum((1.0 - top_p) * total.to(tl.float32) / vocab, 1e-30)
        low = peak + temperature * (tl.log(drop) - 0.5) - tl.abs(peak) * 2.4e-7
        bar, above = _find_bar(row_ptr, vocab, peak, temperature, bar, low, target, True, BLOCK)
        ties = tl.ceil((target - above) / _weight(bar, peak, temperature).to(tl.float64))
        # Not a number where the bar weighs nothing; the token at which the sum reaches the target is kept.
        num_ties = tl.where((ties >= 1.0) & (ties < vocab), ties, tl.where(ties < 1.0, 1.0, vocab)).to(tl.int32)
        last_id = _last_tie(row_ptr, vocab, bar, num_ties, BLOCK, BLOCKS)
    return bar, last_id


@triton.jit
def _kept_weight(row_ptr, ids, vocab, peak, temperature, bar, last_id, min_p):
    """Weights of what all filters keep, float32, 0 for the others."""
    x = _logits(row_ptr, ids, vocab)
    weight = _weight(x, peak, temperature)
    kept = (x > bar) | ((x == bar) & (ids <= last_id))
    return tl.where(kept & (x > float("-inf")) & (weight >= min_p), weight, 0.0)


@triton.jit
def _pick_block(sums, target, blocks):
    """The first block at which the running sum exceeds `target`, and the sum in front of it."""
    hit = (sums > 0.0) & (tl.cumsum(sums, 0) > target)
    # Where nothing exceeds it, by a rounding: the last that holds anything.
    block = tl.min(tl.where(hit, blocks, tl.max(tl.where(sums > 0.0, blocks, 0))))
    return block, tl.sum(tl.where(blocks < block, sums, 0.0))


@triton.jit
def _pick_id(weight, before, target, ids):
    """Likewise the token within a block; never one of weight 0, unless all are."""
    hit = (weight > 0.0) & (before + tl.cumsum(weight, 0) > target)
    return tl.min(tl.where(hit, ids, tl.max(tl.where(weight > 0.0, ids, 0))))


@triton.jit
def _sample(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, out_ptr, stride, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    best, peak, least, finite = _range(row_ptr, vocab, BLOCK)
    token = tl.where(finite, best, _NO_TOKEN)
    if (temperature > 0.0) & finite:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        bar, last_id = _filters(row_ptr, vocab, peak, least, temperature, top_k, top_p, BLOCK, BLOCKS)
        lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
        sums = tl.zeros((BLOCKS,), tl.float64)
        for i in range(0, tl.cdiv(vocab, BLOCK)):
            weight = _kept_weight(row_ptr, i * BLOCK + lanes, vocab, peak, temperature, bar, last_id, min_p)
            sums = tl.where(blocks == i, tl.sum(weight.to(tl.float64)), sums)
        target = tl.load(uniform_ptr + row) * tl.sum(sums)
        block, before = _pick_block(sums, target, blocks)
        ids = block * BLOCK + lanes
        weight = _kept_weight(row_ptr, ids, vocab, peak, temperature, bar, last_id, min_p)
        token = _pick_id(weight.to(tl.float64), before, target, ids)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """`torch_round.sample`, with weights in float32 and their sums in float64; one program a row. Rows of `logits_RV`
    may lie apart. The other arguments have the types that the twin's docstring names."""
    rows, vocab = logits_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    block, blocks, num_warps = _blocks(logits_RV)
    _sample[(rows,)](
        logits_RV, temperature_R.contiguous(), top_k_R.contiguous(), top_p_R.contiguous(), min_p_R.contiguous(),
        uniform_R.contiguous(), out, logits_RV.stride(0), vocab, BLOCK=block, BLOCKS=blocks, num_warps=num_warps,
    )  # fmt: skip
    return out


def _blocks(x_RV: Tensor) -> tuple[int, int, int]:
    """Tokens in a block, blocks in a row (rounded up to a power of two), and warps."""
    assert x_RV.stride(-1) == 1
    vocab = x_RV.shape[-1]
    block = min(4096, triton.next_power_of_2(vocab))
    return block, triton.next_power_of_2(triton.cdiv(vocab, block)), 16 if block == 4096 else 4


@triton.jit
def _distribution(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, stride, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row_ptr = logits_ptr + row * stride, out_ptr + row * vocab
    temperature = tl.load(temperature_ptr + row)
    best, peak, least, finite = _range(row_ptr, vocab, BLOCK)
    lanes = tl.arange(0, BLOCK)
    if (temperature > 0.0) & finite:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        bar, last_id = _filters(row_ptr, vocab, peak, least, temperature, top_k, top_p, BLOCK, BLOCKS)
        sums = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, vocab, BLOCK):
            sums += _kept_weight(row_ptr, start + lanes, vocab, peak, temperature, bar, last_id, min_p)
        scale = (1.0 / tl.sum(sums)).to(tl.float32)
        for start in range(0, vocab, BLOCK):
            ids = start + lanes
            weight = _kept_weight(row_ptr, ids, vocab, peak, temperature, bar, last_id, min_p)
            tl.store(out_row_ptr + ids, weight * scale, mask=ids < vocab)
    else:
        for start in range(0, vocab, BLOCK):
            ids = start + lanes
            one_hot = tl.where(ids == best, 1.0, 0.0)
            tl.store(out_row_ptr + ids, tl.where(finite, one_hot, float("nan")), mask=ids < vocab)


def distribution(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """`torch_round.distribution`, as `sample` draws from it."""
    rows, vocab = logits_RV.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits_RV.device)
    block, blocks, num_warps = _blocks(logits_RV)
    _distribution[(rows,)](
        logits_RV, temperature_R.contiguous(), top_k_R.contiguous(), top_p_R.contiguous(), min_p_R.contiguous(),
        out, logits_RV.stride(0), vocab, BLOCK=block, BLOCKS=blocks, num_warps=num_warps,
    )  # fmt: skip
    return out


# Draws from probabilities


@triton.jit
def _probabilities(p_ptr, q_ptr, inverse_ptr, ids, vocab, q_width, SUBTRACT: tl.constexpr, MAPPED: tl.constexpr):
    """p, or max(p - q, 0), as float64."""
    real = ids < vocab
    p = tl.load(p_ptr + ids, mask=real, other=0.0).to(tl.float64)
    if SUBTRACT:
        if MAPPED:
            place = tl.load(inverse_ptr + ids, mask=real, other=-1)
            q = tl.load(q_ptr + place, mask=place >= 0, other=0.0)
        else:
            q = tl.load(q_ptr + ids, mask=ids < q_width, other=0.0)
        p = tl.maximum(p - q.to(tl.float64), 0.0)
    return tl.where(p > 0.0, p, 0.0)


@triton.jit
def _block_sums(
    p_ptr, q_ptr, inverse_ptr, vocab, q_width,
    SUBTRACT: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float64)
    for i in range(0, tl.cdiv(vocab, BLOCK)):
        p = _probabilities(p_ptr, q_ptr, inverse_ptr, i * BLOCK + lanes, vocab, q_width, SUBTRACT, MAPPED)
        sums = tl.where(blocks == i, tl.sum(p), sums)
    return sums


@triton.jit
def _draw(p_ptr, uniform_ptr, out_ptr, stride, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = p_ptr + row * stride
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    sums = _block_sums(row_ptr, row_ptr, row_ptr, vocab, vocab, False, False, BLOCK, BLOCKS)
    target = tl.load(uniform_ptr + row) * tl.sum(sums)
    block, before = _pick_block(sums, target, blocks)
    ids = block * BLOCK + lanes
    p = _probabilities(row_ptr, row_ptr, row_ptr, ids, vocab, vocab, False, False)
    tl.store(out_ptr + row, _pick_id(p, before, target, ids).to(tl.int64))


def draw(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """`torch_round.draw`; rows of `p_RV` may lie apart."""
    rows, vocab = p_RV.shape
    out = torch.empty(rows, dtype=torch.int64, device=p_RV.device)
    block, blocks, num_warps = _blocks(p_RV)
    _draw[(rows,)](
        p_RV, uniform_R.contiguous(), out, p_RV.stride(0), vocab, BLOCK=block, BLOCKS=blocks, num_warps=num_warps
    )
    return out


@triton.jit
def _accept_chain(
    drafts_ptr, q_ptr, inverse_ptr, p_ptr, num_drafts_ptr, temperature_ptr, accept_ptr, residual_ptr, sample_ptr,
    num_path_ptr, next_token_ptr, num_broken_ptr, vocab, q_width,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    greedy = tl.load(temperature_ptr + seq) == 0.0
    num_drafts = tl.load(num_drafts_ptr + seq).to(tl.int32)
    steps = tl.arange(0, BLOCK_D)
    real = (steps < num_drafts) & (steps < D)
    drafts = tl.load(drafts_ptr + seq * D + steps, mask=real, other=0)
    p = tl.load(p_ptr + (seq * (D + 1) + steps) * vocab + drafts, mask=real, other=0.0).to(tl.float64)
    place = drafts
    if MAPPED:
        place = tl.load(inverse_ptr + drafts, mask=real, other=-1).to(tl.int64)
    known = real & (place >= 0) & (place < q_width)
    q = tl.load(q_ptr + (seq * D + steps) * q_width + place, mask=known, other=0.0).to(tl.float64)
    q = tl.where(greedy, 1.0, q)
    broken = real & (q != q)  # all of that row is NaN, and the draft is rejected
    u = tl.load(accept_ptr + seq * D + steps, mask=real, other=0.0)
    accepted = real & (u * q < p)
    last = tl.min(tl.where(accepted, BLOCK_D, steps))  # the node behind which the next token comes
    last = tl.minimum(last, D)
    rejected = last < num_drafts

    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    p_row_ptr = p_ptr + (seq * (D + 1) + last) * vocab
    q_row_ptr = q_ptr + (seq * D + tl.minimum(last, D - 1)) * q_width
    sums = tl.zeros((BLOCKS,), tl.float64)
    subtract = rejected & (greedy == 0) & (tl.max((broken & (steps == last)).to(tl.int32)) == 0)
    if subtract:
        sums = _block_sums(p_row_ptr, q_row_ptr, inverse_ptr, vocab, q_width, True, MAPPED, BLOCK, BLOCKS)
        # No residual: p = q up to rounding, a rejection that happens with probability zero.
        subtract = tl.sum(sums) > 0.0
    if subtract == 0:
        sums = _block_sums(p_row_ptr, q_row_ptr, inverse_ptr, vocab, q_width, False, MAPPED, BLOCK, BLOCKS)
    u = tl.load(residual_ptr + seq * D + last, mask=rejected, other=0.0)
    u += tl.load(sample_ptr + seq * (D + 1) + last, mask=rejected == 0, other=0.0)
    target = u * tl.sum(sums)
    block, before = _pick_block(sums, target, blocks)
    ids = block * BLOCK + lanes
    if subtract:
        weight = _probabilities(p_row_ptr, q_row_ptr, inverse_ptr, ids, vocab, q_width, True, MAPPED)
    else:
        weight = _probabilities(p_row_ptr, q_row_ptr, inverse_ptr, ids, vocab, q_width, False, MAPPED)
    # No probability at all: p is NaN.
    token = tl.where(tl.sum(sums) > 0.0, _pick_id(weight, before, target, ids), _NO_TOKEN)
    tl.store(next_token_ptr + seq, token.to(tl.int64))
    tl.store(num_path_ptr + seq, last.to(tl.int64) + 1)
    tl.store(num_broken_ptr + seq, tl.sum(broken.to(tl.int64)))


def accept_chain(
    drafts_BD: Tensor,
    q_BDW: Tensor,
    target_ids_W: Tensor | None,
    p_BNV: Tensor,
    num_drafts_B: Tensor,
    temperature_B: Tensor,
    u_accept_BD: Tensor,
    u_residual_BD: Tensor,
    u_sample_BN: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch_round.accept_chain`; two passes over one row of p (and q) a sequence."""
    (batch, num_drafts), (vocab, width) = drafts_BD.shape, (p_BNV.shape[2], q_BDW.shape[2])
    device = drafts_BD.device
    num_path, next_token, num_broken = torch.empty((3, batch), dtype=torch.int64, device=device)
    inverse = num_path  # not read
    if target_ids_W is not None:
        # Where a target token is among the draft's, so that a program can walk over the target's vocabulary alone.
        inverse = torch.full((vocab,), -1, dtype=torch.int32, device=device)
        inverse.scatter_(0, target_ids_W, torch.arange(width, dtype=torch.int32, device=device))
    block, blocks, num_warps = _blocks(p_BNV)
    _accept_chain[(batch,)](
        drafts_BD.contiguous(), q_BDW.contiguous(), inverse, p_BNV.contiguous(), num_drafts_B.contiguous(),
        temperature_B.contiguous(), u_accept_BD.contiguous(), u_residual_BD.contiguous(), u_sample_BN.contiguous(),
        num_path, next_token, num_broken, vocab, width,
        D=num_drafts, BLOCK_D=triton.next_power_of_2(num_drafts), MAPPED=target_ids_W is not None,
        BLOCK=block, BLOCKS=blocks, num_warps=num_warps,
    )  # fmt: skip
    return num_path, next_token, num_broken
