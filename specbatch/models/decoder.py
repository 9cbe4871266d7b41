"""The decoder of every supported family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3. The traits in
`ModelConfig` distinguish them: biases, per-head norms on queries and keys, sliding windows, rotary scaling, tied
embeddings, the activation of the MLP.

Shape suffixes: T packed tokens, E hidden size, V vocabulary, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache, KVScales
from specbatch.kernels import ops_for
from specbatch.models.config import ModelConfig
from specbatch.models.key_offset import key_offset
from specbatch.models.layers import RMSNorm, Rotary
from specbatch.models.linear import traceable_parts
from specbatch.models.sharded import GatheredLinear
from specbatch.models.stages import FIRST, Stages, Turn, completed
from specbatch.models.weight_loader import WeightLoader


class ForwardPass:
    """What all layers of one forward pass share.

    `in_graph`: layers are captured without their attention. There is no plan then, and nothing is computed from the
    batch before the layers run. `turn`: of one of two passes at the same time."""

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
        """(T, H, D). `plan`: of other queries than the batch's."""
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

    def start_output(self, attended_THD: Tensor, residual_TE: Tensor) -> Callable[[], Tensor]:
        """Launches residual + the output projection. The residual may be overwritten."""
        return self._out.start_with_residual(attended_THD.flatten(1), residual_TE)

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

    def start(self, x_TE: Tensor, *, norm: RMSNorm, residual_TE: Tensor) -> Callable[[], Tensor]:
        """Launches residual + mlp(norm(x)). The residual, which may be x, may be overwritten."""
        return self._gated.start_into(self._down, x_TE, norm, residual_TE)

    def traceable(self) -> MLP | None:
        """See `Layer.traceable`."""
        return traceable_parts(self, "_gated", "_down")


class DecoderLayer:
    """Attention and MLP, each with a norm before it and a residual. Without `input_norm` the caller norms the input of
    the attention."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, *, input_norm: bool = True
    ) -> None:
        norm = f"{prefix}input_layernorm"
        self._input_norm = weights.norm(norm, config.rms_norm_eps) if input_norm else None
        self.attention = Attention(config, layer, weights, f"{prefix}self_attn.")
        self._post_norm = weights.norm(f"{prefix}post_attention_layernorm", config.rms_norm_eps)
        self._mlp = MLP(config, weights, f"{prefix}mlp.")

    def stages(
        self,
        x_TI: Tensor,
        step: ForwardPass,
        logits_indices: LogitsIndices | None = None,
        residual_TE: Tensor | None = None,
    ) -> Stages[Tensor]:
        """(T, E), or (R, E) of the selected tokens. `residual_TE`: of the attention; None: x. It may be overwritten."""
        q_THD = self.queries(x_TI, step)
        return (yield from self.select(q_THD, x_TI if residual_TE is None else residual_TE, step, logits_indices))

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        """The part before attention: queries (T, H, D)."""
        return self.attention.queries(x_TI, step, self._input_norm)

    def select(
        self, q_THD: Tensor, residual_TE: Tensor, step: ForwardPass, logits_indices: LogitsIndices | None
    ) -> Stages[Tensor]:
        """The layer's output, from its queries: (T, E), or (R, E) of the selected tokens."""
        plan = None
        if logits_indices is not None:
            q_THD, residual_TE = q_THD[logits_indices.index_R], residual_TE[logits_indices.index_R]
            if q_THD.shape[0] == 0:  # a piece of a prompt: only its keys and values are needed
                return residual_TE
            plan = step.backend.plan(logits_indices.batch)
        projected = self.attention.start_output(step.attend(self.attention, q_THD, plan), residual_TE)
        yield
        x = projected()
        computed = self._mlp.start(x, norm=self._post_norm, residual_TE=x)
        yield
        return computed()

    def finish(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor:
        """The part after attention at once, (T, E). The residual may be overwritten."""
        x = self.attention.start_output(attended_THD, residual_TE)()
        return self._mlp.start(x, norm=self._post_norm, residual_TE=x)()

    def traceable(self) -> DecoderLayer | None:
        """See `Layer.traceable`."""
        return traceable_parts(self, "attention", "_mlp")


# What is computed for every token: of the last layer the queries (T, H, D) and the input (T, E), and the auxiliary
# hidden states.
TrunkOutput = tuple[Tensor, Tensor, list[Tensor]]


class Trunk(Protocol):
    """Another way to compute a decoder up to the attention of its last layer."""

    def fits(self, num_tokens: int, aux_layers: Sequence[int]) -> bool: ...

    def __call__(self, tokens_T: Tensor, step: ForwardPass, aux_layers: Sequence[int]) -> TrunkOutput:
        """The output is valid until the next call."""
        ...


class PagedModel:
    """What a decoder and an EAGLE head have in common: rotary embeddings, a paged cache, logits.

    `num_positions` sizes the rotary tables: the longest sequence, and the slots that speculation writes after it.
    `kv_scales`: of the layers of an FP8 cache; none: 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightLoader,
        backend: AttentionBackend,
        num_positions: int,
        kv_scales: Sequence[KVScales] = (),
    ) -> None:
        self.config, self._kv_scales = config, kv_scales
        self.device = weights.device
        self.num_positions = num_positions
        self._backend = backend
        inv_freq, factor = config.rope.inverse_frequencies(config.head_dim)
        self._rotary = Rotary(inv_freq, factor, num_positions, weights.dtype, weights.device)

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits (R, V) of selected hidden states, in the model's dtype."""
        raise NotImplementedError

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """As `raw_logits`, float32 (float64 where the model is)."""
        out = self.raw_logits(hidden_RE)
        return out if out.dtype == torch.float64 else out.float()

    def new_cache(self, num_slots: int, dtype: torch.dtype) -> KVCache:
        c = self.config
        scales = self._kv_scales if dtype == torch.float8_e4m3fn else ()
        return KVCache(c.num_layers, num_slots, c.num_kv_heads, c.head_dim, dtype, self.device, scales)


class Decoder(PagedModel):
    """A causal language model over a paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightLoader,
        backend: AttentionBackend,
        num_positions: int,
        second_backend: AttentionBackend | None = None,
        kv_scales: Sequence[KVScales] = (),
    ) -> None:
        """`second_backend`: of the second of two passes at the same time; None: the first one, on a CPU, or if there
        are no such passes."""
        super().__init__(config, weights, backend, num_positions, kv_scales)
        self._second_backend = second_backend or backend
        self.embedding_VE = weights.tensor("model.embed_tokens.weight")  # of a rank: a part
        self.embed = weights.embedding(self.embedding_VE)
        self.layers = [DecoderLayer(config, i, weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._norm = weights.norm("model.norm", config.rms_norm_eps)
        self.lm_head = weights.lm_head(self.embedding_VE if config.tie_word_embeddings else None, config.vocab_size)

    def forward(
        self,
        tokens_T: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        logits_indices: LogitsIndices | None = None,
        trunk: Trunk | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states after the final norm, (T, E), or (R, E) of the selected tokens; and the auxiliary hidden
        states, (T, E) each: the inputs of `aux_layers`. There the number of layers means the last layer's output, which
        needs all tokens. `trunk`: where it fits."""
        if trunk is None or not trunk.fits(len(tokens_T), aux_layers):
            return completed(self.stages(tokens_T, batch, cache, aux_layers, logits_indices))
        step = ForwardPass(batch, self._backend, cache, self._rotary)
        q_THD, x_TE, aux_hidden_states = trunk(tokens_T, step, aux_layers)
        x_TE = completed(self.layers[-1].select(q_THD, x_TE, step, logits_indices))
        return self._finished(x_TE, aux_hidden_states, aux_layers, logits_indices)

    def static_pass(self, batch: PagedBatch, cache: KVCache) -> ForwardPass:
        """For layers that are captured without their attention."""
        return ForwardPass(batch, self._backend, cache, self._rotary, in_graph=True)

    def stages(
        self,
        tokens_T: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        logits_indices: LogitsIndices | None = None,
        *,
        turn: Turn = FIRST,
    ) -> Stages[tuple[Tensor, list[Tensor]]]:
        """`forward`, half a layer at a time. `turn`: of one of two passes at the same time."""
        backend = self._second_backend if turn.is_second else self._backend
        step = ForwardPass(batch, backend, cache, self._rotary, turn=turn)
        x_TE = self.embed(tokens_T)
        aux_hidden_states: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                aux_hidden_states.append(x_TE.clone())  # later layers may write their sums over it
            x_TE = yield from layer.stages(x_TE, step, logits_indices if i == len(self.layers) - 1 else None)
        return self._finished(x_TE, aux_hidden_states, aux_layers, logits_indices)

    def _finished(
        self,
        x_TE: Tensor,
        aux_hidden_states: list[Tensor],
        aux_layers: Sequence[int],
        logits_indices: LogitsIndices | None,
    ) -> tuple[Tensor, list[Tensor]]:
        if len(self.layers) in aux_layers:
            assert logits_indices is None, "auxiliary hidden states are those of all tokens"
            aux_hidden_states.append(x_TE)
        return self._norm(x_TE), aux_hidden_states

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        return self.lm_head(hidden_RE)

    def best_tokens(self, hidden_RE: Tensor, ops: ModuleType) -> tuple[Tensor, Tensor] | None:
        """`argmax_and_margin` of the logits. None: to be found from `raw_logits`."""
        head = self.lm_head
        if not isinstance(head, GatheredLinear) or not head.exchanges_best(hidden_RE):
            return None
        return head.best(hidden_RE, ops)
