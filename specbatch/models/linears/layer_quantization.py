"""The common part of all quantizations of linear layers: which layers they cover, and the tensors that files have."""

from __future__ import annotations

import fnmatch
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from specbatch.errors import ModelError
from specbatch.models.checks import shown

QUANTIZED_HINT = (
    "use the unquantised checkpoint, one in FP8 (compressed-tensors, ModelOpt or fp8), one in integers of 4 or 8 bits "
    "(AWQ gemm, GPTQ, compressed-tensors pack-quantized), or a GGUF file"
)
# Inputs of a Gated DeltaNet. Those of its gates have few outputs, and are not quantised.
_DELTA_INPUTS = tuple(f".in_proj_{part}" for part in "qkvz")
Same = TypeVar("Same", bound="LayerQuantization")


@dataclass(frozen=True, kw_only=True)
class LayerQuantization:
    """A quantization of linear layers. `method`: its name in config.json. `ignored`: layers that are not quantised, by
    name; "re:..." is a regular expression, and `*` matches anything. `lm_head`: quantised unless it is ignored."""

    method: str
    ignored: tuple[str, ...] = ()
    lm_head: bool = False

    def covers(self, layer: str) -> bool:
        """`layer`: such as "model.layers.0.mlp.up_proj". All layers of experts are linear ones; some have names such as
        "w1"."""
        is_linear = layer.endswith(("_proj", *_DELTA_INPUTS)) or ".experts." in layer
        if not (is_linear or (self.lm_head and layer == "lm_head")):
            return False
        return not any(_matches(pattern, layer) for pattern in self.ignored)

    @property
    @abstractmethod
    def is_kept(self) -> bool:
        """Return whether layers compute with quantised weights. Otherwise these are dequantised while they are
        loaded."""

    def keeps(self, layer: str) -> bool:
        """Return whether this layer computes with quantised weights."""
        return self.is_kept and self.covers(layer)

    @abstractmethod
    def dequantised(self: Same) -> Same:
        """Return the same quantization of files, whose weights are dequantised while they are loaded."""

    @abstractmethod
    def saved_bytes(self, plain: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        """Count the bytes that weights save in memory, compared with `itemsize` bytes each. `plain`: the names and
        shapes of the unquantised model."""

    @abstractmethod
    def stored(self, plain: Mapping[str, tuple[int, ...]], found: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors that a checkpoint has, from those of the unquantised model. `found`:
        the names in its files, some of which may be left out."""

    @abstractmethod
    def describe(self) -> str: ...


def layer_names(value: object, name: str) -> tuple[str, ...]:
    """Check a list of names of layers."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ModelError(f"{name} must be a list of names, not {shown(value)}")
    for one in value:
        if one.startswith("re:"):
            check_pattern(one[3:], name)
    return tuple(value)


def check_pattern(pattern: str, name: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(f"{name}: {shown(pattern)} is no regular expression: {error}") from error


def check_known_keys(section: Mapping[str, Any], known: Collection[str], name: str) -> None:
    if unknown := sorted(set(section) - set(known)):
        raise unsupported(f"{name}: {shown(unknown[0])}")


def _matches(pattern: str, layer: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    # A module's name covers the layers in it.
    return fnmatch.fnmatchcase(layer, pattern) or layer.startswith(f"{pattern}.") or layer.endswith(f".{pattern}")


def unsupported(what: str) -> ModelError:
    return ModelError(f"{what} is not supported", hint=QUANTIZED_HINT)
