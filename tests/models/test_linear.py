"""Linear layers: which implementation is chosen, what it fuses, and that the residual can be added apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels import ops_for
from specbatch.models.config import expected_tensors
from specbatch.models.decoder import Decoder
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.linear import AlignedLinear, DenseGatedLinear, DenseLinear, Linear
from specbatch.models.linears.packed import PackedGatedLinear, PackedLinear
from specbatch.models.weight_loader import WeightLoader
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import CPU, VOCAB, RandomTensors, attention_of, tiny_config

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class SumOfParts(Linear):
    """A weight that is split by its input features, as over two devices. The sum of the parts is the all-reduce."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._parts, self._bias = weight_OI.chunk(2, dim=1), bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        first, second = (F.linear(x, part) for x, part in zip(x_TI.chunk(2, dim=1), self._parts, strict=True))
        y_TO = first + second
        return y_TO if self._bias is None else y_TO + self._bias


class SplittingLoader(WeightLoader):
    def new_linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        return SumOfParts(weight_OI, bias_O)


@pytest.mark.parametrize("traits", [{}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}])
def test_a_sum_of_parts_gives_the_same_tokens(traits: dict[str, Any]) -> None:
    """The residual is added after the sum is complete: were it added to each part, it would count twice."""
    config = tiny_config(3, **traits)
    tensors = RandomTensors(expected_tensors(config), 0)
    tokens_T = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(0))
    logits = []
    for loader in (WeightLoader, SplittingLoader):
        weights = loader(tensors, torch.float64, CPU)
        model = Decoder(config, weights, attention_of(config), 256)
        cache = model.new_cache(256, torch.float64)
        hidden_TE, _ = model.forward(tokens_T, batch_of([Span(range(32), 0, 200)], 8, CPU), cache)
        logits.append(model.logits(hidden_TE))
    usual, split = logits
    assert torch.equal(split.argmax(-1), usual.argmax(-1))
    torch.testing.assert_close(split, usual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_loader_chooses_by_device_and_dtype(dtype: torch.dtype, has_bias: bool) -> None:
    config = tiny_config(1, qkv_bias=has_bias)
    weights = WeightLoader(RandomTensors(expected_tensors(config), 0), dtype, CPU)
    prefix = "model.layers.0."
    qkv = weights.linear(*(f"{prefix}self_attn.{name}_proj" for name in "qkv"), has_bias=has_bias)
    gated = weights.gated_linear(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj", "silu")
    packed = dtype == torch.float32
    assert isinstance(qkv, PackedLinear if packed else DenseLinear)
    assert isinstance(gated, PackedGatedLinear if packed else DenseGatedLinear)
    x_TI = random(5, 32, seed=1, dtype=dtype)

    def one(name: str) -> Tensor:
        bias = weights.tensor(f"{prefix}self_attn.{name}_proj.bias") if has_bias else None
        return F.linear(x_TI, weights.tensor(f"{prefix}self_attn.{name}_proj.weight"), bias)

    torch.testing.assert_close(qkv(x_TI), torch.cat([one(name) for name in "qkv"], dim=-1))
    gate, up = (F.linear(x_TI, weights.tensor(f"{prefix}mlp.{name}_proj.weight")) for name in ("gate", "up"))
    torch.testing.assert_close(gated(x_TI), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_and_residual(dtype: torch.dtype, has_bias: bool) -> None:
    """In one step or apart: the same bits on a CPU."""
    weights = WeightLoader(RandomTensors({}, 0), dtype, CPU)
    biases = (random(24, seed=2, dtype=dtype), random(24, seed=3, dtype=dtype)) if has_bias else None
    linear = weights.new_linear(random(24, 16, dtype=dtype), biases[0] if biases else None)
    gated = weights.new_gated_linear(random(24, 16, dtype=dtype), random(24, 16, seed=1, dtype=dtype), biases, "silu")
    norm = RMSNorm(random(16, seed=4, dtype=dtype), 1e-5)
    x_TI, residual_TO = random(7, 16, seed=5, dtype=dtype), random(7, 24, seed=6, dtype=dtype)
    assert torch.equal(linear.with_norm(x_TI, norm), linear(norm(x_TI)))
    assert torch.equal(gated.with_norm(x_TI, norm), gated(norm(x_TI)))
    assert torch.equal(linear.with_residual(x_TI, residual_TO.clone()), residual_TO + linear(x_TI))


def test_dense_layers_call_the_fused_operations() -> None:
    """The norm goes into the GEMM, the residual into its epilogue, and the activation where there is no bias."""
    calls: list[str] = []

    def recorded(name: str) -> Any:
        def call(*args: Any) -> Tensor:
            calls.append(f"{name} {sum(arg is not None for arg in args)}")
            result: Tensor = getattr(ops_for(CPU, torch.float64), name)(*args)
            return result

        return call

    names = ("linear", "norm_linear", "gated_linear", "norm_gated_linear", "act_mul")
    ops: Any = SimpleNamespace(**{name: recorded(name) for name in names})
    weight_OI, bias_O, x_TI = random(8, 8), random(8, seed=1), random(3, 8, seed=2)
    norm = RMSNorm(random(8, seed=3), 1e-5)
    for bias, biases in ((None, None), (bias_O, (bias_O, bias_O))):
        linear, gated = DenseLinear(weight_OI, bias, ops), DenseGatedLinear(weight_OI, weight_OI, biases, ops)
        for y_TO in (
            linear(x_TI),
            linear.with_norm(x_TI, norm),
            linear.with_residual(x_TI, x_TI),
            gated(x_TI),
            gated.with_norm(x_TI, norm),
        ):
            assert y_TO.shape == (3, 8)
    without_bias = ["linear 2", "norm_linear 4", "linear 3", "gated_linear 3", "norm_gated_linear 5"]
    with_bias = ["linear 3", "norm_linear 5", "linear 4", *("linear 3", "act_mul 2") * 2]
    assert calls == without_bias + with_bias


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_an_lm_head_with_further_outputs(tied: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of the tokens alone, in rows that are apart."""
    config = tiny_config(3, vocab_size=VOCAB - 3, tie_word_embeddings=tied, logits_soft_cap=cap)
    tensors = RandomTensors(expected_tensors(config), 0)
    logits = []
    for needed in (False, True):
        monkeypatch.setattr(AlignedLinear, "is_needed", classmethod(lambda _, weight, needed=needed: needed))
        weights = WeightLoader(tensors, torch.float64, CPU)
        model = Decoder(config, weights, attention_of(config), 256)
        assert isinstance(model.lm_head, AlignedLinear) == needed
        logits.append(model.raw_logits(random(7, config.hidden_size)))
    assert logits[1].shape == (7, VOCAB - 3)
    assert cap is not None or logits[1].stride(0) % AlignedLinear.ALIGNMENT == 0
    torch.testing.assert_close(logits[1], logits[0])
