"""The counts of experts: those of each round by hand, whatever kind of engine runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.counts import ExpertCounts
from specbatch.draft.shape import DraftShape
from specbatch.models.routing_counter import RoutingCounter
from specbatch.types import SamplingParams
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_engine

CPU = torch.device("cpu")
TREE = DraftShape(3, 3, 8)


def choices(*sizes: int) -> list[Tensor]:
    """Choices of 3 of 16 experts in 2 layers (L, T, K), for rounds of these sizes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(2, size, 16, generator=generator).topk(3, dim=-1).indices for size in sizes]


def test_the_counts_of_rounds() -> None:
    """Padding has slots below 0."""
    counter, rounds = RoutingCounter(2, 16, CPU), choices(1, 5, 6, 9, 70, 20_000)
    load, expected = torch.zeros(2, 16, dtype=torch.int64), dict[int, list[int]]()
    for chosen_LTK, end in zip(rounds, (1, 6, 6, 12, 96, 24576), strict=True):
        size = chosen_LTK.shape[1]
        padding = torch.zeros(2, 3, 3, dtype=torch.int64)
        with counter.round(torch.cat((torch.arange(size), torch.full((3,), -1)))):
            for layer in torch.cat((chosen_LTK, padding), dim=1):
                counter.record(layer.int())
        found = expected.setdefault(end, [0, 0, 0])
        found[0], found[1] = found[0] + 1, found[1] + size
        for layer in range(2):
            load[layer] += chosen_LTK[layer].flatten().bincount(minlength=16)
            found[2] += len(chosen_LTK[layer].unique())
    assert counter.read() == ExpertCounts(load.tolist(), expected)
    means = counter.read().distinct
    assert [one.num_rounds for one in means] == [1, 2, 1, 1, 1]
    assert (means[0].experts, means[1].tokens, means[-1].experts) == (3, 5.5, 16)
    counter.reset()
    assert not counter.read().distinct


def test_only_rounds_with_tokens_count() -> None:
    """A graph is captured with padding alone. Prompts run while no round is counted."""
    counter, (chosen_LTK,) = RoutingCounter(2, 16, CPU), choices(4)
    for layer in chosen_LTK:
        counter.record(layer)
    with counter.round(torch.full((4,), -1)):
        for layer in chosen_LTK:
            counter.record(layer)
    assert counter.read() == ExpertCounts([[0] * 16] * 2, {})


def test_counts_add_up() -> None:
    one = ExpertCounts([[1, 2]], {4: [1, 3, 2]})
    total = ExpertCounts()
    total.add(one)
    total.add(ExpertCounts([[3, 4]], {4: [1, 4, 2], 8: [1, 7, 2]}))
    assert total == ExpertCounts([[4, 6]], {4: [2, 7, 4], 8: [1, 7, 2]})
    total.add(one, times=-1)
    assert total.load == [[3, 4]]
    assert one == ExpertCounts([[1, 2]], {4: [1, 3, 2]})


@pytest.mark.parametrize(
    ("method", "shape", "family"),
    [("none", None, "qwen3-moe"), ("draft_model", TREE, "qwen3-moe"), ("none", None, "flex-olmo")],
)
def test_an_engine_counts_its_rounds(method: str, shape: DraftShape | None, family: str) -> None:
    """Each token of a round chooses 2 experts in each of 3 layers. Padding of a GPU's rounds does not count."""
    settings: dict[str, Any] = {"num_pages": 256, "num_layers": 3, "family": family}
    found = []
    for make in (tiny_engine, tiny_device_engine):
        engine = make(method, shape, **settings)
        completions = run(engine, random_prompts(5), SamplingParams(max_tokens=12))
        counts = engine.stats.experts
        tokens = sum(completion.speculation.rounds + completion.speculation.drafted for completion in completions)
        assert [sum(layer) for layer in counts.load] == [2 * tokens] * 3
        assert sum(one.num_rounds for one in counts.distinct) == engine.stats.rounds
        found.append(counts)
        engine.forget_routing()
        assert engine.stats.experts == ExpertCounts()
    assert found[0].load == found[1].load
