"""Experts are loaded straight to their place."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from specbatch.kernels import ops_for
from specbatch.kernels.experts import ExpertWeights
from specbatch.models.config import MoeConfig, layer_tensors
from specbatch.models.linears.experts import StackedExperts, stack_experts
from specbatch.models.linears.sharded import ModelShard, part_of
from specbatch.models.mixture import MixtureMLP
from specbatch.models.weight_loader import WeightLoader
from tests.parallel.threads import ThreadGroup, on_ranks
from tests.tiny_models import CPU, RandomTensors, tiny_config

MOE = MoeConfig(5, 2, 11, norm_topk_prob=True, layers=(True,), expert_bias=True)
CONFIG = tiny_config(1, moe=MOE)
NAMES = [tuple(f"mlp.experts.{i}.{kind}_proj" for kind in ("gate", "up", "down")) for i in range(5)]


class Watched:
    """Weights or biases of which at most one may be in memory at a time."""

    def __init__(self, kind: str, shard: ModelShard | None = None) -> None:
        self._tensors, self._shard = RandomTensors(layer_tensors(CONFIG, "", has_experts=True), 0), shard
        self._kind = kind
        self._last: weakref.ref[Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        assert self._last is None or self._last() is None, "the weight before this one is still there"
        tensor = self._tensors.load(f"{name}.{self._kind}").float().clone()
        if self._shard is not None:
            tensor = part_of(f"{name}.{self._kind}", tensor, self._shard)
        self._last = weakref.ref(tensor)
        return tensor


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_one_tensor_at_a_time_goes_to_its_place(kind: str) -> None:
    gate_up, all_down = stack_experts(NAMES, Watched(kind), torch.bfloat16, CPU)  # type: ignore[arg-type]
    tensors = RandomTensors(layer_tensors(CONFIG, "", has_experts=True), 0)
    for number, names in enumerate(NAMES):
        gate, up, down = (tensors.load(f"{name}.{kind}").float().bfloat16() for name in names)
        assert torch.equal(gate_up[number], torch.cat((gate, up)))
        assert torch.equal(all_down[number], down)
    assert gate_up.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [2, 3])
def test_stacked_experts_of_ranks_add_up(size: int) -> None:
    """The stacked experts of a GPU run here with the reference kernels."""
    x_TE = torch.randn(7, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    weights_TK = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    experts_TK = torch.rand(7, 5, generator=torch.Generator().manual_seed(3)).topk(2).indices.int()
    ops = ops_for(CPU, torch.float32)

    def computed(shard: ModelShard | None) -> Tensor:
        weights, biases = (
            stack_experts(NAMES, Watched(kind, shard), torch.float32, CPU)  # type: ignore[arg-type]
            for kind in ("weight", "bias")
        )
        return StackedExperts(ExpertWeights(*weights, "silu", *biases), ops)(x_TE, weights_TK, experts_TK)

    shards = [ModelShard.of(CONFIG, ThreadGroup(rank, size, None)) for rank in range(size)]  # type: ignore[arg-type]
    torch.testing.assert_close(sum(computed(shard) for shard in shards), computed(None))
    tensors = RandomTensors(layer_tensors(CONFIG, "", has_experts=True), 0)
    whole = MixtureMLP(CONFIG, WeightLoader(tensors, torch.float32, CPU), "")(x_TE)
    for division in ("tensors", "experts"):
        parts = on_ranks(
            size,
            lambda group, division=division: MixtureMLP(
                CONFIG, WeightLoader(tensors, torch.float32, CPU, shard=ModelShard.of(CONFIG, group, division)), ""
            )(x_TE),
        )
        for part in parts:
            torch.testing.assert_close(part, whole)


@pytest.mark.parametrize("size", [2, 3])
def test_stacked_experts_as_a_whole_add_up(size: int) -> None:
    """Each expert adds its biases once."""
    x_TE = torch.randn(7, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    weights_TK = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    experts_TK = torch.rand(7, 5, generator=torch.Generator().manual_seed(3)).topk(2).indices.int()
    tensors = RandomTensors(layer_tensors(CONFIG, "", has_experts=True), 0)

    def stacked(shard: ModelShard | None) -> StackedExperts:
        loader = WeightLoader(tensors, torch.float32, CPU, shard=shard)
        return loader.stacked_experts(NAMES, "silu", has_bias=True)  # type: ignore[arg-type]

    groups = [ThreadGroup(rank, size, None) for rank in range(size)]  # type: ignore[arg-type]
    parts = [stacked(ModelShard.of(CONFIG, group, "experts")) for group in groups]
    assert sum(len(part.weights.down_XEI) for part in parts) == 5
    expected = stacked(None)(x_TE, weights_TK, experts_TK)
    torch.testing.assert_close(sum(part(x_TE, weights_TK, experts_TK) for part in parts), expected)
