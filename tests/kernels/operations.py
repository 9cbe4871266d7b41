"""Both implementations of the operations of a round, and what their tests share."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specbatch.batch import NUM_FIELDS, Committed, Field
from specbatch.engine.sequence import Sequence
from specbatch.types import Request, RngKey, SamplingParams
from tests.kernels.batches import CUDA, DEVICE

FILTERS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=0.75, top_k=5),
    "top_k 1": SamplingParams(temperature=2.0, top_k=1),
    "top_p": SamplingParams(temperature=1.25, top_p=0.75),
    "tiny top_p": SamplingParams(temperature=1.25, top_p=2.0**-20),
    "min_p": SamplingParams(temperature=1.0, min_p=0.125),
    "all": SamplingParams(temperature=1.5, top_k=20, top_p=0.875, min_p=0.0625),
    "cold": SamplingParams(temperature=2.0**-10, top_p=0.5),
}  # all exact in float32


class Ops:
    """One implementation of the operations; tensors travel to the device under test and back.

    The kernels weigh in float32, so that of a token's interval of uniforms they may miss a millionth at the ends.
    """

    def __init__(self, name: str) -> None:
        self.raw = importlib.import_module(f"specbatch.kernels.{name}")
        self.is_slow = not CUDA and name == "triton"  # interpreted
        self.is_exact = not CUDA and name == "torch"  # float64 as on the host

    def __getattr__(self, name: str) -> Callable:
        function = getattr(self.raw, name)

        def call(*args: object) -> object:
            result = function(*(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args))
            return tuple(r.cpu() for r in result) if isinstance(result, tuple) else result.cpu()

        return call


def make_ops(name: str) -> Ops:
    if name == "triton":
        pytest.importorskip("triton")
    return Ops(name)


def filter_tensors(params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
    )


def random_logits(rows: int, vocab: int, seed: int, ties: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    return (logits * 2).round() / 2 if ties else logits


def sequence(params: SamplingParams, rng: RngKey, committed: int, max_length: int = 10**6) -> Sequence:
    return Sequence(Request(0, [1], params, rng), [1] * (committed + 1), max_length, num_computed_tokens=committed)


def as_int64(words: list[int]) -> Tensor:
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64)


def noise_tensors(keys: list[RngKey], positions: list[int]) -> tuple[Tensor, ...]:
    columns = ([k.seed for k in keys], [k.stream for k in keys], [k.sample for k in keys], positions)
    return tuple(as_int64(c) for c in columns)


def commit(ops: Ops, tokens_BN: Tensor, parents_BN: Tensor, choice_BN: Tensor) -> Committed:
    """Of new slots, that do not end here."""
    batch, num_nodes = tokens_BN.shape
    ints = torch.zeros((batch, NUM_FIELDS), dtype=torch.int64, device=DEVICE)
    ints[:, Field.LIMIT] = 1000
    history, table = torch.empty((batch, 0), device=DEVICE).int(), torch.zeros((batch, 1), device=DEVICE).int()
    ints[:, Field.STOP :] = -1
    rows, eos = torch.arange(batch, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    committed: Committed = ops.raw.commit_round(
        ints, history, table, rows, 4, eos, num_nodes, tokens_BN, choice_BN, parents_BN=parents_BN
    )
    return committed
