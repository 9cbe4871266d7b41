"""The parts of a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from specbatch.models.config import ModelConfig
from specbatch.models.decoder_layer import DecoderLayer, PreNormLayer
from specbatch.models.families.hf_config import HfConfig
from specbatch.models.layers import Rotary
from specbatch.models.weight_loader import WeightLoader

HeadKind = Literal["query", "delta"]


class MakeLayer(Protocol):
    def __call__(
        self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, rotary: Rotary
    ) -> DecoderLayer:
        """Make layer number `layer`, counted from 0. The names of its tensors begin with `prefix`."""
        ...


@dataclass(frozen=True)
class TensorNames:
    """The names of a family's tensors in files, where they differ from the canonical ones, which are Llama's.

    modules: names in files by canonical ones. Names in layers begin after the layer's number.
    joined: modules of the files that have the rows of several ones, one after the other.
    layers: the beginning of the names of layers.
    joins_heads: those of `joined` whose rows alternate by head, with the kind of the heads: "query", or "delta" for key
    heads of a Gated DeltaNet. Other modules of `joined` have the rows of one after those of another.
    transposed: modules of the files whose weights are (in, out) (GPT-2).
    optional: a beginning that all names but that of the LM head have, or none has.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: str = "model.layers."
    joins_heads: Mapping[str, HeadKind] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    optional: str = ""


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    architectures: the names that `architectures` of config.json may have.
    read: the function that reads a config.json.
    keys: the keys that `read` reads in addition to those of `config_keys.APPLIED`.
    neutral: keys that transformers' class of this family does not have, with the values that change nothing. They
    replace those of `config_keys`.
    layer: the class of the layers.
    names: the names of tensors in files; None: they are the canonical ones.
    """

    architectures: tuple[str, ...]
    read: Callable[[HfConfig], ModelConfig]
    keys: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    layer: MakeLayer = PreNormLayer
    names: TensorNames | None = None
