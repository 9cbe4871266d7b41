"""LiLiCorr's head against figures that other programs publish.

TensorRT-LLM tests its head by the scores of NVIDIA's Model Optimizer for weights that are sines. This test has the same
weights, inputs and scores.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specbatch.models.blocks.config import LatticeConfig
from specbatch.models.blocks.heads import BlockOutput, LatticeHead
from specbatch.models.weight_loader import WeightLoader
from tests.tiny_models import CPU

HIDDEN, VOCAB = 32, 16
CONFIG = LatticeConfig(8, 2, 2, 16, 3, 8, 1e-4, 8.0, 4)
FIRST = torch.tensor([-2.00565147, -2.00631571, -2.01010752])
PAIRS = torch.tensor(
    [
        [
            [1.16437435, 1.16812551, 1.15701485],
            [1.16656375, 1.17030466, 1.15921211],
            [1.17068172, 1.17445230, 1.16334319],
        ],
        [
            [1.14806044, 1.14459574, 1.12698877],
            [1.14481199, 1.14134955, 1.12373281],
            [1.14475155, 1.14125943, 1.12357390],
        ],
    ]
)
_NAMED = {"feature_mlp.0.": "feature_norm.", "feature_mlp.1.": "feature_mlp.up_proj.", "mlp.0.": "mlp.up_proj."}
_NAMED |= {"feature_mlp.3.": "feature_mlp.down_proj.", "mlp.2.": "mlp.down_proj."}


def sines(name: str, shape: tuple[int, ...]) -> Tensor:
    """Make a weight, by the name that TensorRT-LLM gives it."""
    name = name.removeprefix("lilicorr.")
    for numbered, named in _NAMED.items():
        if name.startswith("feature") == numbered.startswith("feature"):
            name = name.replace(numbered, named)
    count = torch.tensor(shape).prod()
    values = torch.arange(int(count), dtype=torch.float32).reshape(shape)
    return torch.sin(values * 0.17 + sum(name.encode()) * 0.013) * 0.2


def test_scores_are_those_of_model_optimizer() -> None:
    shapes = CONFIG.tensors(HIDDEN, VOCAB, VOCAB)
    tensors: Any = SimpleNamespace(load=lambda name: sines(name, shapes[name]))
    embedding = torch.linspace(-1.2, 1.3, VOCAB * HIDDEN).reshape(VOCAB, HIDDEN)
    ids = torch.tensor([[2, 5, 9], [6, 3, 1], [4, 7, 8]])
    values = torch.tensor([[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]])
    # All other tokens share the rest of the probability.
    rest = ((1 - values.exp().sum(-1)) / (VOCAB - 3)).log()
    logits = rest[:, None].repeat(1, VOCAB).scatter(1, ids, values)
    positions = torch.linspace(-0.7, 0.9, 3 * HIDDEN).reshape(1, 3, HIDDEN)
    hidden = torch.cat((torch.zeros(1, 1, HIDDEN), positions), 1)
    root = torch.linspace(-0.5, 0.4, HIDDEN).reshape(1, HIDDEN)
    head = LatticeHead(
        CONFIG, WeightLoader(tensors, torch.float32, CPU), lambda tokens: embedding[tokens], HIDDEN, 1e-5
    )
    steps = head.steps(BlockOutput(hidden, logits[:, None], 1, torch.zeros(1, dtype=torch.int64), None, root, None))
    first = steps(0, torch.tensor([0]))
    torch.testing.assert_close(first[0, ids[0]], FIRST, atol=2e-5, rtol=2e-5)
    assert int((first > -torch.inf).sum()) == 3, "others than candidates can be drafted"
    for draft in (1, 2):
        for candidate, expected in zip(ids[draft - 1], PAIRS[draft - 1], strict=True):
            found = steps(draft, candidate[None])[0, ids[draft]]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
