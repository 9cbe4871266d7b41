"""The corpus that rows share: it finds what followed, votes, and keeps a bounded number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from specbatch.draft.corpus import MAX_MATCH, MIN_TOKENS, Corpus, Text


def drafts(corpus: Corpus, tokens: list[int], count: int = 8, least: float = 0.01) -> list[int]:
    found = corpus.search([tokens], count, least)
    return found.tokens_BD[0, : found.counts_B[0]].tolist()


def corpus_of(*texts: list[int], size: int = MIN_TOKENS) -> Corpus:
    corpus = Corpus(size)
    for text in texts:
        corpus.extend([(Text(), text)], room=0)
    return corpus


def test_it_finds_what_followed_the_longest_match() -> None:
    """Against a search of all texts, over random texts of few tokens: the first draft followed a longest match."""
    rng = np.random.default_rng(0)
    num_found = 0
    for _ in range(60):
        texts = [rng.integers(0, 4, size=int(rng.integers(1, 12))).tolist() for _ in range(4)]
        query = rng.integers(0, 4, size=int(rng.integers(1, 12))).tolist()
        expected: set[int] = set()
        for size in range(len(query), 1, -1):
            ends = [(text, end) for text in texts for end in range(size, len(text))]
            expected = {text[end] for text, end in ends if text[end - size : end] == query[-size:]}
            if expected:
                break
        found = drafts(corpus_of(*texts), query)
        assert bool(found) == bool(expected), (texts, query)
        assert not found or found[0] in expected, (texts, query)
        num_found += bool(found)
    assert num_found > 10


def test_the_most_frequent_token_is_drafted_and_rare_ones_end_the_draft() -> None:
    corpus = corpus_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 8, 9, 9])
    assert drafts(corpus, [1, 2, 3], least=0.15) == [4, 5, 7]  # the newer one of two equally frequent tokens is drafted
    # 2/3 of the votes and 3/4 for the first draft after a match of 3; 1 of these votes and 3/5 for the second.
    found = corpus.search([[1, 2, 3]], 8, 0.4)
    assert found.counts_B.tolist() == [2]
    assert found.expected_B[0] == pytest.approx(2 / 3 * (3 / 4 + 3 / 5))
    assert drafts(corpus, [1, 2, 3], least=0.51) == []


def test_long_matches_have_long_drafts() -> None:
    text = list(range(100, 160))
    corpus = corpus_of(text)
    lengths = [len(drafts(corpus, text[:size], 32, 0.3)) for size in (3, 8, 24)]
    assert lengths == [7, 18, 32]  # 3 / (3 + 7) and 8 / (8 + 18) are the last values that are not below 0.3
    assert drafts(corpus, text[:24], 32, 0.3) == text[24:56]


def test_growing_texts_are_found_across_their_parts() -> None:
    """A long text goes on in another part of the ring, with its last tokens before it."""
    rng = np.random.default_rng(1)
    corpus, text, tokens = Corpus(4096), Text(num_added=5), rng.integers(0, 1000, size=600).tolist()
    other, others = Text(), rng.integers(0, 1000, size=600).tolist()
    for end in range(6, 600, 3):
        corpus.extend([(text, tokens[:end]), (other, others[: end - 3])])
    assert all(drafts(corpus, tokens[end - 4 : end], 1) == [tokens[end]] for end in range(8, 590))
    assert drafts(corpus, tokens[:4], 1) == [], "tokens that are left out were added"
    assert drafts(corpus, tokens[1:5], 1) == [tokens[5]], "the tokens left out are the context of the others"


def test_memory_is_bounded_and_the_oldest_tokens_are_dropped() -> None:
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 50_000, size=200).tolist() for _ in range(60)]
    corpus = Corpus(MIN_TOKENS)
    size = corpus.num_bytes
    slow, text = Text(), list(range(60_000, 60_400))
    for i, one in enumerate(texts):  # a text that grows while the ring begins again several times
        corpus.extend([(Text(), one), (slow, text[: 10 + 5 * i])])
    assert corpus.num_bytes == size == corpus_of().num_bytes
    found = [drafts(corpus, one[:50], 1) == [one[50]] for one in texts]
    assert not any(found[:50])
    assert all(found[-2:])
    assert drafts(corpus, text[:300], 1) == [text[300]]


def test_a_text_longer_than_the_corpus_keeps_its_end() -> None:
    tokens = list(range(5000))
    corpus = corpus_of(tokens)
    assert drafts(corpus, tokens[:4990], 4) == tokens[4990:4994]
    assert drafts(corpus, tokens[:100]) == []


def test_texts_do_not_run_into_each_other() -> None:
    corpus = corpus_of([1, 2, 3, 4], [5, 6, 7, 8])
    assert drafts(corpus, [1, 2, 3]) == [4]
    assert drafts(corpus, [2, 3, 4]) == []
    assert drafts(corpus, [4, 5, 6, 7], 1) == [8]
    assert drafts(corpus, [9] * MAX_MATCH) == []


def test_tokens_of_a_file_are_known_until_they_are_overwritten() -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 50_000, size=100).tolist() for _ in range(30)]
    corpus = corpus_of(*texts[:4])
    corpus.mark_loaded()
    corpus.extend([(Text(), texts[4])])

    def is_loaded(text: list[int]) -> bool:
        return corpus.is_loaded(int(corpus.search([text[:50]], 4, 0.1).positions_B[0]))

    assert [is_loaded(text) for text in texts[:5]] == [True] * 4 + [False]
    for text in texts[5:]:
        corpus.extend([(Text(), text)])
    assert not any(map(is_loaded, texts))


def test_where_the_ring_begins_again_texts_stay_whole() -> None:
    """A text whose part was overwritten goes on elsewhere, and no text goes on with tokens of an older one."""
    rng = np.random.default_rng(4)
    slow, tokens = Text(), rng.integers(0, 50_000, size=65).tolist()
    others = [rng.integers(0, 50_000, size=150).tolist() for _ in range(6)]
    corpus = Corpus(MIN_TOKENS)
    corpus.extend([(slow, tokens[:5])])
    for text in others:  # the last one takes the room of `slow`
        corpus.extend([(Text(), text)], room=0)
    corpus.extend([(slow, tokens)])
    assert all(drafts(corpus, others[-1][:end], 1) == [others[-1][end]] for end in range(3, 150))
    assert all(drafts(corpus, tokens[:end], 1) == [tokens[end]] for end in range(7, 65))
    new = rng.integers(0, 50_000, size=30).tolist()
    for _ in range(3):
        corpus.extend([(Text(), new)])
    assert drafts(corpus, new[:20], 32, 1e-6) == new[20:]
