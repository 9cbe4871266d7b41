"""The vector that is subtracted from keys before an FP8 cache rounds them.

Models with a bias on their keys (Qwen2, Qwen2.5) learn biases of up to 450 in dimensions that rotate hardly at all. A
key is rounded to 3 bits of mantissa, so a part of 400 is wrong by up to 16, and what differs from key to key is lost.
Softmax does not change if the same vector is taken from all keys. So the bias is taken from those dimensions, and no
reader of the cache has to know. (SageAttention, arXiv:2410.02367, takes the mean of the keys away for the same reason.)

Shape suffixes: K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.models.config import ModelConfig

_RADIANS = 1.0  # then a rotated bias is nowhere farther from the unrotated one than from zero


def key_offset(bias_O: Tensor, config: ModelConfig) -> Tensor:
    """(K, D), float32: the bias of the key projection where rotary embedding turns by at most one radian from the first
    position to the model's last one; 0 elsewhere. It does not depend on a run's settings."""
    inverse_frequencies, factor = config.rope.inverse_frequencies(config.head_dim)
    is_slow = inverse_frequencies * config.max_position_embeddings <= _RADIANS
    scale_D = torch.ones(config.head_dim)  # 1 where a head does not rotate
    scale_D[: 2 * len(is_slow)] = torch.cat((is_slow, is_slow)) * factor
    return bias_O.float().view(-1, config.head_dim) * scale_D.to(bias_O.device)
