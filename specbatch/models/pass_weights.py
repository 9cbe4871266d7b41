"""The weights that a forward pass reads and multiplies, which differ where layers have experts.

A pass over few tokens reads only the experts that the tokens chose, and a token is multiplied with its own experts
alone. All costs by the number of tokens count weights here: `tune`, `estimate`, lanes, prompts and the floor of
`scripts/bench`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from specbatch.models.config import ModelConfig, MoeConfig, expected_tensors

# The mean number of experts of a layer that a pass over this number of tokens reads.
ExpertCurve = Callable[[float], float]


def distinct_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Return the expected number of distinct experts of a layer that `num_tokens` tokens choose, if each chooses its
    `top_k` ones independently of the others and all experts are equally likely. No other independent choice has
    more."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def measured_curve(moe: MoeConfig, points: Mapping[float, float]) -> ExpertCurve:
    """Return the curve through what was measured. `points`: distinct experts of a layer by the number of tokens.

    For each further token, the share of the experts that nobody chose falls by the same factor between two measured
    numbers, and above the last one. Where only one token was measured, that is `distinct_experts`.
    """
    known = {0.0: 0.0, 1.0: float(moe.top_k), **points}
    tokens = np.array(sorted(known))
    found = np.maximum.accumulate([known[n] for n in tokens])
    left = np.log(np.maximum(1 - found / moe.num_experts, 1e-9))  # a share of zero has no logarithm
    step = (left[-1] - left[-2]) / (tokens[-1] - tokens[-2])

    def at(num_tokens: float) -> float:
        beyond = max(num_tokens - tokens[-1], 0.0)
        return moe.num_experts * -math.expm1(float(np.interp(num_tokens, tokens, left)) + step * beyond)

    return at


@dataclass(frozen=True, slots=True)
class PassWeights:
    """The numbers of elements of weight matrices. `dense`: those that every token is multiplied with. `experts`: those
    of the experts of all layers. `moe` None: there are no experts."""

    dense: int
    experts: int = 0
    moe: MoeConfig | None = None

    @staticmethod
    def of_tensors(tensors: Mapping[str, tuple[int, ...]], moe: MoeConfig | None) -> PassWeights:
        """Count the matrices among these tensors, given by name and shape."""
        sizes = {name: math.prod(shape) for name, shape in tensors.items() if len(shape) == 2}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        return PassWeights(sum(sizes.values()) - experts, experts, moe)

    @staticmethod
    def of_all(config: ModelConfig) -> PassWeights:
        """Count all matrices with the embeddings, as publishers of models count parameters."""
        return PassWeights.of_tensors(expected_tensors(config), config.moe)

    @staticmethod
    def of_layers(config: ModelConfig) -> PassWeights:
        """Count the matrices of all layers."""
        return PassWeights.of_tensors(
            {n: s for n, s in expected_tensors(config).items() if ".layers." in n}, config.moe
        )

    @staticmethod
    def of_model(config: ModelConfig) -> PassWeights:
        """Count the matrices of the layers and the LM head. A pass reads a few rows of the embeddings, which do not
        count unless they are the LM head."""
        tensors = expected_tensors(config)
        if not config.tie_word_embeddings:
            del tensors["model.embed_tokens.weight"]
        return PassWeights.of_tensors(tensors, config.moe)

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def active(self) -> int:
        """The elements that one token is multiplied with."""
        return self.dense + (0 if self.moe is None else self.experts * self.moe.top_k // self.moe.num_experts)

    def read(self, num_tokens: float, curve: ExpertCurve | None = None) -> float:
        """Return the elements that a pass over `num_tokens` tokens reads. `curve`: measured experts of a layer; None:
        routing is uniform."""
        if self.moe is None:
            return self.dense
        num_experts = self.moe.num_experts
        found = distinct_experts(num_experts, self.moe.top_k, num_tokens) if curve is None else curve(num_tokens)
        return self.dense + self.experts * found / num_experts


def round_bytes(
    weights: PassWeights,
    itemsize: float,
    num_tokens: float,
    kv_bytes: float,
    curve: ExpertCurve | None = None,
    expert_itemsize: float | None = None,
) -> float:
    """Return the bytes that a round over `num_tokens` tokens reads: the weights that every token needs, the experts
    that these tokens choose, and keys and values. `kv_bytes`: those of all sequences of the round. `curve`: see
    `PassWeights.read`. `expert_itemsize`: the bytes of an element of an expert; None: `itemsize`."""
    experts = weights.read(num_tokens, curve) - weights.dense
    return weights.dense * itemsize + experts * (expert_itemsize or itemsize) + kv_bytes
