"""The attention function that transformers' modelling code calls, and the one that only looks at the calls.

Both are registered with transformers under a name. They keep nothing: what a call needs is at the module that makes it
(`place`, an attribute that `PagedLayer.bind` sets). The first name has no mask function, so transformers makes no mask.

Shape suffixes: T packed tokens, H query heads, K key/value heads, D head dimension, Z fused queries, keys and values.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache

PAGED, OBSERVED = "specbatch", "specbatch_observed"  # names of attention functions in transformers


class PagedPass:
    """The state of the forward pass that runs: set before a model's forward, read by its attention modules."""

    def __init__(self, backend: AttentionBackend, ops: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
        self._backend, self._ops = backend, ops
        # The tables of a rotation by 0 of two dimensions: the model has rotated keys already.
        self._cos_PR = torch.ones((1, 2), dtype=dtype, device=device)
        self._sin_PR = torch.zeros((1, 2), dtype=dtype, device=device)

    def begin(self, batch: PagedBatch, cache: KVCache) -> None:
        self._cache, self._slots_T = cache, batch.slots_T
        self._plan = self._backend.plan(batch)
        self._zeros_T = torch.zeros_like(batch.positions_T)

    def attend(
        self,
        layer: int,
        window: int | None,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Write keys and values to the cache, and return the attention's output (T, H, D)."""
        cache = self._cache
        qkv_TZ = torch.cat((q_THD, k_TKD, v_TKD), dim=1).flatten(1)
        q: Tensor = self._ops.rotary_write(
            qkv_TZ,
            q_THD.shape[1],
            k_TKD.shape[1],
            self._cos_PR,
            self._sin_PR,
            self._zeros_T,
            self._slots_T,
            cache.layer(layer),
            None,
            None,
            0.0,
            *cache.scales(layer),
        )
        return self._backend.attend(self._plan, q, cache, layer, window, sinks_H)


class Place(Protocol):
    """The object at an attention module that its calls go to."""

    def called(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any, **kwargs: Any
    ) -> Tensor:
        """Return the attention's output (1, T, H, D) of q (1, H, T, D), k and v (1, K, T, D)."""
        ...


class PagedLayer:
    """The place of one attention module: its layer of the cache, and its traits. `scale_ratio`: its factor of queries
    times keys, divided by the backend's."""

    def __init__(self, state: PagedPass, layer: int, window: int | None, scale_ratio: float) -> None:
        self._state, self._layer, self._window, self._scale_ratio = state, layer, window, scale_ratio

    def called(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any, **kwargs: Any
    ) -> Tensor:
        size, value_size, dtype = q.shape[-1], v.shape[-1], v.dtype
        if value_size != size:  # as in multi-head latent attention, whose values have fewer dimensions
            v = F.pad(v, (0, size - value_size))
        if self._scale_ratio != 1:
            q = q * self._scale_ratio
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).to(dtype) for x in (q, k, v))
        sinks_H = kwargs.get("s_aux")
        if sinks_H is not None:
            sinks_H = sinks_H.to(torch.promote_types(dtype, torch.float32))
        out_THD = self._state.attend(self._layer, self._window, q_THD, k_TKD, v_TKD, sinks_H)
        return out_THD[None, ..., :value_size]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    place: Any = module.place
    return place.called(module, query, key, value, attention_mask, scaling, **kwargs), None


AttentionInterface.register(PAGED, _attend)
AttentionInterface.register(OBSERVED, _attend)
