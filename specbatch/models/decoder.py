"""The decoder of every supported family (Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3), told apart by the traits in
`ModelConfig`: biases, per-head norms on queries and keys, sliding windows, rotary scaling, tied embeddings.

Shape suffixes: T packed tokens, E hidden size, V vocabulary, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend, BatchLayout
from specbatch.cache.pages import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.layers import GatedLinear, Linear, RMSNorm, Rotary

# Gives a checkpoint's tensor by its canonical (Hugging Face) name, in the dtype and on the device of the model.
Load = Callable[[str], Tensor]


class TensorReader(Protocol):
    def load(self, name: str) -> Tensor: ...


def loader(tensors: TensorReader, dtype: torch.dtype, device: torch.device, prefix: str = "") -> Load:
    """Load from `tensors` and convert; names are looked up with `prefix` in front."""
    return lambda name: tensors.load(prefix + name).to(device=device, dtype=dtype)


class Attention:
    """Self-attention of one layer: fused QKV projection, optional per-head norms, rotary, cache write, backend,
    output."""

    def __init__(self, config: ModelConfig, layer: int, load: Load, prefix: str) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._window = config.sliding_windows[layer]
        weight = torch.cat([load(f"{prefix}{name}_proj.weight") for name in "qkv"])
        bias = torch.cat([load(f"{prefix}{name}_proj.bias") for name in "qkv"]) if config.qkv_bias else None
        self._qkv = Linear(weight, bias)
        self._out = Linear(load(f"{prefix}o_proj.weight"), load(f"{prefix}o_proj.bias") if config.output_bias else None)
        self._q_norm = RMSNorm(load(f"{prefix}q_norm.weight"), config.rms_norm_eps) if config.qk_norm else None
        self._k_norm = RMSNorm(load(f"{prefix}k_norm.weight"), config.rms_norm_eps) if config.qk_norm else None

    def __call__(
        self,
        x_TE: Tensor,
        rotary: tuple[Tensor, Tensor],
        layout: BatchLayout,
        plan: Any,
        backend: AttentionBackend,
        cache: KVCache,
    ) -> Tensor:
        num_tokens = x_TE.shape[0]
        sizes = (self._heads, self._kv_heads, self._kv_heads)
        qkv = self._qkv(x_TE).view(num_tokens, sum(sizes), self._head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k, v = qkv.split(sizes, dim=1)
            qk = torch.cat((self._q_norm(q), self._k_norm(k)), dim=1)
        else:
            qk, v = qkv.split((sizes[0] + sizes[1], sizes[2]), dim=1)
        q, k = Rotary.apply(qk, *rotary).split(sizes[:2], dim=1)
        cache.write(self._layer, layout.slots_T, k, v)
        out = backend.attend(plan, q, cache, self._layer, self._window)
        return self._out(out.view(num_tokens, -1))


class MLP:
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, load: Load, prefix: str, bias: bool) -> None:
        gate, up, down = (
            (load(f"{prefix}{name}_proj.weight"), load(f"{prefix}{name}_proj.bias") if bias else None)
            for name in ("gate", "up", "down")
        )
        self._gated = GatedLinear(gate[0], up[0], gate[1], up[1])
        self._down = Linear(*down)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self._down(self._gated(x_TE))


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, load: Load, prefix: str) -> None:
        self.input_norm = RMSNorm(load(f"{prefix}input_layernorm.weight"), config.rms_norm_eps)
        self.attention = Attention(config, layer, load, f"{prefix}self_attn.")
        self.post_norm = RMSNorm(load(f"{prefix}post_attention_layernorm.weight"), config.rms_norm_eps)
        self.mlp = MLP(load, f"{prefix}mlp.", config.mlp_bias)

    def __call__(
        self,
        x_TE: Tensor,
        rotary: tuple[Tensor, Tensor],
        layout: BatchLayout,
        plan: Any,
        backend: AttentionBackend,
        cache: KVCache,
    ) -> Tensor:
        x_TE = x_TE + self.attention(self.input_norm(x_TE), rotary, layout, plan, backend, cache)
        return x_TE + self.mlp(self.post_norm(x_TE))


class Decoder:
    """A causal language model over a paged cache.

    `num_positions` sizes the rotary tables: the longest sequence plus the tokens that speculation looks ahead.
    """

    def __init__(
        self,
        config: ModelConfig,
        load: Load,
        backend: AttentionBackend,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.device = device
        self._backend = backend
        self.embedding_VE = load("model.embed_tokens.weight")
        inv_freq, factor = config.rope.inverse_frequencies(config.head_dim)
        self._rotary = Rotary(inv_freq, factor, num_positions, dtype, device)
        self._layers = [DecoderLayer(config, i, load, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._norm = RMSNorm(load("model.norm.weight"), config.rms_norm_eps)
        self._head = Linear(self.embedding_VE if config.tie_word_embeddings else load("lm_head.weight"))

    def forward(
        self, tokens_T: Tensor, layout: BatchLayout, cache: KVCache, capture: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states after the final norm, (T, E), and the inputs of the layers named in `capture` (EAGLE-3
        features)."""
        plan = self._backend.plan(layout)
        rotary = self._rotary.at(layout.positions_T)
        x_TE = self.embedding_VE[tokens_T]
        captured: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            if i in capture:
                captured.append(x_TE)
            x_TE = layer(x_TE, rotary, layout, plan, self._backend, cache)
        return self._norm(x_TE), captured

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits (R, V) of selected rows, float32 (float64 where the model is)."""
        out = self._head(hidden_RE)
        return out if out.dtype == torch.float64 else out.float()

    def new_cache(self, num_slots: int, dtype: torch.dtype) -> KVCache:
        c = self.config
        return KVCache(c.num_layers, num_slots, c.num_kv_heads, c.head_dim, dtype, self.device)
