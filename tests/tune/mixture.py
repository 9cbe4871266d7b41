"""The milliseconds of rounds of Qwen3-30B-A3B, by the bytes that they read and the operations that they take."""

from __future__ import annotations

from functools import cache

from specbatch.models.config import MoeConfig
from specbatch.models.pass_weights import ExpertCurve, PassWeights, measured_curve, round_bytes
from specbatch.models.random_weights import geometries

_MODEL = geometries()["qwen3-30b-a3b"]
# A GPU reads 4.2 TB/s and computes 600 TFLOP/s. Rows have 1,024 tokens of context.
_BYTES_PER_MS, _FLOPS_PER_MS, _CONTEXT = 4.2e9, 6e11, 1024


@cache
def _weights() -> PassWeights:
    return PassWeights.of_model(_MODEL)


def mixture_of_experts() -> MoeConfig:
    assert _MODEL.moe is not None
    return _MODEL.moe


def uniform_curve() -> ExpertCurve:
    return measured_curve(mixture_of_experts(), {})


def mixture_ms(batch: int, width: float, curve: ExpertCurve | None = None) -> float:
    """Return the milliseconds in which the target computes `width` tokens of each request. `curve` None: routing is
    uniform."""
    num_tokens, token_bytes = batch * width, 2 * 2 * _MODEL.num_layers * _MODEL.num_kv_heads * _MODEL.head_dim
    read = round_bytes(_weights(), 2, num_tokens, batch * _CONTEXT * token_bytes, curve)
    return max(read / _BYTES_PER_MS, 2 * _weights().active * num_tokens / _FLOPS_PER_MS)
