# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""N-gram drafts (Triton): each round searches the texts again, in parallel chunks, which costs less than an index on
the device. The corpus that all requests share is a table, see `kernels/corpus.py`.

Shape suffixes as in `kernels/torch/ngram.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.chains import CORPUS, FORECAST, JOB, NETWORK, OF_NETWORK, ROW, UNKNOWN
from specbatch.kernels.corpus import (
    CHECK_BITS,
    CHECK_SHIFT,
    FACTOR,
    HASH_SHIFT,
    LOADED,
    MAX_SCORE,
    MAX_SIZE,
    MIXER,
    SCORE_SHIFT,
    SIZES,
    TOKEN_BITS,
    TOKEN_SHIFT,
)
from specbatch.kernels.triton.parts.launch import launch

_BLOCK = 32  # new tokens of one program
_WALK_BLOCK = 8  # texts of one program: with 4 sizes of contexts, one lookup for each thread of a warp
_MAX_SIZE, _MAX_SCORE, _LOADED = tl.constexpr(MAX_SIZE), tl.constexpr(MAX_SCORE), tl.constexpr(LOADED)
_TOKEN_SHIFT, _SCORE_SHIFT = tl.constexpr(TOKEN_SHIFT), tl.constexpr(SCORE_SHIFT)
_CHECK_SHIFT, _HASH_SHIFT = tl.constexpr(CHECK_SHIFT), tl.constexpr(HASH_SHIFT)
_TOKENS, _CHECK_MASK = tl.constexpr(1 << TOKEN_BITS), tl.constexpr((1 << CHECK_BITS) - 1)
_FACTOR, _MIXER = tl.constexpr(FACTOR), tl.constexpr(MIXER)
_HIGH_33, _HIGH_35 = tl.constexpr((1 << 33) - 1), tl.constexpr((1 << 35) - 1)  # bits that a shift leaves
_SIZE_2, _SIZE_3, _SIZE_6, _SIZE_12 = (tl.constexpr(size) for size in SIZES)
# The factor of the first token of a context, with the sign that int64 gives it.
_POWER_2, _POWER_3, _POWER_6, _POWER_12 = (
    tl.constexpr((pow(FACTOR, size - 1, 1 << 64) ^ (1 << 63)) - (1 << 63)) for size in SIZES
)
_WORD_BITS = tl.constexpr(CHECK_SHIFT + CHECK_BITS)
_WORD_MASK, _NO_WORD = tl.constexpr((1 << (CHECK_SHIFT + CHECK_BITS)) - 1), tl.constexpr(-(1 << 63))
_ORDER_2, _ORDER_3, _ORDER_6, _ORDER_12 = (tl.constexpr(i) for i in range(len(SIZES)))


@triton.jit
def _longest_of_chunk(
    tokens_ptr, predicted_ptr, req_idx_ptr, num_tokens_ptr, num_predicted_ptr, best_ptr, stride, predicted_stride,
    num_tokens_stride, num_predicted_stride, text_chunks, min_match, max_match, CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the longest occurrence that ends in a chunk, and of equal ones the last. The result is (tokens matched) <<
    32 | its end, which is the index of the token after it; 0: there is none. The first `text_chunks` chunks are those
    of the text, and the others those of the prediction."""
    seq, chunk = tl.program_id(0), tl.program_id(1)
    req_idx = tl.load(req_idx_ptr + seq).to(tl.int64)
    length = tl.load(num_tokens_ptr + seq * num_tokens_stride).to(tl.int32)
    text_ptr = tokens_ptr + req_idx * stride
    from_ptr, count, first = text_ptr, length, chunk * CHUNK
    if chunk >= text_chunks:
        from_ptr = predicted_ptr + req_idx * predicted_stride
        count = tl.load(num_predicted_ptr + seq * num_predicted_stride).to(tl.int32)
        first = (chunk - text_chunks) * CHUNK
    ends = first + tl.arange(0, CHUNK)
    best = tl.full((), 0, tl.int64)
    if first < count:
        running = (ends >= 1) & (ends < count)
        matched = tl.zeros((CHUNK,), tl.int32)
        for back in range(1, max_match + 1):
            # A prediction can have more tokens than the text: before the text's beginning, nothing is equal.
            suffix = tl.load(text_ptr + length - back, mask=length >= back, other=-1)
            running = running & (ends >= back)
            before = tl.load(from_ptr + ends - back, mask=running, other=0)
            running = running & (before == suffix)
            matched += running.to(tl.int32)
        found = matched >= min_match
        index = ends - first + chunk * CHUNK
        best = tl.max(tl.where(found, (matched.to(tl.int64) << 32) | index.to(tl.int64), 0))
    tl.store(best_ptr + seq * tl.num_programs(1) + chunk, best)


@triton.jit
def _continue(
    tokens_ptr, predicted_ptr, req_idx_ptr, num_tokens_ptr, num_predicted_ptr, limit_ptr, best_ptr, drafts_ptr,
    num_drafts_ptr, matched_ptr, stride, predicted_stride, num_tokens_stride, num_predicted_stride, limit_stride,
    num_chunks, predicted_start, num_drafts,
    CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    req_idx = tl.load(req_idx_ptr + seq).to(tl.int64)
    length = tl.load(num_tokens_ptr + seq * num_tokens_stride).to(tl.int32)
    limit = tl.load(limit_ptr + seq * limit_stride).to(tl.int32)
    chunks = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + seq * num_chunks + chunks, mask=chunks < num_chunks, other=0))
    start = (best & 0xFFFFFFFF).to(tl.int32)
    count = tl.where(best > 0, tl.minimum(tl.maximum(limit - length, 0), num_drafts), 0)
    from_ptr, end = tokens_ptr + req_idx * stride, length
    if start >= predicted_start:
        from_ptr = predicted_ptr + req_idx * predicted_stride
        end = tl.load(num_predicted_ptr + seq * num_predicted_stride).to(tl.int32)
        start -= predicted_start
    drafted = tl.arange(0, BLOCK_D)
    source = start + drafted % tl.maximum(end - start, 1)
    tokens = tl.load(from_ptr + source, mask=drafted < count, other=0)
    tl.store(drafts_ptr + seq * num_drafts + drafted, tokens.to(tl.int64), mask=drafted < num_drafts)
    tl.store(num_drafts_ptr + seq, count.to(tl.int64))
    tl.store(matched_ptr + seq, best >> 32)


def ngram_lookup(
    tokens_SL: Tensor,
    predicted_SL: Tensor,
    req_idx_B: Tensor,
    num_tokens_B: Tensor,
    num_predicted_B: Tensor,
    limit_B: Tensor,
    min_match: int,
    max_match: int,
    num_drafts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/torch/ngram.py`. Counts and limits may be of any integer type, and columns of a wider table."""
    assert 1 <= min_match <= max_match, (min_match, max_match)
    assert tokens_SL.stride(1) == 1
    req_idx_B = req_idx_B.contiguous()
    batch, device = req_idx_B.shape[0], tokens_SL.device
    width = tokens_SL.shape[1]
    chunk = min(1024, triton.next_power_of_2(width))
    text_chunks = triton.cdiv(width, chunk)
    num_chunks = text_chunks + triton.cdiv(predicted_SL.shape[1], chunk)
    best = torch.empty((batch, num_chunks), dtype=torch.int64, device=device)
    drafts = torch.empty((batch, num_drafts), dtype=torch.int64, device=device)
    num_drafts_B, matched_B = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    launch(
        _longest_of_chunk, (batch, num_chunks),
        tokens_SL, predicted_SL, req_idx_B, num_tokens_B, num_predicted_B, best, tokens_SL.stride(0),
        predicted_SL.stride(0), num_tokens_B.stride(0), num_predicted_B.stride(0), text_chunks, min_match, max_match,
        CHUNK=chunk,
    )  # fmt: skip
    launch(
        _continue, (batch,),
        tokens_SL, predicted_SL, req_idx_B, num_tokens_B, num_predicted_B, limit_B, best, drafts, num_drafts_B,
        matched_B, tokens_SL.stride(0), predicted_SL.stride(0), num_tokens_B.stride(0), num_predicted_B.stride(0),
        limit_B.stride(0), num_chunks, text_chunks * chunk, num_drafts,
        CHUNKS=triton.next_power_of_2(num_chunks), BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return drafts, num_drafts_B, matched_B


# The corpus


@triton.jit
def _hash_of(sums):
    mixed = (sums ^ ((sums >> 31) & _HIGH_33)) * _MIXER
    return mixed ^ ((mixed >> 29) & _HIGH_35)


@triton.jit
def _update(words_ptr, places_ptr, new_ptr, sums, token, is_new, num_words, item, order,
            NUM_SIZES: tl.constexpr, IS_LOADED: tl.constexpr):  # fmt: skip
    """Store the new value of the word of one size of context."""
    hashed = _hash_of(sums)
    place = hashed & (num_words - 1)
    old = tl.load(words_ptr + place, mask=is_new, other=0)
    check = (hashed >> _HASH_SHIFT) & _CHECK_MASK
    known = ((old >> _CHECK_SHIFT) == check) & (old != 0)
    score = (old >> _SCORE_SHIFT) & _MAX_SCORE
    is_right = known & (((old >> _TOKEN_SHIFT) & (_TOKENS - 1)) == token)
    one = tl.full((), 1, tl.int64) << _SCORE_SHIFT
    new = (check << _CHECK_SHIFT) | (token << _TOKEN_SHIFT)
    if IS_LOADED:
        new = new | _LOADED
    new = tl.where(known, new, new + one)
    new = tl.where(known & (is_right == 0) & (score > 0), old - one, new)
    new = tl.where(is_right, tl.where(score < _MAX_SCORE, old + one, old), new)
    at = item * NUM_SIZES + order
    tl.store(places_ptr + at, tl.where(is_new, place, num_words))
    tl.store(new_ptr + at, tl.where(is_new, new, 0))


@triton.jit
def _updates(
    words_ptr, tokens_ptr, req_idx_ptr, starts_ptr, counts_ptr, eos_ptr, places_ptr, new_ptr, stride, width, batch,
    num_words, num_eos, MAX_NEW: tl.constexpr, BLOCK: tl.constexpr, NUM_SIZES: tl.constexpr, IS_LOADED: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq, offset = item // MAX_NEW, item % MAX_NEW
    exists = seq < batch
    line = tokens_ptr + tl.load(req_idx_ptr + seq, mask=exists, other=0) * stride
    index = tl.load(starts_ptr + seq, mask=exists, other=0) + offset
    is_new = exists & (offset < tl.load(counts_ptr + seq, mask=exists, other=0)) & (index < width)
    token = tl.load(line + index, mask=is_new, other=0).to(tl.int64)
    is_new = is_new & (token < _TOKENS)
    last = tl.load(line + index - 1, mask=is_new & (index >= 1), other=-1).to(tl.int64)
    for i in range(num_eos):
        is_new = is_new & (last != tl.load(eos_ptr + i))
    sums = tl.zeros((BLOCK,), tl.int64)
    power = tl.zeros((BLOCK,), tl.int64) + 1
    item = item.to(tl.int64)  # Items that do not exist write to the outputs' padding.
    for back in tl.static_range(1, _MAX_SIZE + 1):
        before = tl.load(line + index - back, mask=is_new & (index >= back), other=-1).to(tl.int64)
        sums += (before + 1) * power
        power = power * _FACTOR
        has_tokens = is_new & (index >= back)
        if back == 2:
            _update(words_ptr, places_ptr, new_ptr, sums, token, has_tokens, num_words, item, _ORDER_2,
                    NUM_SIZES, IS_LOADED)  # fmt: skip
        if back == 3:
            _update(words_ptr, places_ptr, new_ptr, sums, token, has_tokens, num_words, item, _ORDER_3,
                    NUM_SIZES, IS_LOADED)  # fmt: skip
        if back == 6:
            _update(words_ptr, places_ptr, new_ptr, sums, token, has_tokens, num_words, item, _ORDER_6,
                    NUM_SIZES, IS_LOADED)  # fmt: skip
        if back == 12:
            _update(words_ptr, places_ptr, new_ptr, sums, token, has_tokens, num_words, item, _ORDER_12,
                    NUM_SIZES, IS_LOADED)  # fmt: skip


def corpus_updates(
    words_H: Tensor,
    tokens_SL: Tensor,
    req_idx_B: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    max_new: int,
    eos_K: Tensor,
    is_loaded: bool,
) -> tuple[Tensor, Tensor]:
    """See `kernels/torch/ngram.py`. Starts and counts may be of any integer type."""
    assert tokens_SL.stride(1) == 1
    starts_B, counts_B, eos_K = starts_B.contiguous(), counts_B.contiguous(), eos_K.contiguous()
    batch, device = req_idx_B.shape[0], words_H.device
    num_items, num_sizes = batch * max_new, len(SIZES)
    programs = triton.cdiv(num_items, _BLOCK)
    places, new = (torch.empty(programs * _BLOCK * num_sizes, dtype=torch.int64, device=device) for _ in range(2))
    launch(
        _updates, (programs,),
        words_H, tokens_SL, req_idx_B, starts_B, counts_B, eos_K, places, new, tokens_SL.stride(0),
        tokens_SL.shape[1], batch, words_H.shape[0] - 1, eos_K.shape[0], MAX_NEW=max_new, BLOCK=_BLOCK,
        NUM_SIZES=num_sizes, IS_LOADED=is_loaded, num_warps=1,
    )  # fmt: skip
    return places[: num_items * num_sizes], new[: num_items * num_sizes]


@triton.jit
def _of_sizes(two, three, six, twelve):
    """Return a value for each size of context, (1, sizes)."""
    order = tl.arange(0, 4)[None, :]
    return tl.where(order < 2, tl.where(order == 0, two, three), tl.where(order == 2, six, twelve))


@triton.jit
def _walk(
    words_ptr, estimates_ptr, tokens_ptr, req_idx_ptr, lengths_ptr, limit_ptr, drafts_ptr, num_drafts_ptr,
    probabilities_ptr, loaded_ptr, least, stride, lengths_stride, limit_stride, batch, num_words, num_drafts,
    BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Draft for BLOCK sequences at once, with all sizes of contexts side by side, so that a step waits once for its
    words. `drafts_ptr`: the drafts of each sequence are written there."""
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = seq < batch
    line = tokens_ptr + tl.load(req_idx_ptr + seq, mask=exists, other=0) * stride
    length = tl.load(lengths_ptr + seq * lengths_stride, mask=exists, other=0).to(tl.int64)
    room = tl.load(limit_ptr + seq * limit_stride, mask=exists, other=0).to(tl.int64) - length
    first = seq.to(tl.int64) * num_drafts
    size, last_power = (
        _of_sizes(_SIZE_2, _SIZE_3, _SIZE_6, _SIZE_12),
        _of_sizes(_POWER_2, _POWER_3, _POWER_6, _POWER_12),
    )
    sums = tl.zeros((BLOCK, 4), tl.int64)
    power = tl.zeros((BLOCK, 4), tl.int64) + 1
    for back in tl.static_range(1, _MAX_SIZE + 1):
        token = tl.load(line + length - back, mask=exists & (length >= back), other=-1).to(tl.int64)
        sums += tl.where(back <= size, (token[:, None] + 1) * power, 0)
        power = power * _FACTOR
    order = tl.arange(0, 4).to(tl.int64)[None, :]
    count = tl.zeros((BLOCK,), tl.int64)
    loaded = tl.zeros((BLOCK,), tl.int64)
    probability = tl.zeros((BLOCK,), tl.float32) + 1.0
    alive = (exists & (room > 0)).to(tl.int32)
    step = 0
    num_alive = tl.sum(alive)
    while (step < num_drafts) & (num_alive > 0):
        # The token that leaves each context in the next step. It is read before the barrier, so as not to be read after
        # the words: a draft is needed two steps after its store at the earliest, and other threads may have stored it.
        begin = (length + step)[:, None] - size
        has_tokens = (alive > 0)[:, None] & (begin >= 0)
        of_text = tl.load(line[:, None] + begin, mask=has_tokens & (step < size), other=-1).to(tl.int64)
        of_drafts = tl.load(drafts_ptr + first[:, None] + step - size, mask=has_tokens & (step >= size), other=-1)
        tl.debug_barrier()
        hashed = _hash_of(sums)
        found = tl.load(words_ptr + (hashed & (num_words - 1)), mask=has_tokens, other=0)
        is_found = (found != 0) & ((found >> _CHECK_SHIFT) == ((hashed >> _HASH_SHIFT) & _CHECK_MASK))
        # The two highest bits of a word are not used: they take its size, so that the word of the largest is the
        # largest number.
        best = tl.max(tl.where(is_found, found | ((order - 2) << _WORD_BITS), _NO_WORD), 1)
        word, which = best & _WORD_MASK, (best >> _WORD_BITS) + 2
        score = (word >> _SCORE_SHIFT) & _MAX_SCORE
        is_known = (alive > 0) & (word != 0)
        probability *= tl.load(estimates_ptr + which * (_MAX_SCORE + 1) + score, mask=is_known, other=0.0)
        alive = (is_known & (probability >= least) & (room > step)).to(tl.int32)
        draft = (word >> _TOKEN_SHIFT) & (_TOKENS - 1)
        tl.store(drafts_ptr + first + step, draft, mask=alive > 0)
        tl.store(probabilities_ptr + first + step, probability, mask=alive > 0)
        gone = tl.where(step < size, of_text, of_drafts)
        sums = (draft + 1)[:, None] + (sums - (gone + 1) * last_power) * _FACTOR
        count += alive
        if step == 0:
            loaded = tl.where(alive > 0, word & _LOADED, 0)
        num_alive = tl.sum(alive)
        step += 1
    drafted = tl.arange(0, DRAFTS)[None, :]
    rest = exists[:, None] & (drafted >= count[:, None]) & (drafted < num_drafts)
    tl.store(drafts_ptr + first[:, None] + drafted, tl.zeros((BLOCK, DRAFTS), tl.int64), mask=rest)
    tl.store(probabilities_ptr + first[:, None] + drafted, tl.zeros((BLOCK, DRAFTS), tl.float32), mask=rest)
    tl.store(num_drafts_ptr + seq, count, mask=exists)
    tl.store(loaded_ptr + seq, loaded != 0, mask=exists)


def corpus_drafts(
    words_H: Tensor,
    estimates_OS: Tensor,
    tokens_SL: Tensor,
    req_idx_B: Tensor,
    lengths_B: Tensor,
    limit_B: Tensor,
    least: float,
    num_drafts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels/torch/ngram.py`. Lengths and limits may be of any integer type, and columns of a wider table."""
    assert tokens_SL.stride(1) == 1
    batch, device = req_idx_B.shape[0], words_H.device
    drafts_BD = torch.empty((batch, num_drafts), dtype=torch.int64, device=device)
    num_drafts_B = torch.empty(batch, dtype=torch.int64, device=device)
    probabilities_BD = torch.empty((batch, num_drafts), dtype=torch.float32, device=device)
    loaded_B = torch.empty(batch, dtype=torch.bool, device=device)
    launch(
        _walk, (triton.cdiv(batch, _WALK_BLOCK),),
        words_H, estimates_OS, tokens_SL, req_idx_B, lengths_B, limit_B, drafts_BD, num_drafts_B, probabilities_BD,
        loaded_B, least, tokens_SL.stride(0), lengths_B.stride(0), limit_B.stride(0), batch, words_H.shape[0] - 1,
        num_drafts,
        BLOCK=_WALK_BLOCK, DRAFTS=triton.next_power_of_2(num_drafts), num_warps=1,
    )  # fmt: skip
    return drafts_BD, num_drafts_B, probabilities_BD, loaded_B


# Chains, see `draft/suffix.py` and `draft/hybrid.py`

_ROW, _JOB, _CORPUS = tl.constexpr(ROW), tl.constexpr(JOB), tl.constexpr(CORPUS)
_NETWORK, _FORECAST = tl.constexpr(NETWORK), tl.constexpr(FORECAST)
_UNKNOWN, _OF_NETWORK = tl.constexpr(UNKNOWN), tl.constexpr(OF_NETWORK)


@triton.jit
def _steps_of(probabilities, before):
    """Compute the probability of each step from that of all steps up to it, and up to the one before it."""
    is_draft = probabilities > 0.0
    return tl.where(is_draft, tl.div_rn(probabilities, tl.where(is_draft, before, 1.0)), 0.0)


@triton.jit
def _join_chains(
    row_ptr, num_row_ptr, matched_ptr, matches_ptr, shared_ptr, probabilities_ptr, loaded_ptr,
    network_ptr, scores_ptr, lengths_ptr, limit_ptr, likely_ptr, ids_ptr,
    tokens_ptr, estimates_ptr, sources_ptr, known_ptr,
    matches_stride, lengths_stride, limit_stride, num_drafts,
    STEPS: tl.constexpr, IS_DRAWN: tl.constexpr, HAS_IDS: tl.constexpr, CHAINS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_D)
    real = draft < num_drafts
    later = real & (draft > 0)
    first = seq * num_drafts
    out = first * CHAINS + draft  # This is the place of the first chain.

    row = tl.load(row_ptr + first + draft, mask=real, other=0)
    is_draft = real & (draft < tl.load(num_row_ptr + seq))
    line = matches_ptr + tl.load(matched_ptr + seq) * matches_stride + draft
    upto = tl.load(line, mask=is_draft, other=0.0)
    tl.store(tokens_ptr + out, row, mask=real)
    tl.store(estimates_ptr + out, _steps_of(upto, tl.load(line - 1, mask=later, other=1.0)), mask=real)
    tl.store(sources_ptr + seq * CHAINS, _ROW)

    shared = tl.load(shared_ptr + first + draft, mask=real, other=0)
    line = probabilities_ptr + first + draft
    upto = tl.load(line, mask=real, other=0.0)
    tl.store(tokens_ptr + out + num_drafts, shared, mask=real)
    before = tl.load(line - 1, mask=later, other=1.0)
    tl.store(estimates_ptr + out + num_drafts, _steps_of(upto, before), mask=real)
    tl.store(sources_ptr + seq * CHAINS + 1, tl.where(tl.load(loaded_ptr + seq), _CORPUS, _JOB))

    if STEPS > 0:
        last = out + (CHAINS - 1) * num_drafts
        node = seq * (STEPS + 1) + 1 + draft
        tokens = tl.load(network_ptr + node, mask=draft < STEPS, other=0)
        room = tl.load(limit_ptr + seq * limit_stride) - tl.load(lengths_ptr + seq * lengths_stride) - 1
        has_room = (draft < STEPS) & (draft < room)
        upto = tl.exp(tl.load(scores_ptr + node, mask=has_room, other=float("-inf")))
        # The root's score is 0.
        steps = _steps_of(upto, tl.exp(tl.load(scores_ptr + node - 1, mask=has_room & (draft > 0), other=0.0)))
        tl.store(tokens_ptr + last, tokens, mask=real)
        tl.store(estimates_ptr + last, steps, mask=real)
        tl.store(sources_ptr + seq * CHAINS + CHAINS - 1, _NETWORK)
        if IS_DRAWN:
            forecast = last - num_drafts
            tl.store(tokens_ptr + forecast, tokens, mask=real)
            of_first = tl.sum(tl.where(draft == 0, steps, 0.0))
            tl.store(estimates_ptr + forecast, tl.where(has_room, of_first, 0.0), mask=real)
            tl.store(sources_ptr + seq * CHAINS + CHAINS - 2, _FORECAST)
            likely = tl.load(likely_ptr + seq)
            if HAS_IDS:
                likely = tl.load(ids_ptr + likely)
            tl.store(known_ptr + out, row, mask=real)
            tl.store(known_ptr + out + num_drafts, shared, mask=real)
            tl.store(known_ptr + forecast, tl.where(draft == 0, likely, _UNKNOWN), mask=real)
            tl.store(known_ptr + last, tl.full((BLOCK_D,), _OF_NETWORK, tl.int64), mask=real)


def join_chains(
    row_BD: Tensor,
    num_row_B: Tensor,
    matched_B: Tensor,
    match_estimates_MD: Tensor,
    shared_BD: Tensor,
    probabilities_BD: Tensor,
    is_loaded_B: Tensor,
    network_BN: Tensor | None = None,
    scores_BN: Tensor | None = None,
    lengths_B: Tensor | None = None,
    limit_B: Tensor | None = None,
    likely_B: Tensor | None = None,
    target_ids_W: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See `kernels/torch/ngram.py`. Lengths and limits may be columns of a wider table."""
    (batch, num_drafts), device = row_BD.shape, row_BD.device
    steps, is_drawn = 0 if network_BN is None else network_BN.shape[1] - 1, likely_B is not None
    assert steps <= num_drafts, (steps, num_drafts)
    assert match_estimates_MD.stride(1) == 1
    chains = 2 + (network_BN is not None) + is_drawn
    tokens_BCD = torch.empty((batch, chains, num_drafts), dtype=torch.int64, device=device)
    estimates_BCD = torch.empty((batch, chains, num_drafts), dtype=torch.float32, device=device)
    sources_BC = torch.empty((batch, chains), dtype=torch.int64, device=device)
    known_BCD = torch.empty_like(tokens_BCD) if is_drawn else None
    # What is absent is not read.
    absent = (num_row_B if x is None else x for x in (network_BN, scores_BN, lengths_B, limit_B, likely_B))
    network, scores, lengths, limit, likely = absent
    launch(
        _join_chains, (batch,),
        row_BD.contiguous(), num_row_B.contiguous(), matched_B.contiguous(), match_estimates_MD,
        shared_BD.contiguous(), probabilities_BD.contiguous(), is_loaded_B.contiguous(),
        network.contiguous(), scores.contiguous(), lengths, limit, likely.contiguous(),
        num_row_B if target_ids_W is None else target_ids_W,
        tokens_BCD, estimates_BCD, sources_BC, tokens_BCD if known_BCD is None else known_BCD,
        match_estimates_MD.stride(0), lengths.stride(0), limit.stride(0), num_drafts,
        STEPS=steps, IS_DRAWN=is_drawn, HAS_IDS=target_ids_W is not None, CHAINS=chains,
        BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return tokens_BCD, estimates_BCD, sources_BC, known_BCD
