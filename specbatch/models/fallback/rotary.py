"""Gives attention modules of transformers a rotation of queries and keys in one kernel.

Their code calls a function of its module by name. A copy of the `forward` with another function of that name is set at
each module, so nothing of transformers changes. Only a function that gives the same numbers for random inputs is
replaced; heads that rotate in part, and interleaved pairs, keep their own.

Shape suffixes: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from specbatch.kernels import ops_for

_NAME = "apply_rotary_pos_emb"
_TOLERANCE = 1e-5
Rotation = Callable[..., tuple[Tensor, Tensor]]


def replace_rotation(module: nn.Module, ops: ModuleType, head_dim: int) -> bool:
    """Replace the rotation of an attention module. Return False if it keeps its own."""
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    own = forward.__globals__.get(_NAME)
    if _NAME not in forward.__code__.co_names or own is None or head_dim % 2 or not _is_rotate_half(own, head_dim):
        return False

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        parts = (q, k, cos, sin)
        is_whole = cos.shape[-1] == q.shape[-1] == k.shape[-1] and all(x.stride(-1) == 1 for x in parts)
        is_plain = q.shape[0] == 1 and cos.ndim == 3 and cos.shape[0] == 1 and len({x.dtype for x in parts}) == 1
        if args or kwargs or not is_whole or not is_plain:
            rotated: tuple[Tensor, Tensor] = own(q, k, cos, sin, *args, **kwargs)
            return rotated
        q_THD, k_TKD = ops.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q_THD.transpose(0, 1)[None], k_TKD.transpose(0, 1)[None]

    names = {**forward.__globals__, _NAME: rotate}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)
    return True


def _is_rotate_half(own: Rotation, head_dim: int) -> bool:
    """Return whether a function rotates whole heads as `ops.rotate` does. It is called as attention calls it."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 2, 3, head_dim), (1, 1, 3, head_dim), (1, 3, head_dim), (1, 3, head_dim))
    q, k, cos, sin = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    try:
        found = own(q, k, cos, sin)
    except Exception:  # a function with other arguments
        return False
    reference = ops_for(torch.device("cpu"), torch.float64)
    rotated = reference.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    expected = [x.transpose(0, 1)[None] for x in rotated]
    if not isinstance(found, tuple) or [getattr(x, "shape", None) for x in found] != [x.shape for x in expected]:
        return False
    return all(float((x - y).abs().max()) < _TOLERANCE for x, y in zip(found, expected, strict=True))
