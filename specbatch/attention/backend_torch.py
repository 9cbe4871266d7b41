"""The oracle backend: plain torch operations, any device, and *bitwise invariant* on CPU in float32.

A token's output has the same bits however the batch, the prompt chunks, a prefix hit or a tree cut the sequences.
That is what makes speculative output equal plain output exactly, and a resumed file equal an uninterrupted one:

- keys are processed in chunks of a fixed size at fixed positions, with the online softmax of FlashAttention
  (Dao et al. 2022) between them; a chunk past the end of a sequence adds an exact zero;
- the number of query rows of a matrix product is padded to at least MIN_ROWS, because BLAS libraries switch to
  another summation order below a handful of rows (matrix-vector kernels) and to the same one from there on.

Shape suffixes as in `interface.py`; further: n sequences of a group, G query heads for each key/value head, C keys of a
chunk, R = Q * G rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specbatch.attention.interface import BatchLayout, Span

CHUNK = 128  # keys; part of the result's bits, never a function of the batch
MIN_ROWS = 8
MAX_GROUPED_QUERIES = 64  # sequences with more new tokens than this are not padded to each other
MASKED = -1e30  # finite, so that a chunk without any visible key leaves no NaN; exp() turns it into an exact zero


@dataclass(slots=True)
class _Chunk:
    num_sequences: int  # the first ones of the group reach this chunk (they are sorted by length)
    slots: Tensor  # (num_sequences * C,) int64
    visible: Tensor | None  # (num_sequences, Q, C) bool; None: everything
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)  # sliding window -> additive mask


@dataclass(slots=True)
class _Group:
    """Sequences that are computed together, longest first."""

    num_sequences: int
    num_queries: int  # padded
    query_index: Tensor  # (n * Q,) rows of the packed batch; padding repeats a real row
    output_rows: Tensor  # packed rows ...
    output_index: Tensor  # ... and where in the flattened (n, Q) output they are found
    query_positions: Tensor  # (n, Q) int64
    prefix_lens: Tensor  # (n, 1, 1): slots in front of the mask, whose position is their number
    chunks: list[_Chunk]


class TorchAttention:
    """See the module's text. `num_heads` is a multiple of `num_kv_heads`."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._groups_per_head = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._scale = head_dim**-0.5
        self._device = device

    def plan(self, layout: BatchLayout) -> list[_Group]:
        row, together, alone = 0, [], []
        for span in layout.spans:
            (together if span.num_tokens <= MAX_GROUPED_QUERIES else alone).append((span, row))
            row += span.num_tokens
        groups = [self._group([one], layout) for one in alone]
        if together:
            groups.append(self._group(sorted(together, key=lambda s: -(s[0].start + s[0].num_tokens)), layout))
        return groups

    def _group(self, members: list[tuple[Span, int]], layout: BatchLayout) -> _Group:
        device, page_size = self._device, layout.page_size
        num_queries = max(max(span.num_tokens for span, _ in members), -(-MIN_ROWS // self._groups_per_head))
        query_index, output_rows, output_index = [], [], []
        for i, (span, row) in enumerate(members):
            query_index += [row + min(j, span.num_tokens - 1) for j in range(num_queries)]
            output_rows += range(row, row + span.num_tokens)
            output_index += range(i * num_queries, i * num_queries + span.num_tokens)
        kv_lens = [span.start + span.num_tokens for span, _ in members]
        prefix_lens = [
            kv_len - (span.mask.shape[1] if span.mask is not None else span.num_tokens)
            for (span, _), kv_len in zip(members, kv_lens, strict=True)
        ]
        num_chunks = -(-kv_lens[0] // CHUNK)
        slots = torch.zeros((len(members), num_chunks * CHUNK), dtype=torch.int64)
        visible = torch.zeros((len(members), num_queries, num_chunks * CHUNK), dtype=torch.bool)
        offsets = torch.arange(page_size)
        for i, ((span, _), kv_len, prefix) in enumerate(zip(members, kv_lens, prefix_lens, strict=True)):
            pages = torch.tensor(span.pages[: -(-kv_len // page_size)], dtype=torch.int64)
            slots[i, :kv_len] = (pages[:, None] * page_size + offsets).view(-1)[:kv_len]
            visible[i, :, :prefix] = True
            mask = span.mask.cpu() if span.mask is not None else torch.ones(kv_len - prefix, kv_len - prefix).bool().tril()
            visible[i, : span.num_tokens, prefix:kv_len] = mask
        chunks = []
        for c in range(num_chunks):
            low, high = c * CHUNK, (c + 1) * CHUNK
            reached = sum(kv_len > low for kv_len in kv_lens)
            part = visible[:reached, :, low:high]
            chunks.append(
                _Chunk(
                    reached,
                    slots[:reached, low:high].reshape(-1).to(device),
                    None if bool(part.all()) else part.to(device),
                )
            )
        index = torch.tensor(query_index, device=device)
        return _Group(
            num_sequences=len(members),
            num_queries=num_queries,
            query_index=index,
            output_rows=torch.tensor(output_rows, device=device),
            output_index=torch.tensor(output_index, device=device),
            query_positions=layout.positions_T[index].view(len(members), num_queries),
            prefix_lens=torch.tensor(prefix_lens, device=device)[:, None, None],
            chunks=chunks,
        )

    def attend(self, plan: list[_Group], q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, window: int | None) -> Tensor:
        out = torch.empty_like(q_THD)
        for group in plan:
            result = self._attend_group(group, q_THD, k_SKD, v_SKD, window)
            out.index_copy_(0, group.output_rows, result.index_select(0, group.output_index).to(out.dtype))
        return out

    def _attend_group(self, group: _Group, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, window: int | None) -> Tensor:
        n, num_queries, heads, per_head = group.num_sequences, group.num_queries, self._num_kv_heads, self._groups_per_head
        head_dim = q_THD.shape[-1]
        compute = q_THD.dtype if q_THD.dtype in (torch.float32, torch.float64) else torch.float32
        k_KSD, v_KSD = k_SKD.transpose(0, 1), v_SKD.transpose(0, 1)
        rows = num_queries * per_head
        q = q_THD.index_select(0, group.query_index).to(compute) * self._scale
        q_KnRD = q.view(n, num_queries, heads, per_head, head_dim).permute(2, 0, 1, 3, 4).reshape(heads, n, rows, head_dim)

        for number, chunk in enumerate(group.chunks):
            m = chunk.num_sequences
            k = k_KSD.index_select(1, chunk.slots).to(compute).view(heads * m, CHUNK, head_dim)
            v = v_KSD.index_select(1, chunk.slots).to(compute).view(heads * m, CHUNK, head_dim)
            scores = torch.bmm(q_KnRD[:, :m].reshape(heads * m, rows, head_dim), k.transpose(1, 2))
            bias = self._bias(group, chunk, number, window, compute)
            if bias is not None:
                scores.view(heads, m, num_queries, per_head, CHUNK).add_(bias)
            scores = scores.view(heads, m, rows, CHUNK)
            peak = scores.amax(-1, keepdim=True)
            if number == 0:
                weights = torch.exp(scores.sub_(peak))
                top, total = peak, weights.sum(-1, keepdim=True)
                acc = torch.bmm(weights.view(heads * m, rows, CHUNK), v).view(heads, m, rows, head_dim)
                continue
            new_top = torch.maximum(top[:, :m], peak)
            keep = torch.exp(top[:, :m] - new_top)
            weights = torch.exp(scores.sub_(new_top))
            total[:, :m] = total[:, :m] * keep + weights.sum(-1, keepdim=True)
            update = torch.bmm(weights.view(heads * m, rows, CHUNK), v).view(heads, m, rows, head_dim)
            acc[:, :m] = acc[:, :m] * keep + update
            top[:, :m] = new_top
        out = (acc / total).view(heads, n, num_queries, per_head, head_dim).permute(1, 2, 0, 3, 4)
        return out.reshape(n * num_queries, heads * per_head, head_dim)

    def _bias(self, group: _Group, chunk: _Chunk, number: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask of a chunk, (m, Q, 1, C), computed once for all layers; None where every key is visible."""
        if window not in chunk.biases:
            visible, m = chunk.visible, chunk.num_sequences
            if window is not None:
                # Only slots in front of the mask can fall out of the window: what is behind it is younger than any
                # sensible window is long.
                keys = torch.arange(number * CHUNK, (number + 1) * CHUNK, device=self._device)[None, None]
                far = (keys < group.prefix_lens[:m]) & (keys <= group.query_positions[:m, :, None] - window)
                visible = ~far if visible is None else visible & ~far
            bias = None
            if visible is not None and not bool(visible.all()):
                bias = torch.zeros(visible.shape, dtype=dtype, device=self._device).masked_fill_(~visible, MASKED)[:, :, None]
            chunk.biases[window] = bias
        return chunk.biases[window]
