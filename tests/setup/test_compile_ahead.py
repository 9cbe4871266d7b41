"""Where kernels are compiled ahead, and what becomes of a failure. What is compiled: `tests/kernels`."""

from __future__ import annotations

import pytest
import torch

from specbatch.models.config import MoeConfig
from specbatch.models.truncated_model import outlined
from specbatch.setup.compile_ahead import compile_kernels
from specbatch.setup.engine import resolve_compile_ahead
from specbatch.setup.round_parts import RoundParts
from tests.tiny_models import as_schedule, tiny_config, tiny_decoder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "attention", "expected"), [(CUDA, "triton", True), (CPU, "torch", False), (CUDA, "flashinfer", False)]
)
def test_where_kernels_are_compiled_ahead(device: torch.device, attention: str, expected: bool) -> None:
    assert resolve_compile_ahead(device, attention) == expected


def test_a_failure_is_a_note() -> None:
    """The engine of a CPU reads numbers on the host, and fake tensors have none."""
    pytest.importorskip("triton")
    from specbatch.draft.none import NoDraft

    target = tiny_decoder(tiny_config(), torch.float32)
    parts = RoundParts(target, as_schedule(None).map(lambda shape: NoDraft()), torch.float32, 4, (1,))
    note = compile_kernels(parts, 4, 64, 100, "a run")
    assert note.startswith("engine: kernels were not compiled ahead (DataDependentOutputException: "), note
    assert type(torch.zeros(1)) is torch.Tensor


def test_layers_with_experts_and_without_have_other_kernels() -> None:
    moe = MoeConfig(4, 2, 8, norm_topk_prob=True, layers=(False, False, True, True, True))
    decoder = tiny_decoder(tiny_config(5, moe=moe), torch.float32)
    kept = [i for i, layer in enumerate(outlined(decoder).layers) if layer is decoder.layers[i]]
    assert kept == [0, 2, 4]
    assert outlined(decoder).routing is None, "not all layers choose experts"
    assert decoder.routing is not None
