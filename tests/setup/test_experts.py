"""Runs with a mixture of experts: those that cannot compute it are refused, with advice that helps."""

from __future__ import annotations

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.setup.model import check_experts
from specbatch.setup.resolve import resolve

EXPERTS = ["model.target=random:tiny-experts", "engine.device=cpu", "speculation.method=none"]
DRAFT = ["speculation.method=draft_model", "speculation.draft=random:tiny-experts"]
DENSE = ["model.target=random:tiny", "engine.device=cpu", *DRAFT]


@pytest.mark.parametrize("name", ["model.target", "speculation.draft"])
def test_ranks_with_experts_run_on_a_cpu(name: str) -> None:
    config, model = load_config(None, [*EXPERTS, "engine.tensor_parallel=2"]), resolve(load_config(None, DENSE)).draft
    assert isinstance(model, Checkpoint)
    check_experts(name, model, config, torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"{name} has experts") as caught:
        check_experts(name, model, config, torch.device("cuda"))
    assert caught.value.hint == "leave engine.tensor_parallel out"


def test_a_draft_with_experts_is_not_quantised_with_the_target() -> None:
    run = resolve(load_config(None, [*DENSE, "model.quantization=fp8"]))
    assert run.quantization is not None
    assert run.draft_quantization is None


def test_norms_over_all_heads_are_on_one_rank() -> None:
    options = ["model.target=random:olmoe-1b-7b", "engine.device=cpu", "engine.tensor_parallel=2"]
    with pytest.raises(ConfigError, match=r"model.target \(olmoe\) has norms of queries and keys over all heads"):
        resolve(load_config(None, [*options, "speculation.method=none"]))
