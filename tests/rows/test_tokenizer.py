"""Stop strings, chat templates and detokenisation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specbatch.config import DataSection
from specbatch.counts import SpeculationCounts
from specbatch.errors import ConfigError, RowError
from specbatch.rows.row import Row
from specbatch.rows.tokenizer import TextProcessor
from specbatch.startup import use_tokenizer_threads
from specbatch.types import Completion, EngineLimits, FinishReason, SamplingParams
from tests.stub_engine import EOS, StubTokenizer
from tests.text.small_tokenizers import SPECIAL, TEXT, tokenizer_of

LIMITS = EngineLimits(100, 300)
ALPHABET = "ab né😀"
RAW = DataSection(prompts_as_chat=False)


def decode(ids: Sequence[int]) -> str:
    return StubTokenizer().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


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


def encode(data: DataSection, asked: Row, template: str | None = "stub") -> str:
    tokenizer = StubTokenizer()
    tokenizer.chat_template = template
    ids = TextProcessor(tokenizer, data).encode(asked, LIMITS)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def prompt(kind: str, content: object, raw: bool = False, **params: object) -> Row:
    return Row(0, kind=kind, content=content, params=SamplingParams(**params), raw=raw)  # type: ignore[arg-type]


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


def test_tokens_past_the_embedding_are_left_out_of_a_prediction() -> None:
    """The row has the same text with all draft methods, and most of them do not read its prediction."""
    row = Row(0, kind="prompt", content="ab", prediction="aXbYc")
    assert TextProcessor(StubTokenizer(), DataSection()).predicted_ids(row, EngineLimits(100, 99)) == [*b"aXbY"]


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
def test_rows_that_cannot_be_encoded(bad: Row, type: str) -> None:
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


@pytest.mark.parametrize("kind", ["byte-level", "wordpiece", "sentencepiece", "metaspace"])
def test_texts_are_those_of_transformers(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(TEXT + SPECIAL, add_special_tokens=False)
    texts = TextProcessor(tokenizer, DataSection())
    for part in (ids, ids[1:], tuple(ids), []):
        assert texts.decode(part) == tokenizer.decode(
            part, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_a_tokenizer_with_its_own_decoding_decodes() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    tokenizer = Loud(tokenizer_object=tokenizer_of("byte-level").backend_tokenizer)
    ids = tokenizer.encode("don't", add_special_tokens=False)
    assert TextProcessor(tokenizer, DataSection()).decode(ids) == "DON'T"


FORK = """
import os, signal
from tokenizers import Tokenizer, models, pre_tokenizers
from specbatch.startup import use_tokenizer_threads

use_tokenizer_threads()
assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
assert 1 <= int(os.environ["RAYON_NUM_THREADS"]) <= 8
tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
rows = ["a b " * 50] * 64
wanted = [row.ids for row in tokenizer.encode_batch(rows)]
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that waits for ever ends
    os._exit([row.ids for row in tokenizer.encode_batch(rows)] != wanted)
assert os.waitpid(child, 0)[1] == 0, "the child waits for ever"
assert [row.ids for row in tokenizer.encode_batch(rows)] == wanted
"""


def test_a_forked_child_does_not_wait_for_threads_of_the_tokenizer() -> None:
    names = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    subprocess.run([sys.executable, "-c", FORK], check=True, env=environment)


@pytest.mark.parametrize("given", [{"TOKENIZERS_PARALLELISM": "false"}, {"TOKENIZERS_PARALLELISM": "true"}])
def test_the_users_threads_of_the_tokenizer_stay(given: dict[str, str]) -> None:
    environment = dict(given)
    use_tokenizer_threads(environment)
    assert environment == given
