"""The batched operations of a round against the rules that decide one sequence at a time, and their Triton kernels
against the torch twins (in Triton's interpreter on CPU, compiled on CUDA)."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from specbatch.kernels import torch_round
from specbatch.speculation import sampling
from specbatch.speculation.ngram import NgramProposer
from specbatch.speculation.noise import Purpose, uniform
from specbatch.speculation.sequence import Sequence
from specbatch.speculation.tree import DraftShape, DraftTree, select_nodes
from specbatch.speculation.verify import verify
from specbatch.types import NoiseKey, Request, SamplingParams

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


def filter_tensors(params: list[SamplingParams], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
    )


def random_logits(rows: int, vocab: int, seed: int, ties: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    return ((logits * 2).round() / 2 if ties else logits).to(dtype)


def sequence(params: SamplingParams, noise: NoiseKey, committed: int, max_length: int = 10**6) -> Sequence:
    return Sequence(Request(0, [1], params, noise), [1] * (committed + 1), max_length, num_committed=committed)


def host_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), logits_V.shape[0]).double()
    return sampling.distribution(logits_V, params)


# The twins against the host.


def test_twin_of_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-1.0, -1.0, -2.0, -1.0], [0.0, -0.0, -3.0, -math.inf]])
    assert torch_round.argmax(logits).tolist() == [1, 0, 0]


def noise_cases() -> tuple[list[NoiseKey], list[int]]:
    rng = random.Random(0)
    words = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    words += [rng.getrandbits(64) for _ in range(60)]
    keys = [NoiseKey(rng.choice(words), rng.choice(words), rng.randrange(100)) for _ in range(200)]
    return keys, [rng.choice([0, 1, rng.randrange(2**17), 2**32 - 1]) for _ in keys]


def as_int64(words: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64, device=device)


def noise_tensors(keys: list[NoiseKey], positions: list[int], device: str = "cpu") -> tuple[Tensor, ...]:
    columns = ([k.seed for k in keys], [k.stream for k in keys], [k.sample for k in keys], positions)
    return tuple(as_int64(c, device) for c in columns)


@pytest.mark.parametrize("purpose", Purpose)
def test_twin_of_uniform(purpose: Purpose) -> None:
    keys, positions = noise_cases()
    found = torch_round.uniform(*noise_tensors(keys, positions), purpose)
    assert found.dtype == torch.float64
    assert found.tolist() == [uniform(k, p, purpose) for k, p in zip(keys, positions, strict=True)]


def test_twin_of_uniform_broadcasts() -> None:
    seed, stream, sample, position = noise_tensors([NoiseKey(5, 6, 0), NoiseKey(7, 2**40, 1)], [10, 20])
    found = torch_round.uniform(seed[:, None], stream[:, None], sample[:, None], position[:, None] + torch.arange(3), 2)
    assert found.shape == (2, 3)
    assert found[1, 2] == uniform(NoiseKey(7, 2**40, 1), 22, Purpose.ACCEPT)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_twin_of_distribution_and_sample(ties: bool) -> None:
    params = list(FILTERS.values()) * 8
    logits = random_logits(len(params), 50, 1, ties)
    expected = [host_distribution(row, p) for row, p in zip(logits, params, strict=True)]
    found = torch_round.distribution(logits, *filter_tensors(params))
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.stack(expected).float())
    for u in [0.0, 0.1, 0.5, 0.9, 1 - 2.0**-53]:
        tokens = torch_round.sample(logits, *filter_tensors(params), torch.full((len(params),), u, dtype=torch.float64))
        assert tokens.tolist() == [sampling.draw(p, u) for p in expected]


def test_twin_of_draw_at_every_boundary() -> None:
    """Just below each boundary of the cumulative sum and on it: token i gets exactly [cdf[i - 1], cdf[i])."""
    p = torch.tensor([0.0, 0.25, 0.0, 0.125, 0.5, 0.125, 0.0])
    edges = [0.0, 0.25, 0.375, 0.875, 1.0]
    for token, low, high in zip([1, 3, 4, 5], edges, edges[1:], strict=False):
        for u in (low, (low + high) / 2, math.nextafter(high, 0.0)):
            # A total of 3 makes the products inexact; the last boundary must not be left.
            for scale in (1.0, 2.0**-40):
                assert torch_round.draw(p[None] * scale, torch.tensor([u], dtype=torch.float64)).item() == token
    inexact = torch.tensor([[0.1, 0.7, 0.0]], dtype=torch.float32)
    assert torch_round.draw(inexact, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 1


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
def test_twin_of_accept_path(width: int) -> None:
    """The choices are a greedy target's."""
    tokens, parents, sizes, choice = tree_batch(24, width, width)
    path, num_path = torch_round.accept_path(torch.tensor(tokens), torch.tensor(parents), choice)
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), sizes, False, [None] * 24)
    logits = torch.cat([torch.nn.functional.one_hot(choice[b, :n], 8).double() for b, n in enumerate(sizes)])
    sequences = [sequence(SamplingParams(), NoiseKey(0, b, 0), 3) for b in range(24)]
    lengths = set()
    for b, kept in enumerate(verify(sequences, tree, logits)):
        assert path[b].tolist() == kept.path + [0] * (width - len(kept.path))
        assert num_path[b] == len(kept.path)
        assert choice[b, kept.path[-1]] == kept.next_token
        lengths.add(len(kept.path))
    assert width == 1 or len(lengths) > 1


def chain_noise(keys: list[NoiseKey], committed: int, num_drafts: int) -> tuple[Tensor, Tensor, Tensor]:
    """u_accept_BD, u_residual_BD, u_sample_BN."""
    seed, stream, sample, _ = (x[:, None] for x in noise_tensors(keys, [0] * len(keys)))
    position = committed + 1 + torch.arange(num_drafts + 1)[None]
    accept, residual, last = (
        torch_round.uniform(seed, stream, sample, position, p)
        for p in (Purpose.ACCEPT, Purpose.RESIDUAL, Purpose.SAMPLE)
    )
    return accept[:, :num_drafts], residual[:, :num_drafts], last


@pytest.mark.parametrize("draft_vocab", ["same", "smaller", "mapped"])
def test_twin_of_accept_chain(draft_vocab: str) -> None:
    vocab, width, num_drafts, batch, committed = 11, 11 if draft_vocab == "same" else 7, 4, 90, 12
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(9))[:width]
    target_ids = ids if draft_vocab == "mapped" else None
    rng = random.Random(4)
    params = [rng.choice([p for n, p in FILTERS.items() if n != "cold"]) for _ in range(batch)]
    keys = [NoiseKey(5, b, 0) for b in range(batch)]
    logits = random_logits(batch * (num_drafts + 1), vocab, 5, False).view(batch, num_drafts + 1, vocab)
    draft_logits = (logits[:, :num_drafts, ids if target_ids is not None else slice(width)] * 0.8).contiguous()
    flat = [p for p in params for _ in range(num_drafts)]
    q = torch_round.distribution(draft_logits.view(-1, width), *filter_tensors(flat)).view(batch, num_drafts, width)
    p = torch_round.distribution(
        logits.view(-1, vocab), *filter_tensors([p for p in params for _ in range(num_drafts + 1)])
    ).view(batch, num_drafts + 1, vocab)
    seed, stream, sample, position = noise_tensors(keys, [committed + 1] * batch)
    u_draft = torch_round.uniform(
        seed[:, None], stream[:, None], sample[:, None], position[:, None] + torch.arange(4), 1
    )
    drafts = torch_round.draw(q.view(-1, width), u_draft.reshape(-1)).view(batch, num_drafts)
    drafts = drafts if target_ids is None else target_ids[drafts]
    counts = torch.tensor([rng.choice([0, 2, 4, 4]) for _ in range(batch)])
    num_path, next_token = torch_round.accept_chain(
        drafts, q, target_ids, p, counts, filter_tensors(params)[0], *chain_noise(keys, committed, num_drafts)
    )

    wide = torch.zeros(batch, num_drafts, vocab, dtype=torch.float64)
    wide[:, :, ids if target_ids is not None else torch.arange(width)] = q.double()
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


@pytest.mark.parametrize("k", [1, 3, 10, 16])
def test_twin_of_draft_topk(k: int) -> None:
    logits = random_logits(6, 40, k, ties=True)
    scores, ids = torch_round.draft_topk(logits, k)
    for b in range(6):
        order = sorted(range(40), key=lambda i: (-float(logits[b, i]), i))[:k]
        assert ids[b].tolist() == order
        assert torch.allclose(scores[b], torch.log_softmax(logits[b], 0)[order])


def beam(shape: DraftShape, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of drafting by `NeuralProposer._tree`'s rule: tokens, scores, parents (B, C); many scores tie."""
    generator = torch.Generator().manual_seed(seed)
    k = shape.topk

    def step_of(rows: int) -> tuple[Tensor, Tensor]:
        scores = -torch.randint(1, 5, (batch, rows, k), generator=generator).float() / 2
        scores[::2, :, 0] = -0.0625  # deep trees among the broad ones
        tokens = torch.stack([torch.randperm(50, generator=generator)[:k] for _ in range(batch * rows)])
        return scores.sort(dim=-1, descending=True).values, tokens.view(batch, rows, k)

    scores_BK, tokens_BK = (x[:, 0] for x in step_of(1))
    tokens, scores, parents = [tokens_BK], [scores_BK], [torch.full_like(tokens_BK, -1)]
    index = torch.arange(k).expand(batch, k)
    for _ in range(1, shape.num_steps):
        first = sum(t.shape[1] for t in tokens)
        cand_scores, cand_tokens, chosen, scores_BK, tokens_BK, parent = torch_round.beam_step(scores_BK, *step_of(k))
        assert torch.equal(parent, chosen // k)
        assert torch.equal(cand_tokens.gather(1, chosen), tokens_BK)
        expected = [sorted(range(k * k), key=lambda i: (-float(row[i]), i))[:k] for row in cand_scores]
        assert chosen.tolist() == expected
        tokens.append(cand_tokens)
        scores.append(cand_scores)
        parents.append(index.repeat_interleave(k, dim=1))
        index = first + chosen
    return torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1)


def mask_bits(mask_NW: Tensor, num_nodes: int) -> Tensor:
    nodes = torch.arange(num_nodes)
    return (mask_NW[:, nodes >> 5] >> (nodes & 31) & 1).bool()


SHAPES = [DraftShape(7, 10, 60), DraftShape(5, 4, 8), DraftShape(2, 2, 2), DraftShape(6, 8, 64), DraftShape(4, 1, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twin_of_beam_step_and_select_nodes(shape: DraftShape) -> None:
    candidates = beam(shape, 6, shape.topk)
    root = torch.arange(6)
    tokens, parents, depths, mask = torch_round.select_nodes(root, *candidates, shape.num_draft_tokens, shape.num_steps)
    tree = select_nodes(root, *candidates, shape.num_draft_tokens)
    assert torch.equal(tokens, tree.tokens_BN)
    assert torch.equal(parents, tree.parents_BN)
    assert mask.dtype == torch.int32
    assert mask.shape[2] == math.ceil(shape.num_draft_tokens / 32)
    for b in range(6):
        assert depths[b].tolist() == tree.depths(b)
        assert torch.equal(mask_bits(mask[b], shape.num_draft_tokens), tree.mask(b))
    assert depths.max() == min(shape.num_steps, shape.num_draft_tokens - 1)


def histories(seed: int) -> tuple[list[list[int]], list[int]]:
    """Token lists of two to four words, so that matches of every length abound, and their limits."""
    rng = random.Random(seed)
    texts = [[rng.randrange(rng.choice([2, 3, 4])) for _ in range(rng.randrange(1, 40))] for _ in range(60)]
    texts += [[1], [1, 1], [1, 2], [1, 2, 1], [5, 6, 7, 5, 6, 7], [3] * 40]
    return texts, [len(t) + rng.choice([0, 1, 3, 50]) for t in texts]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 4), (3, 8)])
def test_twin_of_ngram_lookup(sizes: tuple[int, int]) -> None:
    texts, limits = histories(sizes[1])
    order = random.Random(1).sample(range(len(texts)), len(texts))
    tokens = torch.full((len(texts), 40), 1, dtype=torch.int32)  # what lies behind a text must not be seen
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = torch.tensor(text)
    drafts, counts = torch_round.ngram_lookup(
        tokens, torch.tensor(order), torch.tensor([len(t) for t in texts]), torch.tensor(limits), *sizes, 6
    )
    sequences = []
    proposer = NgramProposer(7, *sizes)
    for slot in order:
        seq = sequence(SamplingParams(), NoiseKey(0, 0, 0), 1, limits[slot])
        seq.tokens = list(texts[slot])
        proposer.start(seq)
        sequences.append(seq)
    tree = proposer.propose(sequences)
    assert set(tree.num_nodes) >= {1, 2, 4, 7}
    for b, n in enumerate(tree.num_nodes):
        assert counts[b] == n - 1
        assert drafts[b].tolist() == tree.tokens_BN[b, 1:n].tolist() + [0] * (7 - n)
