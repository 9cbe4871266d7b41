"""Runs with a mixture of experts: those that cannot compute it are refused, with advice that helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.random_weights import open_random_model
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


@pytest.mark.parametrize(
    ("target", "options", "match"),
    [
        ("glm-4.5-air", [], "router computes in model.dtype"),
        ("tiny-experts", ["model.quantization=fp8"], "not in FP8"),
        ("tiny-experts", ["60 experts"], "a multiple of 8 experts"),
        ("tiny-experts", ["shared gate"], "without a gate of shared experts"),
    ],
)
def test_experts_that_are_not_deterministic_on_a_gpu(target: str, options: list[str], match: str) -> None:
    """Others are: no error is raised for them."""
    base = [f"model.target=random:{target}", "engine.device=cpu", "speculation.method=none", "model.quantization=none"]
    model = open_random_model(f"random:{target}", torch.bfloat16, torch.device("cpu"))
    assert model.config.moe is not None
    moe = {"60 experts": {"num_experts": 60}, "shared gate": {"shared_size": 8}}.get((*options, "")[0])
    if moe is not None:
        model = replace(model, config=replace(model.config, moe=replace(model.config.moe, **moe)))
        options = []
    config = load_config(None, [*base, *options, "engine.deterministic=true"])
    with pytest.raises(ConfigError, match=match):
        check_experts("model.target", model, config, torch.device("cuda"))
    check_experts("model.target", model, load_config(None, base), torch.device("cuda"))
    usual = open_random_model("random:qwen3-30b-a3b", torch.bfloat16, torch.device("cpu"))
    check_experts("model.target", usual, load_config(None, [*base, "engine.deterministic=true"]), torch.device("cuda"))
