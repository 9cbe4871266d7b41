"""A decoder without most of its layers, for a run that only shows which kernels there are."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from specbatch.batch import LogitsIndices
from specbatch.models.decoder import Decoder
from specbatch.models.decoder_layer import DecoderLayer, ForwardPass
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.linear import Residual
from specbatch.models.stages import Stages


class _Skipped:
    """Takes the place of a layer, so that the numbers of layers stay as they are."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.first_norm = layer.first_norm  # so that the layer before it ends as it does

    def stages(
        self,
        x: Residual,
        step: ForwardPass,
        logits_indices: LogitsIndices | None = None,
        *,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        yield
        return x


def outlined(decoder: Decoder) -> Decoder:
    """The same decoder with one layer of each window, with experts and without, and the last layer. The others launch
    the same kernels."""
    other, last = copy(decoder), len(decoder.layers) - 1
    kinds = [(layer.attention.window, layer.mixture is None) for layer in decoder.layers]
    kept = {*map(kinds.index, kinds), last}
    other.layers = [
        layer if i in kept else _Skipped(layer)  # type: ignore[misc]
        for i, layer in enumerate(decoder.layers)
    ]
    other.routing = None  # it would expect the choices of all layers
    return other
