"""The operands of the operations of `mixture.py`: the weights of a layer's experts, and how a router chooses them.

Shape suffixes: X experts, E hidden size, I inner features of an expert, F inner features of gate and of up, G
groups of inputs that share a scale.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from specbatch.kernels.activations import Activation


class ExpertWeights(NamedTuple):
    """Gated feed-forwards of one size. Of `gate_up_XFE`, (X, 2 I, E), the first I rows of an expert are its gate. The
    biases are None if experts have none. The dtype of a weight says its format. uint8 is MXFP4, with two inputs a byte,
    see `kernels/torch/parts/mxfp4.py`. float8_e4m3fn is FP8, whose scales are float32: one for each GROUP of a row's
    inputs, or one for a row. Other weights have no scales.

    Ranks can divide the experts of a layer. Then this one has those from `first` on, of `total` experts, and choices of
    other experts add nothing here. `total` None: all experts are here."""

    gate_up_XFE: Tensor
    down_XEI: Tensor
    activation: Activation = "silu"
    gate_up_bias_XF: Tensor | None = None
    down_bias_XE: Tensor | None = None
    gate_up_scales_XFG: Tensor | None = None
    down_scales_XEG: Tensor | None = None
    first: int = 0
    total: int | None = None


# How a router's logits become scores: a softmax over all experts; one over the chosen ones, which are those with the
# largest logits; a sigmoid of each logit.
Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]


class Routing(NamedTuple):
    """The traits of a router. It chooses in these steps:

    1. Logits become scores by `scoring`. A correction, if there is one, is added to them for the choice alone (Wang et
       al. 2024, arXiv:2408.15664).
    2. With `num_groups` groups of equal sizes, in the order of the experts' numbers, only the `topk_groups` groups are
       left whose two largest scores have the largest sums (DeepSeek-AI 2024, arXiv:2412.19437).
    3. The `top_k` experts with the largest scores are chosen, the best one first. Of equal scores the expert with the
       lowest number comes first, and of equal sums the group with the lowest number. transformers leaves this to
       torch.topk, whose choice among equal numbers depends on the number of experts.
    4. The scores of the chosen experts are their weights. They are divided by their sum with `norm_topk_prob`, and
       multiplied by `scale`.
    """

    top_k: int
    norm_topk_prob: bool
    scoring: Scoring = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
