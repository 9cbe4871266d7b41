# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The tokens that top-k, top-p and min-p keep of a row of logits (Triton).

Nothing is sorted. Top-k and top-p keep all tokens above a logit, the *bar*, and the first few by id of the tokens that
equal it. The bar is found by cutting an interval of logits at several pivots per pass over the row and narrowing it to
the values that occur in it (after FlashInfer's sorting-free sampling). It ends at one logit of the row, so that ties
are exact: equal probabilities are equal logits. With g = 1 and target k (top-k), or g the token's weight and target p
of the total (top-p), the bar is the lowest logit of the row above which the sum of g stays below the target.

A token's *weight* is exp((logit - peak) / temperature) in float32, 1 at the peak. Sums that decide between tokens are
made in a fixed order, so a row's token does not depend on the batch.

A pass reads only the groups (see `groups.py`) that have a logit above the lower end of the interval. The peak of a row
with a NaN is +inf. So the peak alone says whether the row is finite (see `finite_peak` of the reference kernels).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.batch import LOWEST_LOGIT
from specbatch.kernels.triton.parts.groups import ids_of

_MAX_PASSES = tl.constexpr(128)  # each leaves a quarter of the interval, so about 10 are enough for usual logits
LOWEST = tl.constexpr(LOWEST_LOGIT)


@triton.jit
def _load_logits(row_ptr, ids, vocab):
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    # The lowest finite number, which some masks write, becomes -inf here, because differences of such numbers overflow.
    return tl.where(x > LOWEST, x, float("-inf"))


@triton.jit
def is_finite(peak):
    """Return whether a row with this peak is finite."""
    return (peak > LOWEST) & (peak < float("inf"))


@triton.jit
def scale_of(temperature):
    """Return what `weight_of` takes instead of a temperature, because a division takes longer than all else there. It
    is finite, so that the peak has the weight 1 at any temperature."""
    return tl.minimum(1.4426950408889634 / temperature, 3e38)  # log2(e)


@triton.jit
def weight_of(x, peak, scale):
    return tl.exp2((x - peak) * scale)


@triton.jit
def _list_groups(peaks_ptr, list_ptr, num_groups, low, GROUPS: tl.constexpr):
    """List the groups that have a logit of at least `low`, and return their number."""
    groups = tl.arange(0, GROUPS)
    peaks = tl.load(peaks_ptr + groups, mask=groups < num_groups, other=float("-inf")).to(tl.float32)
    listed = (groups < num_groups) & (peaks >= low)
    place = tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.debug_barrier()  # All threads have read the former list.
    tl.store(list_ptr + place, groups, mask=listed)
    tl.debug_barrier()
    return tl.sum(listed.to(tl.int32))


@triton.jit
def _load_listed(row_ptr, list_ptr, start, count, vocab, num_groups, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return the ids and the logits of some groups of the list, (TILE, GROUP)."""
    at = start + tl.arange(0, TILE)
    ids = ids_of(tl.load(list_ptr + at, mask=at < count, other=num_groups), GROUP)
    return ids, _load_logits(row_ptr, ids, vocab)


@triton.jit
def _find_bar(
    row_ptr, peaks_ptr, list_ptr, vocab, num_groups, peak, scale, floor, low, target,
    BY_WEIGHT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the lowest logit above which the sum of g stays below `target`, and that sum. Logits below `floor` are
    ignored. `low`: any number at which the sum reaches `target`."""
    high = peak
    above = tl.full((), 0.0, tl.float64)  # the sum above `high`
    # It always holds that sum above low >= target > sum above high, so the bar is in (low, high].
    passes = tl.where(low < high, _MAX_PASSES, 0)
    while passes > 0:
        quarter = (high - low) * 0.25
        pivot1, pivot2, pivot3 = low + quarter, low + (high - low) * 0.5, high - quarter
        sum1 = tl.zeros((TILE, GROUP), tl.float32)
        sum2 = tl.zeros((TILE, GROUP), tl.float32)
        sum3 = tl.zeros((TILE, GROUP), tl.float32)
        least = tl.full((TILE, GROUP), float("inf"), tl.float32)
        most = tl.full((TILE, GROUP), float("-inf"), tl.float32)
        count = _list_groups(peaks_ptr, list_ptr, num_groups, low, GROUPS)
        for start in range(0, count, TILE):
            _, x = _load_listed(row_ptr, list_ptr, start, count, vocab, num_groups, GROUP, TILE)
            x = tl.where(x >= floor, x, float("-inf"))
            g = weight_of(x, peak, scale) if BY_WEIGHT else tl.full((TILE, GROUP), 1.0, tl.float32)
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
def _last_tie(
    row_ptr, peaks_ptr, list_ptr, vocab, num_groups, bar, num_ties,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the id of the `num_ties`-th token by id whose logit is the bar, or `vocab` if there are fewer."""
    tiles = tl.arange(0, TILES)
    counts = tl.zeros((TILES,), tl.int32)
    count = _list_groups(peaks_ptr, list_ptr, num_groups, bar, GROUPS)
    for i in range(0, tl.cdiv(count, TILE)):
        _, x = _load_listed(row_ptr, list_ptr, i * TILE, count, vocab, num_groups, GROUP, TILE)
        counts = tl.where(tiles == i, tl.sum(tl.sum((x == bar).to(tl.int32), 1), 0), counts)
    tile = tl.min(tl.where(tl.cumsum(counts, 0) >= num_ties, tiles, TILES))
    wanted = num_ties - tl.sum(tl.where(tiles < tile, counts, 0))
    ids, x = _load_listed(row_ptr, list_ptr, tile * TILE, count, vocab, num_groups, GROUP, TILE)
    equal, ids = tl.reshape(x == bar, (TILE * GROUP,)), tl.reshape(ids, (TILE * GROUP,))
    return tl.min(tl.where(equal & (tl.cumsum(equal.to(tl.int32), 0) == wanted), ids, vocab))


@triton.jit
def _least_logit(row_ptr, vocab, BLOCK: tl.constexpr):
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _load_logits(row_ptr, start + tl.arange(0, BLOCK), vocab)
        least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
    return tl.min(least)


@triton.jit
def bar_of_filters(
    row_ptr, peaks_ptr, list_ptr, vocab, num_groups, peak, temperature, top_k, top_p,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the bar of top-k and top-p, and the last id that is kept of the tokens that equal it. `list_ptr`: memory
    for the numbers of the row's groups."""
    bar = tl.full((), float("-inf"), tl.float32)
    last_id = tl.full((), 0, tl.int32) + vocab
    scale = scale_of(temperature)
    if (top_k > 0) & (top_k < vocab):
        groups = tl.arange(0, GROUPS)
        peaks = tl.load(peaks_ptr + groups, mask=groups < num_groups, other=float("-inf")).to(tl.float32)
        # If each of k groups has a logit, k tokens are not below the least of the groups' peaks.
        low = tl.min(tl.where(peaks > LOWEST, peaks, float("inf")))
        if top_k > tl.sum((peaks > LOWEST).to(tl.int32)):
            low = _least_logit(row_ptr, vocab, TILE * GROUP)
        low = low - tl.abs(low) * 0.01 - 1.0
        bar, _ = _find_bar(
            row_ptr, peaks_ptr, list_ptr, vocab, num_groups, peak, scale, bar, low, top_k.to(tl.float64), False,
            GROUP, GROUPS, TILE,
        )  # fmt: skip
    if top_p < 1.0:
        sums = tl.zeros((TILE, GROUP), tl.float32)
        count = _list_groups(peaks_ptr, list_ptr, num_groups, bar, GROUPS)
        for start in range(0, count, TILE):
            _, x = _load_listed(row_ptr, list_ptr, start, count, vocab, num_groups, GROUP, TILE)
            sums += tl.where((x >= bar) & (x > float("-inf")), weight_of(x, peak, scale), 0.0)
        total = tl.sum(sums.to(tl.float64))
        target = top_p.to(tl.float64) * total
        # Where a weight is so low that all V tokens of such a weight together weigh less than what top-p may drop, the
        # sum above reaches the target; some room for roundings.
        drop = tl.maximum((1.0 - top_p) * total.to(tl.float32) / vocab, 1e-30)
        low = peak + temperature * (tl.log(drop) - 0.5) - tl.abs(peak) * 2.4e-7
        bar, above = _find_bar(
            row_ptr, peaks_ptr, list_ptr, vocab, num_groups, peak, scale, bar, low, target, True, GROUP, GROUPS, TILE
        )
        ties = tl.ceil((target - above) / weight_of(bar, peak, scale).to(tl.float64))
        # `ties` is NaN if the bar has no weight. The token at which the sum reaches the target is kept.
        num_ties = tl.where((ties >= 1.0) & (ties < vocab), ties, tl.where(ties < 1.0, 1.0, vocab)).to(tl.int32)
        last_id = _last_tie(row_ptr, peaks_ptr, list_ptr, vocab, num_groups, bar, num_ties, GROUP, GROUPS, TILE, TILES)
    return bar, last_id


@triton.jit
def kept_weight(row_ptr, ids, vocab, peak, scale, bar, last_id, min_p):
    """Return the weights, float32, of the tokens that all filters keep, and 0 for the others."""
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    kept = (x > bar) | ((x == bar) & (ids <= last_id))
    # Masked logits have no weight, however the filters see them.
    weight = weight_of(tl.where(kept, x, float("-inf")), peak, scale)
    return tl.where(weight >= min_p, weight, 0.0)
