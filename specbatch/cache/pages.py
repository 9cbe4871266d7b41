"""Pages of the KV cache: their owners (`PagePool`), and their keys and values (`KVCache`).

A page is `page_size` consecutive token slots; page `p` covers slots [p * page_size, (p + 1) * page_size). One page id
addresses the same slots in the target's cache and in the draft's, so one table, one allocator and one prefix index
serve both.

Shape suffixes: S slots, H key/value heads, D head dimension, T packed tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbatch.cache.states import StateCache
from specbatch.kernels.torch.model import as_bytes, storable


class PagePool:
    """Reference counts of `num_pages` pages. It holds no tensor.

    A page is free (count 0) or held by one or more owners: running requests and the prefix index. `on_unshared` is
    called with each page that is left with one owner.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one slot, got {num_pages} x {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = [0] * num_pages
        self._free = list(
            range(num_pages - 1, -1, -1)
        )  # a stack: the lowest page comes first, recently freed ones reuse warm memory
        self.on_unshared: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_slots: int) -> int:
        """Return the number of pages that `num_slots` slots need."""
        return -(-num_slots // self.page_size)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference. The caller ensures that there are enough."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that have an owner."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free and cannot be shared"
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page; a page without references is free again."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is released more often than it was held"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free.append(page)
            elif self._refs[page] == 1 and self.on_unshared is not None:
                self.on_unshared(page)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the counts are the sums over `holders`, the page lists of all owners."""
        expected = Counter(page for pages in holders for page in pages)
        for page, refs in enumerate(self._refs):
            assert refs == expected[page], f"page {page} has {refs} references, {expected[page]} holders"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert set(self._free) == {p for p, refs in enumerate(self._refs) if refs == 0}, "free list and counts differ"


class KVScales(NamedTuple):
    """The scales of one layer of an FP8 cache: a key is the stored number times `k`, a value is it times `v`."""

    k: float = 1.0
    v: float = 1.0


class KVCache:
    """Keys and values of every layer for `num_slots` token slots. `scales`: one for each layer of an FP8 cache; empty:
    all scales are 1.

    Heads come before slots, so that the CPU backend gathers the context of a batch into the operands of batched GEMMs
    in one copy.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KVScales] = (),
    ) -> None:
        assert not scales or (len(scales) == num_layers and dtype == torch.float8_e4m3fn)
        self._scales = scales
        self._shape = (num_layers, 2, num_kv_heads, num_slots, head_dim)
        self.dtype, self._device = dtype, device
        self.may_hold_nan = device.type != "cpu" or dtype == torch.float8_e4m3fn  # True: a key can be NaN
        self._kv = self._allocate()
        self.states: StateCache | None = None  # the states of a hybrid; None: all layers have keys and values

    def _allocate(self) -> Tensor:
        # The cache begins with zeros. Slots past a sequence's end are masked, but a value of NaN there would survive
        # the mask (0 * NaN). For the same reason no value of NaN is ever written.
        if self._device.type == "cpu":
            # numpy asks the system for zero pages, which take memory only once they are written to; torch.zeros
            # fills them.
            zeros = np.zeros(math.prod(self._shape) * self.dtype.itemsize, np.uint8)
            return torch.from_numpy(zeros).view(self.dtype).view(self._shape)
        return torch.zeros(self._shape, dtype=self.dtype, device=self._device)

    @property
    def num_slots(self) -> int:
        return self._shape[3]

    def resize(self, num_slots: int) -> None:
        """Replace the cache by an empty one with `num_slots` slots. A trial with a small cache measures how large it
        can be."""
        self._shape = (*self._shape[:3], num_slots, self._shape[4])
        del self._kv  # there may be no memory for both
        self._kv = self._allocate()

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize

    def layer(self, layer: int) -> Tensor:
        """Return a view (2, H, S, D) of the keys and values of a layer."""
        return self._kv[layer]

    def scales(self, layer: int) -> KVScales:
        return self._scales[layer] if self._scales else KVScales()

    @property
    def all_layers(self) -> Tensor:
        """Keys and values of all layers (L, 2, H, S, D)."""
        return self._kv

    def write(self, layer: int, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Store new keys and values; `storable` replaces those that are not finite. The slots are distinct."""
        # On a CPU a finite sum shows at almost no cost that all values are finite. A sum in float16 could overflow, so
        # it is at least float32.
        wide = torch.promote_types(k_THD.dtype, torch.float32)
        if self._device.type != "cpu" or not math.isfinite(float(k_THD.sum(dtype=wide) + v_THD.sum(dtype=wide))):
            k_THD, v_THD = storable(k_THD, v_THD)
            self.may_hold_nan = True
        self._kv[layer, 0].index_copy_(1, slots_T, k_THD.transpose(0, 1))
        self._kv[layer, 1].index_copy_(1, slots_T, v_THD.transpose(0, 1))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to slots `target` in all layers at once. The two may overlap."""
        kv = as_bytes(self._kv)
        kv.index_copy_(3, target, kv.index_select(3, source))
