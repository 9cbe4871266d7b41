"""The decoder of every supported family (Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3), which differ by the traits in
`ModelConfig`: biases, per-head norms on queries and keys, sliding windows, rotary scaling, tied embeddings.

Shape suffixes: T packed tokens, E hidden size, V vocabulary, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.kernels import ops_for
from specbatch.models.config import ModelConfig
from specbatch.models.layers import GatedLinear, Linear, RMSNorm, Rotary

# Gives a checkpoint's tensor by its canonical (Hugging Face) name, in the dtype and on the device of the model.
Load = Callable[[str], Tensor]


class TensorReader(Protocol):
    def load(self, name: str) -> Tensor: ...


def loader(tensors: TensorReader, dtype: torch.dtype, device: torch.device) -> Load:
    """Load from `tensors` and convert."""
    return lambda name: tensors.load(name).to(device=device, dtype=dtype)


class ForwardPass:
    """What every layer of one forward pass needs to know about its tokens."""

    def __init__(self, layout: PagedBatch, backend: AttentionBackend, cache: KVCache, rotary: Rotary):
        self.layout = layout
        self.backend = backend
        self.cache = cache
        self.rotary = rotary
        self.plan: Any = backend.plan(layout)
        # On a CPU angles and slots are looked up once for all layers; the fused operation does so in each.
        self.angles: tuple[Tensor, Tensor] | None = None
        if layout.slots_T.device.type == "cpu" and cache.dtype == rotary.cos_PD.dtype:
            self.angles = rotary.at(layout.positions_T)
            self.slots_T = torch.where(layout.slots_T < 0, cache.num_slots - 1, layout.slots_T)  # the last one is spare


class Attention:
    """Self-attention of one layer: fused QKV projection, optional per-head norms, rotary, cache write, backend,
    output."""

    def __init__(self, config: ModelConfig, layer: int, load: Load, prefix: str) -> None:
        self._layer = layer
        self.heads, self._kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._window = config.sliding_windows[layer]
        weight = torch.cat([load(f"{prefix}{name}_proj.weight") for name in "qkv"])
        bias = torch.cat([load(f"{prefix}{name}_proj.bias") for name in "qkv"]) if config.qkv_bias else None
        self._qkv = Linear(weight, bias)
        self._out = Linear(load(f"{prefix}o_proj.weight"), load(f"{prefix}o_proj.bias") if config.output_bias else None)
        self._q_norm = RMSNorm(load(f"{prefix}q_norm.weight"), config.rms_norm_eps) if config.qk_norm else None
        self._k_norm = RMSNorm(load(f"{prefix}k_norm.weight"), config.rms_norm_eps) if config.qk_norm else None
        self._rotary_write = ops_for(weight.device, weight.dtype).rotary_write
        self.linears = self._qkv, self._out

    def __call__(
        self,
        x_TI: Tensor,
        step: ForwardPass,
        *,
        norm: RMSNorm | None,
        residual_TE: Tensor,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """residual + attention(norm(x)), (T, E), or (R, E) of the selected tokens; the residual, which may be x, may be
        overwritten."""
        qkv = self._qkv(x_TI, norm=norm)
        write = self._rotate_and_write if step.angles is not None else self._rotate_and_write_fused
        q, plan = write(qkv, step), step.plan
        if logits_indices is not None:
            q, residual_TE = q[logits_indices.rows_R], residual_TE[logits_indices.rows_R]
            if q.shape[0] == 0:  # a piece of a prompt: keys and values are all that is wanted of it
                return residual_TE
            plan = step.backend.plan(logits_indices.batch)
        out = step.backend.attend(plan, q, step.cache, self._layer, self._window)
        return self._out(out.view(q.shape[0], -1), residual_TO=residual_TE)

    def _rotate_and_write(self, qkv: Tensor, step: ForwardPass) -> Tensor:
        assert step.angles is not None
        sizes = (self.heads, self._kv_heads, self._kv_heads)
        qkv = qkv.view(qkv.shape[0], sum(sizes), self.head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k, v = qkv.split(sizes, dim=1)
            qk = torch.cat((self._q_norm(q), self._k_norm(k)), dim=1)
        else:
            qk, v = qkv.split((sizes[0] + sizes[1], sizes[2]), dim=1)
        q, k = Rotary.apply(qk, *step.angles).split(sizes[:2], dim=1)
        step.cache.write(self._layer, step.slots_T, k, v)
        return q

    def _rotate_and_write_fused(self, qkv: Tensor, step: ForwardPass) -> Tensor:
        q: Tensor = self._rotary_write(
            qkv,
            self.heads,
            self._kv_heads,
            step.rotary.cos_PD,
            step.rotary.sin_PD,
            step.layout.positions_T,
            step.layout.slots_T,
            step.cache.layer(self._layer),
            self._q_norm.weight if self._q_norm is not None else None,
            self._k_norm.weight if self._k_norm is not None else None,
            self._q_norm.eps if self._q_norm is not None else 0.0,
        )
        return q


class MLP:
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, load: Load, prefix: str, bias: bool) -> None:
        gate, up, down = (
            (load(f"{prefix}{name}_proj.weight"), load(f"{prefix}{name}_proj.bias") if bias else None)
            for name in ("gate", "up", "down")
        )
        self._gated = GatedLinear(gate[0], up[0], gate[1], up[1])
        self._down = Linear(*down)
        self.linears = self._gated, self._down

    def __call__(self, x_TE: Tensor, *, norm: RMSNorm, residual_TE: Tensor) -> Tensor:
        """residual + mlp(norm(x)); the residual, which may be x, may be overwritten."""
        return self._down(self._gated(x_TE, norm=norm), residual_TO=residual_TE)


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, load: Load, prefix: str) -> None:
        self.input_norm = RMSNorm(load(f"{prefix}input_layernorm.weight"), config.rms_norm_eps)
        self.attention = Attention(config, layer, load, f"{prefix}self_attn.")
        self.post_norm = RMSNorm(load(f"{prefix}post_attention_layernorm.weight"), config.rms_norm_eps)
        self.mlp = MLP(load, f"{prefix}mlp.", config.mlp_bias)

    def __call__(self, x_TE: Tensor, step: ForwardPass, logits_indices: LogitsIndices | None = None) -> Tensor:
        x_TE = self.attention(x_TE, step, norm=self.input_norm, residual_TE=x_TE, logits_indices=logits_indices)
        return self.mlp(x_TE, norm=self.post_norm, residual_TE=x_TE) if x_TE.shape[0] else x_TE


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
        self.num_positions = num_positions
        self._backend = backend
        self.embedding_VE = load("model.embed_tokens.weight")
        inv_freq, factor = config.rope.inverse_frequencies(config.head_dim)
        self._rotary = Rotary(inv_freq, factor, num_positions, dtype, device)
        self._layers = [DecoderLayer(config, i, load, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._norm = RMSNorm(load("model.norm.weight"), config.rms_norm_eps)
        self.lm_head = Linear(self.embedding_VE if config.tie_word_embeddings else load("lm_head.weight"))

    @property
    def linears(self) -> list[Linear | GatedLinear]:
        """The matrix products of the layers."""
        found: list[Linear | GatedLinear] = []
        for layer in self._layers:
            found += [*layer.attention.linears, *layer.mlp.linears]
        return found

    def forward(
        self,
        tokens_T: Tensor,
        layout: PagedBatch,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        logits_indices: LogitsIndices | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states after the final norm, (T, E), or (R, E) of the selected tokens; and the inputs of the layers
        named in `capture` (EAGLE-3 features), (T, E) each: the number of layers means the last one's output, which
        needs all tokens."""
        step = ForwardPass(layout, self._backend, cache, self._rotary)
        x_TE = self.embedding_VE[tokens_T]
        aux_hidden_states: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            if i in aux_layers:
                aux_hidden_states.append(x_TE.clone())  # the sums of later layers can overwrite it
            x_TE = layer(x_TE, step, logits_indices if i == len(self._layers) - 1 else None)
        if len(self._layers) in aux_layers:
            assert logits_indices is None, "the features are those of all tokens"
            aux_hidden_states.append(x_TE)
        return self._norm(x_TE), aux_hidden_states

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits (R, V) of selected rows, float32 (float64 where the model is)."""
        out = self.raw_logits(hidden_RE)
        return out if out.dtype == torch.float64 else out.float()

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits (R, V) in the model's dtype."""
        return self.lm_head(hidden_RE)

    def new_cache(self, num_slots: int, dtype: torch.dtype) -> KVCache:
        c = self.config
        return KVCache(c.num_layers, num_slots, c.num_kv_heads, c.head_dim, dtype, self.device)
