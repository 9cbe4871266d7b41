"""A layer of a decoder: attention and a gated MLP, for all supported families (`decoder.py`).

Shape suffixes: T packed tokens, E hidden size, I input features, H query heads, K key/value heads, D head dimension, Z
fused projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.kernels import ops_for
from specbatch.models.config import ModelConfig
from specbatch.models.key_offset import key_offset
from specbatch.models.layers import RMSNorm, Rotary
from specbatch.models.linears.linear import Residual, traceable_parts
from specbatch.models.stages import FIRST, Stages, Turn
from specbatch.models.weight_loader import WeightLoader


class ForwardPass:
    """The state that all layers of one forward pass share.

    `in_graph`: layers are captured without their attention. Then there is no plan, and nothing is computed from the
    batch before the layers run. `turn`: the turn of this pass, if two passes run at the same time.
    """

    def __init__(
        self,
        batch: PagedBatch,
        backend: AttentionBackend,
        cache: KVCache,
        rotary: Rotary,
        *,
        in_graph: bool = False,
        turn: Turn = FIRST,
    ):
        self._turn = turn
        self.batch = batch
        self.backend = backend
        self.cache = cache
        self.rotary = rotary
        self.plan: Any = None if in_graph else backend.plan(batch)
        # On a CPU, angles and slots are computed once for all layers. The fused operation computes them in each layer.
        self.angles: tuple[Tensor, Tensor] | None = None
        if batch.slots_T.device.type == "cpu" and cache.dtype == rotary.cos_PD.dtype and not in_graph:
            self.angles = rotary.at(batch.positions_T)
            self.slots_T = torch.where(batch.slots_T < 0, cache.num_slots - 1, batch.slots_T)  # the last one is spare

    def write(self, attention: Attention, qkv_TZ: Tensor) -> Tensor:
        """Queries (T, H, D), rotated; keys and values go to the cache."""
        q_THD = attention.rotate_and_write(qkv_TZ, self)
        self._turn.wrote(attention.layer)
        return q_THD

    def attend(self, attention: Attention, q_THD: Tensor, plan: Any = None) -> Tensor:
        """Return the attention's output (T, H, D). `plan`: the plan for other queries than those of the batch."""
        plan = self.plan if plan is None else plan
        self._turn.will_read(attention.layer)
        return self.backend.attend(plan, q_THD, self.cache, attention.layer, attention.window)


class Attention:
    """Self-attention of one layer: fused QKV projection, optional per-head norms, rotary, cache write, backend,
    output."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str) -> None:
        self.layer = layer
        self.window = config.sliding_windows[layer]
        self.num_heads, self._num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._qkv = weights.linear(*(f"{prefix}{name}_proj" for name in "qkv"), has_bias=config.qkv_bias)
        self._out = weights.summed_linear(f"{prefix}o_proj", has_bias=config.output_bias)
        self._q_norm, self._k_norm = (
            weights.norm(f"{prefix}{name}_norm", config.rms_norm_eps) if config.qk_norm else None for name in "qk"
        )
        self._key_offset_KD: Tensor | None = None
        if config.qkv_bias and not config.qk_norm:  # a norm changes what the bias adds
            self._key_offset_KD = key_offset(weights.tensor(f"{prefix}k_proj.bias"), config)
        self._rotary_write = ops_for(weights.device, weights.dtype).rotary_write

    def queries(self, x_TI: Tensor, step: ForwardPass, norm: RMSNorm | None) -> Tensor:
        """Queries (T, H, D) of norm(x); its keys and values are in the cache then."""
        return step.write(self, self._qkv(x_TI) if norm is None else self._qkv.with_norm(x_TI, norm))

    @property
    def takes_normed(self) -> bool:
        """See `Layer`."""
        return self._qkv.takes_normed

    def start_output(
        self, attended_THD: Tensor, residual_TE: Tensor, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        """Launches residual + the output projection. The residual may be overwritten."""
        return self._out.start_with_residual(attended_THD.flatten(1), residual_TE, next_norm)

    def traceable(self) -> Attention | None:
        """See `Layer.traceable`."""
        return traceable_parts(self, "_qkv", "_out")

    def rotate_and_write(self, qkv_TZ: Tensor, step: ForwardPass) -> Tensor:
        return (self._rotate_and_write if step.angles is not None else self._rotate_and_write_fused)(qkv_TZ, step)

    def _rotate_and_write(self, qkv: Tensor, step: ForwardPass) -> Tensor:
        assert step.angles is not None
        sizes = (self.num_heads, self._num_kv_heads, self._num_kv_heads)
        qkv = qkv.view(qkv.shape[0], sum(sizes), self.head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k, v = qkv.split(sizes, dim=1)
            qk = torch.cat((self._q_norm(q), self._k_norm(k)), dim=1)
        else:
            qk, v = qkv.split((sizes[0] + sizes[1], sizes[2]), dim=1)
        q, k = Rotary.apply(qk, *step.angles).split(sizes[:2], dim=1)
        step.cache.write(self.layer, step.slots_T, k, v)
        return q

    def _rotate_and_write_fused(self, qkv: Tensor, step: ForwardPass) -> Tensor:
        q: Tensor = self._rotary_write(
            qkv,
            self.num_heads,
            self._num_kv_heads,
            step.rotary.cos_PD,
            step.rotary.sin_PD,
            step.batch.positions_T,
            step.batch.slots_T,
            step.cache.layer(self.layer),
            self._q_norm.weight if self._q_norm is not None else None,
            self._k_norm.weight if self._k_norm is not None else None,
            self._q_norm.eps if self._q_norm is not None else 0.0,
            *step.cache.scales(self.layer),
            self._key_offset_KD if step.cache.dtype == torch.float8_e4m3fn else None,
        )
        return q


class MLP:
    """Gated feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        gate, up = f"{prefix}gate_proj", f"{prefix}up_proj"
        self._gated = weights.gated_linear(gate, up, config.activation, has_bias=config.mlp_bias)
        self._down = weights.summed_linear(f"{prefix}down_proj", has_bias=config.mlp_bias)

    @property
    def takes_normed(self) -> bool:
        """See `Layer`."""
        return self._gated.takes_normed

    def start(self, x: Residual, norm: RMSNorm, next_norm: RMSNorm | None = None) -> Callable[[], Residual]:
        """Launches x + mlp(norm(x)). x may be overwritten."""
        return self._gated.start_into(self._down, x, norm, next_norm)

    def traceable(self) -> MLP | None:
        """See `Layer.traceable`."""
        return traceable_parts(self, "_gated", "_down")


class DecoderLayer:
    """Attention and MLP, each with a norm before it and a residual. Without `input_norm` the caller computes the norm
    of the attention's input."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, *, input_norm: bool = True
    ) -> None:
        norm = f"{prefix}input_layernorm"
        self._input_norm = weights.norm(norm, config.rms_norm_eps) if input_norm else None
        self.attention = Attention(config, layer, weights, f"{prefix}self_attn.")
        self._post_norm = weights.norm(f"{prefix}post_attention_layernorm", config.rms_norm_eps)
        self._mlp = MLP(config, weights, f"{prefix}mlp.")

    @property
    def first_norm(self) -> RMSNorm | None:
        """The norm of the layer's input. None: the layer computes it itself."""
        return self._input_norm if self.attention.takes_normed else None

    def stages(
        self,
        x: Residual,
        step: ForwardPass,
        logits_indices: LogitsIndices | None = None,
        *,
        residual_TE: Tensor | None = None,
        next_norm: RMSNorm | None = None,
    ) -> Stages[Residual]:
        """Compute the layer: (T, E), or (R, E) for the selected tokens. `residual_TE`: the residual that the
        attention's output is added to; None: x. It may be overwritten. `next_norm`: the `first_norm` of the next
        layer."""
        q_THD = self.queries(x.x_TE, step) if x.normed_TE is None else self.attention.queries(x.normed_TE, step, None)
        residual_TE = x.x_TE if residual_TE is None else residual_TE
        return (yield from self.select(q_THD, residual_TE, step, logits_indices, next_norm))

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        """The part before attention: queries (T, H, D)."""
        return self.attention.queries(x_TI, step, self._input_norm)

    def select(
        self,
        q_THD: Tensor,
        residual_TE: Tensor,
        step: ForwardPass,
        logits_indices: LogitsIndices | None,
        next_norm: RMSNorm | None = None,
    ) -> Stages[Residual]:
        """The layer's output, from its queries: (T, E), or (R, E) of the selected tokens."""
        plan = None
        if logits_indices is not None:
            q_THD, residual_TE = q_THD[logits_indices.index_R], residual_TE[logits_indices.index_R]
            if q_THD.shape[0] == 0:  # a piece of a prompt: only its keys and values are needed
                return Residual(residual_TE)
            plan = step.backend.plan(logits_indices.batch)
        post_norm = self._post_norm if self._mlp.takes_normed else None
        # No name for what attention returns: its memory can be used again in the MLP.
        projected = self.attention.start_output(step.attend(self.attention, q_THD, plan), residual_TE, post_norm)
        yield
        computed = self._mlp.start(projected(), self._post_norm, next_norm)
        yield
        return computed()

    def finish(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor:
        """The part after attention at once, (T, E). The residual may be overwritten."""
        x = self.attention.start_output(attended_THD, residual_TE)()
        return self._mlp.start(x, self._post_norm)().x_TE

    def traceable(self) -> DecoderLayer | None:
        """See `Layer.traceable`."""
        return traceable_parts(self, "attention", "_mlp")
