"""The same engine on a CUDA device (torch attention): tokens equal the CPU's in float64."""

from __future__ import annotations

import pytest
import torch

from specbatch.speculation.tree import DraftShape
from specbatch.types import SamplingParams
from tests.models import random_prompts, run, tiny_engine

pytestmark = pytest.mark.gpu

CASES = [
    ("none", None),
    ("ngram", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(5, 4, 8)),
    ("eagle", DraftShape(3, 1, 4)),
    ("eagle", DraftShape(5, 4, 8)),
    ("eagle3", DraftShape(7, 10, 60)),
]


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9)]
)
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_cuda_equals_cpu(method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    prompts = random_prompts(5, shared=10)
    cpu = run(tiny_engine(method, shape, num_pages=256), prompts, params)
    gpu = run(tiny_engine(method, shape, num_pages=256, device=torch.device("cuda")), prompts, params)
    assert [c.token_ids for c in gpu] == [c.token_ids for c in cpu]
    assert [c.speculation for c in gpu] == [c.speculation for c in cpu]
