"""Names of the activations that a gated feed-forward may have."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
