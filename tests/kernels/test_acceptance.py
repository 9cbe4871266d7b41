"""Acceptance, torch and Triton alike, against the oracle and against the distribution that it must give."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from specbatch.draft.rng import Draw
from specbatch.kernels import torch as reference
from specbatch.types import RngKey, SamplingParams
from tests.kernels.batches import CUDA, DEVICE
from tests.kernels.operations import (
    FILTERS,
    Ops,
    commit,
    filter_tensors,
    make_ops,
    noise_tensors,
    random_logits,
    sequence,
)
from tests.marks import slow_on_cpu
from tests.oracle.tree import DraftTree
from tests.oracle.verify import verify

pytestmark = [pytest.mark.gpu] if CUDA else []


def random_tree(rng: random.Random, num_nodes: int, width: int, vocab: int) -> tuple[list[int], list[int]]:
    """Tokens and parents, padded to `width` nodes; siblings differ."""
    tokens, parents = [rng.randrange(vocab)], [-1]
    taken = set()
    while len(tokens) < num_nodes:
        parent, token = rng.randrange(len(tokens)), rng.randrange(vocab)
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    pad = width - num_nodes
    return tokens + [rng.randrange(vocab)] * pad, parents + [-2] * pad


def tree_batch(batch: int, width: int, seed: int) -> tuple[list[list[int]], list[list[int]], list[int], Tensor]:
    """Trees of different sizes, chains among them, and choices that often follow them."""
    rng = random.Random(seed)
    tokens, parents, sizes = [], [], []
    for b in range(batch):
        size = width if b == 0 else rng.randrange(1, width + 1)
        t, p = random_tree(rng, size, width, 8)
        if b % 3 == 1:
            p[1:size] = range(size - 1)
        tokens.append(t)
        parents.append(p)
        sizes.append(size)
    choice = [[rng.randrange(8) for _ in range(width)] for _ in range(batch)]
    for b in range(batch):
        for node in range(1, sizes[b]):
            if rng.random() < 0.8:
                choice[b][parents[b][node]] = tokens[b][node]
    return tokens, parents, sizes, torch.tensor(choice)


@pytest.mark.parametrize("width", [1, 2, 5, 8, 33, 60, 64])
def test_path_down_a_tree(ops: Ops, width: int) -> None:
    """What `commit_round` accepts, and the token after it, with trees of all sizes. The choices are a greedy
    target's."""
    tokens, parents, sizes, choice = tree_batch(24, width, width)
    found = commit(ops, torch.tensor(tokens).to(DEVICE), torch.tensor(parents).to(DEVICE), choice.to(DEVICE))
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), sizes, False, [None] * 24)
    logits = torch.cat([torch.nn.functional.one_hot(choice[b, :n], 8).double() for b, n in enumerate(sizes)])
    sequences = [sequence(SamplingParams(), RngKey(0, b, 0), 3) for b in range(24)]
    lengths = set()
    for b, kept in enumerate(verify(sequences, tree, logits)):
        assert found.path_BM[b].tolist() == kept.path + [0] * (width - len(kept.path))
        assert found.num_path_B[b] == len(kept.path)
        assert found.tokens_BM[b, len(kept.path) - 1] == kept.next_token
        lengths.add(len(kept.path))
    assert width == 1 or len(lengths) > 1


def chain_noise(keys: list[RngKey], committed: int, num_drafts: int) -> tuple[Tensor, Tensor, Tensor]:
    """u_accept_BD, u_residual_BD, u_sample_BN."""
    seed, stream, sample, _ = (x[:, None] for x in noise_tensors(keys, [0] * len(keys)))
    position = committed + 1 + torch.arange(num_drafts + 1)[None]
    accept, residual, last = (
        reference.uniform(seed, stream, sample, position, p) for p in (Draw.ACCEPT, Draw.RESIDUAL, Draw.SAMPLE)
    )
    return accept[:, :num_drafts], residual[:, :num_drafts], last


@pytest.mark.parametrize("draft_vocab", ["same", "smaller", "mapped"])
def test_accept_chain(ops: Ops, draft_vocab: str) -> None:
    vocab, width, num_drafts, committed = 11, 11 if draft_vocab == "same" else 7, 4, 12
    batch = 36 if ops.is_slow else 90
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(9))[:width]
    target_ids = ids if draft_vocab == "mapped" else None
    places = ids if draft_vocab == "mapped" else torch.arange(width)
    rng = random.Random(4)
    params = [rng.choice([p for n, p in FILTERS.items() if n != "cold"]) for _ in range(batch)]
    keys = [RngKey(5, b, 0) for b in range(batch)]

    def distributions(logits: Tensor) -> Tensor:
        flat = [p for p in params for _ in range(logits.shape[1])]
        p = reference.distribution(logits.reshape(len(flat), -1), *filter_tensors(flat))
        return p.float().view(logits.shape)

    logits = random_logits(batch * (num_drafts + 1), vocab, 5, False).view(batch, num_drafts + 1, vocab)
    p, q = distributions(logits), distributions(logits[:, :num_drafts, places] * 0.8)
    seed, stream, sample, position = (x[:, None] for x in noise_tensors(keys, [committed + 1] * batch))
    u_draft = reference.uniform(seed, stream, sample, position + torch.arange(num_drafts), Draw.DRAFT)
    drafts = places[reference.draw(q.view(-1, width), u_draft.reshape(-1))].view(batch, num_drafts)
    counts = torch.tensor([rng.choice([0, 2, 4, 4]) for _ in range(batch)])
    temperature, rng = filter_tensors(params)[0], chain_noise(keys, committed, num_drafts)
    num_path, next_token, num_broken = ops.accept_chain(drafts, q, target_ids, p, counts, temperature, *rng)

    # The rows of nodes past a chain's drafts are left out.
    last = (counts[:, None] + 1).expand(-1, num_drafts + 1)
    is_kept = torch.arange(num_drafts + 1) < last
    index = (is_kept.view(-1).cumsum(0) - 1).view(is_kept.shape)
    packed_p = ops.accept_chain(drafts, q, target_ids, p[is_kept], counts, temperature, *rng, index)
    assert all(torch.equal(*pair) for pair in zip(packed_p, (num_path, next_token, num_broken), strict=True))

    wide = torch.zeros(batch, num_drafts, vocab, dtype=torch.float64)
    wide[:, :, places] = q.double()
    sizes = (counts + 1).tolist()
    tree = DraftTree(
        torch.cat((torch.zeros(batch, 1, dtype=torch.int64), drafts), 1),
        torch.arange(-1, num_drafts).expand(batch, -1),
        sizes,
        True,
        [wide[b, : n - 1] for b, n in enumerate(sizes)],
    )
    packed = torch.cat([logits[b, :n] for b, n in enumerate(sizes)])
    expected = verify([sequence(q_, k, committed) for q_, k in zip(params, keys, strict=True)], tree, packed)
    assert next_token.tolist() == [e.next_token for e in expected]
    assert num_path.tolist() == [len(e.path) for e in expected]
    assert set(num_path.tolist()) == {1, 2, 3, 4, 5}

    # What a greedy row's drafts were drawn from does not matter, and no draw does.
    blurred = torch.where((temperature == 0)[:, None, None], torch.full_like(q, 1 / width), q)
    extreme = [torch.where((temperature == 0)[:, None], 1 - 2.0**-53, u) for u in rng]
    again = ops.accept_chain(drafts, blurred, target_ids, p, counts, temperature, *extreme)
    assert torch.equal(again[0], num_path)
    assert torch.equal(again[1], next_token)
    assert not num_broken.any()


def test_rows_whose_drafts_are_given(ops: Ops) -> None:
    """They are accepted as if they were drawn from distributions that hold them alone. Other rows have fewer drafts,
    and distributions for no more."""
    vocab, num_drafts, num_drawn, batch = 11, 6, 2, 200
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(vocab, generator=generator)[:8]
    p = torch.softmax(torch.randn(batch, num_drafts + 1, vocab, generator=generator) * 2, dim=-1)
    p[:4] = torch.nn.functional.one_hot(torch.tensor(2), vocab)  # a draft that has it all, or nothing
    is_given, temperature = torch.arange(batch) % 3 > 0, (torch.arange(batch) % 5 > 0).float()
    p[temperature == 0] = torch.nn.functional.one_hot(p[temperature == 0].argmax(2), vocab).float()
    likely = p[:, :num_drafts].argmax(2)
    any_token = torch.randint(vocab, likely.shape, generator=generator)
    drafts = torch.where(torch.rand(likely.shape, generator=generator) < 0.6, likely, any_token)
    q = torch.softmax(torch.randn(batch, num_drawn, len(ids), generator=generator), dim=-1)
    drawn = ids[torch.multinomial(q.view(-1, len(ids)), 1, generator=generator)].view(batch, num_drawn)
    drafts[~is_given, :num_drawn] = drawn[~is_given]
    counts = torch.randint(num_drafts + 1, (batch,), generator=generator)
    counts = torch.where(is_given, counts, counts.clamp(max=num_drawn))
    coins = [torch.rand(batch, n, generator=generator, dtype=torch.float64) for n in (6, 6, 7)]
    wide = torch.zeros(batch, num_drafts, vocab)
    wide[:, :num_drawn, ids] = q
    wide[is_given] = torch.nn.functional.one_hot(drafts[is_given], vocab).float()
    expected = reference.accept_chain(drafts, wide, None, p, counts, temperature, *coins)
    q[is_given] = torch.nan  # not read
    found = ops.accept_chain(drafts, q, ids, p, counts, temperature, *coins, None, is_given)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    lengths = {int(n) for n in found[0][is_given & (temperature > 0)]}
    assert len(lengths) > 3

    # Past the distributions q is 0: a grammar forces such tokens.
    p[:, num_drawn:num_drafts] = torch.nn.functional.one_hot(drafts[:, num_drawn:], vocab).float()
    counts[:] = num_drafts
    num_path, _, _ = ops.accept_chain(drafts, q, ids, p, counts, temperature, *coins, None, is_given)
    assert set(num_path[~is_given].tolist()) == {1, 2, num_drafts + 1}


PAIRS = [
    ([4, 2, 1, 1], [2, 2, 2, 2]),
    ([3, 3, 1, 1], [1, 1, 2, 4]),
    ([0, 2, 3, 3], [4, 2, 1, 1]),
    ([2, 2, 2, 2], [2, 2, 2, 2]),
    ([4, 4, 0, 0], [0, 0, 4, 4]),
]


def pair_of(prefix: tuple[int, ...], shift: int) -> int:
    """Which of PAIRS holds after the tokens `prefix`."""
    return (sum(prefix) + len(prefix) + shift) % len(PAIRS)


@pytest.mark.parametrize(("kind", "num_drafts"), [("torch", 2), ("torch", 1), slow_on_cpu("triton", 1)])
def test_accept_chain_realises_the_target(kind: str, num_drafts: int) -> None:
    """Output of a round, by enumeration of drafts and uniforms: exactly the target's distribution."""
    ops, vocab, pairs = make_ops(kind), 4, torch.tensor(PAIRS) / 8

    for shift in range(len(PAIRS)):
        grids = [range(vocab)] * num_drafts + [range(4)] * num_drafts + [range(8)]
        cases = torch.tensor(list(itertools.product(*grids)))
        drafts = cases[:, :num_drafts]
        accept = (cases[:, num_drafts:-1].double() + 0.5) / 4
        last = (cases[:, -1:].double() + 0.5) / 8  # only one of residual and sample is ever drawn
        prefixes = [tuple(row) for row in drafts.tolist()]
        which = [[pair_of(x[:i], shift) for i in range(num_drafts + 1)] for x in prefixes]
        p, q = pairs[:, 0][torch.tensor(which)], pairs[:, 1][torch.tensor(which)][:, :num_drafts]
        mass = q.gather(2, drafts[:, :, None])[:, :, 0].double().prod(dim=1) / 4**num_drafts / 8
        rows = len(cases)
        num_path, next_token, _ = ops.accept_chain(
            drafts,
            q,
            None,
            p,
            torch.full((rows,), num_drafts),
            torch.ones(rows),
            accept,
            last.expand(-1, num_drafts),
            last.expand(-1, num_drafts + 1),
        )
        emitted: dict[tuple[int, ...], float] = {}
        for x, count, token, m in zip(prefixes, num_path.tolist(), next_token.tolist(), mass.tolist(), strict=True):
            key = (*x[: count - 1], token)
            emitted[key] = emitted.get(key, 0.0) + m
        # Continue what is shorter by the target itself.
        for length in range(1, num_drafts + 1):
            for key in [k for k in emitted if len(k) == length]:
                m = emitted.pop(key)
                for token, p_token in enumerate(pairs[pair_of(key, shift), 0].tolist()):
                    emitted[*key, token] = emitted.get((*key, token), 0.0) + m * p_token
        for key in itertools.product(range(vocab), repeat=num_drafts + 1):
            expected = math.prod(float(pairs[pair_of(key[:i], shift), 0, token]) for i, token in enumerate(key))
            assert emitted.get(key, 0.0) == expected


@pytest.mark.parametrize("mapped", [False, True])
def test_large_accept_chain(triton_ops: Ops, mapped: bool) -> None:
    batch, num_drafts, vocab, width = 8, 3, 9001, 5000
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(vocab, generator=generator)[:width]
    p = torch.softmax(torch.randn(batch, num_drafts + 1, vocab, generator=generator) * 4, dim=-1)
    near = p[:, :num_drafts, ids if mapped else slice(width)]
    q = near * torch.rand(near.shape, generator=generator)
    q /= q.sum(dim=-1, keepdim=True)
    flat = torch.multinomial(q.view(-1, width), 1, generator=generator).view(batch, num_drafts)
    coins = [torch.rand(batch, n, generator=generator, dtype=torch.float64) for n in (3, 3, 4)]
    counts = torch.tensor([0, 1, 2, 3] * 2)
    args = (ids[flat] if mapped else flat, q, ids if mapped else None, p, counts, torch.ones(batch), *coins)
    found, expected = triton_ops.accept_chain(*args), reference.accept_chain(*args)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
