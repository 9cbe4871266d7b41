"""Answers -> the values that are scored. The steps are lm-evaluation-harness' filters of the same names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbatch.errors import ConfigError, cut, shown
from specbatch.strict.option import option, required
from specbatch.strict.reader import Reader, nearest

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def check_regex(path: str, pattern: str) -> None:
    """Raises ConfigError, with `path`, for what is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as exc:
        raise ConfigError(f"{path}: {pattern!r} is not a regular expression: {exc}") from exc


class Step:
    """A frozen dataclass, whose fields are the step's options, and an entry of STEPS. It has `apply` or `apply_one`."""

    def apply(self, values: list[str]) -> list[str]:
        """The values of a row's answers after this step."""
        return [self.apply_one(value) for value in values]

    def apply_one(self, value: str) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Regex(Step):
    pattern: str = required("A Python regular expression.", check_regex)
    group_select: int = option(0, "Which of all matches, from 0; -1: the last. Of its groups, the first not empty.")
    fallback: str = option("[invalid]", "The value where nothing matches.")

    def apply_one(self, value: str) -> str:
        try:
            match = re.findall(self.pattern, value)[self.group_select]
        except IndexError:  # nothing matched, or fewer times than group_select counts
            return self.fallback
        if isinstance(match, tuple):
            match = next((group for group in match if group), self.fallback)
        text: str = match.strip()
        return text


@dataclass(frozen=True)
class Remove(Step):
    texts: tuple[str, ...] = required("Every occurrence of each is removed.")

    def apply_one(self, value: str) -> str:
        for text in self.texts:
            value = value.replace(text, "")
        return value


@dataclass(frozen=True)
class CodeBlock(Step):
    """Keep the content of the first ``` block, or the whole text if there is no block."""

    def apply_one(self, value: str) -> str:
        block = _BLOCK.search(value)
        return block.group(1) if block else value


@dataclass(frozen=True)
class Lowercase(Step):
    def apply_one(self, value: str) -> str:
        return value.lower()


@dataclass(frozen=True)
class Strip(Step):
    """A step that removes white space at both ends."""

    def apply_one(self, value: str) -> str:
        return value.strip()


@dataclass(frozen=True)
class TakeFirst(Step):
    """Keep the first of several answers to a row (sampling.n)."""

    def apply(self, values: list[str]) -> list[str]:
        return values[:1]


@dataclass(frozen=True)
class MajorityVote(Step):
    """Keep the most frequent of several answers to a row, the earliest if several are equally frequent."""

    def apply(self, values: list[str]) -> list[str]:
        return [Counter(values).most_common(1)[0][0]]


STEPS: Mapping[str, type[Step]] = {
    "regex": Regex,
    "remove": Remove,
    "code_block": CodeBlock,
    "lowercase": Lowercase,
    "strip": Strip,
    "take_first": TakeFirst,
    "majority_vote": MajorityVote,
}


def read_step(reader: Reader, value: Any, path: str) -> Step:
    """A step from a task's file: its name, or its name with options. Raises ConfigError."""
    name, options = value, None
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, options),) = value.items()
    if not isinstance(name, str) or name not in STEPS:
        near = nearest(cut(str(name)), STEPS)
        raise ConfigError(
            f"{path} must be one step, such as take_first or regex: {{pattern: ...}}, not {shown(value)}",
            f"did you mean {near}?" if near else f"known: {', '.join(STEPS)}",
        )
    step: Step = reader.read(STEPS[name], options, f"{path}.{name}")
    return step


@dataclass(frozen=True)
class Filter:
    """The way from an answer to the value that is scored. Each filter of a task has its own accuracy."""

    name: str = required("Names the filter in the results.")
    steps: tuple[Step, ...] = option((), "What is done to the answers, in this order.", read=read_step)

    def apply(self, answers: Sequence[str]) -> list[str]:
        """The values of a row's answers (one, or sampling.n of them) after all steps."""
        values = list(answers)
        for step in self.steps:
            values = step.apply(values)
        return values
