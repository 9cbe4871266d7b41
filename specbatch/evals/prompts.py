"""Rows -> prompts, with worked examples before them if the task has some.

Completion prompts are lm-evaluation-harness' (`ConfigurableTask.fewshot_context`, `ContextSampler`): question,
delimiter and answer of each example, then the question. Its examples are drawn with one `random.Random(seed)` that
goes through the rows in order, so that the prompt of a row depends on the number of rows before it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from specbatch.errors import InputError
from specbatch.evals.schema import FewShot, Prompt, Task
from specbatch.evals.templates import Renderer, Row

Messages = list[dict[str, str]]


def prompts(task: Task, rows: Sequence[Row], pool: Sequence[Row], num_examples: int) -> Iterator[str | Messages]:
    """The prompt of each row, in order: text, or messages where the task is chat. `pool`: rows to take examples from.

    Raises InputError for a row or an example that lacks a field.
    """
    question = Renderer("prompt.question", task.prompt.question)
    answer = Renderer("prompt.answer", _example_answer(task.prompt))
    description = Renderer("prompt.description", task.prompt.description)
    same_rows = task.few_shot is not None and task.few_shot.data == task.data
    examples = _examples(task.few_shot, rows, pool, num_examples, same_rows)
    for number, (row, chosen) in enumerate(zip(rows, examples, strict=True), start=1):
        pairs = [(question(example, "an example"), answer(example, "an example")) for example in chosen]
        asked = question(row, f"row {number}")
        if task.prompt.kind == "chat":
            yield _chat(task.prompt.system, pairs, asked)
        else:
            yield description(row, f"row {number}") + _completion(task.prompt, pairs, asked)


def _completion(prompt: Prompt, examples: Sequence[tuple[str, str]], question: str) -> str:
    shown = [f"{q}{prompt.answer_delimiter}{a}{prompt.example_delimiter}" for q, a in examples]
    return "".join(shown) + question


def _chat(system: str | None, examples: Sequence[tuple[str, str]], question: str) -> Messages:
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    for q, a in examples:
        messages += [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
    return [*messages, {"role": "user", "content": question}]


def _example_answer(prompt: Prompt) -> str:
    return prompt.answer if prompt.example_answer is None else prompt.example_answer


def _examples(
    few: FewShot | None, rows: Sequence[Row], pool: Sequence[Row], count: int, same_rows: bool
) -> Iterator[Sequence[Row]]:
    """The examples of each row, which is never among them: its answer would be in its prompt. `same_rows`: the pool
    holds the rows themselves."""
    if few is None or count == 0:
        yield from ([] for _ in rows)
        return
    generator = random.Random(few.seed)
    whole_pool = pool
    for row in rows:
        if few.same_field is not None:
            same = row.get(few.same_field)
            pool = [example for example in whole_pool if example.get(few.same_field) == same]
        if few.sampler == "first":
            chosen = list(itertools.islice((example for example in pool if example != row), count))
        else:
            # One more where the row itself may be drawn: as lm-evaluation-harness does it.
            drawn = generator.sample(pool, min(count + same_rows, len(pool)))
            chosen = [example for example in drawn if example != row][:count]
            if len(chosen) < count:  # the row is there more than once, or where it was not expected
                others = [example for example in pool if example != row]
                chosen = generator.sample(others, min(count, len(others)))
        if len(chosen) < count:
            raise InputError(f"{count} examples are wanted, and there are {len(chosen)} rows to take them from")
        yield chosen
