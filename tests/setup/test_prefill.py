"""How prompts are computed, by device, attention and the graphs of rounds."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.config import EngineSection
from specbatch.config_load import load_config
from specbatch.errors import ConfigError
from specbatch.setup.engine import resolve_prompt_graphs


@pytest.mark.parametrize(
    ("wanted", "on_cuda", "attention", "rounds", "expected"),
    [
        ("auto", True, "triton", "round", "both"),
        ("auto", True, "triton", "none", "off"),
        ("auto", True, "flashinfer", "round", "off"),
        ("auto", False, "torch", "none", "off"),
        ("whole", True, "triton", "round", "whole"),
        ("piecewise", True, "flashinfer", "round", "piecewise"),
        ("off", True, "triton", "round", "off"),
    ],
)
def test_graphs_of_prompts(wanted: Any, on_cuda: bool, attention: str, rounds: Any, expected: str) -> None:
    assert resolve_prompt_graphs(wanted, EngineSection(), on_cuda, attention, rounds) == expected


def test_several_ranks_have_no_pieces() -> None:
    section = EngineSection(tensor_parallel=2)
    assert resolve_prompt_graphs("auto", section, True, "triton", "round") == "whole"
    with pytest.raises(ConfigError, match=r"does not run with engine\.tensor_parallel"):
        resolve_prompt_graphs("both", section, True, "triton", "round")


def test_deterministic_layers_are_not_compiled() -> None:
    with pytest.raises(ConfigError, match="cannot be combined with"):
        resolve_prompt_graphs("both", EngineSection(compile="auto", deterministic=True), True, "triton", "round")


@pytest.mark.parametrize(
    ("wanted", "compile_", "on_cuda", "attention", "rounds", "message"),
    [
        ("whole", "off", True, "flashinfer", "round", "prefill.graphs: whole needs .*, not flashinfer and round"),
        ("whole", "off", False, "torch", "none", "prefill.graphs: whole needs .*, not a CPU"),
        ("both", "off", True, "flashinfer", "round", "prefill.graphs: both needs"),
        ("whole", "off", True, "triton", "none", "engine.cuda_graphs: round, not triton and none"),
        ("piecewise", "off", False, "torch", "none", "prefill.graphs: piecewise needs a CUDA device"),
        ("whole", "auto", True, "triton", "round", "engine.compile: auto needs .*, not whole"),
        ("off", "auto", True, "triton", "round", "engine.compile: auto needs .*, not off"),
    ],
)
def test_what_cannot_be(wanted: Any, compile_: Any, on_cuda: bool, attention: str, rounds: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_prompt_graphs(wanted, EngineSection(compile=compile_), on_cuda, attention, rounds)


def test_off_needs_no_quotes() -> None:
    """YAML reads off as false."""
    config = load_config(None, ["prefill.graphs=off", "engine.compile=off"])
    assert (config.prefill.graphs, config.engine.compile) == ("off", "off")
    with pytest.raises(ConfigError, match="must be one of"):
        load_config(None, ["engine.cuda_graphs=off"])
