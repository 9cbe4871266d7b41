"""Values -> right or wrong, and rows -> accuracy with its standard error."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from specbatch.evals.schema import ExactMatch

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(metric: ExactMatch, value: str, answer: str) -> bool:
    """Whether the two are equal once both have lost what the metric ignores. As lm-evaluation-harness' (and before it
    Hugging Face evaluate's) exact_match."""
    return _plain(metric, value) == _plain(metric, answer)


def _plain(metric: ExactMatch, text: str) -> str:
    for pattern in metric.regexes_to_ignore:
        text = re.sub(pattern, "", text)
    if metric.ignore_case:
        text = text.lower()
    return text.translate(_NO_PUNCTUATION) if metric.ignore_punctuation else text


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The mean of `scored` rows' scores in 0 .. 1, and its standard error; None where there are too few rows."""

    value: float | None
    standard_error: float | None
    correct: float  # the sum of the scores: a count, where each row has one answer
    scored: int


def accuracy(scores: Sequence[float]) -> Accuracy:
    """Mean, and the sample's standard deviation over the root of its size, as lm-evaluation-harness' mean_stderr."""
    if not scores:
        return Accuracy(None, None, 0.0, 0)
    mean = sum(scores) / len(scores)
    return Accuracy(mean, standard_error(scores), sum(scores), len(scores))


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of `values`; None for fewer than two."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
