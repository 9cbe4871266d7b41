"""Stop strings, chat templates and detokenisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specbatch.config import Config, DataSection
from specbatch.errors import ConfigError, RowError
from specbatch.job.rows import Prompt
from specbatch.job.tokenizer import StopChecker, TextProcessor, cut_at_stop, with_chat_template_text
from specbatch.types import Completion, EngineLimits, FinishReason, SamplingParams, SpeculationCounts
from tests.stub_engine import EOS, StubTokenizer

LIMITS = EngineLimits(100, 300)
ALPHABET = "ab né😀"
RAW = DataSection(prompts_as_chat=False)


def decode(ids: Sequence[int]) -> str:
    return StubTokenizer().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def expected_stop(tokens: list[bytes], stops: list[str]) -> int | None:
    """The definition: the fewest tokens whose text, unfinished characters aside, holds a stop string."""
    for keep in range(1, len(tokens) + 1):
        text = b"".join(tokens[:keep]).decode("utf-8", "replace").rstrip("\ufffd")
        if any(stop in text for stop in stops):
            return keep
    return None


def split(data: bytes, lengths: list[int]) -> list[bytes]:
    """Tokens of several bytes, borders inside of characters included, and some without any text."""
    tokens, at = [], 0
    for length in [*lengths, *[1] * len(data)]:
        tokens.append(data[at : at + length])
        at += length
    return tokens


@given(
    st.text(ALPHABET, max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(1, 7), max_size=60),
)
@example("aab", ["ab"], [], [1])
@example("é", ["é"], [], [1, 1])
@example("é😀", ["😀"], [0, 0, 0, 0, 0, 3], [])  # a character that begins behind many tokens without text
@example("a 😀", [" "], [1, 3], [3])  # the token that ends the stop string also begins a character
@settings(max_examples=300, deadline=None)
def test_stop_is_found_at_its_last_token_however_tokens_arrive(
    text: str, stops: list[str], lengths: list[int], steps: list[int]
) -> None:
    pieces = split(text.encode(), lengths)
    ids = list(range(len(pieces)))

    def decode_pieces(part: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in part).decode("utf-8", "replace")

    checker = StopChecker(decode_pieces, stops)
    sent, found = 0, None
    for step in [*steps, *[1] * len(ids)]:
        new = min(step, len(ids) - sent)
        if not new:
            break
        sent += new
        found = checker(ids[:sent], new)
        if found is not None:
            break
    assert found == expected_stop(pieces, stops)
    if found is not None:
        cut = cut_at_stop(decode_pieces(ids[:found]), stops)
        assert cut is not None
        assert not any(stop in cut for stop in stops)


def test_stop_work_does_not_grow_with_the_sequence() -> None:
    lengths = []

    def counting(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    checker = StopChecker(counting, ["never"])
    tokens: list[int] = []
    for i in range(3000):
        tokens.append([EOS, 97, 0xC3][i // 1000])  # special tokens, text, and pieces of characters without an end
        assert checker(tokens, 1) is None
    assert max(lengths) <= 20
    assert len(lengths) <= 6000


def test_stop_after_going_back() -> None:
    checker = StopChecker(decode, ["cd"])
    assert checker(list(b"abc"), 3) is None
    assert checker(list(b"ab"), 2) is None  # a preempted request starts again
    assert checker(list(b"abcd"), 2) == 4


@pytest.mark.parametrize(
    ("tokens", "reason", "stop", "text"),
    [
        ([*b"hello", EOS], FinishReason.STOP, (), "hello"),
        (list(b"hello"), FinishReason.STOP, (), "hell"),  # a stop token without a special meaning
        (list(b"hello"), FinishReason.LENGTH, (), "hello"),
        (list(b"hello wor"), FinishReason.STOP, ("wo", "wor"), "hello "),
        ([*b"abc", EOS], FinishReason.STOP, ("x",), "abc"),
        (list(b"a\xc3"), FinishReason.LENGTH, (), "a\ufffd"),
    ],
)
def test_final_text(tokens: list[int], reason: FinishReason, stop: tuple[str, ...], text: str) -> None:
    processor = TextProcessor(StubTokenizer(), DataSection())
    completion = Completion(0, tokens, reason, None, SpeculationCounts())
    assert processor.final_text(completion, SamplingParams(stop=stop)) == text


def encode(data: DataSection, asked: Prompt, template: str | None = "stub") -> str:
    tokenizer = StubTokenizer()
    tokenizer.chat_template = template
    ids = TextProcessor(tokenizer, data).encode(asked, LIMITS)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def prompt(kind: str, content: object, raw: bool = False, **params: object) -> Prompt:
    return Prompt(kind, content, SamplingParams(**params), False, raw)  # type: ignore[arg-type]


def test_special_tokens_are_added_once() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert encode(RAW, prompt("prompt", "hi")) == "<s>hi"
    assert encode(DataSection(), prompt("messages", messages)) == "<user>hi<assistant>"  # the template's business
    assert encode(DataSection(prompts_as_chat=True), prompt("prompt", "hi")) == "<user>hi<assistant>"
    assert encode(DataSection(prompts_as_chat=True), prompt("prompt", "hi", raw=True)) == "<s>hi"


def test_templates_that_print_the_date_print_the_same_one_every_day() -> None:
    assert encode(DataSection(chat_template="date"), prompt("messages", [])) == "26 Jul 2024"


def test_text_with_tokens_past_the_embedding_is_an_error_of_its_row() -> None:
    with pytest.raises(RowError) as caught:
        TextProcessor(StubTokenizer(), DataSection()).encode(prompt("prompt", "hi"), EngineLimits(100, 90))
    assert caught.value.type == "invalid_type"


def test_system_prompt_goes_before_messages_without_one() -> None:
    data = DataSection(system_prompt="S", prompts_as_chat=True)
    own = [{"role": "system", "content": "T"}, {"role": "user", "content": "hi"}]
    assert encode(data, prompt("prompt", "hi")) == "<system>S<user>hi<assistant>"
    assert encode(data, prompt("messages", own[1:])) == "<system>S<user>hi<assistant>"
    assert encode(data, prompt("messages", own)) == "<system>T<user>hi<assistant>"


@pytest.mark.parametrize(
    ("bad", "type"),
    [
        (prompt("prompt", ""), "empty_prompt"),
        (prompt("token_ids", []), "empty_prompt"),
        (prompt("token_ids", [300]), "invalid_type"),
        (prompt("token_ids", [1], stop_token_ids=(300,)), "invalid_type"),
        (prompt("prompt", "a\ud800b"), "invalid_text"),
        (prompt("messages", [{"role": "user", "content": "\udfff"}]), "invalid_text"),
        (prompt("messages", [{"role": "refused", "content": "x"}]), "chat_template_error"),
        (prompt("prompt", "x" * 100), "prompt_too_long"),
    ],
)
def test_rows_that_cannot_be_encoded(bad: Prompt, type: str) -> None:
    with pytest.raises(RowError) as caught:
        encode(RAW, bad)
    assert caught.value.type == type
    if type == "prompt_too_long":
        assert "101" in caught.value.message
        assert "100" in caught.value.message


def test_longest_prompt_fits() -> None:
    assert len(encode(RAW, prompt("prompt", "x" * 99))) == 99 + len("<s>")


def test_models_without_a_chat_template() -> None:
    with pytest.raises(RowError) as caught:
        encode(DataSection(), prompt("messages", [{"role": "user", "content": "x"}]), template=None)
    assert caught.value.type == "no_chat_template"
    assert encode(DataSection(), prompt("prompt", "x"), template=None) == "<s>x"
    with pytest.raises(ConfigError, match="prompts_as_chat"):
        encode(DataSection(prompts_as_chat=True), prompt("prompt", "x"), template=None)


def test_prompts_run_as_chat_where_there_is_a_template() -> None:
    assert encode(DataSection(), prompt("prompt", "hi")) == "<user>hi<assistant>"
    assert encode(DataSection(chat_template="stub"), prompt("prompt", "hi"), template=None) == "<user>hi<assistant>"
    assert encode(DataSection(), prompt("prompt", "hi", raw=True)) == "<s>hi"


def test_chat_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    config = Config(data=DataSection(chat_template=str(tmp_path / "t.jinja")))
    assert with_chat_template_text(config).data.chat_template == "{{ messages }}"
    assert with_chat_template_text(with_chat_template_text(config)).data.chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match="missing"):
        with_chat_template_text(replace(config, data=DataSection(chat_template="missing.jinja")))
