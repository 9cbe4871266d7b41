"""Mixtures of experts: each kind of router against a plain computation and against transformers, ties, experts without
tokens, and bits of single tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Glm4MoeConfig, GraniteMoeConfig, OlmoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

from specbatch.errors import ModelError
from specbatch.kernels.torch.mixture import route
from specbatch.models.config import ModelConfig, MoeConfig, layer_tensors
from specbatch.models.mixture import MixtureMLP
from specbatch.models.weight_loader import WeightLoader
from tests.tiny_models import RandomTensors, tiny_config

CPU = torch.device("cpu")
SOFTMAX = MoeConfig(num_experts=5, top_k=2, expert_size=12, norm_topk_prob=True, layers=(True,), shared_size=8)
SIGMOID = MoeConfig(
    num_experts=12,
    top_k=3,
    expert_size=12,
    norm_topk_prob=True,
    layers=(True,),
    shared_size=8,
    shared_gate=False,
    shared_name="shared_experts",
    scoring="sigmoid",
    num_groups=4,
    topk_groups=2,
    scale=1.5,
    wide_router=True,
    correction_bias="gate.e_score_correction_bias",
)
KINDS: dict[str, MoeConfig] = {
    "softmax": SOFTMAX,
    "softmax, no norm": replace(SOFTMAX, norm_topk_prob=False, shared_size=0),
    "softmax of the chosen": replace(SOFTMAX, scoring="softmax_of_chosen", router_bias=True),
    "softmax, wide, scaled": replace(SOFTMAX, wide_router=True, scale=0.7, correction_bias="gate.correction"),
    "sigmoid": SIGMOID,
    "sigmoid, no groups": replace(SIGMOID, num_groups=1, topk_groups=1, norm_topk_prob=False, wide_router=False),
}


def config_of(moe: MoeConfig) -> ModelConfig:
    return tiny_config(1, moe=moe)


def mixture(moe: MoeConfig, dtype: torch.dtype, router: Tensor | None = None) -> tuple[MixtureMLP, RandomTensors]:
    """Make a layer's experts. `router`: its weight (X, E) in place of a random one."""
    config = config_of(moe)
    tensors = RandomTensors(layer_tensors(config, "", has_experts=True), 0)
    if router is not None:
        tensors._tensors["mlp.gate.weight"] = router
    return MixtureMLP(config, WeightLoader(tensors, dtype, CPU), ""), tensors


def plain(x_TE: Tensor, tensors: RandomTensors, moe: MoeConfig) -> Tensor:
    """Compute every expert for every token, in float64, and choose experts one by one."""

    def expert(name: str) -> Tensor:
        gate, up, down = (tensors.load(f"mlp.{name}.{part}_proj.weight") for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x_TE @ gate.T) * (x_TE @ up.T)) @ down.T

    logits_TX = x_TE @ tensors.load("mlp.gate.weight").T
    if moe.router_bias:
        logits_TX = logits_TX + tensors.load("mlp.gate.bias")
    scores_TX = logits_TX.sigmoid() if moe.scoring == "sigmoid" else logits_TX.softmax(-1)
    correction = tensors.load(f"mlp.{moe.correction_bias}") if moe.correction_bias else torch.zeros(moe.num_experts)
    weights_TX = torch.zeros_like(scores_TX)
    for scores, logits, weights in zip(scores_TX.tolist(), logits_TX, weights_TX, strict=True):
        chosen = chosen_of([s + c for s, c in zip(scores, correction.tolist(), strict=True)], moe)
        own = torch.tensor([scores[i] for i in chosen], dtype=torch.float64)
        if moe.scoring == "softmax_of_chosen":
            own = logits[chosen].softmax(-1)
        elif moe.norm_topk_prob:
            own = own / own.sum()
        weights[chosen] = own * moe.scale
    y = sum(weights_TX[:, i, None] * expert(f"experts.{i}") for i in range(moe.num_experts))
    assert isinstance(y, Tensor)
    if moe.shared_size:
        shared = expert(moe.shared_name)
        gate = torch.sigmoid(x_TE @ tensors.load("mlp.shared_expert_gate.weight").T) if moe.shared_gate else 1.0
        y = y + gate * shared
    return y


def chosen_of(scores: list[float], moe: MoeConfig) -> list[int]:
    """Return the experts with the largest scores. Of equal ones the lowest number comes first, of groups too."""
    size = moe.num_experts // moe.num_groups
    groups = [list(range(first, first + size)) for first in range(0, moe.num_experts, size)]
    if moe.num_groups > 1:
        sums = [sum(sorted((scores[i] for i in group), reverse=True)[:2]) for group in groups]
        best = sorted(range(len(groups)), key=lambda group: -sums[group])[: moe.topk_groups]
        groups = [groups[group] for group in sorted(best)]
    left = [i for group in groups for i in group]
    return sorted(left, key=lambda i: -scores[i])[: moe.top_k]


def inputs(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_is_the_sum_of_its_experts(kind: str) -> None:
    layer, tensors = mixture(KINDS[kind], torch.float64)
    x_TE = inputs(23)
    torch.testing.assert_close(layer(x_TE), plain(x_TE, tensors, KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["tie of all", "tie of two", "one expert takes all"])
def test_routers_that_decide_alike_for_all_tokens(case: str, kind: str) -> None:
    """Equal logits choose the lowest number. With large positive inputs some experts have all tokens, and the
    others have none."""
    moe = replace(KINDS[kind], correction_bias=None, router_bias=False)
    router = torch.zeros(moe.num_experts, 32, dtype=torch.float64)
    x_TE = inputs(9).abs()
    expected = list(range(moe.top_k))
    if case == "tie of two":
        router[3] = router[1] = 1.0
        expected = [1, 3, *expected][: moe.top_k] if moe.num_groups == 1 else [1, 3, 0]
    elif case == "one expert takes all":
        router[3], router[1] = 1.0, 0.5
        expected = [3, 1, *expected][: moe.top_k]
    _, experts_TK = route(x_TE @ router.T, moe.routing)
    assert experts_TK.tolist() == [expected] * 9
    layer, tensors = mixture(moe, torch.float64, router)
    torch.testing.assert_close(layer(x_TE), plain(x_TE, tensors, moe))


@pytest.mark.parametrize("kind", ["random", "tie"])
def test_weights_that_are_a_softmax_of_the_chosen_logits(kind: str) -> None:
    """gpt-oss has such weights, with biases of the router and of experts."""
    moe = replace(SOFTMAX, scoring="softmax_of_chosen", shared_size=0, router_bias=True, expert_bias=True)
    config = tiny_config(1, moe=moe, activation="clamped_swiglu")
    tensors = RandomTensors(layer_tensors(config, "", has_experts=True), 0)
    if kind == "tie":
        tensors._tensors["mlp.gate.weight"].zero_()
        tensors._tensors["mlp.gate.bias"].fill_(3.0)
    x_TE = inputs(23) * 3
    logits = x_TE @ tensors.load("mlp.gate.weight").T + tensors.load("mlp.gate.bias")
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    expected = torch.zeros_like(x_TE)
    for token in range(len(x_TE)):
        chosen = indices[token, : moe.top_k].tolist()
        for weight, expert in zip(values[token, : moe.top_k].softmax(-1), chosen, strict=True):
            gate, up = (
                tensors.load(f"mlp.experts.{expert}.{part}_proj.weight") @ x_TE[token]
                + tensors.load(f"mlp.experts.{expert}.{part}_proj.bias")
                for part in ("gate", "up")
            )
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            down = tensors.load(f"mlp.experts.{expert}.down_proj.weight") @ inner
            expected[token] += weight * (down + tensors.load(f"mlp.experts.{expert}.down_proj.bias"))
    layer = MixtureMLP(config, WeightLoader(tensors, torch.float64, CPU), "")
    torch.testing.assert_close(layer(x_TE), expected)


def test_a_tie_does_not_depend_on_the_number_of_tokens() -> None:
    """torch.topk chooses by another rule for each number of experts."""
    for num_experts in (5, 8, 64, 128, 256):
        moe = replace(SOFTMAX, num_experts=num_experts, top_k=4)
        for num_tokens in (1, 3, 200):
            _, experts_TK = route(torch.zeros(num_tokens, num_experts), moe.routing)
            assert experts_TK.tolist() == [[0, 1, 2, 3]] * num_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_bits_do_not_depend_on_the_others(kind: str) -> None:
    """Float32, as a run on a CPU computes."""
    layer, _ = mixture(KINDS[kind], torch.float32)
    x_TE = inputs(40).float()
    whole = layer(x_TE)
    for first, last in ((0, 1), (7, 9), (39, 40), (3, 30)):
        assert torch.equal(layer(x_TE[first:last]), whole[first:last])


@pytest.mark.parametrize("num_experts", [3, 5, 60])
def test_a_tokens_weights_do_not_depend_on_the_others(num_experts: int) -> None:
    """Elements at the end of a tensor are not computed by another formula than the others."""
    logits_TX = torch.randn(2000, num_experts, generator=torch.Generator().manual_seed(1))
    moe = replace(SIGMOID, num_experts=num_experts, top_k=2, num_groups=1, topk_groups=1)
    weights_TK, experts_TK = route(logits_TX, moe.routing)
    for token in range(0, 2000, 10):
        alone, chosen = route(logits_TX[token : token + 1], moe.routing)
        assert torch.equal(alone[0], weights_TK[token])
        assert torch.equal(chosen[0], experts_TK[token])


def test_a_wide_router_computes_in_float32() -> None:
    """Two experts have logits that differ by less than bfloat16 shows."""
    router = torch.zeros(SIGMOID.num_experts, 32, dtype=torch.float64)
    router[4], router[5] = 1 / 64, 1 / 64 + 1e-5
    x_TE = torch.ones(2, 32)
    for is_wide in (True, False):
        moe = replace(SIGMOID, wide_router=is_wide, top_k=1, num_groups=1, topk_groups=1, correction_bias=None)
        layer, tensors = mixture(moe, torch.bfloat16, router)
        found, expected = layer(x_TE.bfloat16()).double(), plain(x_TE.double(), tensors, moe)
        assert torch.allclose(found, expected, rtol=0.05, atol=0.2) == is_wide


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_of_transformers(norm: bool, dtype: torch.dtype) -> None:
    """The same experts and the same weights, in transformers' dtype."""
    theirs = [
        OlmoeTopKRouter(OlmoeConfig(hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=norm)),
        GraniteMoeTopKRouter(GraniteMoeConfig(hidden_size=32, num_local_experts=16, num_experts_per_tok=4)),
        Glm4MoeTopkRouter(
            Glm4MoeConfig(
                hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, norm_topk_prob=norm,
                n_group=4, topk_group=2, routed_scaling_factor=2.5,
            )
        ),
    ]  # fmt: skip
    base = replace(SOFTMAX, num_experts=16, top_k=4, norm_topk_prob=norm)
    kinds = [
        base,
        replace(base, scoring="softmax_of_chosen"),
        replace(SIGMOID, num_experts=16, top_k=4, norm_topk_prob=norm, scale=2.5),
    ]
    generator = torch.Generator().manual_seed(2)
    x_TE = torch.randn(200, 32, generator=generator).to(dtype)
    for router, moe in zip(theirs, kinds, strict=True):
        router.to(dtype)
        with torch.no_grad():
            router.weight.normal_(0, 0.5, generator=generator)
        correction = None
        if isinstance(router, Glm4MoeTopkRouter):
            router.to(torch.float32)
            correction = router.e_score_correction_bias.normal_(0, 0.3, generator=generator)
        logits_TX, expected_TK, chosen_TK = router(x_TE)
        weights_TK, experts_TK = route(logits_TX.to(router.weight.dtype), moe.routing, correction)
        # transformers has no order within a token with groups.
        order, other = experts_TK.argsort(-1), chosen_TK.argsort(-1)
        is_tied = (logits_TX.sort(-1).values.diff(dim=-1) == 0).any(-1)
        assert int(is_tied.sum()) < 150
        assert torch.equal(experts_TK.gather(1, order)[~is_tied], chosen_TK.gather(1, other)[~is_tied])
        assert weights_TK.dtype == expected_TK.dtype
        found, expected = weights_TK.gather(1, order)[~is_tied], expected_TK.gather(1, other)[~is_tied]
        torch.testing.assert_close(found, expected, rtol=2e-6 if found.dtype == torch.float32 else 0.01, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_correction_that_is_not_finite_is_refused(value: float) -> None:
    """Experts would be chosen by it, and their outputs are finite."""
    config = config_of(SIGMOID)
    tensors = RandomTensors(layer_tensors(config, "", has_experts=True), 0)
    tensors._tensors["mlp.gate.e_score_correction_bias"][3] = value
    with pytest.raises(ModelError, match=r"^mlp: the correction of its router has a number that is not finite"):
        MixtureMLP(config, WeightLoader(tensors, torch.float32, CPU), "")
