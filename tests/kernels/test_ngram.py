"""N-gram drafts, torch and Triton alike, against the oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbatch.draft.corpus import Corpus
from specbatch.draft.ngram import HostNgramDraft
from specbatch.draft.shape import DraftShape
from specbatch.kernels import torch as reference
from specbatch.kernels.corpus import word_estimates
from specbatch.types import RngKey, SamplingParams
from tests.kernels.batches import CUDA
from tests.kernels.operations import (
    Ops,
    sequence,
)
from tests.oracle.ngram import NgramProposer

pytestmark = [pytest.mark.gpu] if CUDA else []


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
    predicted = torch.ones(len(texts), 7, dtype=torch.int32)  # none of it counts
    table = table[order]  # The columns of a wider table are read.
    args = (tokens, predicted, torch.tensor(order), table[:, 1], table[:, 0], table[:, 2])
    drafts, counts, matched = ops.ngram_lookup(*args, *sizes, 6)
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
        text, size = texts[order[b]], int(matched[b])
        occurrences = [text[end - size : end] for end in range(size, len(text))]
        assert not size or (sizes[0] <= size <= sizes[1] and text[-size:] in occurrences)
        assert size or n == 1


def expected_drafts(text: list[int], predicted: list[int], sizes: tuple[int, int], count: int) -> list[int]:
    """The longest match counts, then one in the prediction, then the last one."""
    for size in range(min(sizes[1], len(text)), sizes[0] - 1, -1):
        for corpus in (predicted, text):
            for end in range(len(corpus) - 1, size - 1, -1):
                if corpus[end - size : end] == text[-size:]:
                    return (corpus[end:] * count)[:count]
    return []


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 4), (3, 8)])
@pytest.mark.parametrize("width", [12, 1100])
def test_predictions_are_searched(ops: Ops, sizes: tuple[int, int], width: int) -> None:
    texts, limits = histories(sizes[0])
    rng = random.Random(sizes[1])
    predictions = [[rng.randrange(4) for _ in range(rng.randrange(13))] for _ in texts]
    predictions[:2] = [[]] * 2
    tokens = torch.ones(len(texts), 40, dtype=torch.int32)
    predicted = torch.ones(len(texts), width, dtype=torch.int32)  # what comes after a prediction must not be seen
    for line, (text, prediction) in enumerate(zip(texts, predictions, strict=True)):
        tokens[line, : len(text)] = torch.tensor(text)
        predicted[line, : len(prediction)] = torch.tensor(prediction)
    counts = [torch.tensor([len(one) for one in lists]) for lists in (texts, predictions)]
    lines = torch.arange(len(texts))
    found, num_drafts, matched = ops.ngram_lookup(tokens, predicted, lines, *counts, torch.tensor(limits), *sizes, 6)
    host = HostNgramDraft(DraftShape(6, 1, 7), *sizes)
    by_prediction = 0
    for line, text in enumerate(texts):
        expected = expected_drafts(text, predictions[line], sizes, min(6, limits[line] - len(text)))
        by_prediction += expected != expected_drafts(text, [], sizes, min(6, limits[line] - len(text)))
        assert found[line, : num_drafts[line]].tolist() == expected
        seq = sequence(SamplingParams(), RngKey(0, 0, 0), 1, limits[line])
        seq.tokens, seq.predicted = list(text), predictions[line]
        tree = host.host_draft([seq])
        assert tree.tokens_BN[0, 1 : tree.num_nodes_B[0]].tolist() == expected
        assert tree.matched_B is not None
        assert matched[line] == tree.matched_B[0]
    assert by_prediction > 2


def test_large_ngram_lookup(triton_ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 6, (9, 3000), generator=generator).int()
    lengths = torch.tensor([1, 2, 1023, 1024, 1025, 2048, 2049, 2999, 3000])
    predicted = torch.randint(0, 6, (9, 2100), generator=generator).int()
    num_predicted = torch.tensor([0, 1, 1023, 1024, 1025, 2048, 2049, 2099, 2100])
    lines = torch.tensor([8, 3, 4, 0, 1, 2, 5, 6, 7])
    args = (tokens, predicted, lines, lengths[lines], num_predicted[lines], lengths[lines] + 3, 2, 9, 5)
    for found, expected in zip(triton_ops.ngram_lookup(*args), reference.ngram_lookup(*args), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("max_new", [1, 5])
def test_corpus_updates(ops: Ops, max_new: int) -> None:
    """Both find the same words, over some rounds: a third of the words are known, and rightly or wrongly predicted."""
    corpora = [Corpus(1024, torch.device("cpu"), reference) for _ in range(2)]
    generator = torch.Generator().manual_seed(max_new)
    tokens = torch.randint(0, 3, (9, 40), generator=generator).int()
    tokens[0, 7], tokens[1, 9] = 1 << 20, 60_000
    corpora[0].load(tokens[5:, :20].tolist())
    corpora[1].words_H.copy_(corpora[0].words_H)
    eos, before = torch.tensor([2, 77]), corpora[0].words_H.clone()
    for start in range(0, 36, max_new):
        lines = torch.randperm(9, generator=generator)[:7]
        starts = torch.randint(0, 36, (7,), generator=generator) if start % 3 else torch.full((7,), start)
        counts = torch.randint(0, max_new + 1, (7,), generator=generator)
        args = (tokens, lines, starts, counts, max_new, eos, start % 2 == 0)
        expected = reference.corpus_updates(corpora[0].words_H, *args)
        found = ops.corpus_updates(corpora[1].words_H, *args)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        for corpus in corpora:
            corpus.add(*args[:-1], is_loaded=args[-1])
    assert int((corpora[0].words_H != before).sum()) > 100
    assert not corpora[0].words_H[-1]


@pytest.mark.parametrize("least", [0.0, 0.4])
@pytest.mark.parametrize("num_drafts", [1, 9, 20])
def test_corpus_drafts(ops: Ops, num_drafts: int, least: float) -> None:
    corpus = Corpus(1 << 14, torch.device("cpu"), reference)
    generator = torch.Generator().manual_seed(num_drafts)
    texts = torch.randint(0, 12, (40, 60), generator=generator)
    corpus.load(texts[:20].tolist())
    corpus.load(texts[10:20].tolist())
    tokens, lines = texts.int(), torch.randperm(40, generator=generator)
    lengths = torch.randint(1, 60, (40,), generator=generator)
    room = torch.randint(-1, max(12, num_drafts + 3), (40,), generator=generator)
    estimates = word_estimates(torch.device("cpu"))
    args = (corpus.words_H, estimates, tokens, lines, lengths, lengths + room, least, num_drafts)
    found, expected = ops.corpus_drafts(*args), reference.corpus_drafts(*args)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    counts = expected[1]
    assert len(counts.unique()) > (1 if num_drafts == 1 else 4)
    assert num_drafts < 20 or counts.max() > 14, "no context is made of drafts alone"
    assert bool(expected[3].any())


class _Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation makes; views make none."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, made.numel())
        return made


def test_a_cpu_reads_no_more_than_the_texts() -> None:
    """The tables have room for the longest text of the model. What texts do not have costs nothing."""
    tokens, predicted = torch.ones(3, 100_000, dtype=torch.int32), torch.zeros(3, 8192, dtype=torch.int32)
    lines, lengths, none = torch.arange(2), torch.tensor([40, 30, 90]), torch.zeros(3, dtype=torch.int64)
    words = torch.zeros(4097, dtype=torch.int64)
    with _Largest() as largest:
        reference.ngram_lookup(tokens, predicted, lines, lengths[:2], none[:2], lengths[:2] + 50, 2, 12, 31)
        reference.corpus_updates(words, tokens, lines, lengths[:2], lengths[:2] // 10, 4, none[:1], False)
        reference.corpus_drafts(
            words, word_estimates(tokens.device), tokens, lines, lengths[:2], 2 * lengths[:2], 0.3, 31
        )
    assert 0 < largest.numel < 1000
