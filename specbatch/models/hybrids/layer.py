"""A layer of a hybrid: a Gated DeltaNet or gated attention, and an MLP or a mixture of experts.

Shape suffixes: T packed tokens, R selected tokens, E hidden size, I input features, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbatch.batch import LogitsIndices
from specbatch.models.config import ModelConfig
from specbatch.models.decoder_layer import FirstHalf, ForwardPass, PreNormLayer
from specbatch.models.hybrids.gated_delta import GatedDelta
from specbatch.models.layers import RMSNorm, Rotary
from specbatch.models.linears.linear import Residual
from specbatch.models.stages import Stages
from specbatch.models.weight_loader import WeightLoader


class HybridLayer(PreNormLayer):
    """A layer with a norm before each of its halves. The norms multiply by 1 + weight."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, rotary: Rotary) -> None:
        super().__init__(config, layer, weights, prefix, rotary)
        self._delta: GatedDelta | None = None
        if config.has_delta(layer):
            assert config.delta is not None
            index = sum(config.delta.layers[:layer])
            self._delta = GatedDelta(config, index, weights, f"{prefix}linear_attn.")

    @property
    def half(self) -> FirstHalf:
        return self.attention if self._delta is None else self._delta

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
        assert residual_TE is None, "the residual is that of the layer's input"
        x_TI, norm = (x.x_TE, self._input_norm) if x.normed_TE is None else (x.normed_TE, None)
        index_R = None if logits_indices is None else logits_indices.index_R
        if self._delta is not None:
            mixed = self._delta.mixed(x_TI, step, norm)
            if index_R is not None:
                mixed = mixed[index_R]
        else:
            q_THD, gate_TZ = self.attention.queries_and_gate(x_TI, step, norm)
            plan = None
            if logits_indices is not None:
                q_THD, gate_TZ = q_THD[index_R], gate_TZ[index_R]
                plan = step.backend.plan(logits_indices.batch) if len(q_THD) else None
            mixed = q_THD
            if len(q_THD):
                mixed = self.attention.gated(step.attend(self.attention, q_THD, plan), gate_TZ)
            del q_THD, gate_TZ
        residual_TE = x.x_TE if index_R is None else x.x_TE[index_R]
        if not len(residual_TE):  # a piece of a prompt: only what later tokens read of it is needed
            return Residual(residual_TE)
        after = self.after_attention(mixed, residual_TE, next_norm, counts)
        del mixed
        return (yield from after)
