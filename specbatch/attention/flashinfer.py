"""Attention by FlashInfer's paged kernels over a `PagedBatch` (Ye et al. 2025,
https://github.com/flashinfer-ai/flashinfer).

FlashInfer plans on the host, and here lengths are on the device only. But with one split of the keys, its "fa2" prefill
kernel reads a sequence's length on the device (`paged_kv_t::get_length`), and a plan is the list of (sequence, tile of
queries) pairs. It depends on the numbers of new tokens, which the host has. So a plan is made once for each shape of
a round and stays right while lengths change, also in a captured graph. Prompts are planned chunk by chunk.

The backend relies on these facts, which were read in the source of FlashInfer 0.6.11:

- Every sequence has a whole row of the page table, `indptr[b] = b * P`, so its length is (P - 1) * page_size +
  last_page_len[b], in unsigned arithmetic: a negative last_page_len is right, and nothing else reads it.
- `run` takes the kernel's arguments from attributes of the wrapper: those of `_REPLACED` are replaced after `plan`. The
  wrapper's own CUDA-graph mode cannot be used: it pads the list of pairs, and without splits nothing masks the padding.
- `plan` stages the list in page-locked memory and does not wait for the copy. The list of prompts is staged in a ring.
- The kernel reads lengths before it waits for its predecessor, so it is not launched ahead of time (`enable_pdl`).

Shape suffixes as in `interface.py`; P pages of a table, Z bytes of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.errors import ModelError
from specbatch.kernels import ops_for

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
_REPLACED = ("_paged_kv_indices_buf", "_paged_kv_last_page_len_buf", "_custom_mask_buf", "_mask_indptr_buf")
_RING = 4  # the most plans of prompts whose copies may be under way


class _Planner:
    """A wrapper of FlashInfer, and the memory in which its plan is staged."""

    def __init__(self, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._device = device
        self._splits = torch.empty(16, dtype=torch.uint8, device=device)  # the buffer of splits stays empty
        self._num_bytes = 0
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(self._splits, "HND", backend="fa2")
        if not all(hasattr(self.wrapper, name) for name in _REPLACED):
            raise ModelError(
                "the installed flashinfer-python keeps its buffers in another way than the versions known here",
                hint="pip install 'specbatch[gpu]', or use engine.attention: triton",
            )

    def plan(self, query_starts: np.ndarray, batch: PagedBatch, num_bytes: int, **geometry: Any) -> None:
        """Plan a batch. `num_bytes`: enough memory for the list of pairs; the wrapper's default of 8 MiB is too much
        for each shape."""
        if self._copied is not None:
            self._copied.synchronize()
        if num_bytes > self._num_bytes:
            self.wrapper.reset_workspace_buffer(
                self._splits, torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            )
            self._num_bytes = num_bytes
        num_seqs, num_pages = batch.page_table_BP.shape
        # The arrays are page-locked, so that no copy waits for the device. Lengths are bounds: plans do not depend on
        # them.
        ones = np.ones(num_seqs, dtype=np.int32)
        self.wrapper.plan(
            self._host(query_starts.astype(np.int32)),
            self._host(np.arange(num_seqs + 1, dtype=np.int32) * np.int32(num_pages)),
            batch.page_table_BP.view(-1),
            self._host(ones * np.int32(batch.page_size)),
            page_size=batch.page_size,
            causal=True,
            seq_lens=self._host(ones * np.int32(num_pages * batch.page_size)),
            max_token_per_sequence=batch.max_queries,
            disable_split_kv=True,
            **geometry,
        )
        if self._copied is not None:
            self._copied.record()

    def _host(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of one forward pass."""

    planner: _Planner
    page_size: int
    pages: Tensor  # (B * P,) int32
    last_page_len_B: Tensor  # int32
    mask_BZ: Tensor | None = None
    mask_starts: Tensor | None = None  # (B + 1,) int32, bytes


class FlashInferAttention:
    """The backend `flashinfer`. `num_heads` is a multiple of `num_kv_heads`; `head_dim` and `dtype` are among HEAD_DIMS
    and DTYPES. Sliding windows and soft caps are not supported."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        *,
        scale: float | None = None,
    ) -> None:
        """`kv_dtype`: the dtype of the cache; None: `dtype`. `scale` None: head_dim ** -0.5."""
        self._device = device
        self._group = num_heads // num_kv_heads
        self._geometry = {
            "num_qo_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim_qk": head_dim,
            "q_data_type": dtype,
            "kv_data_type": kv_dtype or dtype,
            "sm_scale": scale,
        }
        self._tree_mask_bits = ops_for(device, dtype).tree_mask_bits
        self._planned: dict[tuple[int, ...], _Planner] = {}
        self._mask_starts: dict[tuple[int, int], Tensor] = {}
        self._ring: list[_Planner] = []
        self._is_compiled = False  # FlashInfer compiles at its first plan

    def plan(self, layout: PagedBatch) -> _Plan:
        """Plan a forward pass. Without `host_query_starts`, each sequence has `max_queries` new tokens. Such a shape
        must be planned once before it is captured in a graph."""
        num_pages, size = layout.page_table_BP.shape[1], layout.page_size
        pages = layout.page_table_BP.view(-1)
        if layout.host_query_starts is not None:
            assert layout.mask_TW is None, "trees are of one size"
            counts = layout.query_starts[1:] - layout.query_starts[:-1]
            last_page_len = layout.starts_B + counts - (num_pages - 1) * size
            return _Plan(self._plan_prompts(layout, layout.host_query_starts), size, pages, last_page_len)
        planner = self._plan_shape(layout)
        last_page_len = layout.starts_B + (layout.max_queries - (num_pages - 1) * size)
        if layout.mask_TW is None:
            return _Plan(planner, size, pages, last_page_len)
        mask = self._tree_mask_bits(
            layout.mask_TW, layout.mask_starts_B, layout.starts_B, layout.max_queries, num_pages * size
        )
        return _Plan(planner, size, pages, last_page_len, mask, self._mask_starts_of(*mask.shape))

    def _plan_shape(self, layout: PagedBatch) -> _Planner:
        (num_seqs, num_pages), queries = layout.page_table_BP.shape, layout.max_queries
        assert layout.slots_T.shape[0] == num_seqs * queries, "sequences of uneven length need host_query_starts"
        key = (num_seqs, queries, num_pages, layout.page_size)
        if key not in self._planned:
            assert not _capturing(self._device), f"{key} was not planned before it is captured"
            planner = _Planner(self._device)
            self._plan_into(planner, layout, np.arange(num_seqs + 1) * queries)
            self._planned[key] = planner
        return self._planned[key]

    def _mask_starts_of(self, num_seqs: int, num_bytes: int) -> Tensor:
        key = (num_seqs, num_bytes)
        if key not in self._mask_starts:
            assert not _capturing(self._device), f"masks of {key} were not made before they are captured"
            assert (num_seqs + 1) * num_bytes < 2**31, "FlashInfer addresses masks in 32 bits"
            ends = torch.arange(num_seqs + 1, dtype=torch.int32, device=self._device) * num_bytes
            self._mask_starts[key] = ends
        return self._mask_starts[key]

    def _plan_prompts(self, layout: PagedBatch, query_starts: np.ndarray) -> _Planner:
        assert not _capturing(self._device), "prompts are planned by the host"
        planner = self._ring.pop(0) if len(self._ring) == _RING else _Planner(self._device)
        self._ring.append(planner)
        self._plan_into(planner, layout, query_starts)
        return planner

    def _plan_into(self, planner: _Planner, layout: PagedBatch, query_starts: np.ndarray) -> None:
        num_seqs = len(query_starts) - 1
        # The list has three numbers for each pair, whose tile has at least 16 rows, and one for each sequence.
        num_pairs = int(query_starts[-1]) * self._group // 16 + num_seqs
        try:
            planner.plan(query_starts, layout, 12 * num_pairs + 4 * num_seqs + 256, **self._geometry)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            if self._is_compiled:
                raise
            raise ModelError(
                f"FlashInfer's first plan, which compiles its kernels, failed: {str(error).strip()[-300:]}",
                hint="it needs nvcc and ninja to compile; or use engine.attention: triton",
            ) from error
        self._is_compiled = True

    def attend(
        self,
        plan: _Plan,
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        assert window is None, "resolve() refuses sliding windows"
        assert sinks_H is None, "resolve() refuses attention sinks"
        kv = cache.layer(layer)
        _, heads, _, dim = kv.shape
        k, v = kv.view(2, heads, -1, plan.page_size, dim).transpose(1, 2)  # (pages, H, page_size, D), strided
        wrapper = plan.planner.wrapper
        mask = None if plan.mask_BZ is None else plan.mask_BZ.view(-1)
        for name, tensor in zip(_REPLACED, (plan.pages, plan.last_page_len_B, mask, plan.mask_starts), strict=True):
            setattr(wrapper, name, tensor)
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        wrapper.run(q_THD, (k, v), out=out, enable_pdl=False)
        for name in _REPLACED:  # otherwise they would hold memory that the graphs of other batch sizes share
            setattr(wrapper, name, None)
        return out


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
