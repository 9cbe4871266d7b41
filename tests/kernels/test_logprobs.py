"""Log-probabilities, torch and Triton alike, against plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from specbatch.kernels import torch as reference
from tests.kernels.batches import CUDA
from tests.kernels.operations import Ops, random_logits

pytestmark = [pytest.mark.gpu] if CUDA else []


@pytest.mark.parametrize(
    ("vocab", "num_top"), [(3, 0), (3, 1), (3, 20), (50, 0), (50, 1), (50, 5), (50, 20), (9001, 1), (9001, 5)]
)
def test_logprobs(ops: Ops, vocab: int, num_top: int) -> None:
    """Rows in any order and more than once; masked tokens (-inf and the lowest number)."""
    logits = random_logits(6, vocab, 2, ties=False)
    logits[1, :-1] = -math.inf
    logits[2, 0] = torch.finfo(torch.float32).min
    index, tokens = torch.tensor([5, 0, 2, 2, 1, 1]), torch.tensor([1, 0, 2, 0, vocab - 1, 0])
    values, ids = ops.logprobs(logits, index, tokens, num_top)
    width = min(num_top, vocab)
    assert (values.shape, ids.shape) == ((6, 1 + width), (6, width))
    for row, (i, token) in enumerate(zip(index.tolist(), tokens.tolist(), strict=True)):
        x = logits[i].tolist()
        peak = max(x)
        total = math.log(math.fsum(math.exp(one - peak) for one in x))
        best = sorted(range(vocab), key=lambda one: -x[one])[:width]
        if i != 1:  # of a row with one possible token, the order of the others is open
            assert ids[row].tolist() == best
        expected = [x[one] - peak - total for one in (token, *best)]
        assert values[row].tolist() == pytest.approx(expected, rel=1e-6, abs=2e-6)
    assert values[4, 0] == 0.0


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_more_rows_than_are_computed_at_once(ops: Ops, num_top: int) -> None:
    logits = random_logits(70, 30, 4, ties=False)
    index = torch.arange(70).flip(0)
    values, ids = ops.logprobs(logits, index, torch.full_like(index, 3), num_top)
    expected = torch.log_softmax(logits, dim=-1).flip(0)
    assert torch.allclose(values[:, 0], expected[:, 3], atol=2e-6)
    assert torch.equal(ids, expected.topk(num_top).indices)
    assert torch.allclose(values[:, 1:], expected.topk(num_top).values, atol=2e-6)


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_types_and_rows_that_lie_apart(triton_ops: Ops, num_top: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(4, 9008, 3, ties=False).to(dtype)[:, :9001]
        logits[:, 5:10] = torch.arange(20, 25)  # bfloat16 has ties elsewhere
        arguments = (logits, torch.tensor([3, 1, 0]), torch.tensor([9000, 7, 4096]), num_top)
        found, expected = triton_ops.logprobs(*arguments), reference.logprobs(*arguments)
        assert torch.equal(found[1], expected[1])
        assert torch.allclose(found[0], expected[0], atol=2e-6)
        assert found[0].dtype == expected[0].dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_give_tokens_of_the_vocabulary(ops: Ops, bad: float) -> None:
    for logits in (torch.full((2, 5000), bad), random_logits(2, 5000, 0, ties=False)):
        logits[0, 4097] = bad
        for num_top in (1, 5):
            _, ids = ops.logprobs(logits, torch.tensor([0, 1]), torch.tensor([0, 4097]), num_top)
            assert bool(((ids >= 0) & (ids < 5000)).all())


def test_the_lower_id_of_equal_logits_comes_first(ops: Ops) -> None:
    """Otherwise the ids depend on how many rows and likely tokens are computed together."""
    logits = torch.randint(-3, 4, (5, 5000), generator=torch.Generator().manual_seed(0)).float()
    logits[:, 4000] = 5.0
    rows, tokens = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    values, ids = ops.logprobs(logits, rows, tokens, 20)
    for row in range(5):
        assert ids[row].tolist() == sorted(range(5000), key=lambda i: (-logits[row, i].item(), i))[:20]
    for num_top in (1, 2, 5):
        fewer = ops.logprobs(logits[2:3], rows[:1], tokens[:1], num_top)
        assert torch.equal(fewer[1], ids[2:3, :num_top])
        assert torch.equal(fewer[0], values[2:3, : num_top + 1])
