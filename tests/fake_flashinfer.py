"""FlashInfer's paged prefill wrapper in plain torch, as far as the backend uses it. It reads buffers as the kernel
does: lengths from `indptr` and `last_page_len` at run time, and the list of (sequence, tile) pairs from `plan`."""

from __future__ import annotations

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    made = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> None:
        assert (kv_layout, backend) == ("HND", "fa2")
        type(self).made += 1
        self._int_bytes = 8 * 2**20
        self._paged_kv_indices_buf: Tensor | None = None
        self._paged_kv_last_page_len_buf: Tensor | None = None
        self._custom_mask_buf: Tensor | None = None
        self._mask_indptr_buf: Tensor | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._int_bytes = int_workspace_buffer.numel()

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float | None,
        seq_lens: Tensor,
        max_token_per_sequence: int,
        disable_split_kv: bool,
    ) -> None:
        assert causal
        assert disable_split_kv
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
        counts = qo_indptr.diff()
        assert max_token_per_sequence >= int(counts.max())
        group = num_qo_heads // num_kv_heads
        mean = int(counts.sum()) * group // len(counts)  # computed as in FA2DetermineCtaTileQ
        tile = 128 if mean > 64 and head_dim_qk < 256 else 64 if mean > 16 else 16
        pairs = sum(-(-int(count) * group // tile) for count in counts)
        needed = 3 * -(-4 * pairs // 16) * 16 + -(-4 * (len(counts) + 1) // 16) * 16 + 4
        assert needed <= self._int_bytes, (needed, self._int_bytes)
        self._dtypes = q_data_type, kv_data_type
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._query_starts = qo_indptr.clone()
        self._page_size = page_size
        self._paged_kv_indptr_buf = paged_kv_indptr.clone()
        self._paged_kv_indices_buf = paged_kv_indices
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len
        self._custom_mask_buf = self._mask_indptr_buf = None

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool) -> Tensor:
        assert not enable_pdl
        k_cache, v_cache = paged_kv_cache
        assert (q.dtype, k_cache.dtype) == self._dtypes
        assert q.shape[0] == int(self._query_starts[-1])
        assert out.is_contiguous()
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.shape[2] == self._page_size
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        group = q.shape[1] // k_cache.shape[1]
        assert self._paged_kv_indices_buf is not None
        assert self._paged_kv_last_page_len_buf is not None
        for b in range(len(self._query_starts) - 1):
            first, end = self._query_starts[b : b + 2].tolist()
            page_first, page_end = self._paged_kv_indptr_buf[b : b + 2].tolist()
            length = (page_end - page_first - 1) * self._page_size + int(self._paged_kv_last_page_len_buf[b])
            assert end - first <= length <= (page_end - page_first) * self._page_size or end == first
            pages = self._paged_kv_indices_buf[page_first:page_end].long()
            k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(wide) for c in (k_cache, v_cache))
            queries, keys = torch.arange(end - first)[:, None], torch.arange(length)[None]
            if self._custom_mask_buf is None:
                visible = keys <= length - (end - first) + queries
            else:
                assert self._mask_indptr_buf is not None
                index = queries * length + keys
                row = self._custom_mask_buf[int(self._mask_indptr_buf[b]) :]
                visible = ((row[index // 8] >> (index % 8)) & 1).bool()
            k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
            scores = torch.einsum("qhd,hkd->hqk", q[first:end].to(wide), k) * self._scale
            weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
            out[first:end] = torch.einsum("hqk,hkd->qhd", weights, v).to(q.dtype)
        return out
