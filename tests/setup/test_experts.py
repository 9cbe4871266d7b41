"""Runs with a mixture of experts: those that cannot compute it are refused, with advice that helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.random_weights import open_random_model
from specbatch.setup.engine import resolve_engine
from specbatch.setup.expert_parallel import chunk_of_requests, engine_of_requests, resolve_division
from specbatch.setup.model import check_experts
from specbatch.setup.resolve import resolve

EXPERTS = ["model.target=random:tiny-experts", "engine.device=cpu", "speculation.method=none"]
DRAFT = ["speculation.method=draft_model", "speculation.draft=random:tiny-experts"]
DENSE = ["model.target=random:tiny", "engine.device=cpu", *DRAFT]


@pytest.mark.parametrize("name", ["model.target", "speculation.draft"])
def test_ranks_with_experts_run(name: str) -> None:
    """Experts of the target in FP8 are an error, unless each rank has whole experts."""
    config, model = load_config(None, [*EXPERTS, "engine.tensor_parallel=2"]), resolve(load_config(None, DENSE)).draft
    assert isinstance(model, Checkpoint)
    for device in ("cpu", "cuda"):
        check_experts(name, model, config, torch.device(device))
    fp8 = load_config(None, [*EXPERTS, "engine.tensor_parallel=2", "model.quantization=fp8"])
    check_experts(name, model, fp8, torch.device("cuda"), "experts")
    if name == "model.target":
        with pytest.raises(ConfigError, match="in FP8 only if each is on one rank") as caught:
            check_experts(name, model, fp8, torch.device("cuda"))
        assert "engine.expert_parallel: on" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["engine.expert_parallel=on"], "there is one rank"),
        (["engine.dp_attention=on"], "there is one rank"),
        (["engine.tensor_parallel=2", "engine.expert_parallel=off", "engine.dp_attention=on"], "needs engine.expert"),
        (["engine.tensor_parallel=2", "engine.expert_parallel=on", "model.target=random:tiny"], "has no experts"),
        (["engine.tensor_parallel=2", "engine.dp_attention=on", "prefill.graphs=whole"], "whole"),
        (["engine.tensor_parallel=9", "engine.expert_parallel=on"], "8 experts, and there are 9 ranks"),
    ],
)
def test_experts_that_ranks_cannot_divide(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(load_config(None, [*EXPERTS, *options]))


@pytest.mark.parametrize(
    ("options", "division"),
    [
        (["engine.tensor_parallel=2"], "tensors"),
        (["engine.tensor_parallel=2", "engine.expert_parallel=on"], "experts"),
        (["engine.tensor_parallel=2", "engine.dp_attention=on"], "requests"),
        ([], "tensors"),
    ],
)
def test_the_division_of_a_run(options: list[str], division: str) -> None:
    run = resolve(load_config(None, [*EXPERTS, *options]))
    assert run.division == division
    section = run.config.engine
    found = section.expert_parallel, section.dp_attention
    assert found == {"tensors": ("off", "off"), "experts": ("on", "off"), "requests": ("on", "on")}[division]


def test_large_batches_on_gpus_have_requests_of_their_own() -> None:
    """By the model and the number of rows, with a note that says why."""
    model = open_random_model("random:qwen3-30b-a3b", torch.bfloat16, torch.device("cpu"))
    for rows, division in ((1024, "requests"), (8, "tensors")):
        config = load_config(None, ["engine.tensor_parallel=2", f"engine.max_batch_size={rows}"])
        notes: list[str] = []
        assert resolve_division(config, model, torch.device("cuda"), torch.bfloat16, notes) == division
        assert f"({rows} rows of a rank; from about" in notes[0]


@pytest.mark.parametrize(
    ("options", "device", "num_ranks", "gigabytes", "tokens"),
    [
        ([], "cuda", 2, 60, 32768),
        ([], "cuda", 8, 60, 32768),
        ([], "cuda", 8, 30, 16384),
        ([], "cuda", 2, 5, 8192),
        ([], "cuda", 2, -1, 8192),
        (["engine.prefill_chunk_tokens=4096"], "cuda", 2, 60, 4096),
        (["engine.prefill_chunk_tokens=50000"], "cuda", 8, 1, 50000),
        (["engine.attention=torch"], "cuda", 2, 60, 8192),
        ([], "cpu", 2, 60, 512),
    ],
)
def test_prompt_chunks_of_ranks_with_requests_of_their_own(
    options: list[str], device: str, num_ranks: int, gigabytes: int, tokens: int
) -> None:
    """They are larger on CUDA, if the user has not set them and if weights leave enough memory, and are no graphs."""
    model = open_random_model("random:qwen3-30b-a3b", torch.bfloat16, torch.device("cpu"))
    config = load_config(None, options)
    engine = engine_of_requests(config, resolve_engine(config, torch.device(device), torch.bfloat16, []))
    assert chunk_of_requests(engine, model.config, num_ranks, 2, gigabytes * 10**9) == tokens
    assert engine.prompt_graphs == "off"


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
