"""The corpus that rows share: it predicts what followed, mostly and lately, and keeps a bounded number of words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specbatch.draft.corpus import Corpus
from specbatch.kernels import torch as ops
from specbatch.kernels.corpus import MAX_SIZE, SIZES, word_estimates
from tests.tiny_models import CPU

SMALL = 1024  # tokens of a small corpus


def search(corpus: Corpus, tokens: list[int], count: int = 8, least: float = 0.01) -> tuple[list[int], float, bool]:
    line, one = torch.tensor([tokens], dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    drafts, counts, probabilities, loaded = corpus.search(line, one - 1, one * len(tokens), one * 200, least, count)
    assert not drafts[0, int(counts) :].any(), "padded with 0"
    return drafts[0, : int(counts)].tolist(), float(probabilities.sum()), bool(loaded)


def drafts(corpus: Corpus, tokens: list[int], count: int = 8, least: float = 0.01) -> list[int]:
    return search(corpus, tokens, count, least)[0]


def corpus_of(*texts: list[int], size: int = SMALL) -> Corpus:
    corpus = Corpus(size, CPU, ops)
    for text in texts:
        corpus.load([text])
    return corpus


def add(corpus: Corpus, lines: list[list[int]], starts: list[int], eos: tuple[int, ...] = ()) -> None:
    """Add the tokens of each line from `starts` on."""
    width = max(map(len, lines))
    tokens = torch.tensor([line + [0] * (width - len(line)) for line in lines], dtype=torch.int32)
    counts = torch.tensor([len(line) - start for line, start in zip(lines, starts, strict=True)])
    ends = torch.tensor(eos, dtype=torch.int64)
    corpus.add(tokens, torch.arange(len(lines)), torch.tensor(starts), counts, int(counts.max()), ends)


def test_it_predicts_what_followed_the_largest_context() -> None:
    """Against a search of random texts of few tokens: the first draft followed the largest context that there is."""
    rng, num_found = np.random.default_rng(0), 0
    for _ in range(60):
        texts = [rng.integers(0, 4, size=int(rng.integers(1, 30))).tolist() for _ in range(4)]
        query = rng.integers(0, 4, size=int(rng.integers(1, 16))).tolist()
        expected: set[int] = set()
        for size in reversed(SIZES):
            ends = [(text, end) for text in texts for end in range(size, len(text)) if size <= len(query)]
            expected = {text[end] for text, end in ends if text[end - size : end] == query[-size:]}
            if expected:
                break
        found = drafts(corpus_of(*texts, size=1 << 12), query)
        assert bool(found) == bool(expected), (texts, query)
        assert not found or found[0] in expected, (texts, query)
        num_found += bool(found)
    assert num_found > 20


def test_what_came_mostly_and_lately_is_predicted() -> None:
    other, once, often = [1, 2, 9], [1, 2, 7], [1, 2, 8]
    assert drafts(corpus_of(often, often, once), [1, 2]) == [8]
    assert drafts(corpus_of(once, often), [1, 2]) == [7], "once more is needed"
    assert drafts(corpus_of(once, often, often), [1, 2]) == [8]
    assert drafts(corpus_of(*[often] * 30, *[other] * 9), [1, 2]) == [9], "a high score is bounded"


def test_estimates_rise_with_the_context_and_the_score() -> None:
    text = list(range(100, 160))
    corpus = corpus_of(text)
    assert [search(corpus, text[:size], 1)[1] for size in SIZES] == pytest.approx([0.31, 0.38, 0.58, 0.92])
    assert search(corpus_of(text, text), text[:2], 1)[1] == pytest.approx(0.46)
    estimates = word_estimates(CPU)
    assert bool((estimates.diff(dim=0) >= 0).all())
    assert bool((estimates.diff(dim=1) >= 0).all())
    lengths = [len(drafts(corpus, text[:size], 40, 0.3)) for size in (2, 6, MAX_SIZE)]
    assert lengths == sorted(set(lengths)), "drafts after larger contexts are longer"
    assert drafts(corpus, text[:MAX_SIZE], 40, 0.0) == text[MAX_SIZE : MAX_SIZE + 40]
    assert drafts(corpus, text[:2], 40, 0.7) == []


def test_tokens_are_added_after_any_context() -> None:
    """A text that grows has the same words as one that is added as a whole. Its first tokens, such as those of a
    prompt, are contexts only."""
    text = list(range(40, 70))
    whole, grown = corpus_of(), corpus_of()
    add(whole, [text], [5])
    for end in range(6, 31):
        add(grown, [text[:end]], [end - 1])
    assert torch.equal(whole.words_H, grown.words_H)
    assert drafts(whole, text[:3]) == []
    assert drafts(whole, text[:5], 3) == text[5:8]


def test_the_order_of_requests_does_not_matter() -> None:
    """Ranks write in any order. They have the same corpus only if each order has the same result."""
    rng = np.random.default_rng(1)
    lines = rng.integers(0, 3, size=(40, 24)).tolist()
    corpora = [corpus_of(), corpus_of()]
    for corpus, order in zip(corpora, (range(40), reversed(range(40))), strict=True):
        some = [lines[i] for i in order]
        for _ in range(3):
            add(corpus, some, [2] * 40)
    assert torch.equal(corpora[0].words_H, corpora[1].words_H)
    assert int((corpora[0].words_H != 0).sum()) > 500


def test_nothing_is_predicted_after_the_end_of_a_text() -> None:
    corpus = corpus_of()
    add(corpus, [[5, 6, 7, 0, 9, 9, 9]], [2], eos=(0,))
    assert drafts(corpus, [5, 6]) == [7, 0]
    corpus = corpus_of()
    add(corpus, [[5, 6, 7, 0, 9, 9, 9]], [2])
    assert drafts(corpus, [5, 6], 4) == [7, 0, 9, 9]


def test_old_words_are_overwritten() -> None:
    """The table stays as large as it is, and new texts are found in it."""
    corpus = corpus_of(size=SMALL)
    size = corpus.words_H.shape[0]
    texts = np.random.default_rng(2).integers(0, 1000, size=(400, 30)).tolist()
    for text in texts:
        corpus.load([text])
    assert corpus.words_H.shape[0] == size == 4 * SMALL + 1
    found = [drafts(corpus, text[:12], 8) == text[12:20] for text in texts]
    assert sum(found[-10:]) >= 8
    assert sum(found[:40]) < 10
    assert not corpus.words_H[-1], "the word of no context is empty"


def test_words_of_a_file_are_marked() -> None:
    text = [4, 5, 6, 7, 8]
    corpus = corpus_of(text)
    assert search(corpus, text[:2])[2]
    assert not search(corpus, [9, 9])[2]
    add(corpus, [[4, 5, 6]], [2])
    assert search(corpus, text[:2])[2], "it was known from the file first"
    add(corpus, [[7, 8, 9]], [2])
    assert not search(corpus, [7, 8])[2]


def test_tokens_that_a_word_cannot_hold_are_not_predicted() -> None:
    corpus = corpus_of([1 << 20, 3, 1 << 20, 3, 5])
    assert drafts(corpus, [1 << 20, 3]) == [5]


def test_each_request_has_its_own_room() -> None:
    corpus = corpus_of(list(range(10, 60)))
    tokens = torch.tensor([[10, 11, 12], [20, 21, 22]], dtype=torch.int32)
    limits, lengths = torch.tensor([2, 6]), torch.tensor([2, 3])
    found: tuple[Tensor, ...] = corpus.search(tokens, torch.tensor([1, 0]), lengths, limits, 0.0, 5)
    assert found[0].tolist() == [[0] * 5, [13, 14, 15, 0, 0]]
    assert found[1].tolist() == [0, 3]
