"""The decoder of every supported family. A family (`families/`) chooses the class of its layers, and the traits in
`ModelConfig` say the rest: biases, per-head norms on queries and keys, sliding windows, rotary scaling, soft caps, tied
embeddings, the activation of the MLP.

Shape suffixes: T packed tokens, R selected tokens, E hidden size, V vocabulary, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specbatch.attention.interface import AttentionBackend
from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.cache.pages import KVCache, KVScales
from specbatch.kernels import ops_for
from specbatch.models.config import ModelConfig
from specbatch.models.decoder_layer import DecoderLayer, ForwardPass
from specbatch.models.families.registry import FAMILIES
from specbatch.models.layers import LayerNorm, RMSNorm, Rotary
from specbatch.models.linears.linear import Linear, Residual
from specbatch.models.linears.sharded import GatheredLinear
from specbatch.models.rope import RopeConfig
from specbatch.models.routing_counter import RoutingCounter
from specbatch.models.stages import FIRST, Stages, Turn, completed
from specbatch.models.weight_loader import WeightLoader

# What is computed for every token: of the last layer the queries (T, H, D) and the input (T, E), and the auxiliary
# hidden states.
TrunkOutput = tuple[Tensor, Tensor, list[Tensor]]


class Trunk(Protocol):
    """Another way to compute a decoder up to the attention of its last layer."""

    def fits(self, num_tokens: int, aux_layers: Sequence[int]) -> bool: ...

    def __call__(self, tokens_T: Tensor, step: ForwardPass, aux_layers: Sequence[int]) -> TrunkOutput:
        """The output is valid until the next call."""
        ...


class CausalModel(Protocol):
    """A model as the engine uses it: `Decoder`, or one that transformers computes (`fallback/decoder.py`)."""

    config: ModelConfig
    device: torch.device
    num_positions: int
    embedding_VE: Tensor
    routing: RoutingCounter | None

    @property
    def lm_head(self) -> Linear:
        """Return the LM head, which draft heads without one use."""
        ...

    @property
    def embed(self) -> Callable[[Tensor], Tensor]:
        """Return the function from tokens to their embeddings, which draft heads use."""
        ...

    def forward(
        self,
        tokens_T: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        logits_indices: LogitsIndices | None = None,
        trunk: Trunk | None = None,
        *,
        is_even: bool = False,
    ) -> tuple[Tensor, list[Tensor]]: ...

    def take_part(self) -> None: ...

    def raw_logits(self, hidden_RE: Tensor) -> Tensor: ...

    def logits(self, hidden_RE: Tensor) -> Tensor: ...

    def best_tokens(self, hidden_RE: Tensor, ops: ModuleType) -> tuple[Tensor, Tensor] | None: ...

    def new_cache(self, num_slots: int, dtype: torch.dtype) -> KVCache: ...


class TokenCounts(NamedTuple):
    """The tokens of each rank in a forward pass where ranks have tokens of their own. `selected`: those of the last
    layer."""

    tokens: tuple[int, ...]
    selected: tuple[int, ...]

    def of_layer(self, *, is_last: bool) -> tuple[int, ...]:
        return self.selected if is_last else self.tokens


class PagedModel:
    """The common parts of a decoder and an EAGLE head: rotary embeddings, a paged cache, logits.

    `num_positions` sizes the rotary tables: the longest sequence, and the slots that speculation writes after it.
    `kv_scales`: the scales of each layer of an FP8 cache; empty: all are 1.
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
        self._ropes: dict[RopeConfig, Rotary] = {}
        for rope in map(config.rope_of, range(config.num_layers)):
            if rope not in self._ropes:
                inv_freq, factor = rope.inverse_frequencies(config.head_dim)
                self._ropes[rope] = Rotary(inv_freq, factor, num_positions, weights.dtype, weights.device)

    def rotary_of(self, layer: int) -> Rotary:
        """Return the rotary embedding of a layer. Layers with equal frequencies share one."""
        return self._ropes[self.config.rope_of(layer)]

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits (R, V) of selected hidden states, in the model's dtype."""
        raise NotImplementedError

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return `raw_logits` in float32 (in float64 if the model is in float64)."""
        out = self.raw_logits(hidden_RE)
        return out if out.dtype == torch.float64 else out.float()

    def new_cache(self, num_slots: int, dtype: torch.dtype) -> KVCache:
        c, layers = self.config, self.config.cached_layers
        scales = [self._kv_scales[i] for i in layers] if dtype == torch.float8_e4m3fn and self._kv_scales else ()
        return KVCache(len(layers), num_slots, c.num_kv_heads, c.head_dim, dtype, self.device, scales)


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
        """Make the layers of the model. `second_backend`: the attention of the second of two passes at the same time;
        None: it is the first one, which is right on a CPU, or if there are no such passes."""
        super().__init__(config, weights, backend, num_positions, kv_scales)
        self._second_backend = second_backend or backend
        self.embedding_VE = weights.tensor("model.embed_tokens.weight")  # on a rank: its part
        self.embed = weights.embedding(self.embedding_VE)
        self._positions_PE: Tensor | None = None
        if config.learned_positions:  # speculation computes slots after the last position, and drops them
            table_PE = weights.tensor("model.embed_positions.weight")
            missing = max(0, num_positions - len(table_PE))
            self._positions_PE = torch.nn.functional.pad(table_PE, (0, 0, 0, missing))
        self._embedding_scale = config.embedding_scale
        if config.embedding_scale is not None and not config.wide_embedding_scale:  # rounded as in transformers
            self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=torch.float32).to(weights.dtype))
        layer = FAMILIES[config.model_type].layer
        self.layers: list[DecoderLayer] = [
            layer(config, i, weights, f"model.layers.{i}.", self.rotary_of(i)) for i in range(config.num_layers)
        ]
        mixtures = [layer.mixture for layer in self.layers if layer.mixture is not None]
        # The ranks that tokens travel between; None: they do not.
        self._peers = weights.group if weights.divides_requests and mixtures else None
        self.routing: RoutingCounter | None = None  # counts the experts that tokens choose in rounds
        if config.moe is not None and mixtures:
            self.routing = RoutingCounter(len(mixtures), config.moe.num_experts, weights.device)
        for mixture in mixtures:
            mixture.counter = self.routing
        eps, offset = config.rms_norm_eps, config.norm_offset
        self._norm: RMSNorm | LayerNorm
        if config.layer_norms:
            self._norm = weights.layer_norm("model.norm", eps, offset, has_bias=config.norm_bias)
        else:
            self._norm = weights.norm("model.norm", eps, offset, is_wide=config.wide_norms)
        # The norm that the last layer may compute with its sum.
        self._fused_norm = self._norm if isinstance(self._norm, RMSNorm) else None
        self._soft_capped = ops_for(weights.device, weights.dtype).soft_capped
        tied_VE = self.embedding_VE if config.tie_word_embeddings else None
        self.lm_head = weights.lm_head(tied_VE, config.vocab_size, has_bias=config.lm_head_bias)

    def embedded(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the input of the first layer (T, E): embeddings, scaled or with vectors of the positions where the
        family does so. Draft heads take the embeddings themselves (`embed`)."""
        x_TE = self.embed(tokens_T)
        if self._positions_PE is not None:
            x_TE = x_TE + self._positions_PE[positions_T]
        return x_TE if self._embedding_scale is None else x_TE * self._embedding_scale

    def auxiliary(self, x_TE: Tensor) -> Tensor:
        """Return the residual as an auxiliary hidden state. It is a copy, because layers may write over x."""
        scale = self.config.residual_scale
        return x_TE.clone() if scale == 1 else x_TE * scale

    def forward(
        self,
        tokens_T: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        logits_indices: LogitsIndices | None = None,
        trunk: Trunk | None = None,
        *,
        is_even: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states after the final norm, (T, E), or (R, E) for the selected tokens; and the auxiliary
        hidden states, (T, E) each: the inputs of `aux_layers`. The number of layers, as an index in `aux_layers`, means
        the last layer's output, which needs all tokens. `trunk`: computes the layers if the pass fits into it.
        `is_even`: all ranks have as many tokens; otherwise ranks with tokens of their own agree on their numbers."""
        if trunk is None or not trunk.fits(len(tokens_T), aux_layers):
            return completed(self.stages(tokens_T, batch, cache, aux_layers, logits_indices, is_even=is_even))
        step = ForwardPass(batch, self._backend, cache)
        q_THD, x_TE, aux_hidden_states = trunk(tokens_T, step, aux_layers)
        x = completed(self.layers[-1].select(q_THD, x_TE, step, logits_indices, self._fused_norm))
        return self._finished(x, aux_hidden_states, aux_layers, logits_indices)

    def static_pass(self, batch: PagedBatch, cache: KVCache) -> ForwardPass:
        """Make the pass for layers that are captured without their attention."""
        return ForwardPass(batch, self._backend, cache, in_graph=True)

    def stages(
        self,
        tokens_T: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
        logits_indices: LogitsIndices | None = None,
        *,
        turn: Turn = FIRST,
        is_even: bool = False,
    ) -> Stages[tuple[Tensor, list[Tensor]]]:
        """Run `forward`, half a layer at a time. `turn`: the turn of this pass, if two passes run at the same time."""
        num_selected = len(tokens_T) if logits_indices is None else len(logits_indices.index_R)
        found = None if is_even else self._agreed(len(tokens_T), num_selected)
        backend = self._second_backend if turn.is_second else self._backend
        step = ForwardPass(batch, backend, cache, turn=turn)
        x = Residual(self.embedded(tokens_T, batch.positions_T))
        aux_hidden_states: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                aux_hidden_states.append(self.auxiliary(x.x_TE))
            is_last = i == len(self.layers) - 1
            next_norm = self._fused_norm if is_last else self.layers[i + 1].first_norm
            indices, counts = logits_indices if is_last else None, found and found.of_layer(is_last=is_last)
            x = yield from layer.stages(x, step, indices, next_norm=next_norm, counts=counts)
        return self._finished(x, aux_hidden_states, aux_layers, logits_indices)

    def take_part(self) -> None:
        """Take part in a forward pass of the other ranks for which this one has no tokens."""
        completed(self._idle_stages())

    def _idle_stages(self) -> Stages[None]:
        found = self._agreed(0, 0)
        assert found is not None, "the ranks compute the same tokens"
        nothing_TE = self.embedding_VE.new_empty((0, self.config.hidden_size))
        for layer in self.layers:
            yield from layer.take_part(nothing_TE, found.of_layer(is_last=layer is self.layers[-1]))

    def _agreed(self, num_tokens: int, num_selected: int) -> TokenCounts | None:
        """Return the numbers of tokens of all ranks; None: they compute the same tokens."""
        if self._peers is None:
            return None
        numbers = self._peers.agree([num_tokens, num_selected])
        return TokenCounts(tuple(n for n, _ in numbers), tuple(n for _, n in numbers))

    def _finished(
        self,
        x: Residual,
        aux_hidden_states: list[Tensor],
        aux_layers: Sequence[int],
        logits_indices: LogitsIndices | None,
    ) -> tuple[Tensor, list[Tensor]]:
        if len(self.layers) in aux_layers:
            assert logits_indices is None, "auxiliary hidden states are those of all tokens"
            aux_hidden_states.append(self.auxiliary(x.x_TE))
        return x.normed(self._norm), aux_hidden_states

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        logits_RV = self.lm_head(self._scaled(hidden_RE))
        cap = self.config.logits_soft_cap
        return logits_RV if cap is None else self._soft_capped(logits_RV.contiguous(), cap)

    def best_tokens(self, hidden_RE: Tensor, ops: ModuleType) -> tuple[Tensor, Tensor] | None:
        """Return `argmax_and_margin` of the logits; None: find it from `raw_logits`."""
        head = self.lm_head
        if self.config.logits_soft_cap is not None:  # the margin is that of capped logits
            return None
        if not isinstance(head, GatheredLinear) or not head.exchanges_best(hidden_RE):
            return None
        return head.best(self._scaled(hidden_RE), ops)

    def _scaled(self, hidden_RE: Tensor) -> Tensor:
        """Return the input of the LM head. Hidden states are scaled in place of logits, which are many more numbers."""
        scale = self.config.logits_scale
        return hidden_RE if scale == 1 else hidden_RE * scale
