"""A tokenizer as small as the tests' models: bytes of JSON texts, and some longer tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 0
_LETTERS = '{}[]":,-.0123456789abcdefilmnorstuy_<>ĠĊ'  # the last two: a space and a line's end
_LONGER = ["na", "nam", "name", 'Ġ"', '":', '":Ġ"', "tr", "tru", "true", "10", "ab", "Ã", "©"]


def tiny_tokenizer(vocab_size: int = 61) -> PreTrainedTokenizerFast:
    """Token 0 ends a text. A token past the ones with a text is `<60>`."""
    texts = ["<|end|>", *_LETTERS, *_LONGER]
    texts += [f"<{i}>" for i in range(len(texts), vocab_size)]
    vocab = {text: i for i, text in enumerate(texts)}
    merges = [("n", "a"), ("na", "m"), ("nam", "e"), ("Ġ", '"'), ('"', ":"), ('":', 'Ġ"'), ("t", "r"), ("tr", "u")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[*merges, ("tru", "e"), ("1", "0"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)
