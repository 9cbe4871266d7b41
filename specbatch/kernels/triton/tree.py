# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The tokens of a draft tree, the choice of its nodes, and its mask as FlashInfer's kernels read it (Triton).

Shape suffixes as in `kernels/torch/tree.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.corpus import ESTIMATE_UNIT, LITTLE
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.ordering import LOWEST, ordered, pack, packed_index, packed_number

_MASK_BYTES = 512  # bytes of a mask of one program


@triton.jit
def _topk_of_chunk(logits_ptr, best_ptr, peak_ptr, sum_ptr, stride, width, K: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a peak of +inf says that the row is not finite
    peak = tl.max(x)
    out = row * num_chunks + chunk
    tl.store(peak_ptr + out, peak)
    tl.store(sum_ptr + out, tl.sum(tl.where(x > float("-inf"), tl.exp(x - peak), 0.0)))
    packed = tl.where(ids < width, pack(x, ids), LOWEST)
    for i in range(K):
        best = tl.max(packed)
        tl.store(best_ptr + out * K + i, best)
        packed = tl.where(packed == best, LOWEST, packed)


@triton.jit
def _topk_of_chunks(
    best_ptr, peak_ptr, sum_ptr, scores_ptr, ids_ptr, num_chunks,
    K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks, entries = tl.arange(0, CHUNKS), tl.arange(0, BLOCK)
    peaks = tl.load(peak_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    peak = tl.max(peaks)
    log_sum = tl.log(tl.sum(tl.where(sums > 0.0, sums * tl.exp(peaks - peak), 0.0)))
    finite = (peak > float("-inf")) & (peak < float("inf"))
    packed = tl.load(best_ptr + row * num_chunks * K + entries, mask=entries < num_chunks * K, other=LOWEST)
    for i in range(K):
        best = tl.max(packed)
        tl.store(ids_ptr + row * K + i, tl.where(finite, packed_index(best), i))
        tl.store(scores_ptr + row * K + i, tl.where(finite, packed_number(best) - peak - log_sum, float("-inf")))
        packed = tl.where(packed == best, LOWEST, packed)


def draft_topk(logits_RW: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `kernels/torch/tree.py`. It makes one pass over the logits, and a small one over the best of each chunk.
    Order and scores are in float32. Rows of `logits_RW` need not be contiguous to each other."""
    rows, width = logits_RW.shape
    assert 1 <= k <= min(32, width), (k, width)
    assert logits_RW.stride(1) == 1
    chunk = min(4096, triton.next_power_of_2(width))
    num_chunks = triton.cdiv(width, chunk)
    best = torch.empty((rows, num_chunks, k), dtype=torch.int64, device=logits_RW.device)
    peak, total = torch.empty((2, rows, num_chunks), dtype=torch.float32, device=logits_RW.device)
    scores = torch.empty((rows, k), dtype=torch.float32, device=logits_RW.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits_RW.device)
    launch(
        _topk_of_chunk,
        (rows, num_chunks),
        logits_RW,
        best,
        peak,
        total,
        logits_RW.stride(0),
        width,
        K=k,
        CHUNK=chunk,
        num_warps=8,
    )
    launch(
        _topk_of_chunks, (rows,),
        best, peak, total, scores, ids, num_chunks,
        K=k, CHUNKS=triton.next_power_of_2(num_chunks), BLOCK=triton.next_power_of_2(num_chunks * k),
    )  # fmt: skip
    return scores, ids


@triton.jit
def _select_nodes(
    root_ptr, tokens_ptr, scores_ptr, parents_ptr,
    out_tokens_ptr, out_parents_ptr, depths_ptr, mask_ptr, num_candidates,
    N: tl.constexpr, LOG_STEPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    candidates = tl.arange(0, BLOCK_C)
    real = candidates < num_candidates
    at = row * num_candidates + candidates
    key = ordered(tl.load(scores_ptr + at, mask=real, other=float("-inf"))).to(tl.int64)
    tokens = tl.load(tokens_ptr + at, mask=real, other=0)
    above = tl.load(parents_ptr + at, mask=real, other=-1).to(tl.int32)

    # The lowest score that is kept: the largest that N - 1 candidates reach, one bit at a time.
    low = tl.full((), -(2**31), tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = tl.sum((real & (key >= middle)).to(tl.int32)) >= N - 1
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    better = real & (key > low)
    equal = real & (key == low)
    room = N - 1 - tl.sum(better.to(tl.int32))
    kept = better | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))

    # Candidates in their order become nodes 1, 2, ..
    node = tl.cumsum(kept.to(tl.int32), 0)
    parent = tl.where(above < 0, 0, tl.gather(node, tl.maximum(above, 0), 0))
    tl.store(out_tokens_ptr + row * N, tl.load(root_ptr + row))
    tl.store(out_tokens_ptr + row * N + node, tokens, mask=kept)
    tl.store(out_parents_ptr + row * N, -1)
    tl.store(out_parents_ptr + row * N + node, parent.to(tl.int64), mask=kept)
    # The parents are read back by node: all threads must have written theirs.
    tl.debug_barrier()

    nodes = tl.arange(0, BLOCK_N)
    parents = tl.load(out_parents_ptr + row * N + nodes, mask=nodes < N, other=-1).to(tl.int32)
    # A node sees its parent and itself. Each squaring doubles the distance.
    sees = (parents[:, None] == nodes[None, :]) | (nodes[:, None] == nodes[None, :])
    for _ in tl.static_range(LOG_STEPS):
        half = sees.to(tl.float16)
        sees = tl.dot(half, half) > 0.0
    tl.store(depths_ptr + row * N + nodes, tl.sum(sees.to(tl.int32), 1).to(tl.int64) - 1, mask=nodes < N)
    bits = tl.full((BLOCK_N,), 1, tl.int32) << (nodes & 31)
    for word in tl.static_range(WORDS):
        own = tl.sum(tl.where(sees & ((nodes >> 5) == word)[None, :], bits[None, :], 0), 1)
        tl.store(mask_ptr + (row * N + nodes) * WORDS + word, own.to(tl.int32), mask=nodes < N)


def select_nodes(
    root_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, num_draft_tokens: int, num_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels/torch/tree.py`."""
    batch, num_candidates = tokens_BC.shape
    assert 2 <= num_draft_tokens <= num_candidates + 1, (num_draft_tokens, num_candidates)
    words = triton.cdiv(num_draft_tokens, 32)
    tokens, parents, depths = torch.empty((3, batch, num_draft_tokens), dtype=torch.int64, device=tokens_BC.device)
    mask = torch.empty((batch, num_draft_tokens, words), dtype=torch.int32, device=tokens_BC.device)
    launch(
        _select_nodes, (batch,),
        root_B.contiguous(), tokens_BC.contiguous(), scores_BC.contiguous(), parents_BC.contiguous(),
        tokens, parents, depths, mask, num_candidates,
        N=num_draft_tokens, LOG_STEPS=(num_steps - 1).bit_length(), BLOCK_C=triton.next_power_of_2(num_candidates),
        BLOCK_N=max(16, triton.next_power_of_2(num_draft_tokens)), WORDS=words,
    )  # fmt: skip
    return tokens, parents, depths, mask


@triton.jit
def _tree_mask_bits(
    mask_ptr,
    mask_starts_ptr,
    starts_ptr,
    out_ptr,
    num_queries,
    num_words,
    num_bytes,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_former(PDL)
    seq, first = tl.program_id(1), tl.program_id(0) * BLOCK
    num_keys = tl.load(starts_ptr + seq) + num_queries
    num_bits = num_queries * num_keys
    if first * 8 >= num_bits:
        return
    mask_start = tl.load(mask_starts_ptr + seq)
    byte = first + tl.arange(0, BLOCK)
    bit_of_byte = tl.arange(0, 8)
    index = byte[:, None] * 8 + bit_of_byte[None, :]
    query = index // num_keys
    bit = index - query * num_keys - mask_start
    word = tl.load(
        mask_ptr + (seq.to(tl.int64) * num_queries + query) * num_words + bit // 32,
        mask=(index < num_bits) & (bit >= 0) & (bit < num_words * 32),
        other=0,
    )
    visible = (bit < 0) | (((word >> (bit & 31)) & 1) != 0)
    packed = tl.sum(visible.to(tl.int32) << bit_of_byte[None, :], 1)
    tl.store(out_ptr + seq.to(tl.int64) * num_bytes + byte, packed.to(tl.uint8), mask=byte < num_bytes)


def tree_mask_bits(mask_TW: Tensor, mask_starts_B: Tensor, starts_B: Tensor, num_queries: int, max_keys: int) -> Tensor:
    """See `kernels/torch/tree.py`."""
    batch = starts_B.shape[0]
    num_bytes = triton.cdiv(num_queries * max_keys, 8)
    out = torch.empty((batch, num_bytes), dtype=torch.uint8, device=mask_TW.device)
    pdl = dependent_launch(mask_TW)
    launch(
        _tree_mask_bits,
        (triton.cdiv(num_bytes, _MASK_BYTES), batch),
        mask_TW,
        mask_starts_B,
        starts_B,
        out,
        num_queries,
        mask_TW.shape[1],
        num_bytes,
        BLOCK=_MASK_BYTES,
        PDL=pdl,
        **launch_options(pdl),
    )
    return out


# Chains of drafts by how likely they are, and how many of them were right, see `draft/calibration.py`

_ESTIMATE_UNIT, _LITTLE = tl.constexpr(ESTIMATE_UNIT), tl.constexpr(LITTLE)


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _judge_chains(
    tokens_ptr, estimates_ptr, sources_ptr, factors_ptr, edges_ptr, places_ptr, probabilities_ptr, buckets_ptr,
    num_drafts, most, CHAINS: tl.constexpr, EDGES: tl.constexpr, PLACES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    first_line = line // CHAINS * CHAINS
    draft = tl.arange(0, BLOCK_D)
    real = draft < num_drafts
    tokens = tl.load(tokens_ptr + line * num_drafts + draft, mask=real, other=0)
    estimates = tl.load(estimates_ptr + line * num_drafts + draft, mask=real, other=0.0)
    agrees = tl.zeros((BLOCK_D,), tl.int32)
    for chain in tl.static_range(CHAINS):
        other = first_line + chain
        its_tokens = tl.load(tokens_ptr + other * num_drafts + draft, mask=real, other=0)
        its_estimates = tl.load(estimates_ptr + other * num_drafts + draft, mask=real, other=0.0)
        differs = (its_tokens != tokens) | (its_estimates <= 0) | (estimates <= 0)
        same_so_far = tl.cumsum(differs.to(tl.int32), 0) == 0
        agrees = agrees | (same_so_far & (other != line)).to(tl.int32)
    place = tl.zeros((BLOCK_D,), tl.int32)
    for i in tl.static_range(PLACES):
        place += (draft + 1 > tl.load(places_ptr + i)).to(tl.int32)
    first = tl.load(estimates_ptr + line * num_drafts)
    bucket_of_first = 0
    for i in tl.static_range(EDGES):
        bucket_of_first += (first > tl.load(edges_ptr + i)).to(tl.int32)
    kind = 2 * tl.load(sources_ptr + line) + agrees
    buckets = (kind * (EDGES + 1) + bucket_of_first) * (PLACES + 1) + place
    steps = tl.minimum(estimates * tl.load(factors_ptr + buckets, mask=real, other=0.0), most)
    tl.store(probabilities_ptr + line * num_drafts + draft, tl.associative_scan(steps, 0, _product), mask=real)
    tl.store(buckets_ptr + line * num_drafts + draft, buckets.to(tl.int64), mask=real)


def judge_chains(
    tokens_BCD: Tensor,
    estimates_BCD: Tensor,
    sources_BC: Tensor,
    factors_Q: Tensor,
    edges_E: Tensor,
    places_P: Tensor,
    most: float,
) -> tuple[Tensor, Tensor]:
    """See `kernels/torch/tree.py`."""
    batch, chains, num_drafts = tokens_BCD.shape
    tokens_BCD, estimates_BCD = tokens_BCD.contiguous(), estimates_BCD.contiguous()
    probabilities_BCD, buckets_BCD = torch.empty_like(estimates_BCD), torch.empty_like(tokens_BCD)
    launch(
        _judge_chains, (batch * chains,),
        tokens_BCD, estimates_BCD, sources_BC.contiguous(), factors_Q, edges_E, places_P, probabilities_BCD,
        buckets_BCD, num_drafts, most, CHAINS=chains, EDGES=len(edges_E), PLACES=len(places_P),
        BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return probabilities_BCD, buckets_BCD


@triton.jit
def _choose_chain(
    root_ptr, tokens_ptr, probabilities_ptr, sources_ptr, price_ptr, out_ptr, scores_ptr, num_nodes_ptr, chosen_ptr,
    given_ptr, root_stride, num_drafts, least, CHAINS: tl.constexpr, IS_DRAWN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_D)
    real = draft < num_drafts
    best, largest = tl.full((), 0, tl.int64), tl.full((), -1.0, tl.float32)
    price = tl.load(price_ptr)
    for chain in tl.static_range(CHAINS - IS_DRAWN):
        line = seq * CHAINS + chain
        p = tl.load(probabilities_ptr + line * num_drafts + draft, mask=real, other=0.0)
        p = tl.where(p >= least, p, 0.0)
        total = tl.sum(tl.maximum(p - price, 0.0) + _LITTLE * p)
        best = tl.where(total > largest, chain, best)
        largest = tl.maximum(total, largest)
    if IS_DRAWN:
        is_given = best < CHAINS - 2
        tl.store(given_ptr + seq, is_given)
        best = tl.where(is_given, best, CHAINS - 1)
    line, first = seq * CHAINS + best, seq * (num_drafts + 1)
    p = tl.load(probabilities_ptr + line * num_drafts + draft, mask=real, other=0.0)
    is_draft = (p >= least) & (p > 0.0)
    count = tl.sum(is_draft.to(tl.int64))
    tokens = tl.load(tokens_ptr + line * num_drafts + draft, mask=real, other=0)
    tl.store(out_ptr + first, tl.load(root_ptr + seq * root_stride))
    tl.store(out_ptr + first + 1 + draft, tokens, mask=real)
    tl.store(scores_ptr + first, 0.0)
    scores = tl.where(is_draft, tl.log(tl.where(is_draft, p, 1.0)), float("-inf"))
    tl.store(scores_ptr + first + 1 + draft, scores, mask=real)
    tl.store(num_nodes_ptr + seq, count + 1)
    tl.store(chosen_ptr + 3 * seq, count)
    tl.store(chosen_ptr + 3 * seq + 1, tl.load(sources_ptr + line))
    tl.store(chosen_ptr + 3 * seq + 2, best)


def choose_chain(
    root_B: Tensor,
    tokens_BCD: Tensor,
    probabilities_BCD: Tensor,
    sources_BC: Tensor,
    price: Tensor,
    least: float,
    is_drawn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """See `kernels/torch/tree.py`."""
    (batch, chains, num_drafts), device = tokens_BCD.shape, tokens_BCD.device
    tokens_BN = torch.empty((batch, num_drafts + 1), dtype=torch.int64, device=device)
    scores_BN = torch.empty((batch, num_drafts + 1), dtype=torch.float32, device=device)
    num_nodes_B = torch.empty(batch, dtype=torch.int64, device=device)
    chosen_B3 = torch.empty((batch, 3), dtype=torch.int64, device=device)
    is_given_B = torch.empty(batch, dtype=torch.bool, device=device) if is_drawn else None
    launch(
        _choose_chain, (batch,),
        root_B, tokens_BCD.contiguous(), probabilities_BCD.contiguous(), sources_BC.contiguous(), price, tokens_BN,
        scores_BN, num_nodes_B, chosen_B3, num_nodes_B if is_given_B is None else is_given_B, root_B.stride(0),
        num_drafts, least,
        CHAINS=chains, IS_DRAWN=is_drawn, BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return tokens_BN, scores_BN, num_nodes_B, chosen_B3, is_given_B


@triton.jit
def _largest_left(scores_ptr, num_verified_ptr, num_new_ptr, left_ptr, num_drafts, BLOCK_D: tl.constexpr):
    seq = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_D)
    num_drafts_if_live = tl.where(tl.load(num_new_ptr + seq) > 0, num_drafts, 0)
    is_left = (draft < num_drafts_if_live) & (draft >= tl.load(num_verified_ptr + seq))
    scores = tl.load(scores_ptr + seq * (num_drafts + 1) + 1 + draft, mask=is_left, other=float("-inf"))
    tl.store(left_ptr + seq, tl.max(tl.exp(scores)))


def largest_left(scores_BN: Tensor, num_verified_B: Tensor, num_new_B: Tensor) -> Tensor:
    """See `kernels/torch/tree.py`."""
    batch, num_drafts = scores_BN.shape[0], scores_BN.shape[1] - 1
    left_B = torch.empty(batch, dtype=torch.float32, device=scores_BN.device)
    launch(
        _largest_left, (batch,),
        scores_BN.contiguous(), num_verified_B.contiguous(), num_new_B.contiguous(), left_B, num_drafts,
        BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return left_B.amax().view(1)


@triton.jit
def _count_right(
    tokens_ptr, estimates_ptr, buckets_ptr, factors_ptr, chosen_ptr, new_ptr, num_new_ptr, num_drawn_ptr, sums_ptr,
    chosen_stride, num_drafts, num_columns, num_buckets, num_texts,
    CHAINS: tl.constexpr, HAS_DRAWN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    seq = line // CHAINS
    draft = tl.arange(0, BLOCK_D)
    num_new = tl.load(num_new_ptr + seq)
    known = (draft < num_drafts) & (draft < num_columns) & (draft < num_new)
    if HAS_DRAWN:
        is_drawn = line - seq * CHAINS >= CHAINS - 2
        known = known & (draft < tl.where(is_drawn, tl.load(num_drawn_ptr + seq), num_drafts))
    tokens = tl.load(tokens_ptr + line * num_drafts + draft, mask=known, other=0)
    estimates = tl.load(estimates_ptr + line * num_drafts + draft, mask=known, other=0.0)
    bucket = tl.load(buckets_ptr + line * num_drafts + draft, mask=known, other=0)
    new = tl.load(new_ptr + seq * num_columns + draft, mask=known, other=0)
    is_wrong = ((known & (tokens == new) & (estimates > 0)) == 0).to(tl.int32)
    num_wrong = tl.cumsum(is_wrong, 0)
    tried = known & (num_wrong - is_wrong == 0) & (estimates > 0)
    tl.atomic_add(sums_ptr + 2 * bucket, (estimates * _ESTIMATE_UNIT).to(tl.int64), mask=tried)
    right = (num_wrong == 0).to(tl.int64)
    tl.atomic_add(sums_ptr + 2 * bucket + 1, right, mask=tried)
    chain = line - seq * CHAINS
    num_chosen = tl.where(chain == tl.load(chosen_ptr + seq * chosen_stride), num_drafts, 0)
    counts = tried & (draft < tl.where(chain < num_texts, num_chosen, 0))
    estimates *= tl.load(factors_ptr + bucket, mask=counts, other=0.0)
    bucket += num_buckets
    tl.atomic_add(sums_ptr + 2 * bucket, (estimates * _ESTIMATE_UNIT).to(tl.int64), mask=counts)
    tl.atomic_add(sums_ptr + 2 * bucket + 1, right, mask=counts)


def count_right(
    tokens_BCD: Tensor,
    estimates_BCD: Tensor,
    buckets_BCD: Tensor,
    factors_Q: Tensor,
    chosen_B: Tensor,
    new_BM: Tensor,
    num_new_B: Tensor,
    sums_2Q2: Tensor,
    num_texts: int,
    num_drawn_B: Tensor | None = None,
) -> Tensor:
    """See `kernels/torch/tree.py`."""
    batch, chains, num_drafts = tokens_BCD.shape
    launch(
        _count_right, (batch * chains,),
        tokens_BCD.contiguous(), estimates_BCD.contiguous(), buckets_BCD, factors_Q, chosen_B, new_BM.contiguous(),
        num_new_B.contiguous(), num_new_B if num_drawn_B is None else num_drawn_B, sums_2Q2, chosen_B.stride(0),
        num_drafts, new_BM.shape[1], sums_2Q2.shape[1], num_texts,
        CHAINS=chains, HAS_DRAWN=num_drawn_B is not None,
        BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return sums_2Q2
