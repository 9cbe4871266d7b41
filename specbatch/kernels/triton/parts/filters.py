# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The tokens that top-k, top-p and min-p keep of a row of logits (Triton).

Nothing is sorted. Top-k and top-p keep all tokens above a logit, the *bar*, and the first few by id of the tokens that
equal it. The bar is found by cutting an interval of logits at several pivots per pass over the row and narrowing it to
the values that occur in it (after FlashInfer's sorting-free sampling). It ends at one logit of the row, so that ties
are exact: equal probabilities are equal logits. With g = 1 and target k (top-k), or g the token's weight and target p
of the total (top-p), the bar is the lowest logit of the row above which the sum of g stays below the target.

A token's *weight* is exp((logit - peak) / temperature) in float32, 1 at the peak. Sums that decide between tokens are
made in a fixed order, so a row's token does not depend on the batch.

The search for a row's peak reads a NaN as +inf, because a maximum need not be NaN if one number is. So the peak alone
says whether the row is finite (see `finite_peak` of the reference kernels).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.batch import LOWEST_LOGIT

_MAX_PASSES = tl.constexpr(128)  # each leaves a quarter of the interval, so about 10 are enough for usual logits
NO_ID = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(LOWEST_LOGIT)


@triton.jit
def _load_logits(row_ptr, ids, vocab):
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    # The lowest finite number, which some masks write, becomes -inf here, because differences of such numbers overflow.
    return tl.where(x > LOWEST, x, float("-inf"))


@triton.jit
def _weight_of(x, peak, temperature):
    return tl.where(x == peak, 1.0, tl.exp((x - peak) / temperature))


@triton.jit
def range_of(row_ptr, vocab, BLOCK: tl.constexpr):
    """Return the argmax of a row, its largest and its least finite logit, and whether it is finite."""
    lanes = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    best_id = lanes
    for start in range(0, vocab, BLOCK):
        x = tl.load(row_ptr + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        best_id = tl.where(x > most, start + lanes, best_id)
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(x > LOWEST, x, float("inf")))
    peak = tl.max(most)
    finite = (peak > LOWEST) & (peak < float("inf"))
    return tl.min(tl.where(most == peak, best_id, NO_ID)), peak, tl.min(least), finite


@triton.jit
def _find_bar(row_ptr, vocab, peak, temperature, floor, low, target, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the lowest logit above which the sum of g stays below `target`, and that sum. Logits below `floor` are
    ignored. `low`: any number at which the sum reaches `target`."""
    lanes = tl.arange(0, BLOCK)
    high = peak
    above = tl.full((), 0.0, tl.float64)  # the sum above `high`
    # It always holds that sum above low >= target > sum above high, so the bar is in (low, high].
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
            x = _load_logits(row_ptr, start + lanes, vocab)
            x = tl.where(x >= floor, x, float("-inf"))
            g = _weight_of(x, peak, temperature) if BY_WEIGHT else tl.full((BLOCK,), 1.0, tl.float32)
            sum1 += tl.where(x > pivot1, g, 0.0)
            sum2 += tl.where(x > pivot2, g, 0.0)
            sum3 += tl.where(x > pivot3, g, 0.0)
            least = tl.minimum(least, tl.where(x > low, x, float("inf")))
            most = tl.maximum(most, tl.where(x <= high, x, float("-inf")))
        above1 = tl.sum(sum1.to(tl.float64))
        above2 = tl.sum(sum2.to(tl.float64))
        above3 = tl.sum(sum3.to(tl.float64))
        first, last = tl.min(least), tl.max(most)  # the least and the largest of the logits in (low, high]
        found = first >= last
        below1 = (above1 < target) & (found == 0)
        below2 = (above2 < target) & (found == 0)
        below3 = (above3 < target) & (found == 0)
        # The new interval ends at the lowest pivot above which the sum is below the target, and begins at the next
        # lower one.
        high = tl.where(below1, pivot1, tl.where(below2, pivot2, tl.where(below3, pivot3, last)))
        above = tl.where(below1, above1, tl.where(below2, above2, tl.where(below3, above3, above)))
        low = tl.where(below1 | found, low, tl.where(below2, pivot1, tl.where(below3, pivot2, pivot3)))
        passes = tl.where(found, 0, passes - 1)
    return high, above


@triton.jit
def _last_tie(row_ptr, vocab, bar, num_ties, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the id of the `num_ties`-th token by id whose logit is the bar, or `vocab` if there are fewer."""
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    counts = tl.zeros((BLOCKS,), tl.int32)
    for i in range(0, tl.cdiv(vocab, BLOCK)):
        ids = i * BLOCK + lanes
        equal = (_load_logits(row_ptr, ids, vocab) == bar) & (ids < vocab)
        counts = tl.where(blocks == i, tl.sum(equal.to(tl.int32)), counts)
    block = tl.min(tl.where(tl.cumsum(counts, 0) >= num_ties, blocks, BLOCKS))
    wanted = num_ties - tl.sum(tl.where(blocks < block, counts, 0))
    ids = block * BLOCK + lanes
    equal = (_load_logits(row_ptr, ids, vocab) == bar) & (ids < vocab)
    return tl.min(tl.where(equal & (tl.cumsum(equal.to(tl.int32), 0) == wanted), ids, vocab))


@triton.jit
def bar_of_filters(row_ptr, vocab, peak, least, temperature, top_k, top_p, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the bar of top-k and top-p, and the last id that is kept of the tokens that equal it."""
    bar = tl.full((), float("-inf"), tl.float32)
    last_id = tl.full((), 0, tl.int32) + vocab
    if (top_k > 0) & (top_k < vocab):
        low = least - tl.abs(least) * 0.01 - 1.0
        bar, _ = _find_bar(row_ptr, vocab, peak, temperature, bar, low, top_k.to(tl.float64), False, BLOCK)
    if top_p < 1.0:
        lanes = tl.arange(0, BLOCK)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _load_logits(row_ptr, start + lanes, vocab)
            sums += tl.where((x >= bar) & (x > float("-inf")), _weight_of(x, peak, temperature), 0.0)
        total = tl.sum(sums.to(tl.float64))
        target = top_p.to(tl.float64) * total
        # Where a weight is so low that all V tokens of such a weight together weigh less than what top-p may drop, the
        # sum above reaches the target; some room for roundings.
        drop = tl.maximum((1.0 - top_p) * total.to(tl.float32) / vocab, 1e-30)
        low = peak + temperature * (tl.log(drop) - 0.5) - tl.abs(peak) * 2.4e-7
        bar, above = _find_bar(row_ptr, vocab, peak, temperature, bar, low, target, True, BLOCK)
        ties = tl.ceil((target - above) / _weight_of(bar, peak, temperature).to(tl.float64))
        # `ties` is NaN if the bar has no weight. The token at which the sum reaches the target is kept.
        num_ties = tl.where((ties >= 1.0) & (ties < vocab), ties, tl.where(ties < 1.0, 1.0, vocab)).to(tl.int32)
        last_id = _last_tie(row_ptr, vocab, bar, num_ties, BLOCK, BLOCKS)
    return bar, last_id


@triton.jit
def kept_weight(row_ptr, ids, vocab, peak, temperature, bar, last_id, min_p):
    """Return the weights, float32, of the tokens that all filters keep, and 0 for the others."""
    x = _load_logits(row_ptr, ids, vocab)
    weight = _weight_of(x, peak, temperature)
    kept = (x > bar) | ((x == bar) & (ids <= last_id))
    return tl.where(kept & (x > float("-inf")) & (weight >= min_p), weight, 0.0)
