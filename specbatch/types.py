"""The types that the file job and the engine exchange. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.errors import FieldError, shown
from specbatch.logprobs import TokenLogprobs
from specbatch.matcher import GrammarMatcher
from specbatch.schemas.response_format import read_response_format
from specbatch.strict.option import SEED, Range, option


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context or of the KV cache
    TOOL_CALLS = "tool_calls"  # STOP in a result line whose text has calls of tools
    ERROR = "error"  # the model's logits for the next token are not finite, or rules forbid all tokens


def check_unicode(path: str, text: str) -> None:
    """Raise FieldError if the text has half of a surrogate pair, which JSON can hold but no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        bad = f"U+{ord(text[exc.start]):04X}"
        raise FieldError("invalid_text", f"{path} has {bad} at character {exc.start}, which is not text") from exc


def _not_empty(path: str, text: str) -> None:
    check_unicode(path, text)
    if not text:
        raise FieldError("invalid_value", f"{path} must not be an empty text, which would match everywhere")


def _not_blank(path: str, text: str) -> None:
    check_unicode(path, text)
    if not text.strip():
        raise FieldError("invalid_value", f"{path} must have a visible character")


def _biases(reader: Any, value: Any, path: str) -> Mapping[int, float] | None:
    """Read biases. Token ids are keys, so they are text in JSON; elsewhere they can be integers."""
    if not isinstance(value, dict):
        raise FieldError("invalid_type", f"{path} must map token ids to numbers, not {shown(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_text = isinstance(key, str) and key.isdecimal() and key.isascii() and len(key) <= 10
        if not (type(key) is int or is_text) or not 0 <= int(key) < 2**31:
            raise FieldError("invalid_value", f"{path} must have token ids as keys, not {shown(key)}")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise FieldError("invalid_type", f"{path}[{key}] must be a number, not {shown(bias)}")
        if not -100 <= bias <= 100:
            raise FieldError("invalid_value", f"{path}[{key}] must be >= -100 and <= 100, not {shown(bias)}")
        biases[int(key)] = float(bias)
    return biases or None


TOKEN_ID = Range(">= 0 and < 2^31", lambda v: 0 <= v < 2**31)
_PENALTY = Range(">= -2 and <= 2 (0 = off)", lambda v: -2 <= v <= 2)


# The options that limit the text. At most one is given. An option of a row replaces the default's.
GRAMMAR_FIELDS = ("response_format", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The options for choosing tokens. A row overrides any of these with a field of the same name. An option that is
    left out can come from the model's `generation_config.json` (`model.generation_config`)."""

    # Lengths, counts and token ids are held in int32 buffers on the device.
    max_tokens: int = option(256, "Most tokens of a completion.", Range(">= 1 and < 2^31", lambda v: 1 <= v < 2**31))
    temperature: float = option(0.0, "0 = greedy.", Range(">= 0 and <= 10000 (0 = greedy)", lambda v: 0 <= v <= 10_000))
    top_p: float = option(
        1.0,
        "Sample from the most probable tokens that add up to this probability. 1 = off.",
        Range("> 0 and <= 1 (1 = off)", lambda v: 0 < v <= 1),
    )
    top_k: int = option(
        0,
        "Sample from this number of most probable tokens. 0 = off, and so is -1, as in vLLM.",
        Range(">= -1 and < 2^31 (0 and -1 = off)", lambda v: -1 <= v < 2**31),
    )
    min_p: float = option(
        0.0,
        "Sample from tokens with at least this share of the highest probability. 0 = off. It comes after top_k and "
        "top_p, as in transformers; in vLLM it comes before them.",
        Range(">= 0 and <= 1 (0 = off)", lambda v: 0 <= v <= 1),
    )
    seed: int | None = option(
        None,
        "Seeds the sampling, together with the row's index. null: `engine.seed` does. A row's own seed counts alone.",
        SEED,
    )
    stop: tuple[str, ...] = option((), "Texts that end a completion. They are not part of its text.", _not_empty)
    stop_token_ids: tuple[int, ...] = option((), "Token ids that end a completion.", TOKEN_ID)
    ignore_eos: bool = option(False, "Continue after the end-of-sequence token.")
    logprobs: int | None = option(
        None,
        "Log-probabilities. null = off, 0 = of the chosen tokens, k = also of the k most likely (at most 20).",
        Range(">= 0 and <= 20", lambda v: 0 <= v <= 20),
    )
    prompt_logprobs: int | None = option(
        None,
        "Log-probabilities of the prompt's tokens, each after those before it. null = off, 0 = of these tokens, "
        "k = also of the k most likely (at most 20).",
        Range(">= 0 and <= 20", lambda v: 0 <= v <= 20),
    )
    prompt_logprobs_start: int = option(
        0,
        "The first prompt token whose log-probability is wanted. Tokens before it can come from the prefix cache.",
        Range(">= 0 and < 2^31", lambda v: 0 <= v < 2**31),
    )
    repetition_penalty: float = option(
        1.0,
        "Divides the positive logits, and multiplies the negative ones, of tokens that the prompt or the output has. "
        "1 = off.",
        Range("> 0 and <= 100 (1 = off)", lambda v: 0 < v <= 100),
    )
    frequency_penalty: float = option(
        0.0, "Taken off a token's logit for each time that the output has the token.", _PENALTY
    )
    presence_penalty: float = option(0.0, "Taken off the logit of each token that the output has.", _PENALTY)
    logit_bias: Mapping[int, float] | None = option(
        None, "Added to the logits of tokens: {token id: -100 to 100}, up to 1024 of them.", read=_biases
    )
    allowed_token_ids: tuple[int, ...] | None = option(
        None, "The only token ids that may be chosen. null: all.", TOKEN_ID
    )
    bad_words: tuple[str, ...] = option(
        (),
        "Texts that the model must not write, with or without a space before them. Capitals matter. A text has up to "
        "16 tokens; 128 texts always fit.",
        _not_blank,
    )
    min_tokens: int = option(
        0,
        "Tokens before which no end-of-sequence or stop token is chosen, and no stop text ends the completion.",
        Range(">= 0 and <= max_tokens", lambda v: 0 <= v < 2**31),
    )
    include_stop_str_in_output: bool = option(
        False, "The stop text, or the text of the stop token, stays at the end of the completion."
    )
    n: int = option(
        1,
        "Completions for each row. At temperature 0 one is computed, and the others are copies.",
        Range(">= 1 and <= 1024", lambda v: 1 <= v <= 1024),
    )
    response_format: str | None = option(
        None,
        'As OpenAI has it: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": {...}}}`. '
        "The text is JSON that the schema allows. Its objects have no other keys than those that it names, unless it "
        "gives `additionalProperties`, or `json_schema` has `strict: false`.",
        read=read_response_format,
    )
    regex: str | None = option(
        None, "The text matches this regular expression, in the syntax of Rust's `regex`.", check_unicode
    )
    choice: tuple[str, ...] | None = option(None, "The text is one of these.", check_unicode)
    grammar: str | None = option(None, "The text is a sentence of this grammar, in Lark or GBNF.", check_unicode)

    def __post_init__(self) -> None:
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)  # so fingerprints and kernels know one value only
        if self.min_tokens > self.max_tokens:
            raise FieldError(
                "invalid_value", f"min_tokens must be <= max_tokens, which is {self.max_tokens}, not {self.min_tokens}"
            )
        if self.allowed_token_ids == ():
            raise FieldError("invalid_value", "allowed_token_ids must not be empty")
        if len(given := [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]) > 1:
            raise FieldError("invalid_value", f"{' and '.join(given)} are given; give one of them")
        if self.choice is not None and (len(set(self.choice)) < max(2, len(self.choice)) or "" in self.choice):
            raise FieldError(
                "invalid_value", f"choice must be a list of two or more different texts, not {shown([*self.choice])}"
            )


@dataclass(frozen=True, slots=True)
class RngKey:
    """The key of a request's random numbers: Philox key `seed` (64 bit), counter words `stream` (64 bit) and `sample`.

    The remaining counter words are the position in the sequence and the purpose of the draw. So random numbers do not
    depend on scheduling.
    """

    seed: int
    stream: int  # the row's index; 0 if the row has its own seed
    sample: int  # 0 .. n-1


# A check for stop strings: (tokens, index of the first generated token, number of new tokens) -> the number of
# generated tokens to keep, if a stop string ends within the new tokens, else None. The token that completes the stop
# string is kept.
StopCheck = Callable[[Sequence[int], int, int], int | None]


@dataclass(slots=True)
class Request:
    """One completion to compute."""

    request_id: int  # unique among the requests in flight; chosen by the caller
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    rng: RngKey
    check_stop: StopCheck | None = None  # None: no stop strings
    bad_words: tuple[tuple[int, ...], ...] = ()  # `params.bad_words` as token ids
    matcher: GrammarMatcher | None = None  # the matcher, which no other request has; None: any text
    matcher_spec: Any = None  # a `grammar.compiler.MatcherSpec`, from which other ranks make the same matcher
    stop_spec: Any = None  # a `rows.tokenizer.StopSpec`, from which other ranks make the same `check_stop`
    predicted_token_ids: Sequence[int] = ()  # a text that the output may be like; n-gram drafts come from it, too


class Margin(NamedTuple):
    """The margin of a greedy completion: the smallest difference of the two largest logits at one of its tokens, and
    the first position with it. Logits are those by which the token was chosen, as float32."""

    value: float  # infinite: no position had a second token that was possible
    position: int  # index among the completion's tokens


NO_MARGIN = Margin(math.inf, 0)


@dataclass(slots=True)
class Completion:
    """A finished request."""

    request_id: int
    # Generated tokens. The last one can be a stop token or an end-of-sequence token. With ERROR these are the tokens
    # before the error.
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: TokenLogprobs | None  # one for each generated token, if the request wants them
    speculation: SpeculationCounts
    margin: Margin = NO_MARGIN  # a sampled completion has none
    # Log-probabilities of the prompt's tokens from `params.prompt_logprobs_start` on. The first token has none.
    prompt_logprobs: TokenLogprobs | None = None
    incomplete: bool = False  # with LENGTH: the request's grammar does not allow an end there
    grammar_error: str | None = None  # with ERROR: the error that keeps the request's grammar from going on
    no_token_left: bool = False  # with ERROR: the request's rules forbid all tokens; else the logits are not finite


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of a request. The caller checks rows against them before it submits requests."""

    max_prompt_tokens: int  # the longest prompt that leaves room for one token
    vocab_size: int
    max_logprobs: int = 20
    eos_token_ids: tuple[int, ...] = ()


class BatchEngine(Protocol):
    """The interface of an engine that the file job needs. Tests have stubs of it."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def tokens_so_far(self) -> dict[int, int]:
        """Return the number of generated tokens by request id, for the requests that have started and not finished."""
        ...

    def limit_length(self, tokens: int | None) -> int:
        """Allow requests of at most `tokens` tokens from now on, prompt and output together. None: the limit that was
        decided when the engine was built. Return the limit. It raises ModelError if the cache has no room for it."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request that fits `limits`. It raises ValueError for a request that does not."""
        ...

    def step(self) -> list[Completion]:
        """Run one prefill chunk or one round, and return the requests that it finished. An idle engine returns at
        once."""
        ...

    def close(self) -> None:
        """Free what is shared with other processes. Nothing can run after this. A second call does nothing."""
        ...
