"""The start of a request, and the tokens that are added to it until it ends. Both engines use these functions."""

from __future__ import annotations

from collections.abc import Set

from specbatch.batch import NO_TOKEN
from specbatch.engine.constrained.state import GrammarState
from specbatch.engine.rules import make_rules
from specbatch.engine.sequence import Sequence
from specbatch.types import EngineLimits, FinishReason, Request


def new_sequence(request: Request, limits: EngineLimits, max_length: int) -> Sequence:
    """Raises ValueError for a prompt that does not fit `limits`. `max_length` bounds prompt and output together."""
    prompt = list(request.prompt_token_ids)
    if not 1 <= len(prompt) <= limits.max_prompt_tokens:
        raise ValueError(f"a prompt has 1 to {limits.max_prompt_tokens} tokens here, got {len(prompt)}")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise ValueError(f"a token id is outside the vocabulary of {limits.vocab_size}")
    params, matcher = request.params, request.matcher
    rules = make_rules(params, request.bad_words, limits, has_grammar=matcher is not None)
    grammar = None
    if matcher is not None:
        grammar = GrammarState(matcher, limits.eos_token_ids, params.stop_token_ids, limits.vocab_size)
    return Sequence(request, prompt, min(len(prompt) + params.max_tokens, max_length), rules=rules, grammar=grammar)


def append_tokens(seq: Sequence, tokens: list[int], eos: Set[int]) -> FinishReason | None:
    """Append new tokens up to where the request ends; the reason if it does.

    End-of-sequence and stop are looked for before the length is: a last token that is both counts as a stop. The last
    may be NO_TOKEN: an error, unless the request ends before it.
    """
    params = seq.request.params
    failed = tokens[-1] == NO_TOKEN
    if failed:
        tokens = tokens[:-1]
    kept = tokens[: seq.max_length - len(seq.tokens)]
    reason = FinishReason.LENGTH if len(seq.tokens) + len(kept) == seq.max_length else None
    if params.stop_token_ids or not (params.ignore_eos or eos.isdisjoint(kept)):  # hardly ever
        for i, token in enumerate(kept):
            if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
                kept, reason = kept[: i + 1], FinishReason.STOP
                break
    seq.tokens += kept
    check = seq.request.check_stop
    if check is not None and kept:
        keep = check(seq.tokens, seq.num_prompt, len(kept))
        if keep is not None:
            del seq.tokens[seq.num_prompt + keep :]
            reason = FinishReason.STOP
    return FinishReason.ERROR if failed and reason is None else reason
