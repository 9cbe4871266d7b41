"""The rules of one request on the host: what its sampling options forbid and change. `edits` applies them.

Shape suffixes: W words of a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbatch.batch import Edits
from specbatch.cache.rule_table import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES
from specbatch.errors import FieldError, shown
from specbatch.types import GRAMMAR_FIELDS, EngineLimits, SamplingParams

NO_TOKEN_LEFT = "no token is left to choose"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one request. The masks are those of `RuleTable`."""

    masks_2W: np.ndarray  # int32
    min_tokens: int
    biases: Mapping[int, float]
    bad_words: tuple[tuple[int, ...], ...]  # those of several tokens
    penalties: tuple[float, float, float]  # repetition, frequency, presence
    edits: Edits

    def leaves_none(self, output: Sequence[int]) -> bool:
        """Return whether the rules forbid all tokens after this output."""
        return not self.allowed(output).any()

    def allowed(self, output: Sequence[int]) -> np.ndarray:
        """(W,) int32, the tokens that may come after this output."""
        mask_W = self.masks_2W[int(len(output) >= self.min_tokens)].copy()
        for word in self.bad_words:
            if tuple(output[1 - len(word) :]) == word[:-1]:
                _remove(mask_W, word[-1:])
        return mask_W


def make_rules(
    params: SamplingParams, bad_words: Sequence[tuple[int, ...]], limits: EngineLimits, of_grammar: Edits = Edits.NONE
) -> Rules | None:
    """Make the rules of a request; None: it has none. `bad_words`: their token ids. `of_grammar`: the edits of its
    grammar. Raise FieldError if a token id is
    not in the vocabulary, if there are more of something than the device has room for, or if no token is allowed."""
    biases = dict(params.logit_bias or {})
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    several = tuple(dict.fromkeys(word for word in bad_words if len(word) > 1))
    edits = Edits.NONE
    if params.allowed_token_ids is not None or params.min_tokens or len(several) < len(bad_words):
        edits |= Edits.MASK
    if several:
        edits |= Edits.BAD_WORDS
    if biases or penalties != (1.0, 0.0, 0.0):
        edits |= Edits.VALUES
    if edits is Edits.NONE and of_grammar:
        return Rules(_all_tokens(limits.vocab_size), 0, {}, (), penalties, of_grammar)
    edits |= of_grammar
    if edits is Edits.NONE:
        return None
    allowed = params.allowed_token_ids
    _check_ids("logit_bias", biases, limits.vocab_size)
    _check_ids("allowed_token_ids", allowed or (), limits.vocab_size)
    _check_count("logit_bias", "entries", len(biases), MAX_BIASES)
    several_tokens = "texts of several tokens, with and without a space before them"
    _check_count("bad_words", several_tokens, len(several), MAX_BAD_WORDS)
    _check_count("bad_words", "tokens in a word", max(map(len, several), default=0), MAX_BAD_WORD_TOKENS)
    mask_W = _mask(limits.vocab_size, allowed)
    _remove(mask_W, [word[0] for word in bad_words if len(word) == 1])
    early_W = mask_W.copy()
    if params.min_tokens:
        # The end of a text in the tokenizer may be no token of the model.
        ends = {*limits.eos_token_ids, *params.stop_token_ids}
        _remove(early_W, [token for token in ends if token < limits.vocab_size])
    rules = Rules(np.stack((early_W, mask_W)), params.min_tokens, biases, several, penalties, edits)
    if not mask_W.any() or rules.leaves_none(()):
        raise FieldError("invalid_value", f"{NO_TOKEN_LEFT}: {forbidden_by(params, bad_words)}")
    return rules


def forbidden_by(params: SamplingParams, bad_words: Sequence[object]) -> str:
    """The options that forbid tokens, for a message."""
    given = {
        **{name: getattr(params, name) for name in GRAMMAR_FIELDS},
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": bad_words,
        "min_tokens": params.min_tokens,
    }
    names = [name for name, value in given.items() if value]
    return f"{' and '.join(names)} forbid{'s' * (len(names) == 1)} all of them"


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise FieldError("invalid_value", f"{name}: {shown(token)} is not a token id (0 .. {vocab_size - 1})")


def _check_count(name: str, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise FieldError("invalid_value", f"{name} may have up to {limit} {what}, not {count}")


def _mask(vocab_size: int, allowed: Sequence[int] | None) -> np.ndarray:
    """Return the mask of the allowed tokens, (W,) int32 words. `allowed` None: all tokens are allowed."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    bits[slice(vocab_size) if allowed is None else np.array(allowed, dtype=np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@functools.cache
def _all_tokens(vocab_size: int) -> np.ndarray:
    """(2, W) the masks that allow all tokens. Nobody may change them."""
    mask_W = _mask(vocab_size, None)
    return np.stack((mask_W, mask_W))


def _remove(mask_W: np.ndarray, tokens: Iterable[int]) -> None:
    ids = np.array(list(tokens), dtype=np.int64)
    np.bitwise_and.at(mask_W.view(np.uint32), ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
