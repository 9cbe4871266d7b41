"""Gated DeltaNet (Yang et al. 2024), which takes the place of attention in most layers of a hybrid.

Shape suffixes: T packed tokens, E hidden size, I input features, H value heads, V dimensions of a value head, C
channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specbatch.kernels import ops_for
from specbatch.kernels.delta import DeltaWeights
from specbatch.models.config import ModelConfig
from specbatch.models.decoder_layer import ForwardPass
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.fp8 import JoinedLinear
from specbatch.models.linears.linear import Linear, Residual
from specbatch.models.weight_loader import WeightLoader


class GatedDelta:
    """The Gated DeltaNet of one layer: fused input projections, a short convolution, the gated delta rule, a gated
    norm, output. `index`: the layer's number among those with states."""

    def __init__(self, config: ModelConfig, index: int, weights: WeightLoader, prefix: str) -> None:
        sizes = config.delta
        assert sizes is not None
        self._index, self._eps = index, config.rms_norm_eps
        self._channels, self._values_size = sizes.conv_channels, sizes.values_size
        names = [f"{prefix}{name}" for name in sizes.parts]
        self._in: Linear
        if weights.is_quantised(*names):  # files in FP8 do not quantise the small layers of the gates
            self._in = JoinedLinear([weights.linear(*names[:4]), weights.linear(*names[4:])])
        else:
            self._in = weights.linear(*names)
        self._out = weights.summed_linear(f"{prefix}out_proj")
        decay_H, bias_H = -weights.wide(f"{prefix}A_log").exp(), weights.wide(f"{prefix}dt_bias")
        # Threads of a kernel have consecutive channels, so that these are next to each other in memory.
        conv_CW = weights.tensor(f"{prefix}conv1d.weight")[:, 0].T.contiguous().T
        self._weights = DeltaWeights(conv_CW, decay_H, bias_H, sizes.num_key_heads)
        self._norm_weight = weights.tensor(f"{prefix}norm.weight")
        self._ops = ops_for(weights.device, weights.dtype)

    @property
    def takes_normed(self) -> bool:
        """See `Layer`."""
        return self._in.takes_normed

    def mixed(self, x_TI: Tensor, step: ForwardPass, norm: RMSNorm | None) -> Tensor:
        """Return the output before its projection, (T, H * V), of norm(x). The states move."""
        projected = self._in(x_TI) if norm is None else self._in.with_norm(x_TI, norm)
        qkv_TC, z_TZ, gates_T2H = projected.tensor_split((self._channels, self._channels + self._values_size), dim=1)
        batch, cache = step.batch, step.cache.states
        assert batch.states is not None, "a pass of a hybrid has the lines of its states"
        assert cache is not None
        compute = self._ops.delta_prompts if batch.states.is_prompt else self._ops.delta_rounds
        out_THV = compute(qkv_TC, gates_T2H, self._weights, cache.layer(self._index), batch)
        mixed: Tensor = self._ops.gated_norm(out_THV, z_TZ, self._norm_weight, self._eps)
        return mixed

    def start_output(
        self, mixed_TZ: Tensor, residual_TE: Tensor, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        """Launch residual + the output projection. The residual may be overwritten."""
        return self._out.start_with_residual(mixed_TZ, residual_TE, next_norm)
