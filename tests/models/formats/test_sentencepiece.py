"""Tokenizers that are only a SentencePiece model (`tokenizer.model`) or `tekken.json`."""

from __future__ import annotations

import json
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pytest

from specbatch.errors import ModelError
from specbatch.models.formats import tokenizer as tokenizer_file
from specbatch.models.formats.tokenizer import load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

WORDS = (
    "The quick brown fox jumps over 13 lazy dogs, while seven children count apples in the garden.",
    "Ça coûte 3 €, s'il vous plaît.",
    "return x + 1, where every number of the series is larger than the numbers before it",
)


def folder(path: Path, kind: str, tokenizer_class: str | None) -> Path:
    """Write a folder whose tokenizer is a SentencePiece model of one kind, `bpe` or `unigram`."""
    path.mkdir()
    text, examples = path / "text.txt", resources.files("specbatch.tune").joinpath("examples.jsonl")
    text.write_text(examples.read_text(encoding="utf-8") + "\n".join(WORDS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(path / "tokenizer"), model_type=kind, vocab_size=500, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": tokenizer_class, "eos_token": "</s>"} if tokenizer_class else {}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.mark.parametrize(("kind", "tokenizer_class"), [("bpe", "LlamaTokenizer"), ("bpe", None), ("unigram", None)])
def test_tokens_are_those_of_sentencepiece(tmp_path: Path, kind: str, tokenizer_class: str | None) -> None:
    path = folder(tmp_path / "m", kind, tokenizer_class)
    own = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    tokenizer = load_tokenizer(path)
    for text in (*WORDS, "two  spaces", "日本語 😀", "a\n\n\tb", "tail "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == own.encode(text)
        assert tokenizer.decode(ids) == text


def test_a_class_for_another_kind_of_model_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", "unigram", "LlamaTokenizer")
    with pytest.raises(ModelError, match="LlamaTokenizer of transformers gives") as caught:
        load_tokenizer(path)
    assert "tokenizer_class" in str(caught.value.hint)


@pytest.mark.parametrize(("name", "package"), [("tokenizer.model", "sentencepiece"), ("tekken.json", "mistral-common")])
def test_the_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(
        tokenizer_file, "find_spec", lambda m: None if m in ("sentencepiece", "mistral_common") else find_spec(m)
    )
    with pytest.raises(ModelError, match=f"has its tokenizer as {name}, and {package} is not installed") as caught:
        load_tokenizer(tmp_path)
    assert f"pip install {package}" in str(caught.value.hint)
