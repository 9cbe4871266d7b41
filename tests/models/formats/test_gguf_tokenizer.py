"""Tokenizers rebuilt from GGUF metadata against independently specified originals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specbatch.errors import ModelError
from specbatch.models.formats.tokenizer import describe_tokenizer_difference, load_tokenizer

MODELS = Path(os.environ.get("SPECBATCH_TEST_MODELS", Path.home() / ".cache" / "specbatch-dev"))
TEXTS = [
    "The year  2024 has 365 days,  and 12345678 seconds is  7 weeks.",
    "def f(a, b):\n\treturn a ** 2  # 3 spaces:   x\n\n\n    if a != b: pass\r\n",
    "naïve café déjà vu — “quotes” … ½ ² ③",
    "漢字かな交じり文 한국어 中文，测试 123",
    "😀👩‍👩‍👧 🇩🇪 emoji",
    "مرحبا بالعالم ١٢٣ نص",
    "I'm sure WE'LL see; they'Ve don't",
    "<|im_start|>user\nhi  42<|im_end|>\n<|endoftext|> <s> x </s>",
    "  leading and trailing  ",
    " ",
    "\u00a0\u200b\ufeff\x00",
    "1 22 333 4444 55555",
    "",
]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The first steps of each published tokenizer.json.
PIPELINES: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def original(pre: str) -> Tokenizer:
    """A small byte-level BPE, trained on the texts so that merges cross wherever the pipeline lets them."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PIPELINES[pre])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS if pre == "smollm" else [],  # SmolLM2 has them first, the others last
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def write(path: Path, tokenizer: Tokenizer, pre: str, padding: int = 0, **metadata: Any) -> Path:
    vocab = {i: text for text, i in tokenizer.get_vocab().items()}
    tokens = [vocab[i] for i in range(len(vocab))]
    kinds = [3 if text in SPECIALS else 4 if text == "<tool_call>" else 1 for text in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_types(kinds + [5] * padding)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for key, value in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", list(PIPELINES))
def test_byte_level_tokenizers_are_rebuilt_exactly(pre: str, tmp_path: Path) -> None:
    theirs = original(pre)
    ours = load_tokenizer(write(tmp_path / "t.gguf", theirs, pre, padding=5, add_bos_token=False))
    for text in TEXTS:
        expected = theirs.encode(text).ids
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=False)
        assert ours.decode(expected, skip_special_tokens=True) == theirs.decode(expected, skip_special_tokens=True)
        assert ours.decode(expected) == text or pre == "qwen2"  # NFC changes some texts
    # Padding entries of the embedding are no tokens.
    assert ours.encode("[PAD0]") == theirs.encode("[PAD0]").ids
    assert len(ours) == theirs.get_vocab_size()
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    chat = ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"


def test_pipelines_differ_on_the_texts(tmp_path: Path) -> None:
    """Or else the test above could not fail: read one file under every name."""
    theirs = original("gpt-2")
    encodings = {}
    for pre in PIPELINES:
        tokenizer = load_tokenizer(write(tmp_path / "t.gguf", theirs, pre, add_bos_token=False))
        encodings[pre] = str([tokenizer.encode(text) for text in TEXTS])
    assert len(set(encodings.values())) == len(PIPELINES)


def test_bos_token(tmp_path: Path) -> None:
    theirs = original("llama-bpe")
    bos = theirs.token_to_id("<|im_start|>")
    plain = theirs.encode("x 1").ids
    implied = load_tokenizer(write(tmp_path / "a.gguf", theirs, "llama-bpe"))  # Llama 3 adds it where nothing is said
    assert implied.encode("x 1") == [bos, *plain]
    assert implied("x 1", add_special_tokens=False)["input_ids"] == plain
    asked = load_tokenizer(write(tmp_path / "b.gguf", theirs, "gpt-2", add_bos_token=True, add_eos_token=True))
    assert asked.encode("x 1")[0] == bos
    assert asked.encode("x 1")[-1] == theirs.token_to_id("<|im_end|>")


def test_unknown_pre_tokenizers_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", original("gpt-2"), "brand-new")
    with pytest.raises(ModelError, match="brand-new") as caught:
        load_tokenizer(path)
    assert "smollm" in str(caught.value.hint)


def test_difference(tmp_path: Path) -> None:
    theirs = original("qwen2")
    directory = tmp_path / "hf"
    PreTrainedTokenizerFast(tokenizer_object=theirs).save_pretrained(directory)
    from_directory = load_tokenizer(directory)
    from_gguf = load_tokenizer(write(tmp_path / "t.gguf", theirs, "qwen2", add_bos_token=False))
    padded = load_tokenizer(write(tmp_path / "p.gguf", theirs, "qwen2", padding=9, add_bos_token=False))
    for same in (from_gguf, padded):
        assert describe_tokenizer_difference(from_directory, same) is None
    other = load_tokenizer(write(tmp_path / "o.gguf", original("smollm"), "smollm"))
    text = describe_tokenizer_difference(from_gguf, other)
    assert text is not None
    assert "token 0 is '!' in one, '<|endoftext|>' in the other" in text


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizer"])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_directories_keep_their_tokenizer_json(pre: str, class_name: str, tmp_path: Path) -> None:
    """tokenizer_class is ignored: for SmolLM2 it is GPT2Tokenizer, whose pipeline would not split digits."""
    theirs = original(pre)
    bos = theirs.token_to_id("<|im_start|>")
    theirs.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": class_name, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.eos_token == "<|im_end|>"
    assert ours.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|im_start|>x"


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


SPM_PIECES = [("▁", -5.0), ("h", -6.0), ("i", -7.0), ("▁h", -1.0), ("hi", -0.5), ("▁hi", -2.0), ("x", -8.0)]


def write_sentencepiece(path: Path, **metadata: bool) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *[piece for piece, _ in SPM_PIECES]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES))
    writer.add_token_scores([0.0] * 259 + [score for _, score in SPM_PIECES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "t.gguf"))

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))

    # "hi" has the best score, so it forms first and "▁h" cannot; then "▁" + "hi".
    assert pieces("hi") == ["<s>", "▁hi"]
    assert pieces("hh") == ["<s>", "▁h", "h"]
    assert pieces("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]  # byte fallback
    assert pieces("x  x") == ["<s>", "▁", "x", "▁", "▁", "x"]
    for text in ("hi", "  hi x", "é😀\n", "x  "):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    bare = load_tokenizer(write_sentencepiece(tmp_path / "b.gguf", add_bos_token=False, add_space_prefix=False))
    assert bare.convert_ids_to_tokens(bare.encode("hi")) == ["hi"]
    assert bare.decode(bare.encode(" hi")) == " hi"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_tokenizers_equal_their_tokenizer_json(name: str) -> None:
    if not (MODELS / f"{name}.gguf").exists() or not (MODELS / f"{name}-hf").exists():
        pytest.skip(f"no {name} under {MODELS}")
    ours, loaded = load_tokenizer(MODELS / f"{name}.gguf"), load_tokenizer(MODELS / f"{name}-hf")
    theirs = Tokenizer.from_file(str(MODELS / f"{name}-hf" / "tokenizer.json"))
    for text in [*TEXTS, "<repo_name> <tool_call> [PAD151665]", *(a + b for a in TEXTS for b in TEXTS)]:
        expected = theirs.encode(text).ids
        assert ours.encode(text) == expected == loaded.encode(text), text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=False)
    assert describe_tokenizer_difference(ours, loaded) is None
