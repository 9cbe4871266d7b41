"""Mixtures of experts: routing against a plain computation, ties, experts without tokens, and bits of single tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specbatch.kernels.torch.mixture import route
from specbatch.models.config import MoeConfig, layer_tensors
from specbatch.models.mixture import MixtureMLP
from specbatch.models.weight_loader import WeightLoader
from tests.tiny_models import RandomTensors, tiny_config

CPU = torch.device("cpu")
MOE = MoeConfig(num_experts=5, top_k=2, expert_size=12, norm_topk_prob=True, layers=(True,), shared_size=8)
CONFIG = tiny_config(1, moe=MOE)


def mixture(dtype: torch.dtype, router: Tensor | None = None) -> tuple[MixtureMLP, RandomTensors]:
    """Make a layer's experts. `router`: its weight (X, E) in place of a random one."""
    tensors = RandomTensors(layer_tensors(CONFIG, "", has_experts=True), 0)
    if router is not None:
        tensors._tensors["mlp.gate.weight"] = router
    return MixtureMLP(CONFIG, WeightLoader(tensors, dtype, CPU), ""), tensors


def plain(x_TE: Tensor, tensors: RandomTensors) -> Tensor:
    """Compute every expert for every token, in float64."""

    def expert(name: str) -> Tensor:
        gate, up, down = (tensors.load(f"mlp.{name}.{part}_proj.weight") for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x_TE @ gate.T) * (x_TE @ up.T)) @ down.T

    logits = x_TE @ tensors.load("mlp.gate.weight").T
    weights_TX = torch.zeros_like(logits)
    values, indices = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    best, chosen = values[:, : MOE.top_k], indices[:, : MOE.top_k]
    weights_TX.scatter_(1, chosen, best / best.sum(-1, keepdim=True))
    y = sum(weights_TX[:, i, None] * expert(f"experts.{i}") for i in range(MOE.num_experts))
    return y + torch.sigmoid(x_TE @ tensors.load("mlp.shared_expert_gate.weight").T) * expert("shared_expert")


def inputs(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_mixture_is_the_sum_of_its_experts() -> None:
    layer, tensors = mixture(torch.float64)
    x_TE = inputs(23)
    torch.testing.assert_close(layer(x_TE), plain(x_TE, tensors))


@pytest.mark.parametrize("kind", ["tie", "one expert takes all"])
def test_routers_that_decide_alike_for_all_tokens(kind: str) -> None:
    """Equal logits choose by order; with large positive inputs one expert has all tokens and three have none."""
    router = torch.zeros(MOE.num_experts, CONFIG.hidden_size, dtype=torch.float64)
    x_TE = inputs(9).abs()
    if kind != "tie":
        router[3], router[1] = 1.0, 0.5
        _, experts_TK = route(x_TE @ router.T, MOE.routing)
        assert experts_TK.tolist() == [[3, 1]] * 9
    layer, tensors = mixture(torch.float64, router)
    torch.testing.assert_close(layer(x_TE), plain(x_TE, tensors))


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    """Float32, as a run on a CPU computes."""
    layer, _ = mixture(torch.float32)
    x_TE = inputs(40).float()
    whole = layer(x_TE)
    for first, last in ((0, 1), (7, 9), (39, 40), (3, 30)):
        assert torch.equal(layer(x_TE[first:last]), whole[first:last])
