"""Names of the activations that a gated feed-forward may have, and their constants."""

from __future__ import annotations

from typing import Literal

# "silu": silu(gate) * up. "gelu_tanh": gelu(gate) * up, with GELU's tanh approximation (Hendrycks and Gimpel 2016).
# "clamped_swiglu": that of gpt-oss, g * sigmoid(ALPHA * g) * (u + 1), where g is the gate, at most LIMIT, and u is up,
# between -LIMIT and LIMIT.
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
