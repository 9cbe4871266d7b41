"""Choice scoring: rows that ask how likely a model finds each of some texts after a prompt, and that generate nothing.

The log-probability of a choice is the sum over its tokens, as in lm-evaluation-harness. So is the way from text to
tokens: prompt and choice are tokenized as one text, white space at the end of the prompt belongs to the choice, and a
choice's tokens are those after as many as the prompt alone has. A choice that has none of these merges with the end of
the prompt. It cannot be compared with the others, so it has an error instead of a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specbatch.errors import RowError
from specbatch.files.jsonl import json_type
from specbatch.logprobs import LOWEST_LOGPROB
from specbatch.types import Completion, SamplingParams

FIELD = "score_choices"
_MAX_CHOICES = 1024


class ChoiceTokens(NamedTuple):
    """Prompt and choice as token ids; the choice's begin at `start`."""

    token_ids: list[int]
    start: int

    @property
    def is_scored(self) -> bool:
        """Return whether the prompt has a token before the first token of the choice, and the choice has a token."""
        return 1 <= self.start < len(self.token_ids)

    @property
    def params(self) -> SamplingParams:
        """Return the parameters of the request. Its one token costs nothing: the prompt's computation gives it."""
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
        if not isinstance(choice, str):
            raise RowError("invalid_type", f"{FIELD}[{i}] must be a text, not {json_type(choice)}")
    if params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        raise RowError("invalid_value", f"n, logprobs and prompt_logprobs have no effect on a row with {FIELD}")
    return tuple(given)


def tokens_of_text(
    prompt: str, choices: Sequence[str], tokenize: Callable[[list[str]], list[list[int]]]
) -> list[ChoiceTokens]:
    """`prompt` with each of the choices."""
    context = prompt.rstrip() or prompt
    space = prompt[len(context) :]
    alone, *whole = tokenize([context, *(context + space + choice for choice in choices)])
    return [ChoiceTokens(ids, len(alone)) for ids in whole]


def tokens_of_ids(
    prompt: Sequence[int], choices: Sequence[str], tokenize: Callable[[list[str]], list[list[int]]]
) -> list[ChoiceTokens]:
    """Split choices after a prompt of token ids. See `tokens_of_text`."""
    return [ChoiceTokens([*prompt, *ids], len(prompt)) for ids in tokenize(list(choices))]


def choice_scores(choices: Sequence[str], results: Sequence[Completion | RowError]) -> list[dict[str, Any]]:
    """Return the fields of each choice in a result line."""
    scores: list[dict[str, Any]] = []
    for choice, result in zip(choices, results, strict=True):
        if isinstance(result, RowError):
            error = {"type": result.type, "message": result.message}
            scores.append({"text": choice, "logprob": None, "num_tokens": 0, "error": error})
            continue
        assert result.prompt_logprobs is not None
        logprob = sum(max(token.logprob, LOWEST_LOGPROB) for token in result.prompt_logprobs)
        scores.append({"text": choice, "logprob": logprob, "num_tokens": len(result.prompt_logprobs)})
    return scores
