"""The bytes of tokens: joined they are the text, and each token begins where `text_offset` says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specbatch import LLM
from specbatch.config import DataSection
from specbatch.files.jsonl import encode_line
from specbatch.logprobs import TokenLogprob, TokenLogprobs
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.results.logprob_json import LogprobJson
from specbatch.rows.tokenizer import TextProcessor
from tests.text.small_tokenizers import SPECIAL, tokenizer_of
from tests.tiny_checkpoint import write_checkpoint

KINDS = ["byte-level", "sentencepiece", "metaspace", "wordpiece"]
RAW = DataSection(prompts_as_chat=False)


def written(texts: TextProcessor, ids: Sequence[int], tops: Sequence[Sequence[int]] = ()) -> Any:
    """The log-probabilities of tokens as (native, chat, completion)."""
    tops = tops or [()] * len(ids)
    scores = [
        TokenLogprob(token, -0.5 - i, tuple((other, -0.5 - i - rank) for rank, other in enumerate(top)))
        for i, (token, top) in enumerate(zip(ids, tops, strict=True))
    ]
    columns, to = TokenLogprobs.of(scores), LogprobJson(texts.pieces)
    native, chat, completion = json.loads(
        encode_line({"": [to.native(columns), to.chat(columns), to.completion(columns)]})
    )[""]
    return native, chat["content"], completion


def token_ids(tokenizer: PreTrainedTokenizerFast, *names: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[name] for name in names]


def bytes_of(entry: dict[str, Any]) -> bytes:
    """Of a native entry, which has the bytes only where they are not those of the name."""
    return bytes(entry["bytes"]) if "bytes" in entry else entry["token"].encode()


def characters_before(text: str, num_bytes: int) -> int:
    """The index of the character in which a byte of the text is."""
    ends, size = [], 0
    for character in text:
        size += len(character.encode())
        ends.append(size)
    return sum(end <= num_bytes for end in ends)


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.text("ab né😀\n:€漢'\u0301\u200f\u05d0\0\r", max_size=8) | st.just(SPECIAL), max_size=5))
@example([" a", SPECIAL, SPECIAL, " b"])
@example([SPECIAL, " né 😀"])
@example(["\u00a0😀", SPECIAL])
@settings(max_examples=40, deadline=None)
def test_tokens_of_texts(kind: str, parts: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    texts = TextProcessor(tokenizer, RAW)
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
    text = texts.decode(ids)
    native, chat, completion = written(texts, ids)
    data = [bytes(entry["bytes"]) for entry in chat]
    if "\ufffd" not in text:  # special tokens between the parts of a character end it for some decoders
        assert b"".join(data).decode() == text
        starts = [sum(map(len, data[:i])) for i in range(len(ids))]
        assert completion["text_offset"] == [characters_before(text, start) for start in starts]
    assert list(map(bytes_of, native)) == data
    assert [entry["token"] for entry in native] == [entry["token"] for entry in chat]
    assert [name.removeprefix("bytes:") for name in completion["tokens"]] == [entry["token"] for entry in chat]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_offsets_of_random_tokens(kind: str, data: st.DataObject) -> None:
    """Also of bytes that are no character."""
    tokenizer = tokenizer_of(kind)
    texts = TextProcessor(tokenizer, RAW)
    broken = [i for i in range(len(tokenizer)) if "\ufffd" in texts.decode([i])] or [0]
    some = st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from(broken))
    ids = data.draw(st.lists(some, max_size=14))
    text = texts.decode(ids)
    _, chat, completion = written(texts, ids)
    offsets = completion["text_offset"]
    assert offsets == sorted(offsets)
    for i, offset in enumerate(offsets):
        # What comes before is text already, but for a character that is not complete yet. Byte fallback decides about
        # all bytes in a row: more of them can make text of earlier ones, or no text.
        before = texts.decode(ids[:i])
        if kind != "sentencepiece" or "\ufffd" not in text + before:
            assert text[:offset].rstrip("\ufffd") == before.rstrip("\ufffd")[:offset]
        rest = [entry for entry in chat[i:] if entry["bytes"]]
        assert offset < len(text) or not rest
    if kind == "byte-level":
        assert b"".join(bytes(entry["bytes"]) for entry in chat).decode("utf-8", "replace") == text


WITHIN: list[tuple[str, list[str], str, list[int]]] = [
    # A run of bytes that is no text: each byte is a character for itself.
    ("sentencepiece", ["a", "<0xC3>", "<0xA9>", "<0xFF>", "b"], "a\ufffd\ufffd\ufffdb", [0, 1, 2, 3, 4]),
    # The beginning of a character is one character.
    ("byte-level", ["a", "ð", "Ł", "b", "ð"], "a\ufffdb\ufffd", [0, 1, 1, 2, 3]),
    # The decoder does not get special tokens.
    ("byte-level", ["a", "Ã", SPECIAL, "©", SPECIAL, "b"], "aéb", [0, 1, 1, 1, 2, 2]),
    ("sentencepiece", [SPECIAL, "<0xC3>", SPECIAL, "<0xA9>", "▁a"], "é a", [0, 0, 0, 0, 1]),
]


def test_offsets_within_characters() -> None:
    for kind, names, text, offsets in WITHIN:
        tokenizer = tokenizer_of(kind)
        texts, ids = TextProcessor(tokenizer, RAW), token_ids(tokenizer, *names)
        assert texts.decode(ids) == text
        assert written(texts, ids)[2]["text_offset"] == offsets


def test_parts_of_characters_are_distinct() -> None:
    """In the forms of OpenAI: a chat has bytes, and completions have them as the name."""
    tokenizer = byte_tokenizer(300, [299])
    texts = TextProcessor(tokenizer, RAW)
    ids = [*tokenizer.encode("é😀a"), 299]
    tops = [ids[i : i + 3] for i in range(len(ids) - 2)] + [[*ids[-2:], ids[0]], [ids[-1], *ids[:2]]]
    native, chat, completion = written(texts, ids, tops)
    assert [entry["bytes"] for entry in chat] == [[195], [169], [240], [159], [152], [128], [97], []]
    assert [entry["token"] for entry in chat] == [
        *("\\xc3", "\\xa9", "\\xf0", "\\x9f", "\\x98", "\\x80", "a", "<|end-299|>")
    ]
    assert native[0] == {
        **{"token": "\\xc3", "bytes": [195], "token_id": ids[0], "logprob": -0.5},
        "top": [
            {"token": f"\\x{byte:02x}", "bytes": [byte], "token_id": token, "logprob": -0.5 - i}
            for i, (byte, token) in enumerate(zip([195, 169, 240], ids, strict=False))
        ],
    }
    assert completion["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert completion["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    for name, value, top in zip(
        completion["tokens"], completion["token_logprobs"], completion["top_logprobs"], strict=True
    ):
        assert len(top) == 3
        assert top[name] == value  # the tokens are greedy


def test_tokens_with_the_same_text_are_all_there() -> None:
    """The likeliest has the text as its key, so that a greedy token finds its own value."""
    tokenizer = tokenizer_of("sentencepiece")
    texts = TextProcessor(tokenizer, RAW)
    fallback, letter = token_ids(tokenizer, "<0x61>", "a")
    _, _, completion = written(texts, [letter, letter], [[letter, fallback], [fallback, letter]])
    assert completion["top_logprobs"] == [
        {"a": -0.5, f"token_id:{fallback}": -1.5},
        {"a": -1.5, f"token_id:{letter}": -2.5},
    ]


def test_the_space_before_a_sentencepiece_token() -> None:
    """The decoder drops it at the beginning of a text, and nowhere else. Likely tokens are written as the chosen one
    would be there."""
    tokenizer = tokenizer_of("sentencepiece")
    texts = TextProcessor(tokenizer, RAW)
    a, ab, space = token_ids(tokenizer, "▁a", "▁ab", "▁")
    [end] = token_ids(tokenizer, SPECIAL)
    native, chat, completion = written(texts, [end, a, ab, space, a], [[a, ab], [a, ab], [ab, a], [a, ab], [a, ab]])
    assert texts.decode([end, a, ab, space, a]) == "a ab  a"
    assert completion["tokens"] == [SPECIAL, "a", " ab", " ", " a"]
    assert completion["text_offset"] == [0, 0, 1, 4, 5]
    assert [list(top) for top in completion["top_logprobs"]][1:3] == [["a", "ab"], [" ab", " a"]]
    assert [entry["bytes"] for entry in chat][:2] == [[], [97]]
    assert [entry["token_id"] for entry in native] == [end, a, ab, space, a]
    assert [top["token_id"] for top in native[1]["top"]] == [a, ab]


def test_a_prompt_has_its_special_tokens() -> None:
    tokenizer = tokenizer_of("byte-level")
    to = LogprobJson(TextProcessor(tokenizer, RAW).pieces)
    [end] = token_ids(tokenizer, SPECIAL)
    scores = TokenLogprobs.of([TokenLogprob(end, -1.0)])
    prompt, answer = json.loads(encode_line({"": [to.prompt(scores, from_first=True), to.native(scores)]}))[""]
    assert prompt == [None, {"token": SPECIAL, "token_id": end, "logprob": -1.0, "top": []}]
    assert answer == [{"token": SPECIAL, "bytes": [], "token_id": end, "logprob": -1.0, "top": []}]


def test_rows_of_a_model_with_sentencepiece_tokens(tmp_path: Path) -> None:
    """The text of a prompt begins after its special tokens, wherever its log-probabilities begin."""
    tokenizer = tokenizer_of("sentencepiece")
    write_checkpoint(tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    a, ab, end = token_ids(tokenizer, "▁a", "▁ab", SPECIAL)
    row = {"prompt_logprobs": 0, "logprobs": 0, "max_tokens": 8, "ignore_eos": True, "temperature": 1.0}
    prompts = [[end, a, ab, a], [a, ab, a], [end, a, ab, a], [end, end, a], [end]]
    rows = [{**row, "prompt_token_ids": ids, "prompt_logprobs_start": 2 * (i == 2)} for i, ids in enumerate(prompts)]
    with LLM(str(tmp_path), method="none", kv_cache_tokens=256, max_batch_size=4) as llm:
        found = list(llm.generate(rows))
    assert [[entry and entry["token"] for entry in line["prompt_logprobs"]] for line in found] == [
        *([None, "a", " ab", " a"], [None, " ab", " a"], [" ab", " a"], [None, SPECIAL, "a"], [None])
    ]
    for line in found:
        text = b"".join(map(bytes_of, line["logprobs"])).decode("utf-8", "replace")
        assert "\ufffd" in line["text"] or text == line["text"]
