"""What the operations of a round and of the model make of NaN and infinities: torch and Triton alike."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.kernels import torch as reference
from specbatch.types import SamplingParams
from tests.kernels.batches import CUDA, DEVICE, paged_batch
from tests.kernels.operations import Ops, filter_tensors

pytestmark = [pytest.mark.gpu] if CUDA else []
NAN, INF = math.nan, math.inf
LOWEST = float(torch.finfo(torch.float32).min)  # -inf in float16
PARAMS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
}


def rows(vocab: int, dtype: torch.dtype) -> tuple[Tensor, list[bool]]:
    """Logits, and whether each row is finite."""
    healthy = (torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    cases: list[tuple[dict[int, float], bool]] = [({}, True)]
    last = vocab - 1
    cases += [({0: NAN}, False), ({last: NAN}, False), ({last: INF}, False), ({0: -INF, 2: LOWEST}, True)]
    logits = healthy.repeat(len(cases) + 4, 1)
    for row, (places, _) in zip(logits, cases, strict=False):
        for place, value in places.items():
            row[place] = value
    logits[-4], logits[-3], logits[-2] = NAN, -INF, INF
    logits[-1] = -INF
    logits[-1, 3] = 1.0  # all masked but for one
    return logits, [*(finite for _, finite in cases), False, False, False, True]


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(7, torch.float32), (7, torch.float16), (7, torch.bfloat16), (5000, torch.float32)], ids=str
)
def test_rows_that_are_not_finite_have_no_token(ops: Ops, vocab: int, dtype: torch.dtype) -> None:
    logits, finite = rows(vocab, dtype)
    best = ops.argmax(logits, NO_TOKEN)
    assert (best != NO_TOKEN).tolist() == finite
    drafted = ops.argmax(logits)
    assert drafted.tolist() == [max(token, 0) for token in best.tolist()]
    for params in PARAMS.values():
        filters = filter_tensors([params] * len(logits))
        u = torch.full((len(logits),), 0.7, dtype=torch.float64)
        tokens = ops.sample(logits, *filters, u)
        assert (tokens != NO_TOKEN).tolist() == finite
        p = ops.distribution(logits, *filters)
        assert (~p.isnan()).all(dim=1).tolist() == finite
        assert p.isnan().all(dim=1).tolist() == [not f for f in finite]
        drawn = ops.draw(p, u)
        assert drawn[~torch.tensor(finite)].eq(0).all()
        assert torch.equal(drawn[finite], tokens[finite]) or params.temperature == 0
        expected = reference.distribution(logits, *filters)
        assert torch.allclose(p.double(), expected.double(), rtol=1e-4, atol=1e-7, equal_nan=True)


def test_a_masked_vocabulary_is_no_error(ops: Ops) -> None:
    """All logits the lowest number of the type, as masks write it: as if they were -inf."""
    logits = torch.full((1, 300), LOWEST)
    assert ops.argmax(logits, NO_TOKEN).item() == NO_TOKEN
    logits[0, 200] = -5.0
    assert ops.argmax(logits, NO_TOKEN).item() == 200


@pytest.mark.parametrize("vocab", [7, 5000])
def test_drafts_of_rows_that_are_not_finite(ops: Ops, vocab: int) -> None:
    """Distinct, in the vocabulary, and of no weight: a tree of NaN would have children without their parents."""
    logits, finite = rows(vocab, torch.float32)
    scores, ids = ops.draft_topk(logits, 4)
    expected_scores, expected_ids = reference.draft_topk(logits, 4)
    assert not scores.isnan().any()
    assert scores.isneginf().all(dim=1).tolist() == [not f for f in finite]
    broken = ~torch.tensor(finite)
    assert ids[broken].tolist() == [[0, 1, 2, 3]] * int(broken.sum())
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(scores, expected_scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draft_vocab", ["same", "smaller", "mapped"])
def test_chains_with_nan(ops: Ops, draft_vocab: str) -> None:
    """A draft without probabilities is rejected and its token drawn from p, all of it; a target without any has no
    token; what is rejected anyway changes nothing."""
    width = 6 if draft_vocab == "same" else 3
    ids = torch.tensor([4, 1, 2])
    target_ids = ids if draft_vocab == "mapped" else None
    p = torch.tensor([[0.125, 0.25, 0.125, 0.25, 0.125, 0.125]]).repeat(3, 1)
    q = torch.zeros(2, width)
    q[:, 1] = 1.0
    drafts = torch.tensor([1, 1])  # target tokens: 1 in each vocabulary
    cases: list[tuple[str, list[int], list[int], tuple[int, ...]]] = [
        # rows of q and of p that are NaN, and what comes of it where u accepts: path, broken
        ("healthy", [], [], (3, 0)),
        ("first draft", [0], [], (1, 1)),
        ("second draft", [1], [], (2, 1)),
        ("both", [0, 1], [], (1, 2)),
        ("root", [], [0], (1, 0)),
        ("after the first", [], [1], (2, 0)),
        ("at the end", [], [2], (3, 0)),
        ("not reached", [0], [1, 2], (1, 1)),
    ]
    for u in (0.05, 0.7):
        for temperature in (1.0, 0.0):
            all_p, all_q = torch.stack([p] * len(cases)), torch.stack([q] * len(cases))
            if temperature == 0:
                all_p = torch.zeros_like(all_p)
                all_p[:, :, 1] = 1.0
            for b, (_, bad_q, bad_p, _) in enumerate(cases):
                all_q[b, bad_q], all_p[b, bad_p] = NAN, NAN
            batch = len(cases)
            accept = torch.full((batch, 2), 0.125, dtype=torch.float64)
            last = torch.full((batch, 3), u, dtype=torch.float64)
            num_path, tokens, num_broken = ops.accept_chain(
                drafts.expand(batch, -1), all_q, target_ids, all_p, torch.full((batch,), 2),
                torch.full((batch,), temperature), accept, last[:, :2], last,
            )  # fmt: skip
            of_target = 1 if temperature == 0 else int(reference.draw(p[:1], last[:1, 0]))
            for b, (name, _, bad_p, (path, broken)) in enumerate(cases):
                if temperature == 0:  # what a greedy row's drafts were drawn from does not matter
                    path, broken = min([n + 1 for n in bad_p] + [3]), 0
                expected = NO_TOKEN if path - 1 in bad_p else of_target
                assert (name, num_path[b], tokens[b], num_broken[b]) == (name, path, expected, broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [16, 80])
def test_a_cache_holds_no_value_that_is_not_finite(dim: int, dtype: torch.dtype) -> None:
    """Triton and reference: a token whose key or value is not finite in a head has keys of NaN there, and such a value
    is 0; other heads and tokens have the bits that they had."""
    model = pytest.importorskip("specbatch.kernels.triton.model")
    heads, kv_heads, tokens = 12, 4, 7  # of more than one program
    width = (heads + 2 * kv_heads) * dim
    clean = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    qkv = clean.clone()
    first_key, first_value = heads * dim, (heads + kv_heads) * dim
    qkv[1, first_key + 2 * dim + 3] = NAN  # a key of head 2
    qkv[2, first_value + dim + 5] = INF  # a value of head 1
    qkv[3] = NAN
    qkv[4, 5] = NAN  # a query
    qkv[5, first_key + dim] = -INF
    qkv[6, first_value - 1] = INF  # the last number of the last key
    angles = torch.outer(torch.arange(50.0), torch.rand(dim // 2, generator=torch.Generator().manual_seed(1)))
    cos, sin = (t.repeat(1, 2).to(DEVICE, dtype) for t in (angles.cos(), angles.sin()))
    at = torch.arange(tokens, device=DEVICE)
    bad_keys = [(1, 2), (2, 1), *((3, h) for h in range(kv_heads)), (5, 1), (6, kv_heads - 1)]
    bad_values = [(2, 1), *((3, h) for h in range(kv_heads))]
    for ops in (model, reference):
        caches = []
        for values in (clean, qkv):
            cache = torch.zeros(2, kv_heads, tokens + 1, dim, dtype=dtype, device=DEVICE)
            ops.rotary_write(values.to(DEVICE), heads, kv_heads, cos, sin, at, at, cache, None, None, 0.0)
            caches.append(cache)
        expected, found = caches
        for token, head in bad_keys:
            expected[0, head, token] = NAN
        for token, head in bad_values:
            expected[1, head, token] = 0.0
        assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert found[1].isfinite().all()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("masked", [False, True], ids=["chain", "tree"])
def test_attention_beside_hidden_tokens_that_are_not_finite(masked: bool, splits: int) -> None:
    """Triton and reference: a query gets NaN where it sees such a token, and else the very bits that it has without: of
    later tokens of a chain, of other branches of a tree, and of what is left in pages past a sequence's end."""
    attention = pytest.importorskip("specbatch.kernels.triton.attention")
    starts, counts, dim = [5, 21, 0], [4, 4, 4], 16
    batch = paged_batch(starts, counts, 16)
    if masked:  # of each sequence: 0 - 1 - 3, and 2, which is bad, below 0
        words = torch.tensor([0b0001, 0b0011, 0b0101, 0b1011] * 3, dtype=torch.int32, device=DEVICE)[:, None]
        batch = dataclasses.replace(batch, mask_TW=words, mask_starts_B=batch.starts_B)
    generator = torch.Generator().manual_seed(0)
    num_slots = (int(batch.page_table_BP.max()) + 2) * 16
    kv = torch.randn(2, 2, num_slots, dim, generator=generator).to(DEVICE)
    q = torch.randn(12, 4, dim, generator=generator).to(DEVICE)
    spoilt = kv.clone()
    in_use = torch.cat([
        batch.page_table_BP[b, i // 16].view(1) * 16 + i % 16
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)) for i in range(start + count)
    ])  # fmt: skip
    left = torch.ones(num_slots, dtype=torch.bool, device=DEVICE)
    left[in_use.long()] = False
    spoilt[0, :, left], spoilt[1, :, left] = NAN, 0.0
    bad = batch.slots_T[[2, 10]]  # the third new token of the first sequence and of the last
    spoilt[0, :, bad], spoilt[1, :, bad] = NAN, 0.0
    sees_it = [2, 10] if masked else [2, 3, 10, 11]
    others = [i for i in range(12) if i not in sees_it]
    for ops in (attention, reference):
        workspace = ops.Workspace(DEVICE, 16384, dim)
        expected, found = (ops.attend(q, x, batch, dim**-0.5, None, splits, workspace) for x in (kv, spoilt))
        assert found[sees_it].isnan().all()
        assert torch.equal(found[others], expected[others])
