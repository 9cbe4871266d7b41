"""The frozen target: it computes features to draft from and distributions to learn, for right-padded batches of whole
sequences.

It is the project's Decoder with an attention for training: every sequence starts at 0 and is computed once. So only the
keys and values of one layer are kept, and torch's fused causal attention runs on any device.

Shape suffixes: B sequences, L padded length, T = B * L, Q rows to learn, F features, E hidden size, V
vocabulary, W draft vocabulary, H query heads, K key/value heads, D head dimension, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.errors import ModelError
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.weight_loader import WeightLoader

_LOGITS_AT_ONCE = 2**28  # the most elements of logits at once: 0.5 GiB in bfloat16


class PaddedAttention:
    """Causal attention of B sequences of one padded length L; an `AttentionBackend`. Padding is at the end, where no
    real token sees it."""

    def __init__(self, config: ModelConfig) -> None:
        check_target(config)
        self._num_heads, self._head_dim, self._scale = config.num_heads, config.head_dim, config.attention_scale

    def plan(self, batch: PagedBatch) -> tuple[int, int]:
        return batch.starts_B.shape[0], batch.page_size

    def attend(
        self,
        plan: Any,
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        batch, length = plan
        kv = cache.layer(layer)[:, :, : batch * length].unflatten(2, (batch, length))  # (2, K, B, L, D)
        q = q_THD.view(batch, length, self._num_heads, self._head_dim).transpose(1, 2)
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        k, v = kv[0].transpose(0, 1), kv[1].transpose(0, 1)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self._scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch * length, self._num_heads, self._head_dim)


def check_target(config: ModelConfig) -> None:
    """Raise ModelError for a target that this attention does not compute."""
    if config.attention_sinks or config.attention_soft_cap is not None:
        raise ModelError(f"drafters cannot be trained for {config.model_type}: its attention has sinks or soft caps")


class OneLayerCache(KVCache):
    """A cache whose layers share the same memory, because a layer is read before the next one writes."""

    def layer(self, layer: int) -> Tensor:
        return super().layer(0)

    def write(self, layer: int, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        super().write(0, slots_T, k_THD, v_THD)


@dataclass(frozen=True)
class TargetRows:
    """The target's predictions at Q positions of a batch."""

    logits_QW: Tensor  # logits over the draft vocabulary, in the target's dtype
    best_Q: Tensor  # the target's argmax as a draft token; -1 if the draft vocabulary lacks that token


class FrozenTarget:
    """The frozen target. `max_tokens`: the most tokens of a batch, padding included. `aux_layers`: the layers whose
    inputs the drafter reads. `draft_ids_W`: the target ids of the draft vocabulary; None: it is the whole one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        aux_layers: Sequence[int],
        draft_ids_W: Tensor | None,
        max_tokens: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = c = checkpoint.config
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        weights = WeightLoader(checkpoint.tensors, dtype, device)
        self._decoder = Decoder(c, weights, PaddedAttention(c), max_length)
        self._cache = OneLayerCache(1, max_tokens, c.num_kv_heads, c.head_dim, dtype, device)
        self._aux_layers = tuple(aux_layers)
        self._draft_ids_W = None if draft_ids_W is None else draft_ids_W.to(device)
        self._draft_of_V = torch.arange(c.vocab_size, device=device)
        if self._draft_ids_W is not None:
            self._draft_of_V = torch.full_like(self._draft_of_V, -1)
            self._draft_of_V[self._draft_ids_W] = torch.arange(len(self._draft_ids_W), device=device)

    @property
    def embedding_VE(self) -> Tensor:
        return self._decoder.embedding_VE

    @cached_property
    def lm_head_VE(self) -> Tensor:
        """The matrix of the LM head, with which gradients can be computed."""
        if self.config.tie_word_embeddings:
            return self.embedding_VE
        return self._checkpoint.tensors.load("lm_head.weight").to(self._device, self._dtype)

    @cached_property
    def draft_head_WE(self) -> Tensor:
        """The rows of the LM head that a draft vocabulary has."""
        return self.lm_head_VE if self._draft_ids_W is None else self.lm_head_VE[self._draft_ids_W]

    @torch.no_grad()
    def features(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the features (B, L, F) of all `aux_layers` and the last hidden states (T, E)."""
        batch, length = tokens_BL.shape
        assert batch * length <= self._cache.num_slots, (tokens_BL.shape, self._cache.num_slots)
        device = tokens_BL.device
        slots_T = torch.arange(batch * length, device=device)
        rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        layout = PagedBatch(
            slots_T, slots_T % length, rows[:-1, None], length, torch.zeros_like(rows[:-1]), rows * length, length
        )
        hidden_TE, captured = self._decoder.forward(tokens_BL.view(-1), layout, self._cache, self._aux_layers)
        return torch.cat(captured, dim=-1).view(batch, length, -1), hidden_TE

    @torch.no_grad()
    def rows(self, hidden_TE: Tensor, rows_Q: Tensor) -> TargetRows:
        """Compute the target's predictions at `rows_Q` of `hidden_TE`. Logits of the whole vocabulary are computed in
        pieces."""
        size = max(_LOGITS_AT_ONCE // self.config.vocab_size, 1)
        parts, best = [], []
        for rows in rows_Q.split(size):
            logits = self._decoder.raw_logits(hidden_TE[rows])
            best.append(self._draft_of_V[logits.argmax(dim=-1)])
            parts.append(logits if self._draft_ids_W is None else logits[:, self._draft_ids_W])
        return TargetRows(torch.cat(parts), torch.cat(best))
