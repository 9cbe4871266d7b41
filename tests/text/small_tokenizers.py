"""Small tokenizers of the kinds that models have: pieces of characters, spaces at the front, bytes as tokens."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "User: a né\n\nnb 😀😀 don't a. b?\n€uro ab  ab\n# né" * 3
SPECIAL = "<end>"


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """One of a small vocabulary, by the name of its kind."""
    special = [AddedToken(SPECIAL, special=True)]
    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            [TEXT], trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
        )
    elif kind == "wordpiece":
        words = ["a", "b", "n", "##a", "##b", "n't", "not", "do", ".", "?", "'", "don", "#", "[UNK]"]
        backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        backend.decoder = decoders.WordPiece(cleanup=True)
    else:
        pieces = [
            "<unk>",
            "▁",
            "▁a",
            "▁ab",
            "a",
            "b",
            "n",
            "\n",
            "\n\n",
            "é",
            "▁né",
            ":",
            "▁User",
            "User:",
            "don",
            "'",
            "t",
        ]
        pieces += [f"<0x{byte:02X}>" for byte in range(256)]
        backend = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, True))
        if kind == "sentencepiece":
            replace = decoders.Replace("▁", " ")
            parts = [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
            backend.decoder = decoders.Sequence(parts)
        else:
            backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
