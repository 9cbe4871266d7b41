"""Where kernels are compiled ahead, and what becomes of a failure. What is compiled: `tests/kernels`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from specbatch.models.config import MoeConfig
from specbatch.models.truncated_model import outlined
from specbatch.parallel.group import Group
from specbatch.setup.compile_ahead import compile_kernels
from specbatch.setup.engine import resolve_compile_ahead
from specbatch.setup.round_parts import RoundParts
from tests.parallel.threads import on_ranks
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


@pytest.mark.parametrize("fault", ["run", "sign", "code"])
def test_a_fault_of_one_rank_is_a_note_and_keeps_no_rank_waiting(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels cannot be launched over fake tensors; or another one alone has the sign of an earlier start; or the
    code changes while it is looked at."""
    pytest.importorskip("triton")
    from specbatch.draft.none import NoDraft

    def run(parts: RoundParts, *sizes: int) -> None:
        assert parts.group is not None
        ran.append(parts.group.rank)
        if fault == "run" and parts.group.rank == 1:
            raise ValueError("no kernel")

    def lstat(path: Path) -> os.stat_result:
        if fault == "code":
            raise FileNotFoundError(path)
        return os.stat(path)

    def start(group: Group) -> str:
        target = tiny_decoder(tiny_config(), torch.float32)
        parts = RoundParts(target, as_schedule(None).map(lambda _: NoDraft()), torch.float32, 4, (1,), group=group)
        return compile_kernels(parts, 4, 64, 100, f"rank {group.rank}")

    ran: list[int] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("specbatch.setup.compile_ahead._run", run)
    monkeypatch.setattr("specbatch.setup.compile_ahead.os.lstat", lstat)
    notes = on_ranks(2, start)
    assert sorted(ran) == [0, 1]
    expected = "not compiled ahead (ValueError: no kernel)" if fault == "run" else "0 kernels compiled ahead"
    assert "0 kernels compiled ahead" in notes[0]
    assert expected in notes[1]
    signs = sorted(tmp_path.glob("specbatch-*"))
    assert len(signs) == {"run": 1, "sign": 2, "code": 0}[fault]
    if fault == "sign":
        signs[0].unlink()
        assert all("0 kernels compiled ahead" in note for note in on_ranks(2, start))
        assert all("by an earlier start" in note for note in on_ranks(2, start))


def test_layers_with_experts_and_without_have_other_kernels() -> None:
    moe = MoeConfig(4, 2, 8, norm_topk_prob=True, layers=(False, False, True, True, True))
    decoder = tiny_decoder(tiny_config(5, moe=moe), torch.float32)
    kept = [i for i, layer in enumerate(outlined(decoder).layers) if layer is decoder.layers[i]]
    assert kept == [0, 2, 4]
    assert outlined(decoder).routing is None, "not all layers choose experts"
    assert decoder.routing is not None
