"""Attention in plain torch operations, for any device, and *bitwise invariant* on CPU in float32.

A token's output has the same bits however the batch, the prompt chunks, a prefix hit or a draft tree divide the
sequences. So speculative output is exactly equal to plain output, and a resumed file to an uninterrupted one:

- The keys that a query sees are put in order of position and processed in chunks of a fixed size at fixed positions.
  Each chunk has a separate softmax, and chunks are merged in order (split-KV, as in FlashDecoding). A chunk past the
  end of a sequence adds an exact zero. A node of a draft tree sees its ancestors at the positions of plain decoding,
  wherever their slots are.
- The number of query rows of a GEMM is padded, because BLAS libraries use another summation order for few rows
  (matrix-vector kernels), and the same order for all larger numbers.

Shape suffixes as in `interface.py`; further: n sequences of a group, G query heads for each key/value head, C keys of a
chunk, R = Q * G rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.batch import PagedBatch, slots_of
from specbatch.cache.pages import KVCache, KVScales
from specbatch.kernels.torch.model import as_bytes

CHUNK = 256  # keys of a chunk; the result's bits depend on it, so it must not depend on the batch
MAX_GROUPED_QUERIES = 64  # sequences with more new tokens than this are not padded to each other
MASKED = -1e30  # It is finite, so that a chunk without visible keys gives no NaN. exp() turns it into an exact zero.


class _Member(NamedTuple):
    """A sequence of a batch, with packed tokens [first, first + num_tokens). `kv_len`: the number of its keys, with
    those of these tokens."""

    number: int
    first: int
    num_tokens: int
    kv_len: int


@dataclass(slots=True)
class _Chunk:
    """Keys [number * C, (number + 1) * C) of the first `num_sequences` sequences of a group, which is sorted by
    length."""

    number: int
    num_sequences: int
    per_query: bool  # True: the queries of one sequence see different keys here (branches of a tree)
    slots: Tensor  # int64, (num_sequences * C,), or (num_sequences * Q * C,) if per query
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)  # sliding window -> additive mask


@dataclass(slots=True)
class _Group:
    """Sequences that are computed together, longest first."""

    num_sequences: int
    num_queries: int  # the number of queries of a sequence, padding included
    query_index: Tensor  # (n * Q,) rows of the packed batch; padding repeats a real row
    output_rows: Tensor  # the rows of the packed batch that the group computes
    output_index: Tensor  # the index of these rows in the flattened (n, Q) output
    num_visible: Tensor  # (n, Q): a query sees the keys of positions [0, num_visible)
    position: Tensor  # (n, Q): the query's own position, from which a sliding window reaches back
    chunks: list[_Chunk]


class TorchAttention:
    """The backend `torch`, see the module's text. `num_heads` is a multiple of `num_kv_heads`. `scale` None: head_dim
    ** -0.5. `chunk`: the keys of a chunk; a run has one value, because the result's bits depend on it."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self._per_head = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self._soft_cap = soft_cap
        # With MKL, up to 5 rows have other bits at head_dim 128, and up to 10 at 256. test_invariance.py checks this.
        self._min_rows = max(8, head_dim // 16)
        self._device = device
        self._chunk = chunk

    def plan(self, batch: PagedBatch) -> list[_Group]:
        """Plan a forward pass. The host reads the lengths."""
        starts_B = batch.starts_B.tolist()
        ends = (batch.query_starts if batch.host_query_starts is None else batch.host_query_starts).tolist()
        grouped: list[_Member] = []
        alone: list[list[_Member]] = []
        for b, (start, first, end) in enumerate(zip(starts_B, ends, ends[1:], strict=False)):
            member = _Member(b, first, end - first, start + end - first)
            if member.num_tokens > MAX_GROUPED_QUERIES:
                alone.append([member])
            elif member.num_tokens:
                grouped.append(member)
        return [
            self._group(sorted(members, key=lambda member: -member.kv_len), batch)
            for members in (*alone, grouped)
            if members
        ]

    def _group(self, members: list[_Member], batch: PagedBatch) -> _Group:
        device, size, chunk = batch.slots_T.device, len(members), self._chunk
        num_queries = max(max(member.num_tokens for member in members), -(-self._min_rows // self._per_head))
        number_n, first_n, count_n, kv_len_n = torch.tensor(members, device=device).unbind(1)
        query = torch.arange(num_queries, device=device)
        query_nQ = first_n[:, None] + torch.minimum(query, count_n[:, None] - 1)
        real_nQ = query < count_n[:, None]
        output_index = real_nQ.view(-1).nonzero()[:, 0]
        width = -(-members[0].kv_len // chunk) * chunk
        key = torch.arange(width, device=device)
        slots_nL = slots_of(batch.page_table_BP[number_n], batch.page_size, key.expand(size, -1))
        slots_nL = torch.where(key < kv_len_n[:, None], slots_nL, 0)
        if batch.mask_TW is None or batch.mask_starts_B is None:
            prefix_lens = [member.kv_len for member in members]
            visible_nQ = (kv_len_n - count_n)[:, None] + 1 + query
        else:
            # Keys before this one are visible to all queries of the sequence.
            prefix_n = batch.mask_starts_B[number_n].long()
            prefix_lens = prefix_n.tolist()
            num_masked = max(m.kv_len - prefix for m, prefix in zip(members, prefix_lens, strict=True))
            seen_nQM = _bits(batch.mask_TW[query_nQ], num_masked)
            visible_nQ = prefix_n[:, None] + seen_nQM.sum(2)
        chunks = []
        for number in range(width // chunk):
            low, high = number * chunk, (number + 1) * chunk
            reached = sum(member.kv_len > low for member in members)
            part = slots_nL[:reached, low:high]
            per_query = any(
                prefix < min(high, member.kv_len)
                for prefix, member in zip(prefix_lens[:reached], members, strict=False)
            )
            if per_query:
                part = _per_query(slots_nL[:reached], seen_nQM[:reached], prefix_n[:reached], low, chunk)
            chunks.append(_Chunk(number, reached, per_query, part.reshape(-1)))
        return _Group(
            num_sequences=size,
            num_queries=num_queries,
            query_index=query_nQ.view(-1),
            output_rows=query_nQ.view(-1)[output_index],
            output_index=output_index,
            num_visible=torch.where(real_nQ, visible_nQ, 1),
            position=torch.where(real_nQ, batch.positions_T[query_nQ], 0),
            chunks=chunks,
        )

    def attend(
        self,
        plan: list[_Group],
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q_THD)
        for group in plan:
            result = self._attend_group(
                group, q_THD, cache.layer(layer), cache.scales(layer), window, cache.may_hold_nan, sinks_H
            )
            out.index_copy_(0, group.output_rows, result.index_select(0, group.output_index).to(out.dtype))
        return out

    def _attend_group(
        self,
        group: _Group,
        q_THD: Tensor,
        kv_2KSD: Tensor,
        scales: KVScales,
        window: int | None,
        may_hold_nan: bool,
        sinks_H: Tensor | None,
    ) -> Tensor:
        n, num_queries, heads, per_head, dim = (
            group.num_sequences,
            group.num_queries,
            self._num_kv_heads,
            self._per_head,
            self._head_dim,
        )
        compute = q_THD.dtype if q_THD.dtype in (torch.float32, torch.float64) else torch.float32
        q = q_THD.index_select(0, group.query_index).to(compute) * (self._scale * scales.k)
        q_KnRD = (
            q.view(n, num_queries, heads, per_head, dim)
            .permute(2, 0, 1, 3, 4)
            .reshape(heads, n, num_queries * per_head, dim)
        )
        rows = num_queries * per_head
        needs_lse = len(group.chunks) > 1 or sinks_H is not None
        for chunk in group.chunks:
            m = chunk.num_sequences
            batch, batch_rows = (m * num_queries, per_head) if chunk.per_query else (m, rows)
            gathered = as_bytes(kv_2KSD).index_select(2, chunk.slots).view(kv_2KSD.dtype)
            kv = gathered.to(compute).view(2, heads * batch, self._chunk, dim)
            queries = q_KnRD[:, :m].reshape(heads * batch, batch_rows, dim)
            bias = self._bias(group, chunk, window, compute)
            out, lse = self._partial(queries, kv[0], kv[1], bias, needs_lse, may_hold_nan)
            out = out.reshape(heads, m, rows, dim)
            if not needs_lse:
                merged = out
                continue
            lse = lse.reshape(heads, m, rows, 1)
            if chunk.number == 0:
                merged, peak, total = out, lse, torch.ones_like(lse)
                continue
            # Chunks are merged with weights exp(lse). The weight of a chunk without a visible key is exactly zero.
            new_peak = torch.maximum(peak[:, :m], lse)
            old, new = torch.exp(peak[:, :m] - new_peak), torch.exp(lse - new_peak)
            total[:, :m] = total[:, :m] * old + new
            merged[:, :m] = merged[:, :m] * old + out * new
            peak[:, :m] = new_peak
        if sinks_H is not None:
            # A sink is merged last, as a key without a value.
            sinks_KR = sinks_H.to(compute).view(heads, 1, per_head, 1).repeat(1, 1, num_queries, 1)
            new_peak = torch.maximum(peak, sinks_KR)
            old = torch.exp(peak - new_peak)
            merged, total = merged * old, total * old + torch.exp(sinks_KR - new_peak)
        if needs_lse:
            merged = merged / total
        if scales.v != 1:
            merged = merged * scales.v
        return (
            merged.view(heads, n, num_queries, per_head, dim)
            .permute(1, 2, 0, 3, 4)
            .reshape(n * num_queries, heads * per_head, dim)
        )

    def _partial(
        self,
        q_brD: Tensor,
        k_bCD: Tensor,
        v_bCD: Tensor,
        bias: Tensor | None,
        with_lse: bool,
        may_hold_nan: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention over one chunk (b, r, D), and the logarithm of its sum of exponentials (b, r)."""
        rows = q_brD.shape[1]
        padding = self._min_rows - rows
        if padding > 0:  # true for single queries; a group has enough rows
            q_brD = F.pad(q_brD, (0, 0, 0, padding))
        scores = torch.bmm(q_brD, k_bCD.transpose(1, 2))
        if self._soft_cap is not None:
            scores = torch.tanh(scores / self._soft_cap) * self._soft_cap
        if bias is not None:
            # The bias has the shape (m, Q, C) for queries times heads of one sequence, (m * Q, 1, C) for single
            # queries.
            part = scores[:, :rows].view(self._num_kv_heads, bias.shape[0], bias.shape[1], self._per_head, -1)
            if may_hold_nan:
                # This gives the same bits, but takes several times as long. A sum would not replace a NaN. (Values are
                # always finite.)
                part.masked_fill_((bias < 0)[:, :, None], MASKED)
            else:
                part += bias[:, :, None]
        lse = torch.logsumexp(scores, -1) if with_lse else scores[..., 0]
        out = torch.bmm(torch.softmax(scores, -1), v_bCD)
        return (out[:, :rows], lse[:, :rows]) if padding > 0 else (out, lse)

    def _bias(self, group: _Group, chunk: _Chunk, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of a chunk, which is computed once for all layers. Return None if every query sees
        every key."""
        if window not in chunk.biases:
            m = chunk.num_sequences
            limits = group.num_visible[:m, :, None]
            keys = torch.arange(chunk.number * self._chunk, (chunk.number + 1) * self._chunk, device=self._device)
            hidden = keys >= limits
            if window is not None:
                hidden |= keys <= group.position[:m, :, None] - window
            bias = None
            if bool(hidden.any()):
                bias = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, MASKED)
                if chunk.per_query:
                    bias = bias.view(-1, 1, self._chunk)
            chunk.biases[window] = bias
        return chunk.biases[window]


def _bits(words_nQW: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of words of 32 bits, as bool (n, Q, count)."""
    bits = (words_nQW[..., None] >> torch.arange(32, device=words_nQW.device)) & 1
    return bits.flatten(2)[:, :, :count].bool()


def _per_query(slots_nL: Tensor, seen_nQM: Tensor, prefix_n: Tensor, low: int, size: int) -> Tensor:
    """Return the slots (n, Q, C) that each query sees, in order of position, in the chunk of `size` keys that starts at
    `low`. These are the slots before `prefix_n`, then the masked ones that the query sees, which are in order of depth,
    because nodes come after their parents."""
    num_sequences, num_queries, num_masked = seen_nQM.shape
    masked = prefix_n[:, None] + torch.arange(num_masked, device=slots_nL.device)
    own_nM = slots_nL.gather(1, masked.clamp(max=slots_nL.shape[1] - 1))
    place = prefix_n[:, None, None] + seen_nQM.cumsum(2) - 1 - low
    place = torch.where(seen_nQM & (place >= 0) & (place < size), place, size)  # `size`: slots of other chunks
    part = torch.zeros((num_sequences, num_queries, size + 1), dtype=torch.int64, device=slots_nL.device)
    part[:, :, :size] = slots_nL[:, None, low : low + size]
    return part.scatter_(2, place, own_nM[:, None].expand_as(place))[:, :, :size]
