"""Stop strings: found at the token that completes them, as if all text were decoded after each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specbatch.config import DataSection
from specbatch.rows.tokenizer import TextProcessor
from specbatch.text.stop_strings import StopChecker, StopTokens, TokenTexts, adds_its_own_text, cut_at_stop, find_stop
from specbatch.types import SamplingParams
from tests.stub_engine import EOS, StubTokenizer
from tests.text.small_tokenizers import SPECIAL, TEXT, tokenizer_of

ALPHABET = "ab né😀"
PROMPT = [0, 1]  # is no part of the text


def decode(ids: Sequence[int]) -> str:
    return StubTokenizer().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def checker_of(
    decode: Callable[[Sequence[int]], str], stops: Sequence[str], specials: Sequence[int] = ()
) -> StopChecker:
    """For a tokenizer that nothing is known of."""
    texts = TokenTexts(decode, lambda token: SPECIAL if token in specials else "")
    return StopChecker(texts, stops, StopTokens(texts, frozenset(stop[-1] for stop in stops), plain=False))


def split(data: bytes, lengths: list[int]) -> list[bytes]:
    """Tokens of several bytes, borders inside of characters included, and some without any text."""
    tokens, at = [], 0
    for length in [*lengths, *[1] * len(data)]:
        tokens.append(data[at : at + length])
        at += length
    return tokens


def expected_stop(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0
) -> int | None:
    """The definition: the fewest tokens whose text, unfinished characters aside, holds a stop string."""
    num_old = len(decode(ids[:min_tokens]).rstrip("\ufffd")) if min_tokens else 0
    for keep in range(min_tokens + 1, len(ids) + 1):
        text = decode(ids[:keep]).rstrip("\ufffd")
        if any(find_stop(text, stop, num_old) >= 0 for stop in stops):
            return keep
    return None


def found_stop(checker: Any, ids: Sequence[int], steps: Sequence[int]) -> int | None:
    """With `steps` new tokens a call, then one a call."""
    sent = 0
    for step in [*steps, *[1] * len(ids)]:
        new = min(step, len(ids) - sent)
        sent += new
        if new and (found := checker([*PROMPT, *ids[:sent]], len(PROMPT), new)) is not None:
            return found
    return None


@given(
    st.text(ALPHABET, max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(1, 7), max_size=60),
)
@example("aab", ["ab"], [], [1])
@example("é", ["é"], [], [1, 1])
@example("é😀", ["😀"], [0, 0, 0, 0, 0, 3], [])  # a character that begins after many tokens without text
@example("a 😀", [" "], [1, 3], [3])  # the token that ends the stop string also begins a character
@settings(max_examples=100, deadline=None)
def test_stop_is_found_at_its_last_token_however_tokens_arrive(
    text: str, stops: list[str], lengths: list[int], steps: list[int]
) -> None:
    pieces = split(text.encode(), lengths)
    ids = list(range(len(pieces)))

    def decode_pieces(part: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in part).decode("utf-8", "replace")

    found = found_stop(checker_of(decode_pieces, stops), ids, steps)
    assert found == expected_stop(decode_pieces, ids, stops)
    if found is not None:
        cut = cut_at_stop(decode_pieces(ids[:found]), stops)
        assert cut is not None
        assert not any(stop in cut for stop in stops)


@pytest.mark.parametrize("pieces", [[b"\xa9b", b"a b"], [b"\x9f", b"\x9f", b"\x98", b"ba", b" b"], [b"\xff", b"ba b"]])
def test_stop_after_bytes_that_are_no_character(pieces: list[bytes]) -> None:
    """Where the text begins with them, they are part of it; elsewhere they may be the end of a character."""

    def decode_pieces(part: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in part).decode("utf-8", "replace")

    ids = list(range(len(pieces)))
    assert expected_stop(decode_pieces, ids, ["ba b"]) == len(pieces)
    assert found_stop(checker_of(decode_pieces, ["ba b"]), ids, []) == len(pieces)


STOPS = [
    "\n\n", "User:", "a", "é", "€", "😀", "né", " ", "b\n", "\n# né", "'t", "ab", ":", "\ufffd", " né 😀", "n't",
    "User: a né\n\nnb", "don'", "€uro a", "aaaaaaaaaaaa",
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "plain"),
    [("byte-level", True), ("sentencepiece", True), ("metaspace", True), ("wordpiece", False)],
)
def test_decoders_that_add_the_same_text_to_each_text(kind: str, plain: bool) -> None:
    assert adds_its_own_text(tokenizer_of(kind)) is plain
    assert not adds_its_own_text(StubTokenizer())


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "metaspace", "wordpiece"])
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_stop_strings_of_each_kind_of_tokenizer(kind: str, data: st.DataObject) -> None:
    """Random tokens and those of texts: characters of several tokens, broken ones, special tokens between."""
    tokenizer = tokenizer_of(kind)
    texts = TextProcessor(tokenizer, DataSection(prompts_as_chat=False))
    some = st.integers(0, len(tokenizer) - 1)
    bytes_of = [i for i in range(len(tokenizer)) if "\ufffd" in texts.decode([i])] or [0]
    pieces = st.one_of(
        st.text("ab né😀\n:€", max_size=8).map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.sampled_from(STOPS).map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.sampled_from(["é😀€漢"]).map(lambda text: tokenizer.encode("漢字" * 20 + text, add_special_tokens=False)),
        st.lists(some, max_size=6),
        st.lists(st.sampled_from(bytes_of), max_size=5),
        st.just([tokenizer.convert_tokens_to_ids(SPECIAL)]).map(lambda ids: ids * 3),
    )
    ids = [i for part in data.draw(st.lists(pieces, max_size=8)) for i in part]
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
    min_tokens = data.draw(st.sampled_from([0, 0, 0, 3]))
    check = texts.stop_check(SamplingParams(stop=tuple(stops), min_tokens=min_tokens))
    steps = data.draw(st.lists(st.integers(1, 5), max_size=10))
    assert found_stop(check, ids, steps) == expected_stop(texts.decode, ids, stops, min_tokens)


def test_few_tokens_are_decoded() -> None:
    """Only where a stop string is but for its spaces, and the end of the text before."""
    tokenizer = tokenizer_of("byte-level")
    lengths: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return tokenizer.decode(ids, skip_special_tokens=True)

    texts = TokenTexts(counting, lambda token: "")
    checker = StopChecker(texts, ["b: never", "Us er"], StopTokens(texts, frozenset("r"), plain=True))
    tokens = tokenizer.encode(TEXT * 20, add_special_tokens=False)
    for token in range(len(tokenizer)):
        texts[token]
    lengths.clear()
    assert found_stop(checker, tokens, []) is None
    assert len(lengths) == TEXT.count("User") * 20
    assert (TEXT * 20).count("r") == 2 * len(lengths)
    assert max(lengths) <= 20


def test_the_work_does_not_grow_with_the_sequence() -> None:
    """Of a tokenizer that nothing is known of."""
    lengths: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    checker = checker_of(counting, ["never"], specials=[EOS])
    tokens: list[int] = []
    for i in range(1200):
        tokens.append([EOS, 97, 0xC3][i // 400])  # special tokens, text, and pieces of characters without an end
        assert checker(tokens, 0, 1) is None
    assert max(lengths) <= 130
    assert len(lengths) <= 2500


def test_the_work_does_not_grow_with_a_text_of_other_characters() -> None:
    """Chinese text has no characters of which the first look knows where they are; each token may bring a space."""
    looked: list[int] = []

    class Texts(TokenTexts):
        def __missing__(self, token: int) -> str | None:
            return "é"

        def __getitem__(self, token: int) -> str:
            looked.append(token)
            return "é"

    texts = Texts(lambda ids: "é" * len(ids), lambda token: "")
    texts.own.update({1: ""})
    checker = StopChecker(texts, ["\n "], StopTokens(texts, frozenset(" "), plain=True))
    tokens: list[int] = []
    counts = []
    for _ in range(600):
        tokens.append(1)
        looked.clear()
        assert checker(tokens, 0, 1) is None
        counts.append(len(looked))
    assert max(counts) == counts[-1] < 40


def test_stop_after_going_back() -> None:
    checker = checker_of(decode, ["cd"])
    assert checker(list(b"abc"), 0, 3) is None
    assert checker(list(b"ab"), 0, 2) is None  # a preempted request starts again
    assert checker(list(b"abcd"), 0, 2) == 4


def test_rows_with_their_own_stop_strings_share_what_is_known() -> None:
    texts = TextProcessor(tokenizer_of("byte-level"), DataSection(prompts_as_chat=False))
    for number in range(1000):
        assert texts.stop_check(SamplingParams(stop=(chr(0x4E00 + number),))) is not None
    assert len(texts._stop_tokens) <= 256
