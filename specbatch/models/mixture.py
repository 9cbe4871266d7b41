"""A mixture of experts in place of an MLP.

A token's experts are added in the order of its choices. So its bits do not depend on the other tokens.

Shape suffixes: T packed tokens, E hidden size, X experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.kernels.torch.mixture import row_sigmoid
from specbatch.models.config import ModelConfig
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.linear import DenseLinear, Linear, Residual
from specbatch.models.linears.sharded import start_sum
from specbatch.models.routing_counter import RoutingCounter
from specbatch.models.stages import Stages
from specbatch.models.weight_loader import WeightLoader

_MAX_FUSED = 2  # the largest number of tokens for which the router computes the norm of its inputs


class MixtureMLP:
    """See the module's text. `prefix`: the beginning of the names of the layer's tensors."""

    takes_normed = True

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        moe = config.moe
        assert moe is not None
        self._group = weights.group
        self.travels = weights.divides_requests  # tokens go to the ranks that have their experts
        self._routing, self._is_wide = moe.routing, moe.wide_router
        self._ops = ops_for(weights.device, weights.dtype)
        block = f"{prefix}{moe.block}."
        self.counter: RoutingCounter | None = None  # None: choices are not counted
        router = weights.wide_linear if moe.wide_router else weights.linear
        self._router = router(f"{block}{moe.router}", has_bias=moe.router_bias)
        self._fuses_norm = (
            isinstance(self._router, DenseLinear) and not moe.wide_router and weights.device.type == "cuda"
        )
        correction = moe.correction_bias
        self._correction_X = None if correction is None else _finite(weights.wide(f"{block}{correction}"), block)
        gate, up, down = moe.projections
        names = [(f"{name}.{gate}", f"{name}.{up}", f"{name}.{down}") for name in moe.experts(block)]
        self._experts = weights.experts(names, config.activation, has_bias=moe.expert_bias)
        self._shared: _SharedExpert | None = None
        self._shared_gate: Linear | None = None
        if moe.shared_size:
            self._shared = _SharedExpert(config, weights, f"{block}{moe.shared_name}.")
            self._shared_gate = weights.linear(f"{block}{moe.shared_name}_gate") if moe.shared_gate else None

    def start(self, x: Residual, norm: RMSNorm, next_norm: RMSNorm | None = None) -> Callable[[], Residual]:
        """Compute x + mixture(norm(x)), as `MLP.start` does."""
        if self._group is not None:
            return start_sum(self._group, self._add_to(None, x.normed(norm)), x.x_TE, next_norm)
        if x.normed_TE is None and self._fuses_norm and x.x_TE.shape[0] <= _MAX_FUSED:
            y_TE = self._start_few(x.x_TE, norm)
        else:
            y_TE = self._add_to(x.x_TE, x.normed(norm))
        return lambda: Residual(y_TE)

    def _start_few(self, x_TE: Tensor, norm: RMSNorm) -> Tensor:
        """Compute x + mixture(norm(x)) for few tokens with one launch less: the router's GEMM norms its inputs itself,
        and the kernel that chooses experts computes the norm for the experts."""
        logits_TX = self._router.with_norm(x_TE, norm)
        weights_TK, experts_TK, normed_TE = self._ops.route_and_norm(
            logits_TX, self._routing, self._correction_X, x_TE, norm.weight, norm.eps
        )
        return self._sum(x_TE, normed_TE, weights_TK, experts_TK)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return mixture(x), (T, E)."""
        part_TE = self._add_to(None, x_TE)
        return part_TE if self._group is None else self._group.sum(part_TE)

    def place_of(self, x_TE: Tensor, counts: Sequence[int] | None = None) -> Tensor | None:
        """Return memory for tokens like x from which they can travel without a copy; None: there is none. `counts`: see
        `travel`."""
        assert self._group is not None
        is_padded = counts is not None and len(x_TE) < max(counts)
        return None if is_padded or not len(x_TE) else self._group.dispatch_place(x_TE)

    def travel(
        self, x_TE: Tensor, counts: Sequence[int] | None = None, residual_TE: Tensor | None = None
    ) -> Stages[Tensor]:
        """Return residual + mixture(x) if ranks have tokens of their own. Each rank gets the tokens of all, computes
        its experts for them, and gets the sums for its own tokens. `counts`: the tokens of each rank; None: all have as
        many as this one."""
        group, num_tokens = self._group, len(x_TE)
        assert group is not None
        width = num_tokens if counts is None else max(counts)
        if not width:
            return x_TE
        gathered = group.start_dispatch(_padded(x_TE, width))
        yield
        all_TE = gathered().flatten(0, 1)
        weights_TK, experts_TK = self._chosen(all_TE)
        for rank, count in enumerate(counts or ()):
            if count < width:
                experts_TK[rank * width + count : (rank + 1) * width] = -1  # padding needs no expert
        if self.counter is not None:
            own = group.rank * width
            self.counter.record(experts_TK[own : own + num_tokens])
        parts_TE = self._experts(all_TE, weights_TK, experts_TK)
        shared_TE = self._of_shared(x_TE) if num_tokens else None
        if shared_TE is not None:
            residual_TE = shared_TE if residual_TE is None else residual_TE + shared_TE
        rest_TE = None if residual_TE is None else _padded(residual_TE, width)
        summed = group.start_scatter_sum(parts_TE.view(group.size, width, -1), rest_TE)
        yield
        return summed()[:num_tokens]

    def _chosen(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers (T, K) of each token's experts."""
        logits_TX = self._router(x_TE.to(torch.promote_types(x_TE.dtype, torch.float32)) if self._is_wide else x_TE)
        weights_TK, experts_TK = self._ops.route(logits_TX, self._routing, self._correction_X)
        return weights_TK, experts_TK

    def _add_to(self, residual_TE: Tensor | None, x_TE: Tensor) -> Tensor:
        """Return residual + mixture(x), or on a rank its part of it."""
        return self._sum(residual_TE, x_TE, *self._chosen(x_TE))

    def _sum(self, residual_TE: Tensor | None, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Return residual + the sum of the experts of x and of the shared expert."""
        if self.counter is not None:
            self.counter.record(experts_TK)
        shared_TE = self._of_shared(x_TE)
        if shared_TE is not None:
            residual_TE = shared_TE if residual_TE is None else residual_TE + shared_TE
        return self._experts(x_TE, weights_TK, experts_TK, residual_TE)

    def _of_shared(self, x_TE: Tensor) -> Tensor | None:
        """Return the output of the expert that every token takes; None: there is none."""
        if self._shared is None:
            return None
        shared_TE = self._shared(x_TE)
        return shared_TE if self._shared_gate is None else row_sigmoid(self._shared_gate(x_TE)) * shared_TE

    def traceable(self) -> None:
        """See `linears.linear.Layer.traceable`: no compiler fuses the experts."""
        return


def _padded(x_TE: Tensor, num_tokens: int) -> Tensor:
    """Return x with lines of zeros at its end."""
    missing = num_tokens - len(x_TE)
    return torch.nn.functional.pad(x_TE, (0, 0, 0, missing)) if missing else x_TE


def mixture_of(config: ModelConfig, layer: int, weights: WeightLoader, prefix: str) -> MixtureMLP | None:
    """Make the mixture of experts of a layer; None: it has an MLP. `prefix`: see `MixtureMLP`."""
    has_experts = config.moe is not None and config.moe.layers[layer]
    return MixtureMLP(config, weights, prefix) if has_experts else None


def _finite(correction_X: Tensor, block: str) -> Tensor:
    """Return the correction. Raise ModelError if it is not finite: it would choose experts, and no output show it."""
    if not bool(correction_X.isfinite().all()):
        raise ModelError(
            f"{block.removesuffix('.')}: the correction of its router has a number that is not finite",
            hint="download the file again",
        )
    return correction_X


class _SharedExpert:
    """The gated feed-forward of the expert that every token takes."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        self._gated = weights.gated_linear(f"{prefix}gate_proj", f"{prefix}up_proj", config.activation)
        self._down = weights.linear(f"{prefix}down_proj")

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self._gated.into(self._down, x_TE)
