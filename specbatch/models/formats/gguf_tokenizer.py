"""The tokenizer of a GGUF file, rebuilt from its metadata.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) without saying what it does. Each name known here means the
pipeline of the `tokenizer.json` that it was converted from. A name that is not known is refused, because a wrong
pipeline gives fluent, different answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specbatch.errors import ModelError
from specbatch.models.checks import flag
from specbatch.models.formats.gguf import GgufFile

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACE = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_PATTERN = _CONTRACTIONS + "|" + _WORDS_AND_SPACE % r"\p{N}"
_LLAMA3_PATTERN = _CONTRACTIONS + "|" + _WORDS_AND_SPACE % r"\p{N}{1,3}"
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _ByteLevelKind:
    """The pre-tokenizer of a byte-level BPE, which cuts a text into the pieces that BPE merges within."""

    pattern: str | None  # None: GPT-2's own, built into the ByteLevel pre-tokenizer
    split_digits: bool = False  # every digit apart, before anything else
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is itself a token is not split
    adds_bos: bool = False  # if the file does not set it


_KINDS: Mapping[str, _ByteLevelKind] = {
    "gpt-2": _ByteLevelKind(None),
    "smollm": _ByteLevelKind(None, split_digits=True),
    "qwen2": _ByteLevelKind(_QWEN2_PATTERN, nfc=True),
    "llama-bpe": _ByteLevelKind(_LLAMA3_PATTERN, ignore_merges=True, adds_bos=True),
    "tekken": _ByteLevelKind(_TEKKEN_PATTERN, ignore_merges=True, adds_bos=True),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Raises ModelError for a tokenizer that cannot be rebuilt exactly."""
    path, tokens = file.path, file.items("tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelError(f"{path} has no tokenizer (tokenizer.ggml.tokens)")
    kinds = file.items("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{path}: {len(tokens)} tokens, but {len(kinds)} token types", hint="download the file again")
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        backend, adds_bos = _byte_level(file, tokens, kinds)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(file, tokens, kinds)
    else:
        raise ModelError(
            f"{path}: tokenizer model {model!r} is not supported",
            hint="supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)",
        )
    # Added in the order of ids, so that each keeps its id: a token that the model does not hold gets the next free one.
    for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and text:
            special = kind != _USER_DEFINED
            added = AddedToken(text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([added])
            if backend.token_to_id(text) != i:
                raise ModelError(f"{path}: token {text!r} appears under two ids, or ids before {i} are unused")
    adds_bos, adds_eos = _flag(file, "add_bos_token", adds_bos), _flag(file, "add_eos_token", False)
    bos, eos = _named(file, "bos", tokens), _named(file, "eos", tokens)
    before, after = [bos] if adds_bos and bos else [], [eos] if adds_eos and eos else []
    if before or after:
        backend.post_processor = _surrounding(backend, before, after)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=_named(file, "padding", tokens),
        unk_token=_named(file, "unknown", tokens),
        chat_template=file.text("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _flag(file: GgufFile, key: str, default: bool) -> bool:
    return flag(file.metadata.get(f"tokenizer.ggml.{key}", default), f"{file.path}: tokenizer.ggml.{key}")


def _named(file: GgufFile, key: str, tokens: Sequence[str]) -> str | None:
    """The token that the metadata gives a role, None where it gives none."""
    i = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[i] if isinstance(i, int) and 0 <= i < len(tokens) else None


def _byte_level(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    name = file.text("tokenizer.ggml.pre") or "default"
    if name == "default":  # files from before the key: the family decides
        name = _guess_kind(file.metadata, tokens)
    kind = _KINDS.get(_ALIASES.get(name, name))
    if kind is None:
        raise ModelError(
            f"{file.path}: pre-tokenizer {name!r} is not known, and a guess would change the text that the model sees",
            hint=f"known: {', '.join(_KINDS)}; or use the model's Hugging Face directory",
        )
    # Unused entries pad the embedding; as vocabulary they could match text. Added tokens are matched before the model.
    vocab = {text: i for i, text in enumerate(tokens) if kinds[i] == _NORMAL}
    gap_free = _with_leading_added(vocab, tokens, kinds)
    pairs = [tuple(merge.split(" ", 1)) for merge in file.items("tokenizer.ggml.merges", str)]
    backend = Tokenizer(models.BPE(vocab=gap_free, merges=pairs, ignore_merges=kind.ignore_merges))  # type: ignore[arg-type]
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if kind.split_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, kind.adds_bos


def _guess_kind(metadata: Mapping[str, Any], tokens: Sequence[str]) -> str:
    if metadata.get("general.architecture") in ("qwen2", "qwen3"):
        return "qwen2"
    return "llama-bpe" if "<|begin_of_text|>" in tokens else "gpt-2"


def _with_leading_added(vocab: dict[str, int], tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """The vocabulary, with the added tokens if not all of them come after it.

    `tokenizers` numbers added tokens from the vocabulary's size on; those with lower ids (or between unused ones) must
    be in the vocabulary to keep their ids. They cannot match as ordinary text: no merge forms them.
    """
    added = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)]
    if added == list(range(len(vocab), len(vocab) + len(added))):
        return vocab
    return vocab | {tokens[i]: i for i in added if tokens[i]}


def _sentencepiece(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    scores = file.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: the tokenizer has no scores (tokenizer.ggml.scores)")
    vocab = {text: i for i, text in enumerate(tokens) if kinds[i] != _UNUSED}
    mergeable = {text: scores[i] for text, i in vocab.items() if kinds[i] == _NORMAL}
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, mergeable),
            unk_token=_named(file, "unknown", tokens),
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    prefix = _flag(file, "add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True


def _merges_from_scores(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose union has the best score; BPE wants the pairs in that order.

    Ties within one piece go to the split with the lower ids, as in transformers' conversion.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        local = [(left, right) for left, right in splits if left in scores and right in scores]
        local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges.extend((score, len(left), len(right), left, right) for left, right in local)
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _surrounding(backend: Tokenizer, before: Sequence[str], after: Sequence[str]) -> processors.TemplateProcessing:
    single = [*before, "$A", *after]
    pair = [*single, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
