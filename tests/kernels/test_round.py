"""The batched operations of a round, torch and Triton alike, against the rules that decide one sequence at a time;
and Triton's against the reference on sizes that take many blocks. Without a GPU, in Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specbatch.batch import NUM_FIELDS, Candidates, Committed, Field
from specbatch.draft.rng import Draw
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence
from specbatch.kernels import torch as reference
from specbatch.types import Request, RngKey, SamplingParams
from tests.marks import slow_on_cpu
from tests.oracle import sampling
from tests.oracle.ngram import NgramProposer
from tests.oracle.rng import uniform
from tests.oracle.tree import DraftTree, select_nodes
from tests.oracle.verify import verify

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if CUDA else []
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


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


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


def host_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), logits_V.shape[0]).double()
    return sampling.distribution(logits_V, params)


def test_argmax(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-1.0, -1.0, -2.0, -1.0], [0.0, -0.0, -3.0, -math.inf]])
    assert ops.argmax(logits).tolist() == [1, 0, 0]


def noise_cases() -> tuple[list[RngKey], list[int]]:
    rng = random.Random(0)
    words = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    words += [rng.getrandbits(64) for _ in range(60)]
    keys = [RngKey(rng.choice(words), rng.choice(words), rng.randrange(100)) for _ in range(200)]
    return keys, [rng.choice([0, 1, rng.randrange(2**17), 2**32 - 1]) for _ in keys]


def as_int64(words: list[int]) -> Tensor:
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64)


def noise_tensors(keys: list[RngKey], positions: list[int]) -> tuple[Tensor, ...]:
    columns = ([k.seed for k in keys], [k.stream for k in keys], [k.sample for k in keys], positions)
    return tuple(as_int64(c) for c in columns)


@pytest.mark.parametrize("purpose", Draw)
def test_uniform(ops: Ops, purpose: Draw) -> None:
    keys, positions = noise_cases()
    found = ops.uniform(*noise_tensors(keys, positions), purpose)
    assert found.dtype == torch.float64
    assert found.tolist() == [uniform(k, p, purpose) for k, p in zip(keys, positions, strict=True)]


def test_uniform_broadcasts(ops: Ops) -> None:
    seed, stream, sample, position = noise_tensors([RngKey(5, 6, 0), RngKey(7, 2**40, 1)], [10, 20])
    found = ops.uniform(seed[:, None], stream[:, None], sample[:, None], position[:, None] + torch.arange(3), 2)
    assert found.shape == (2, 3)
    assert found[1, 2] == uniform(RngKey(7, 2**40, 1), 22, Draw.ACCEPT)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_distribution_and_sample(ops: Ops, ties: bool) -> None:
    params = list(FILTERS.values()) * (1 if ops.is_slow else 8)
    logits = random_logits(len(params), 50, 1, ties)
    expected = [host_distribution(row, p) for row, p in zip(logits, params, strict=True)]
    found = ops.distribution(logits, *filter_tensors(params))
    assert found.dtype == torch.float32
    if ops.is_exact:
        assert torch.equal(found, torch.stack(expected).float())
    assert torch.equal(found > 0, torch.stack(expected).float() > 0)
    assert torch.allclose(found, torch.stack(expected).float(), rtol=2e-5, atol=0)
    for u in [0.0, 0.1, 0.5, 0.9, 1 - 2.0**-53]:
        tokens = ops.sample(logits, *filter_tensors(params), torch.full((len(params),), u, dtype=torch.float64))
        assert tokens.tolist() == [sampling.draw(p, u) for p in expected]


def test_draw_at_every_boundary(ops: Ops) -> None:
    """Just below each boundary of the cumulative sum and on it: token i gets exactly [cdf[i - 1], cdf[i])."""
    p = torch.tensor([0.0, 0.25, 0.0, 0.125, 0.5, 0.125, 0.0])
    edges = [0.0, 0.25, 0.375, 0.875, 1.0]
    for token, low, high in zip([1, 3, 4, 5], edges, edges[1:], strict=False):
        for u in (low, (low + high) / 2, math.nextafter(high, 0.0)):
            # A total of 3 makes the products inexact; the last boundary must not be left.
            for scale in (1.0, 2.0**-40):
                assert ops.draw(p[None] * scale, torch.tensor([u], dtype=torch.float64)).item() == token
    inexact = torch.tensor([[0.1, 0.7, 0.0]], dtype=torch.float32)
    assert ops.draw(inexact, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 1


@pytest.mark.parametrize("name", [n for n in FILTERS if n != "greedy"])
def test_sample_realises_the_distribution(ops: Ops, name: str) -> None:
    """Every token is drawn over its whole interval of uniforms, and nothing else is: at both ends and in the middle."""
    rows, uniforms, expected = [], [], []
    for seed in range(2 if ops.is_slow else 20):
        logits = random_logits(1, 8 if ops.is_slow else 24, seed, ties=seed % 2 == 0)[0]
        cdf = [0.0, *host_distribution(logits, FILTERS[name]).cumsum(0).tolist()]
        for token, (low, high) in enumerate(itertools.pairwise(cdf)):
            margin = 0.0 if ops.is_exact and low == 0.0 else 1e-6
            if high - low > 4e-6:
                for u in (low + margin, (low + high) / 2, high - max(margin, 1e-15)):
                    rows.append(logits)
                    uniforms.append(u)
                    expected.append(token)
    assert len(set(expected)) > 1 or name in ("top_k 1", "tiny top_p", "cold")
    filters = filter_tensors([FILTERS[name]] * len(rows))
    assert ops.sample(torch.stack(rows), *filters, torch.tensor(uniforms, dtype=torch.float64)).tolist() == expected


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
    vocab, width, num_drafts, batch, committed = 11, 11 if draft_vocab == "same" else 7, 4, 90, 12
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(9))[:width]
    target_ids = ids if draft_vocab == "mapped" else None
    places = ids if draft_vocab == "mapped" else torch.arange(width)
    rng = random.Random(4)
    params = [rng.choice([p for n, p in FILTERS.items() if n != "cold"]) for _ in range(batch)]
    keys = [RngKey(5, b, 0) for b in range(batch)]

    def distributions(logits: Tensor) -> Tensor:
        flat = [p for p in params for _ in range(logits.shape[1])]
        return reference.distribution(logits.reshape(len(flat), -1), *filter_tensors(flat)).view(logits.shape)

    logits = random_logits(batch * (num_drafts + 1), vocab, 5, False).view(batch, num_drafts + 1, vocab)
    p, q = distributions(logits), distributions(logits[:, :num_drafts, places] * 0.8)
    seed, stream, sample, position = (x[:, None] for x in noise_tensors(keys, [committed + 1] * batch))
    u_draft = reference.uniform(seed, stream, sample, position + torch.arange(num_drafts), Draw.DRAFT)
    drafts = places[reference.draw(q.view(-1, width), u_draft.reshape(-1))].view(batch, num_drafts)
    counts = torch.tensor([rng.choice([0, 2, 4, 4]) for _ in range(batch)])
    temperature, rng = filter_tensors(params)[0], chain_noise(keys, committed, num_drafts)
    num_path, next_token, num_broken = ops.accept_chain(drafts, q, target_ids, p, counts, temperature, *rng)

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


# Pairs p, q in eighths, for which p / q is a multiple of 1/4 and quantiles of p and of the residual are such of 1/8. So
# uniforms in the middles of the quarters and of the eighths measure exactly.
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


@pytest.mark.parametrize("k", [1, 3, 10, 16])
def test_draft_topk(ops: Ops, k: int) -> None:
    logits = random_logits(6, 40, k, ties=True)
    scores, ids = ops.draft_topk(logits, k)
    for b in range(6):
        order = sorted(range(40), key=lambda i: (-float(logits[b, i]), i))[:k]
        assert ids[b].tolist() == order
        assert torch.allclose(scores[b], torch.log_softmax(logits[b], 0)[order])


def draft(ops: Ops, shape: DraftShape, batch: int, seed: int) -> Candidates:
    """Candidates of a tree whose scores often tie."""
    generator = torch.Generator().manual_seed(seed)
    k = shape.topk

    def step_of(*rows: int) -> tuple[Tensor, Tensor]:
        scores = -torch.randint(1, 5, (batch, *rows, k), generator=generator).float() / 2
        scores[::2, ..., 0] = -0.0625  # deep trees among the broad ones
        tokens = torch.rand(batch, *rows, 50, generator=generator).argsort(dim=-1)[..., :k]
        return scores.sort(dim=-1, descending=True).values.to(DEVICE), tokens.to(DEVICE)

    candidates, branches = ops.raw.beam_start(*step_of(), None, shape.num_candidates, 1)
    for step in range(1, shape.num_steps):
        branches = ops.raw.beam_expand(candidates, branches, *step_of(k), None, step)
    return candidates


def mask_bits(mask_NW: Tensor, num_nodes: int) -> Tensor:
    nodes = torch.arange(num_nodes)
    return (mask_NW[:, nodes >> 5] >> (nodes & 31) & 1).bool()


SHAPES = [DraftShape(7, 10, 60), DraftShape(5, 4, 8), DraftShape(2, 2, 2), DraftShape(6, 8, 64), DraftShape(4, 1, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_select_nodes(ops: Ops, shape: DraftShape) -> None:
    candidates = draft(ops, shape, 6, shape.topk)
    root = torch.arange(6)
    tokens, parents, depths, mask = ops.select_nodes(root, *candidates, shape.num_draft_tokens, shape.num_steps)
    tree = select_nodes(root, *(x.cpu() for x in candidates), shape.num_draft_tokens)
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
def test_ngram_lookup(ops: Ops, sizes: tuple[int, int]) -> None:
    texts, limits = histories(sizes[1])
    order = random.Random(1).sample(range(len(texts)), len(texts))
    tokens = torch.full((len(texts), 40), 1, dtype=torch.int32)  # what lies after a text must not be seen
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = torch.tensor(text)
    table = torch.tensor([[0, len(t), limit] for t, limit in zip(texts, limits, strict=True)])
    drafts, counts = ops.ngram_lookup(tokens, torch.tensor(order), table[:, 1], table[:, 2], *sizes, 6)
    sequences = []
    proposer = NgramProposer(7, *sizes)
    for slot in order:
        seq = sequence(SamplingParams(), RngKey(0, 0, 0), 1, limits[slot])
        seq.tokens = list(texts[slot])
        proposer.start(seq)
        sequences.append(seq)
    tree = proposer.propose(sequences)
    assert set(tree.num_nodes) >= {1, 2, 4, 7}
    for b, n in enumerate(tree.num_nodes):
        assert counts[b] == n - 1
        assert drafts[b].tolist() == tree.tokens_BN[b, 1:n].tolist() + [0] * (7 - n)


# Triton against the reference: rows of many blocks, other types, rows that lie apart.


def large_logits(dtype: torch.dtype, ties: bool = False) -> Tensor:
    """(5, 9001), rows apart, and a row each of equal logits, of -inf but for a few, and of a peak with zeros."""
    logits = random_logits(5, 9008, 3, ties)
    logits[1] = -0.5
    logits[2, :] = -math.inf
    logits[2, [5, 4095, 4096, 9000]] = torch.tensor([1.0, 2.0, 2.0, -3.0])
    logits[3] = torch.tensor([0.0, -0.0]).repeat(4504)
    logits[3, 8999] = 1.5
    return logits.to(dtype)[:, :9001]


@pytest.fixture
def triton_ops() -> Ops:
    return make_ops("triton")


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_argmax_and_topk(triton_ops: Ops, dtype: torch.dtype) -> None:
    logits = large_logits(dtype)
    assert torch.equal(triton_ops.argmax(logits), reference.argmax(logits.double()))
    for k in (1, 10):
        scores, ids = triton_ops.draft_topk(logits, k)
        expected_scores, expected_ids = reference.draft_topk(logits.float(), k)
        assert torch.equal(ids, expected_ids)
        assert torch.allclose(scores, expected_scores, atol=1e-5)


LARGE = [(name, torch.float32) for name in FILTERS] + [("plain", torch.bfloat16), ("all", torch.bfloat16)]
# Of another type only what is loaded differs, whatever the filters.
LARGE += [slow_on_cpu(name, torch.bfloat16) for name in FILTERS if name not in ("plain", "all")]


@pytest.mark.parametrize(("name", "dtype"), LARGE, ids=str)
def test_large_distribution_sample_and_draw(triton_ops: Ops, name: str, dtype: torch.dtype) -> None:
    logits = large_logits(dtype)
    filters = filter_tensors([FILTERS[name]] * len(logits))
    found, expected = triton_ops.distribution(logits, *filters), reference.distribution(logits, *filters)
    assert torch.equal(found > 1e-30, expected > 1e-30)
    assert torch.allclose(found, expected, rtol=1e-4, atol=0)
    for u in (0.123, 1 - 2.0**-53):
        uniforms = torch.full((len(logits),), u, dtype=torch.float64)
        tokens = triton_ops.sample(logits, *filters, uniforms)
        assert torch.equal(tokens, triton_ops.draw(found, uniforms))
        # The same token, or its neighbour if the uniform is at their boundary.
        cdf = expected.double().cumsum(1)
        high = cdf.gather(1, tokens[:, None])[:, 0]
        low = high - expected.gather(1, tokens[:, None])[:, 0]
        assert bool(((low - 1e-6 <= u) & (u <= high + 1e-6)).all())
        assert bool((expected.gather(1, tokens[:, None]) > 0).all())


@pytest.mark.parametrize("seed", range(4))
def test_large_filters_of_any_strength(triton_ops: Ops, seed: int) -> None:
    """What is kept, on random combinations of filters."""
    rng = random.Random(seed)
    logits = large_logits(torch.float32, ties=seed % 2 == 0)
    params = [
        SamplingParams(
            temperature=2.0 ** rng.randrange(-3, 4),
            top_k=rng.choice([0, 1, 2, 50, 1000, 8999, 9000, 9001, 20000]),
            top_p=rng.choice([1.0, 1 - 2.0**-12, 0.9375, 0.5, 2.0**-10]),
            min_p=rng.choice([0.0, 0.0, 2.0**-10, 0.5, 1.0]),
        )
        for _ in logits
    ]
    found = triton_ops.distribution(logits, *filter_tensors(params))
    expected = reference.distribution(logits, *filter_tensors(params))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert ((found > 0) != (expected > 0)).sum() <= 2, "more than a rounding at the end of top-p"


@pytest.mark.parametrize("mapped", [False, True])
def test_large_accept_chain(triton_ops: Ops, mapped: bool) -> None:
    batch, num_drafts, vocab, width = 12, 3, 9001, 5000
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(vocab, generator=generator)[:width]
    p = torch.softmax(torch.randn(batch, num_drafts + 1, vocab, generator=generator) * 4, dim=-1)
    near = p[:, :num_drafts, ids if mapped else slice(width)]
    q = near * torch.rand(near.shape, generator=generator)
    q /= q.sum(dim=-1, keepdim=True)
    flat = torch.multinomial(q.view(-1, width), 1, generator=generator).view(batch, num_drafts)
    coins = [torch.rand(batch, n, generator=generator, dtype=torch.float64) for n in (3, 3, 4)]
    counts = torch.tensor([0, 1, 2, 3] * 3)
    args = (ids[flat] if mapped else flat, q, ids if mapped else None, p, counts, torch.ones(batch), *coins)
    found, expected = triton_ops.accept_chain(*args), reference.accept_chain(*args)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_large_ngram_lookup(triton_ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 6, (9, 3000), generator=generator).int()
    lengths = torch.tensor([1, 2, 1023, 1024, 1025, 2048, 2049, 2999, 3000])
    args = (tokens, torch.tensor([8, 3, 4, 0, 1, 2, 5, 6, 7]), lengths, lengths + 3, 2, 9, 5)
    for found, expected in zip(triton_ops.ngram_lookup(*args), reference.ngram_lookup(*args), strict=True):
        assert torch.equal(found, expected)


def test_garbage_gives_no_index_out_of_range(triton_ops: Ops) -> None:
    """As in a captured graph's padding rows."""
    logits = torch.full((3, 300), math.nan)
    logits[1] = -math.inf
    logits[2, ::2] = math.inf
    assert triton_ops.draw(logits, torch.full((3,), 0.5, dtype=torch.float64)).lt(300).all()
    for garbage in (math.nan, -math.inf, math.inf):
        scores, ids = torch.full((3, 4, 4), garbage, device=DEVICE), torch.ones((3, 4, 4), device=DEVICE).long()
        candidates, branches = triton_ops.raw.beam_start(scores[:, 0], ids[:, 0], None, 20, 1)
        branches = triton_ops.raw.beam_expand(candidates, branches, scores, ids, None, 1)
        assert bool(((branches.parent_BK >= 0) & (branches.parent_BK < 4)).all())
        assert bool(((branches.index_BK >= 4) & (branches.index_BK < 20)).all())
        assert bool((branches.tokens_BK == 1).all())
        tokens, parents, depths, _ = triton_ops.select_nodes(ids[:, 0, 0], *candidates, 8, 2)
        assert bool((tokens == 1).all())
        assert bool((parents < torch.arange(8)).all())
        assert bool(((depths >= 0) & (depths < 8)).all())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_captured_in_a_graph(kind: str) -> None:
    """All operations one after the other in one CUDA graph (capture refuses what makes the host wait), replayed on
    other inputs."""
    ops = make_ops(kind)

    def inputs(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(12, 9001, generator=generator) * 3
        integers = [torch.randint(-(2**62), 2**62, (12,), generator=generator) for _ in range(4)]
        history = torch.randint(0, 4, (12, 2000), generator=generator).int()
        parents = torch.stack([torch.arange(-1, 3), torch.tensor([-1, 0, 0, 1]), torch.tensor([-1, 0, 0, 2])])
        root = torch.randint(0, 9, (3,), generator=generator)
        return [x.to(DEVICE) for x in (logits, *integers, history, parents, root)]

    filters = [x.to(DEVICE) for x in filter_tensors([FILTERS["all"], FILTERS["greedy"], FILTERS["top_p"]] * 4)]
    lengths = torch.arange(500, 1700, 100, device=DEVICE)
    rows = torch.arange(12, device=DEVICE).flip(0)

    def everything(
        logits: Tensor, seed: Tensor, stream: Tensor, sample: Tensor, position: Tensor, history: Tensor,
        parents: Tensor, root: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        u = ops.raw.uniform(seed, stream, sample, position, Draw.SAMPLE)
        p = ops.raw.distribution(logits, *filters)
        choice = ops.raw.sample(logits, *filters, u).view(3, 4)
        tokens = torch.cat((root[:, None], choice[:, :3]), dim=1)
        scores, ids = ops.raw.draft_topk(logits[:3], 4)
        steps = ops.raw.draft_topk(logits, 4)
        candidates, beam = ops.raw.beam_start(scores, ids, None, 20, 1)
        beam = ops.raw.beam_expand(candidates, beam, steps[0].view(3, 4, 4), steps[1].view(3, 4, 4), None, 1)
        nodes = ops.raw.select_nodes(root, *candidates, 8, 2)
        q, coins = p.view(3, 4, -1)[:, 1:], u.view(3, 4)
        chain = ops.raw.accept_chain(
            choice[:, 1:], q, None, p.view(3, 4, -1), rows[-3:], filters[0][:3], coins[:, :3], coins[:, :3], coins
        )
        found = [u, p, choice, ops.raw.argmax(logits), ops.raw.draw(p, u), scores, ids]
        found += [*candidates, *beam, *nodes, *chain, *commit(ops, tokens, parents, choice)]
        found += ops.raw.ngram_lookup(history, rows, lengths, lengths + 4, 2, 4, 5)
        return found

    static = inputs(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        everything(*static)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        aux_hidden_states = everything(*static)
    for seed in (1, 2):
        new = inputs(seed)
        for buffer, value in zip(static, new, strict=True):
            buffer.copy_(value)
        graph.replay()
        for found, expected in zip(aux_hidden_states, everything(*new), strict=True):
            assert torch.equal(found, expected)
