"""Layers whose norms are LayerNorms, and layers whose attention and MLP read the same residual."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbatch.models.config import ModelConfig
from specbatch.models.decoder_layer import MLP, Attention, DecoderLayer, ForwardPass
from specbatch.models.layers import LayerNorm, RMSNorm, Rotary
from specbatch.models.linears.linear import Residual
from specbatch.models.stages import Stages
from specbatch.models.weight_loader import WeightLoader


class LayerNormLayer(DecoderLayer):
    """A layer with a LayerNorm before attention. If it `is_parallel`, the MLP reads the norm of the layer's input: the
    same norm, or a second one. Otherwise it reads the second norm of the sum of input and attention."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, rotary: Rotary) -> None:
        norms = [_norm(config, weights, f"{prefix}{name}") for name in config.norms]
        self._input_norm, self._mlp_norm, self._is_parallel = norms[0], norms[-1], config.is_parallel
        self.attention = Attention(config, layer, weights, f"{prefix}self_attn.", rotary)
        self._mlp = MLP(config, weights, f"{prefix}mlp.")

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        return self.attention.queries(self._input_norm(x_TI), step, None)

    def after_attention(
        self,
        attended_THD: Tensor,
        residual_TE: Tensor,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        normed_TE = self._mlp_norm(residual_TE) if self._is_parallel else None
        projected = self.attention.start_output(attended_THD, residual_TE)
        del attended_THD
        yield
        x_TE = projected().x_TE
        computed = self._mlp.start_added(self._mlp_norm(x_TE) if normed_TE is None else normed_TE, x_TE)
        yield
        return computed()


def _norm(config: ModelConfig, weights: WeightLoader, name: str) -> LayerNorm:
    return weights.layer_norm(name, config.rms_norm_eps, config.norm_offset, has_bias=config.norm_bias)
