"""A layer of a decoder and its parts, attention and a gated MLP. Families (`families/`) choose the class of a layer.

Shape suffixes: T packed tokens, E hidden size, I input features, H query heads, K key/value heads, D head dimension, Z
fused projection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
from specbatch.models.mixture import MixtureMLP, mixture_of
from specbatch.models.stages import FIRST, Stages, Turn, completed
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
        *,
        in_graph: bool = False,
        turn: Turn = FIRST,
    ):
        self._turn = turn
        self.batch = batch
        self.backend = backend
        self.cache = cache
        self.plan: Any = None if in_graph else backend.plan(batch)
        # On a CPU, angles and slots are computed once for all layers. The fused operation computes them in each layer.
        self._angles: dict[Rotary, tuple[Tensor, Tensor]] | None = None
        if batch.slots_T.device.type == "cpu" and not in_graph:
            self._angles = {}
            self.slots_T = torch.where(batch.slots_T < 0, cache.num_slots - 1, batch.slots_T)  # the last one is spare

    def angles(self, rotary: Rotary) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of all tokens. None: the fused operation reads them from the tables."""
        if self._angles is None or self.cache.dtype != rotary.cos_PR.dtype:
            return None
        if rotary not in self._angles:
            self._angles[rotary] = rotary.at(self.batch.positions_T)
        return self._angles[rotary]

    def write(self, attention: Attention, qkv_TZ: Tensor) -> Tensor:
        """Queries (T, H, D), rotated; keys and values go to the cache."""
        q_THD = attention.rotate_and_write(qkv_TZ, self)
        self._turn.wrote(attention.layer)
        return q_THD

    def attend(self, attention: Attention, q_THD: Tensor, plan: Any = None) -> Tensor:
        """Return the attention's output (T, H, D). `plan`: the plan for other queries than those of the batch."""
        plan = self.plan if plan is None else plan
        self._turn.will_read(attention.layer)
        return self.backend.attend(plan, q_THD, self.cache, attention.layer, attention.window, attention.sinks_H)


class Attention:
    """Self-attention of one layer: fused QKV projection, optional norms of queries and keys, rotary, cache write,
    backend, output."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, rotary: Rotary) -> None:
        self.layer, self._rotary = config.cached_layers.index(layer), rotary
        self.window = config.sliding_windows[layer]
        self.num_heads, self._num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        names = ("q", "k", "v", "gate") if config.gated_attention else ("q", "k", "v")
        self._qkv = weights.linear(*(f"{prefix}{name}_proj" for name in names), has_bias=config.qkv_bias)
        self._qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._out = weights.summed_linear(f"{prefix}o_proj", has_bias=config.output_bias)
        norms: list[RMSNorm | None] = [None, None]
        if config.qk_norm:
            eps, offset = config.rms_norm_eps, config.norm_offset
            norms = [weights.norm(f"{prefix}{x}_norm", eps, offset, is_wide=config.wide_norms) for x in "qk"]
        self._norms_are_whole, self._norms_last = config.qk_norm_whole, config.qk_norm_last
        self._q_norm, self._k_norm = norms
        self.sinks_H: Tensor | None = None
        if config.attention_sinks:
            wide = torch.promote_types(weights.dtype, torch.float32)
            self.sinks_H = weights.tensor(f"{prefix}sinks").to(wide)
        self._key_offset_KD: Tensor | None = None
        # A norm changes what the bias adds. A sink has no bias, so taking it from the keys would change the softmax.
        if config.qkv_bias and not config.qk_norm and not config.attention_sinks:
            self._key_offset_KD = key_offset(weights.tensor(f"{prefix}k_proj.bias"), config)
        self._ops = ops_for(weights.device, weights.dtype)
        self._query_factors_P11: Tensor | None = None
        num_positions, growth = len(rotary.cos_PR), config.query_growth
        if growth is not None and num_positions > growth.period:
            periods = torch.arange(num_positions, device=weights.device) // growth.period
            self._query_factors_P11 = (1 + growth.beta * torch.log(1 + periods)).to(weights.dtype)[:, None, None]

    def queries(self, x_TI: Tensor, step: ForwardPass, norm: RMSNorm | None) -> Tensor:
        """Queries (T, H, D) of norm(x); its keys and values are in the cache then."""
        return step.write(self, self._projected(x_TI, norm))

    def queries_and_gate(self, x_TI: Tensor, step: ForwardPass, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Return the same queries, and the projection (T, Z) whose sigmoid the output is multiplied by."""
        projected_TZ = self._projected(x_TI, norm)
        q_THD = step.write(self, projected_TZ[:, : self._qkv_size])
        return q_THD, projected_TZ[:, self._qkv_size :]

    def gated(self, attended_THD: Tensor, gate_TZ: Tensor) -> Tensor:
        """Return the output of attention, (T, H, D), multiplied by its gate."""
        out_THD: Tensor = self._ops.sigmoid_mul(attended_THD, gate_TZ)
        return out_THD

    def _projected(self, x_TI: Tensor, norm: RMSNorm | None) -> Tensor:
        return self._qkv(x_TI) if norm is None else self._qkv.with_norm(x_TI, norm)

    @property
    def takes_normed(self) -> bool:
        """See `Layer`."""
        return self._qkv.takes_normed

    def start_output(
        self, mixed: Tensor, residual_TE: Tensor, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        """Launch residual + the output projection of what was attended (T, H, D). The residual may be overwritten."""
        return self._out.start_with_residual(mixed.flatten(1), residual_TE, next_norm)

    def output(self, attended_THD: Tensor) -> Tensor:
        """Return the output projection (T, E)."""
        return self._out(attended_THD.flatten(1))

    def traceable(self) -> Attention | None:
        """See `Layer.traceable`."""
        return traceable_parts(self, "_qkv", "_out")

    def rotate_and_write(self, qkv_TZ: Tensor, step: ForwardPass) -> Tensor:
        if self._norms_are_whole:
            qkv_TZ = self._normed(qkv_TZ)
        angles = step.angles(self._rotary)
        q_THD = self._rotate_and_write_fused(qkv_TZ, step) if angles is None else self._by_angles(qkv_TZ, step, angles)
        factors_P11 = self._query_factors_P11
        return q_THD if factors_P11 is None else q_THD * factors_P11[step.batch.positions_T]

    def _normed(self, qkv_TZ: Tensor) -> Tensor:
        """Norm all heads of queries together, and all heads of keys. The projection may be overwritten."""
        assert self._q_norm is not None
        assert self._k_norm is not None
        normed: Tensor = self._ops.norm_whole_heads(qkv_TZ, self._q_norm.weight, self._k_norm.weight, self._q_norm.eps)
        return normed

    def _norms_of_heads(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Return the norms of each head of queries and of keys; None: there are none."""
        if self._q_norm is None or self._k_norm is None or self._norms_are_whole:
            return None
        return self._q_norm, self._k_norm

    def _by_angles(self, qkv: Tensor, step: ForwardPass, angles: tuple[Tensor, Tensor]) -> Tensor:
        sizes = (self.num_heads, self._num_kv_heads, self._num_kv_heads)
        qkv = qkv.view(qkv.shape[0], sum(sizes), self.head_dim)
        norms = self._norms_of_heads()
        if norms is not None and not self._norms_last:
            q, k, v = qkv.split(sizes, dim=1)
            qk = torch.cat((norms[0](q), norms[1](k)), dim=1)
        else:
            qk, v = qkv.split((sizes[0] + sizes[1], sizes[2]), dim=1)
        q, k = Rotary.apply(qk, *angles).split(sizes[:2], dim=1)
        if norms is not None and self._norms_last:
            q, k = norms[0](q), norms[1](k)
        step.cache.write(self.layer, step.slots_T, k, v)
        return q

    def _rotate_and_write_fused(self, qkv: Tensor, step: ForwardPass) -> Tensor:
        norms = self._norms_of_heads()
        q: Tensor = self._ops.rotary_write(
            qkv,
            self.num_heads,
            self._num_kv_heads,
            self._rotary.cos_PR,
            self._rotary.sin_PR,
            step.batch.positions_T,
            step.batch.slots_T,
            step.cache.layer(self.layer),
            None if norms is None else norms[0].weight,
            None if norms is None else norms[1].weight,
            0.0 if norms is None else norms[0].eps,
            *step.cache.scales(self.layer),
            self._key_offset_KD if step.cache.dtype == torch.float8_e4m3fn else None,
            norms_last=self._norms_last,
        )
        return q


class FirstHalf(Protocol):
    """The part of a layer before its MLP: attention, or what takes its place."""

    @property
    def takes_normed(self) -> bool:
        """See `Layer`."""
        ...

    def start_output(
        self, mixed: Tensor, residual_TE: Tensor, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        """Launch residual + the output projection. The residual may be overwritten."""
        ...


class MLP:
    """Feed-forward, with a gate (Shazeer 2020) or without."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        gate, up = f"{prefix}gate_proj", f"{prefix}up_proj"
        if config.gated_mlp:
            self._gated = weights.gated_linear(gate, up, config.activation, has_bias=config.mlp_bias)
        else:
            self._gated = weights.activated_linear(up, config.activation, has_bias=config.mlp_bias)
        self._down = weights.summed_linear(f"{prefix}down_proj", has_bias=config.mlp_bias)

    @property
    def takes_normed(self) -> bool:
        """See `Layer`."""
        return self._gated.takes_normed

    def start(self, x: Residual, norm: RMSNorm, next_norm: RMSNorm | None = None) -> Callable[[], Residual]:
        """Launch x + mlp(norm(x)). x may be overwritten."""
        return self._gated.start_into(self._down, x, norm, next_norm)

    def start_added(self, x_TE: Tensor, residual_TE: Tensor) -> Callable[[], Residual]:
        """Launch residual + mlp(x). The residual may be overwritten."""
        return self._gated.start_added(self._down, x_TE, residual_TE)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return mlp(x), (T, E)."""
        return self._gated.into(self._down, x_TE)

    def traceable(self) -> MLP | None:
        """See `Layer.traceable`."""
        return traceable_parts(self, "_gated", "_down")


class DecoderLayer(ABC):
    """Attention and MLP with residuals. A subclass says where the norms are."""

    attention: Attention
    mixture: MixtureMLP | None = None  # the mixture of experts of a layer that has one

    @property
    def first_norm(self) -> RMSNorm | None:
        """The norm of the layer's input. None: the layer computes it itself."""
        return None

    @abstractmethod
    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        """Return queries (T, H, D): the part before attention. Keys and values are in the cache then."""
        ...

    @abstractmethod
    def after_attention(
        self,
        attended_THD: Tensor,
        residual_TE: Tensor,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        """Compute the part after attention. The residual may be overwritten. `next_norm`: the `first_norm` of the next
        layer. `counts`: see `MixtureMLP.travel`."""
        ...

    def take_part(self, x_TE: Tensor, counts: Sequence[int]) -> Stages[None]:
        """Compute this rank's experts for the tokens of the other ranks. `x_TE`: (0, E), this one has none."""
        if self.mixture is not None and self.mixture.travels:
            yield from self.mixture.travel(x_TE, counts)

    def stages(
        self,
        x: Residual,
        step: ForwardPass,
        logits_indices: LogitsIndices | None = None,
        *,
        residual_TE: Tensor | None = None,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        """Compute the layer: (T, E), or (R, E) for the selected tokens. `residual_TE`: the residual that the
        attention's output is added to; None: x. It may be overwritten. `counts`: see `MixtureMLP.travel`."""
        q_THD = self.queries(x.x_TE, step) if x.normed_TE is None else self.attention.queries(x.normed_TE, step, None)
        residual_TE = x.x_TE if residual_TE is None else residual_TE
        return (yield from self.select(q_THD, residual_TE, step, logits_indices, next_norm, counts))

    def select(
        self,
        q_THD: Tensor,
        residual_TE: Tensor,
        step: ForwardPass,
        logits_indices: LogitsIndices | None,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        """Return the layer's output, computed from its queries: (T, E), or (R, E) of the selected tokens."""
        plan = None
        if logits_indices is not None:
            q_THD, residual_TE = q_THD[logits_indices.index_R], residual_TE[logits_indices.index_R]
            if q_THD.shape[0] == 0:  # a piece of a prompt: only its keys and values are needed
                if counts is not None:
                    yield from self.take_part(residual_TE, counts)
                return Residual(residual_TE)
            plan = step.backend.plan(logits_indices.batch)
        # What attention returns has no name here, so that its memory can be used again in the MLP.
        attended_THD = step.attend(self.attention, q_THD, plan)
        del q_THD
        stages = self.after_attention(attended_THD, residual_TE, next_norm, counts)
        del attended_THD
        return (yield from stages)

    def finish(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor:
        """Return the layer's output (T, E): the part after attention at once. The residual may be overwritten."""
        return completed(self.after_attention(attended_THD, residual_TE)).x_TE

    def traceable(self) -> DecoderLayer | None:
        """Return the same layer in plain torch operations; see `linears.linear.Layer.traceable`."""
        return None


class PreNormLayer(DecoderLayer):
    """A layer with a norm before attention and one before the MLP (Llama, Mistral, Qwen). Without `input_norm` the
    caller computes the norm of the attention's input."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: WeightLoader,
        prefix: str,
        rotary: Rotary,
        *,
        input_norm: bool = True,
    ) -> None:
        eps, offset, is_wide = config.rms_norm_eps, config.norm_offset, config.wide_norms
        self._input_norm = None
        if input_norm:
            self._input_norm = weights.norm(f"{prefix}input_layernorm", eps, offset, is_wide=is_wide)
        if not config.has_delta(layer):
            self.attention = Attention(config, layer, weights, f"{prefix}self_attn.", rotary)
        self._post_norm = weights.norm(f"{prefix}post_attention_layernorm", eps, offset, is_wide=is_wide)
        self.mixture = mixture_of(config, layer, weights, prefix)
        self._mlp = self.mixture or MLP(config, weights, f"{prefix}mlp.")

    @property
    def half(self) -> FirstHalf:
        return self.attention

    @property
    def first_norm(self) -> RMSNorm | None:
        return self._input_norm if self.half.takes_normed else None

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        return self.attention.queries(x_TI, step, self._input_norm)

    def after_attention(
        self,
        attended_THD: Tensor,
        residual_TE: Tensor,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        if self.mixture is not None and self.mixture.travels:
            x = self.half.start_output(attended_THD, residual_TE)()
            del attended_THD
            normed_TE = self._post_norm(x.x_TE, self.mixture.place_of(x.x_TE, counts))
            return Residual((yield from self.mixture.travel(normed_TE, counts, x.x_TE)))
        post_norm = self._post_norm if self._mlp.takes_normed else None
        projected = self.half.start_output(attended_THD, residual_TE, post_norm)
        del attended_THD
        yield
        computed = self._mlp.start(projected(), self._post_norm, next_norm)
        yield
        return computed()

    def finish(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor:
        x = self.attention.start_output(attended_THD, residual_TE)()
        return self._mlp.start(x, self._post_norm)().x_TE

    def traceable(self) -> PreNormLayer | None:
        return traceable_parts(self, "attention", "_mlp")
