"""The oracle backend: plain torch operations, any device, and *bitwise invariant* on CPU in float32.

A token's output has the same bits however the batch, the prompt chunks, a prefix hit or a draft tree cut the sequences.
That is what makes speculative output equal plain output exactly, and a resumed file equal an uninterrupted one:

- the keys that a query sees are put in order of position and processed in chunks of a fixed size at fixed positions,
  each with a softmax of its own, merged in order (split-KV, as in FlashDecoding); a chunk past the end of a sequence
  adds an exact zero. A node of a draft tree sees its ancestors where plain decoding would have them, wherever their
  slots are;
- the number of query rows of a matrix product is padded, because BLAS libraries use another summation order for a
  handful of rows (matrix-vector kernels) and one and the same from there on.

Shape suffixes as in `interface.py`; further: n sequences of a group, G query heads for each key/value head, C keys of a
chunk, R = Q * G rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.attention.interface import BatchLayout, Span
from specbatch.cache.pages import KVCache

CHUNK = 256  # keys; part of the result's bits, never a function of the batch
MAX_GROUPED_QUERIES = 64  # sequences with more new tokens than this are not padded to each other
MASKED = -1e30  # finite, so that a chunk without any visible key leaves no NaN; exp() turns it into an exact zero


@dataclass(slots=True)
class _Chunk:
    """Keys [number * C, (number + 1) * C) of the first `num_sequences` sequences of a group, which is sorted by
    length."""

    number: int
    num_sequences: int
    per_query: bool  # the queries of one sequence see different keys here (branches of a tree)
    slots: Tensor  # int64, (num_sequences * C,), or (num_sequences * Q * C,) if per query
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)  # sliding window -> additive mask


@dataclass(slots=True)
class _Group:
    """Sequences that are computed together, longest first."""

    num_sequences: int
    num_queries: int  # padded
    query_index: Tensor  # (n * Q,) rows of the packed batch; padding repeats a real row
    output_rows: Tensor  # packed rows ...
    output_index: Tensor  # ... and where in the flattened (n, Q) output they are found
    num_visible: Tensor  # (n, Q): a query sees the keys of positions [0, num_visible), its own being the last
    chunks: list[_Chunk]


class TorchAttention:
    """See the module's text. `num_heads` is a multiple of `num_kv_heads`."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._per_head = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
        # Observed with MKL: up to 5 rows differ at head_dim 128, up to 10 at 256. test_invariance.py watches it.
        self._min_rows = max(8, head_dim // 16)
        self._device = device

    def plan(self, layout: BatchLayout) -> list[_Group]:
        row = 0
        alone: list[list[tuple[Span, int]]] = []
        causal: list[tuple[Span, int]] = []
        trees: list[tuple[Span, int]] = []
        for span in layout.spans:
            if span.num_tokens > MAX_GROUPED_QUERIES:
                alone.append([(span, row)])
            else:
                (causal if span.mask is None else trees).append((span, row))
            row += span.num_tokens
        members = [*alone, *([causal] if causal else []), *([trees] if trees else [])]
        return [
            self._group(sorted(m, key=lambda s: -(s[0].start + s[0].num_tokens)), layout.page_size) for m in members
        ]

    def _group(self, members: list[tuple[Span, int]], page_size: int) -> _Group:
        num_queries = max(max(span.num_tokens for span, _ in members), -(-self._min_rows // self._per_head))
        query_index: list[int] = []
        output_rows: list[int] = []
        output_index: list[int] = []
        kv_lens, prefix_lens = [], []
        for i, (span, row) in enumerate(members):
            query_index += [row + min(j, span.num_tokens - 1) for j in range(num_queries)]
            output_rows += range(row, row + span.num_tokens)
            output_index += range(i * num_queries, i * num_queries + span.num_tokens)
            kv_lens.append(span.start + span.num_tokens)
            # Keys in front of this one are the same for all queries of the sequence that see them.
            prefix_lens.append(kv_lens[-1] - span.mask.shape[1] if span.mask is not None else kv_lens[-1])
        width = -(-kv_lens[0] // CHUNK) * CHUNK
        slots = torch.zeros((len(members), width), dtype=torch.int64)
        visible = torch.ones((len(members), num_queries), dtype=torch.int64)
        offsets = torch.arange(page_size)
        for i, (span, _) in enumerate(members):
            pages = torch.tensor(span.pages[: -(-kv_lens[i] // page_size)], dtype=torch.int64)
            slots[i, : kv_lens[i]] = (pages[:, None] * page_size + offsets).view(-1)[: kv_lens[i]]
            counts = (
                span.start + 1 + torch.arange(span.num_tokens)
                if span.mask is None
                else prefix_lens[i] + span.mask.sum(1).cpu()
            )
            visible[i, : span.num_tokens] = counts
        chunks = []
        for number in range(width // CHUNK):
            low, high = number * CHUNK, (number + 1) * CHUNK
            reached = sum(kv_len > low for kv_len in kv_lens)
            per_query = any(
                prefix < min(high, kv_len) for prefix, kv_len in zip(prefix_lens[:reached], kv_lens, strict=False)
            )
            part = slots[:reached, low:high]
            if per_query:
                part = part[:, None].repeat(1, num_queries, 1)
                for i, (span, _) in enumerate(members[:reached]):
                    _place_ancestors(part[i], span, slots[i], prefix_lens[i], low)
            chunks.append(_Chunk(number, reached, per_query, part.reshape(-1).to(self._device)))
        return _Group(
            num_sequences=len(members),
            num_queries=num_queries,
            query_index=torch.tensor(query_index, device=self._device),
            output_rows=torch.tensor(output_rows, device=self._device),
            output_index=torch.tensor(output_index, device=self._device),
            num_visible=visible.to(self._device),
            chunks=chunks,
        )

    def attend(self, plan: list[_Group], q_THD: Tensor, cache: KVCache, layer: int, window: int | None) -> Tensor:
        out = torch.empty_like(q_THD)
        for group in plan:
            result = self._attend_group(group, q_THD, cache.layer(layer), window, cache.may_hold_nan)
            out.index_copy_(0, group.output_rows, result.index_select(0, group.output_index).to(out.dtype))
        return out

    def _attend_group(
        self, group: _Group, q_THD: Tensor, kv_2KSD: Tensor, window: int | None, may_hold_nan: bool
    ) -> Tensor:
        n, num_queries, heads, per_head, dim = (
            group.num_sequences,
            group.num_queries,
            self._num_kv_heads,
            self._per_head,
            self._head_dim,
        )
        compute = q_THD.dtype if q_THD.dtype in (torch.float32, torch.float64) else torch.float32
        q = q_THD.index_select(0, group.query_index).to(compute) * self._scale
        q_KnRD = (
            q.view(n, num_queries, heads, per_head, dim)
            .permute(2, 0, 1, 3, 4)
            .reshape(heads, n, num_queries * per_head, dim)
        )
        rows = num_queries * per_head
        for chunk in group.chunks:
            m = chunk.num_sequences
            batch, batch_rows = (m * num_queries, per_head) if chunk.per_query else (m, rows)
            kv = kv_2KSD.index_select(2, chunk.slots).to(compute).view(2, heads * batch, CHUNK, dim)
            queries = q_KnRD[:, :m].reshape(heads * batch, batch_rows, dim)
            bias = self._bias(group, chunk, window, compute)
            out, lse = self._partial(queries, kv[0], kv[1], bias, len(group.chunks) > 1, may_hold_nan)
            out = out.reshape(heads, m, rows, dim)
            if len(group.chunks) == 1:
                merged = out
                continue
            lse = lse.reshape(heads, m, rows, 1)
            if chunk.number == 0:
                merged, peak, total = out, lse, torch.ones_like(lse)
                continue
            # Merge by weights exp(lse): of a chunk without a visible key the weight is exactly zero.
            new_peak = torch.maximum(peak[:, :m], lse)
            old, new = torch.exp(peak[:, :m] - new_peak), torch.exp(lse - new_peak)
            total[:, :m] = total[:, :m] * old + new
            merged[:, :m] = merged[:, :m] * old + out * new
            peak[:, :m] = new_peak
        if len(group.chunks) > 1:
            merged = merged / total
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
        """Attention over one chunk (b, r, D), and the log of its sum of exponentials (b, r)."""
        rows = q_brD.shape[1]
        padding = self._min_rows - rows
        if padding > 0:  # single queries; a group's rows are enough already
            q_brD = F.pad(q_brD, (0, 0, 0, padding))
        scores = torch.bmm(q_brD, k_bCD.transpose(1, 2))
        if bias is not None:
            # (m, Q, C) for queries times heads of one sequence, (m * Q, 1, C) for single queries
            part = scores[:, :rows].view(self._num_kv_heads, bias.shape[0], bias.shape[1], self._per_head, CHUNK)
            if may_hold_nan:
                # The same bits, several times slower: what is added to a NaN leaves it one. (Values are finite always.)
                part.masked_fill_((bias < 0)[:, :, None], MASKED)
            else:
                part += bias[:, :, None]
        lse = torch.logsumexp(scores, -1) if with_lse else scores[..., 0]
        out = torch.bmm(torch.softmax(scores, -1), v_bCD)
        return (out[:, :rows], lse[:, :rows]) if padding > 0 else (out, lse)

    def _bias(self, group: _Group, chunk: _Chunk, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask of a chunk, computed once for all layers; None where every query sees every key."""
        if window not in chunk.biases:
            m = chunk.num_sequences
            limits = group.num_visible[:m, :, None]
            keys = torch.arange(chunk.number * CHUNK, (chunk.number + 1) * CHUNK, device=self._device)
            hidden = keys >= limits
            if window is not None:
                hidden |= keys <= limits - 1 - window
            bias = None
            if bool(hidden.any()):
                bias = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, MASKED)
                if chunk.per_query:
                    bias = bias.view(-1, 1, CHUNK)
            chunk.biases[window] = bias
        return chunk.biases[window]


def _place_ancestors(part_QC: Tensor, span: Span, slots: Tensor, prefix: int, low: int) -> None:
    """Put the slots that each query sees behind `prefix` in order of position, into the chunk that starts at `low`."""
    if span.mask is None:
        return
    window = slots[prefix : prefix + span.mask.shape[1]]
    for j, row in enumerate(span.mask.cpu()):
        path = window[row]  # nodes come after their parents, so this is by depth
        first, last = max(prefix, low), min(prefix + len(path), low + CHUNK)
        if first < last:
            part_QC[j, first - low : last - low] = path[first - prefix : last - prefix]
