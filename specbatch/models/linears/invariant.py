"""Linear layers for a deterministic mode on CUDA: a row's bits do not depend on how many rows are computed with it.

Tensor cores add the input features in order, whatever tile a kernel has. Only a kernel that splits them into parts, to
be summed afterwards, gives other bits. So few rows go to our kernels without splits, and more rows to those of cuBLASLt
without split-K. On an H200, 2,672 of 2,672 pairs of a size and such an algorithm gave the bits of our kernels, for 17
shapes of weights and 1 to 8,192 rows (docs/bench/2026-11-23-h200-invariant-products.json). `checks` repeat that on the
card at hand. Norm, bias, activation and the sum with a residual are steps of their own, each rounded, in both cases.
Of few rows the last two are computed in the kernel of the product, with the same bits.

Shape suffixes: T packed tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.kernels.activations import Activation
from specbatch.kernels.card_checks import CardChecks, Pair
from specbatch.kernels.cublaslt import Algorithm, CublasLt
from specbatch.models.linears.linear import GatedLinear, Linear

_ALIGNMENT = 256  # bytes, of what cuBLASLt reads
_CHECKED_TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 96, 200, 512)  # each tile, and some of the library's


class InvariantGemm:
    """x W^T for the weights of one device, for launches in order on one stream. `dtype`: bfloat16 or float16. `checks`:
    those of this card, for the weights that it has seen."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # Triton exists where CUDA does, and need not exist elsewhere.
        from specbatch.kernels.triton.skinny.ops import invariant_gated_linear, invariant_linear
        from specbatch.kernels.triton.skinny.tile import MAX_TOKENS

        self._max_skinny = MAX_TOKENS
        self._act_mul = ops_for(device, dtype).act_mul
        self._skinny, self._skinny_gated = invariant_linear, invariant_gated_linear
        self._library = CublasLt(device, dtype, unsplit=True)
        self._algorithms: dict[tuple[int, int, int], Algorithm] = {}
        self._dtype = dtype
        self.checks = CardChecks()

    def __call__(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        num_out, num_in = weight_OI.shape
        size = (x_TI.shape[0], num_out, num_in)
        if not x_TI.shape[0]:
            return x_TI.new_empty(0, num_out)
        if self._is_skinny(x_TI, weight_OI):
            return self._skinny(x_TI, weight_OI)
        if isinstance(x_TI, FakeTensor):  # The run compiles kernels, and the library has its own.
            return x_TI.new_empty(x_TI.shape[0], num_out)
        if size not in self._algorithms:
            found = self._library.algorithms(*size)
            if not found:
                raise ModelError(
                    f"cuBLASLt has no product without split-K for {size[0]} tokens and a weight of {size[1:]}",
                    "engine.deterministic: false",
                )
            self._algorithms[size] = found[0]
        x_TI = x_TI.contiguous()
        if x_TI.data_ptr() % _ALIGNMENT:
            x_TI = x_TI.clone()
        return self._library.multiply(self._algorithms[size], x_TI, weight_OI)

    def with_residual(self, x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor) -> Tensor:
        """residual + x W^T, each step rounded."""
        if x_TI.shape[0] and self._is_skinny(x_TI, weight_OI):
            return self._skinny(x_TI, weight_OI, residual_TO)
        return residual_TO + self(x_TI, weight_OI)

    def gated(self, x_TI: Tensor, gate_up_OI: Tensor, activation: Activation = "silu") -> Tensor:
        """Return activation(x G^T) * (x U^T), each step rounded."""
        if x_TI.shape[0] and self._is_skinny(x_TI, gate_up_OI):
            return self._skinny_gated(x_TI, gate_up_OI, activation)
        return self.act_mul(self(x_TI, gate_up_OI), activation)

    def act_mul(self, gate_up_TO: Tensor, activation: Activation) -> Tensor:
        y_TO: Tensor = self._act_mul(gate_up_TO, activation)
        return y_TO

    def _is_skinny(self, x_TI: Tensor, weight_OI: Tensor) -> bool:
        return x_TI.shape[0] <= self._max_skinny and weight_OI.shape[0] % 8 == 0 and weight_OI.shape[1] % 8 == 0

    def check_later(self, weight_OI: Tensor, multiply: Callable[[Tensor], Tensor]) -> None:
        """Have `checks` compare rows of several numbers of rows. `multiply`: x W^T."""
        shape = (weight_OI.shape[0], weight_OI.shape[1])
        device, dtype = weight_OI.device, self._dtype

        def pairs() -> Iterator[Pair]:
            generator = torch.Generator(device).manual_seed(0)
            x = torch.randn(_CHECKED_TOKENS[-1], shape[1], generator=generator, device=device).to(dtype)
            expected = multiply(x)
            for count in _CHECKED_TOKENS:
                differs = f"products of {count} and of {len(x)} tokens differ for a weight of {shape}"
                yield Pair(multiply(x[-count:]), expected[-count:], differs)

        self.checks.add((*shape, weight_OI.dtype), pairs)


class InvariantLinear(Linear):
    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, gemm: InvariantGemm) -> None:
        gemm.check_later(weight_OI, lambda x_TI: gemm(x_TI, weight_OI))
        self._weight, self._bias, self._gemm = weight_OI, bias_O, gemm

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = self._gemm(x_TI, self._weight)
        return y_TO if self._bias is None else y_TO + self._bias

    def with_residual(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        if self._bias is not None:
            return residual_TO + self(x_TI)
        return self._gemm.with_residual(x_TI, self._weight, residual_TO)


class InvariantGatedLinear(GatedLinear):
    def __init__(
        self,
        gate_OI: Tensor,
        up_OI: Tensor,
        biases_O: tuple[Tensor, Tensor] | None,
        gemm: InvariantGemm,
        activation: Activation = "silu",
    ) -> None:
        gate_up_OI = torch.cat((gate_OI, up_OI))
        self._weight, self._gemm, self._activation = gate_up_OI, gemm, activation
        self._both = None if biases_O is None else InvariantLinear(gate_up_OI, torch.cat(biases_O), gemm)
        if self._both is None:
            gemm.check_later(gate_up_OI, lambda x_TI: gemm.gated(x_TI, gate_up_OI, activation))

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._both is not None:
            return self._gemm.act_mul(self._both(x_TI), self._activation)
        return self._gemm.gated(x_TI, self._weight, self._activation)
