"""Choice scoring: rows that ask how likely a model finds each of some texts after a prompt, and that generate nothing.

The log-probability of a choice is the sum over its tokens, as in lm-evaluation-harness. So is the way from text to
tokens: prompt and choice are tokenized as one text, white space at the end of the prompt belongs to the choice, and a
choice's tokens are those after as many as the prompt alone has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specbatch.errors import RowError
from specbatch.job.jsonl import json_type
from specbatch.job.logprob_json import LOWEST_LOGPROB
from specbatch.types import Completion, SamplingParams

FIELD = "score_choices"
_MAX_CHOICES = 1024


class ChoiceTokens(NamedTuple):
    """Prompt and choice as token ids; the choice's begin at `start`."""

    token_ids: list[int]
    start: int

    @property
    def params(self) -> SamplingParams:
        """Of the request. Its one token costs nothing: the prompt's computation gives it."""
        return SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=self.start)


def read_choices(fields: Mapping[str, Any], params: SamplingParams) -> tuple[str, ...]:
    """A row's choices; empty if it has none. `params`: the row's. Raises RowError."""
    given = fields.get(FIELD)
    if given is None:
        return ()
    if not isinstance(given, list):
        raise RowError("invalid_type", f"{FIELD} must be a list of texts, not {json_type(given)}")
    if not 1 <= len(given) <= _MAX_CHOICES:
        raise RowError("invalid_value", f"{FIELD} must have 1 to {_MAX_CHOICES} texts, not {len(given)}")
    for i, choice in enumerate(given):
        if not isinstance(choice, str) or not choice:
            raise RowError("invalid_type", f"{FIELD}[{i}] must be a text that is not empty")
    if params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        raise RowError("invalid_value", f"n, logprobs and prompt_logprobs have no effect on a row with {FIELD}")
    return tuple(given)


def tokens_of_text(
    prompt: str, choices: Sequence[str], tokenize: Callable[[list[str]], list[list[int]]]
) -> list[ChoiceTokens]:
    """Raises RowError for a choice that adds no token."""
    context = prompt.rstrip() or prompt
    space = prompt[len(context) :]
    alone, *whole = tokenize([context, *(context + space + choice for choice in choices)])
    return _checked([ChoiceTokens(ids, len(alone)) for ids in whole])


def tokens_of_ids(
    prompt: Sequence[int], choices: Sequence[str], tokenize: Callable[[list[str]], list[list[int]]]
) -> list[ChoiceTokens]:
    """As `tokens_of_text`, of a prompt that is given as token ids."""
    return _checked([ChoiceTokens([*prompt, *ids], len(prompt)) for ids in tokenize(list(choices))])


def _checked(found: list[ChoiceTokens]) -> list[ChoiceTokens]:
    for i, one in enumerate(found):
        if not 1 <= one.start < len(one.token_ids):
            raise RowError("invalid_value", f"{FIELD}[{i}] adds no token to the prompt")
    return found


def choice_scores(choices: Sequence[str], completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """What a result line has of each choice."""
    scores = []
    for choice, completion in zip(choices, completions, strict=True):
        assert completion.prompt_logprobs is not None
        logprob = sum(max(token.logprob, LOWEST_LOGPROB) for token in completion.prompt_logprobs)
        scores.append({"text": choice, "logprob": logprob, "num_tokens": len(completion.prompt_logprobs)})
    return scores
