"""Answers -> the values that are scored. The steps are lm-evaluation-harness' filters of the same names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from specbatch.evals.schema import (
    CodeBlock,
    Filter,
    Lowercase,
    MajorityVote,
    Regex,
    Remove,
    Step,
    Strip,
    TakeFirst,
)

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def apply_filter(chain: Filter, answers: Sequence[str]) -> list[str]:
    """The values of a row's answers (one, or sampling.n of them) after all steps of `chain`."""
    values = list(answers)
    for step in chain.steps:
        values = _apply(step, values)
    return values


def _apply(step: Step, values: list[str]) -> list[str]:
    match step:
        case TakeFirst():
            return values[:1]
        case MajorityVote():
            return [Counter(values).most_common(1)[0][0]]
        case Regex():
            return [_match(step, value) for value in values]
        case Remove():
            return [_without(step.texts, value) for value in values]
        case CodeBlock():
            return [_code(value) for value in values]
        case Lowercase():
            return [value.lower() for value in values]
        case Strip():
            return [value.strip() for value in values]


def _match(step: Regex, text: str) -> str:
    found = re.findall(step.pattern, text)
    try:
        match = found[step.group_select]
    except IndexError:  # nothing matched, or fewer times than group_select counts
        return step.fallback
    if isinstance(match, tuple):
        match = next((group for group in match if group), step.fallback)
    return match.strip()


def _without(texts: Sequence[str], value: str) -> str:
    for text in texts:
        value = value.replace(text, "")
    return value


def _code(text: str) -> str:
    block = _BLOCK.search(text)
    return block.group(1) if block else text
