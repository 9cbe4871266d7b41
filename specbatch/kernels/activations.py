"""Names of the activations that a feed-forward may have, and their constants."""

from __future__ import annotations

from typing import Literal

# "silu": silu(gate) * up. "gelu_tanh": gelu(gate) * up, with GELU's tanh approximation (Hendrycks and Gimpel 2016).
# "clamped_swiglu": that of gpt-oss, g * sigmoid(ALPHA * g) * (u + 1), where g is the gate, at most LIMIT, and u is up,
# between -LIMIT and LIMIT.
# Only without a gate: "gelu", with the error function; "relu"; "relu2", its square.
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "gelu", "relu", "relu2"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
