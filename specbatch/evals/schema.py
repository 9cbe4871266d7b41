"""What a task is: frozen data, read from one YAML file by `load.py`.

Names follow lm-evaluation-harness where it has them (group_select, fallback, ignore_case, regexes_to_ignore), so that
its tasks can be compared line by line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specbatch.types import SamplingParams


@dataclass(frozen=True)
class DataSource:
    """Rows: exactly one of `packaged`, `file` and `hub`."""

    packaged: str | None = None  # a file of specbatch/evals/data
    file: str | None = None  # relative to the task's YAML file
    hub: str | None = None  # org/name
    subset: str | None = None  # of a hub data set
    split: str = "test"  # of a hub data set


@dataclass(frozen=True)
class Prompt:
    """Jinja templates over a row's fields."""

    question: str  # the text to continue, or the user's message
    kind: Literal["completion", "chat"] = "completion"  # chat: through the model's chat template
    answer: str = ""  # the right answer: what exact_match compares with, and the answer of a few-shot example
    example_answer: str | None = None  # the answer of a few-shot example, where it is worded differently
    answer_delimiter: str = " "  # completion: between the question and the answer of an example
    example_delimiter: str = "\n\n"  # completion: behind each example
    system: str | None = None  # chat: the system message


@dataclass(frozen=True)
class FewShot:
    """Worked examples before the question: rows of `data`, or `examples` themselves."""

    count: int
    data: DataSource | None = None
    examples: tuple[Mapping[str, Any], ...] = ()
    # random: as lm-evaluation-harness draws them, from one generator that goes through the rows in order.
    sampler: Literal["first", "random"] = "first"
    seed: int = 1234


@dataclass(frozen=True)
class Regex:
    """Of all matches the one at `group_select` (-1: the last); of its groups the first that is not empty."""

    pattern: str
    group_select: int = 0
    fallback: str = "[invalid]"  # where nothing matches


@dataclass(frozen=True)
class Remove:
    """Every occurrence of each text."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class CodeBlock:
    """What the first ``` block holds; the whole text where there is none."""


@dataclass(frozen=True)
class Lowercase:
    pass


@dataclass(frozen=True)
class Strip:
    """Without white space at both ends."""


@dataclass(frozen=True)
class TakeFirst:
    """Of several answers to a row (sampling.n) the first."""


@dataclass(frozen=True)
class MajorityVote:
    """Of several answers to a row the most frequent one, the earliest of equals."""


Step = Regex | Remove | CodeBlock | Lowercase | Strip | TakeFirst | MajorityVote
STEPS: Mapping[str, type[Step]] = {
    "regex": Regex,
    "remove": Remove,
    "code_block": CodeBlock,
    "lowercase": Lowercase,
    "strip": Strip,
    "take_first": TakeFirst,
    "majority_vote": MajorityVote,
}


@dataclass(frozen=True)
class Filter:
    """A named way from an answer to the value that is scored; each filter of a task is reported apart."""

    name: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class ExactMatch:
    """Whether value and answer are equal, once both have lost what is ignored."""

    ignore_case: bool = False
    ignore_punctuation: bool = False
    regexes_to_ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class Execution:
    """Whether a program runs to its end. `program`: a template over the row's fields and `response`, the value."""

    program: str
    timeout_seconds: float = 10.0
    memory_mb: int = 1024


@dataclass(frozen=True)
class NoMetric:
    """Nothing is scored: for speed and acceptance."""


Metric = ExactMatch | Execution | NoMetric
METRICS: Mapping[str, type[Metric]] = {"exact_match": ExactMatch, "pass@1": Execution, "none": NoMetric}


@dataclass(frozen=True)
class Task:
    """See the packaged tasks for examples."""

    name: str
    version: str
    data: DataSource
    prompt: Prompt
    metric: Metric
    description: str = ""
    few_shot: FewShot | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    filters: tuple[Filter, ...] = (Filter("none"),)
    id_field: str | None = None  # of the row; None: its number
    # Where the task came from; not read from YAML.
    path: str = field(default="", metadata={"in_file": False})
    sha256: str = field(default="", metadata={"in_file": False})

    @property
    def metric_name(self) -> str:
        return next(name for name, cls in METRICS.items() if isinstance(self.metric, cls))
