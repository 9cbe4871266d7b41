"""Data of a task: frozen dataclasses, read from one YAML file by `load.py`.

Names follow lm-evaluation-harness where it has them (group_select, fallback, ignore_case, regexes_to_ignore), so that
its tasks can be compared line by line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specbatch.config import read_variables
from specbatch.errors import ConfigError, FieldError, shown
from specbatch.evals.filters import Filter
from specbatch.evals.metrics import Metric, read_metric
from specbatch.evals.templates import check_template
from specbatch.strict.option import Range, option, required
from specbatch.strict.reader import Reader
from specbatch.types import SamplingParams

_COUNT = Range(">= 0", lambda v: 0 <= v <= 2**31)


def _names_files(path: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"{path}: {name!r} cannot name files", "letters, digits, _, - and .")


def _read_version(reader: Reader, value: Any, path: str) -> str:
    """Versions look like numbers: 1.0."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FieldError("invalid_type", f"{path} must be text, not {shown(value)}")
    return str(value)


@dataclass(frozen=True)
class DataSource:
    """Rows: exactly one of `packaged`, `file` and `hub`."""

    packaged: str | None = option(None, "A file of specbatch/evals/data.")
    file: str | None = option(None, "A file, relative to the task's YAML file.")
    hub: str | None = option(None, "A data set of the hub: org/name.")
    subset: str | None = option(None, "The subset of a hub data set.")
    split: str = option("test", "The split of a hub data set.")


@dataclass(frozen=True)
class Prompt:
    """Jinja templates over a row's fields."""

    question: str = required("The text to continue, or the user's message.", check_template)
    kind: Literal["completion", "chat"] = option("completion", "chat: through the model's chat template.")
    answer: str = option(
        "", "The right answer: what exact_match compares with, and the answer of a few-shot example.", check_template
    )
    example_answer: str | None = option(
        None, "The answer of a few-shot example, if its words differ from those of `answer`.", check_template
    )
    choices: str | None = option(
        None,
        "multiple_choice: a template of a JSON list, the choices of a row, such as `{{ endings | tojson }}`. Then "
        "`answer` is the index of the right one, from 0.",
        check_template,
    )
    description: str = option("", "completion: before the examples.", check_template)
    answer_delimiter: str = option(
        " ", "completion: between the question and the answer of an example, and before a choice."
    )
    example_delimiter: str = option("\n\n", "completion: after each example.")
    system: str | None = option(None, "chat: the system message.")
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "chat: variables of the chat template, such as {enable_thinking: false}. Those of the configuration have "
        "precedence, name by name.",
        read=read_variables,
    )


@dataclass(frozen=True)
class FewShot:
    """Worked examples before the question: rows of `data`, or `examples` themselves."""

    count: int = required("Examples before each question.", _COUNT)
    data: DataSource | None = option(None, "Where their rows come from.")
    examples: tuple[Mapping[str, Any], ...] = option((), "The rows themselves.")
    sampler: Literal["first", "random"] = option(
        "first",
        "first: the first rows. random: as lm-evaluation-harness draws them, from one generator that goes through the "
        "rows in order.",
    )
    seed: int = option(1234, "Of the random sampler.", _COUNT)
    same_field: str | None = option(
        None, "Take only examples that have the same value in this field as the row, such as `subject`."
    )


@dataclass(frozen=True)
class Task:
    """See the packaged tasks for examples."""

    name: str = required("Names the task and the folder of its results.", _names_files)
    version: str = required("Changes with everything that changes a score.", read=_read_version)
    data: DataSource = required("The rows.")
    prompt: Prompt = required("What the model is asked.")
    metric: Metric = required("How answers are scored: its name, and its options.", read=read_metric)
    description: str = option("", "One line.")
    few_shot: FewShot | None = option(None, "Worked examples before each question.")
    sampling: SamplingParams = field(default_factory=SamplingParams)
    filters: tuple[Filter, ...] = option((Filter("none"),), "The ways from an answer to the value that is scored.")
    id_field: str | None = option(None, "The row's field that identifies it. null: its number.")
    # Where the task came from; not read from YAML.
    path: str = field(default="", metadata={"in_file": False})
    sha256: str = field(default="", metadata={"in_file": False})

    @property
    def scored_filters(self) -> tuple[Filter, ...]:
        """The filters that have an accuracy. There are none if nothing is scored. Choices have two, named as in
        lm-evaluation-harness: by their log-probability, and by that divided by their number of characters."""
        if self.metric.scores_choices:
            return Filter("acc"), Filter("acc_norm")
        return self.filters if self.metric.has_scores else ()
