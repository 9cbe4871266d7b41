"""Runs a model of transformers without weights, and looks at what its code asks of attention.

The names of options differ from model to model, the call of the attention function does not. So the traits of a model
(heads, windows, scales, soft caps, sinks) are those of its calls, and its windows are those of its masks. What a paged
cache cannot do is refused here, before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface

from specbatch.errors import ModelError
from specbatch.models.checks import shown
from specbatch.models.fallback.attention import OBSERVED

_NUM_TOKENS = 8
_MAX_POSITIONS = 1 << 20  # masks are looked at up to here
# Keyword arguments of attention whose values change nothing, or are read here.
_KNOWN = frozenset(("s_aux", "position_ids", "position_embeddings"))


class Unsupported(Exception):
    """The reason why a model cannot run with a paged cache."""


@dataclass(frozen=True)
class AttentionCall:
    """The call of one attention module. `window`: the sliding window of its mask; None: it sees all positions."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    scale: float
    soft_cap: float | None
    has_sinks: bool


@dataclass(frozen=True)
class Probed:
    """The findings about a model's code. `calls`: the call of each layer, in their order."""

    calls: tuple[AttentionCall, ...]
    hidden_size: int
    vocab_size: int


class _SeenMask(Tensor):
    """A mask that was only looked at. The model must give it to attention as it is."""

    window: int | None


class _Observer:
    """The place of all modules while the model is probed."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self.calls: list[AttentionCall] = []

    def called(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any, **kwargs: Any
    ) -> Tensor:
        name = self._names[module]
        if any(call.name == name for call in self.calls):
            raise Unsupported(f"{name} attends more than once in a pass")
        if not isinstance(mask, _SeenMask) or not hasattr(mask, "window"):
            raise Unsupported(f"{name} has a mask that the model makes itself, as ALiBi does")
        unknown = [key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in _KNOWN]
        if unknown:
            raise Unsupported(f"attention of {name} takes {unknown[0]}")
        if q.shape[-1] != k.shape[-1] or v.shape[-1] > q.shape[-1] or k.shape[1] != v.shape[1]:
            raise Unsupported(f"{name} has queries, keys and values that do not fit each other")
        if q.shape[2] != _NUM_TOKENS or k.shape[2] != _NUM_TOKENS or q.shape[0] != 1:
            raise Unsupported(f"{name} attends to something else than the tokens of the text")
        scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
        cap = kwargs.get("softcap")
        self.calls.append(
            AttentionCall(
                name,
                q.shape[1],
                k.shape[1],
                q.shape[-1],
                v.shape[-1],
                mask.window,
                scale,
                float(cap) if cap else None,
                kwargs.get("s_aux") is not None,
            )
        )
        return q.new_empty((1, q.shape[2], q.shape[1], v.shape[-1]))


def _seen_mask(mask_function: Callable[..., Tensor], config: Any, **kwargs: Any) -> Tensor:
    length = min(_MAX_POSITIONS, max(64, int(getattr(config, "max_position_embeddings", None) or 4096)))
    mask = torch.empty((1, 1, 1, 1), device="meta").as_subclass(_SeenMask)
    mask.window = _window_of(mask_function, length)
    return mask


def _window_of(mask_function: Callable[..., Tensor], length: int) -> int | None:
    """Return the sliding window of a mask function; None: it has none. `length`: the longest sequence."""
    keys, window, zero = torch.arange(length), None, torch.tensor(0)
    for query in (length - 1, 0, 1, 5, length // 3, length // 2 + 3, length - 2):
        try:
            seen = mask_function(zero, zero, torch.tensor(query), keys)
        except Exception as error:
            raise Unsupported(f"its mask depends on more than positions ({type(error).__name__})") from error
        count = int(seen.sum())
        if query == length - 1 and count < length:
            window = count
        first = 0 if window is None else max(0, query + 1 - window)
        if not torch.equal(seen, (keys >= first) & (keys <= query)):
            raise Unsupported("its mask is neither causal nor that of a sliding window")
    return window


AttentionMaskInterface.register(OBSERVED, _seen_mask)


@contextmanager
def _places(model: nn.Module, place: Any) -> Iterator[None]:
    for module in model.modules():
        module.place = place
    try:
        yield
    finally:
        for module in model.modules():
            del module.place


def probe(model: Any) -> Probed:
    """Run a model whose parameters are on the device `meta`. Raise Unsupported for what a paged cache cannot do."""
    observer = _Observer({module: name for name, module in model.named_modules()})
    tokens = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
    model.set_attn_implementation(OBSERVED)
    try:
        with _places(model, observer), torch.no_grad():
            output = model(
                input_ids=tokens,
                position_ids=torch.zeros_like(tokens),
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
            )
    except (Unsupported, ModelError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {shown(str(error))}"
        raise Unsupported(f"its code does not run without weights ({why})") from error
    embedding = model.get_input_embeddings()
    return Probed(tuple(observer.calls), embedding.weight.shape[-1], output.logits.shape[-1])
