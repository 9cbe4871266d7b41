"""Multiple-choice tasks, on small samples in the form of their hub data sets: prompts, choices, and their scores. The
expected texts follow from the templates of lm-evaluation-harness."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from specbatch.config import Config, EngineSection
from specbatch.counts import SpeculationCounts
from specbatch.errors import SpecbatchError
from specbatch.evals.load import find_tasks
from specbatch.evals.plan import Plan, make_plan
from specbatch.evals.runner import with_shared_tokens_of
from specbatch.evals.schema import DataSource
from specbatch.job.worker import Runtime
from specbatch.logprobs import TokenLogprob, TokenLogprobs
from specbatch.types import Completion, FinishReason, Request
from tests.evals.test_command import Eval
from tests.evals.test_evals import write_task
from tests.stub_engine import StubEngine, resolve

MMLU = [
    {"question": " What is 1 + 1? ", "subject": "abstract_algebra", "choices": ["0", "1", "2", "3"], "answer": 2},
    {"question": "Who?", "subject": "world_religions", "choices": ["a", "b", "c", "d"], "answer": 0},
]
ENDINGS = [" [step] he  stops.", "It [title] ends.", "goes on."]
HELLASWAG = [
    {"activity_label": "Baking", "ctx_a": "A man [header] opens an oven. [title] Then", "ctx_b": "the Bread",
     "endings": ENDINGS, "label": "1"},
    {"activity_label": "B", "ctx_a": "C", "ctx_b": "d", "endings": ["e", "f"], "label": "0"},
]  # fmt: skip
ARC = [
    {"question": "Why?", "choices": {"text": ["so", "no", "yes"], "label": ["A", "B", "C"]}, "answerKey": "C"},
    {"question": "How?", "choices": {"text": ["up", "down"], "label": ["1", "2"]}, "answerKey": "1"},
]
ROWS = {"mmlu": MMLU, "hellaswag": HELLASWAG, "arc_easy": ARC, "arc_challenge": ARC}


def plan_of(name: str, folder: Path, rows: list[dict[str, Any]], num_examples: int) -> Plan:
    """Examples come from the same file."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [task] = find_tasks([name], [])
    assert task.data.hub is not None
    assert task.few_shot is not None
    data = DataSource(file=str(path))
    task = dataclasses.replace(task, data=data, few_shot=dataclasses.replace(task.few_shot, data=data))
    return make_plan(
        task, num_examples=num_examples, data=None, limit=None, config=Config(), overrides=(), folder=folder
    )


def test_mmlu(tmp_path: Path) -> None:
    other = {**MMLU[0], "question": "What is 2 + 2?", "answer": 3}
    plan = plan_of("mmlu", tmp_path, [MMLU[0], other], 1)
    options = "\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer:"
    assert plan.prompts[0] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        f"What is 2 + 2?{options} D\n\nWhat is 1 + 1?{options}"
    )
    assert plan.answers == ["2", "3"]
    assert json.loads(plan.lines().splitlines()[0])["score_choices"] == [" A", " B", " C", " D"]
    with pytest.raises(SpecbatchError, match="1 examples are wanted"):
        plan_of("mmlu", tmp_path, MMLU, 1)  # none of the same subject


def as_lm_eval(text: str) -> str:
    """`preprocess` of its task."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub("\\[.*?\\]", "", text).replace("  ", " ")


def test_hellaswag(tmp_path: Path) -> None:
    plan = plan_of("hellaswag", tmp_path, HELLASWAG, 0)
    assert plan.prompts == ["Baking: A man opens an oven.. Then The bread", "B: C D"]
    assert plan.choices == [[" he stops.", "It. ends.", "goes on."], ["e", "f"]]
    for row, prompt, choices in zip(HELLASWAG, plan.prompts, plan.choices, strict=True):
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"  # type: ignore[attr-defined]
        assert prompt == as_lm_eval(context)
        assert choices == [as_lm_eval(ending) for ending in row["endings"]]
    assert plan.answers == ["1", "0"]
    assert plan_of("hellaswag", tmp_path, HELLASWAG, 1).prompts[1] == f"{plan.prompts[0]} It. ends.\n\nB: C D"


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge"])
def test_arc(tmp_path: Path, name: str) -> None:
    plan = plan_of(name, tmp_path, ARC, 1)
    assert plan.prompts == [
        "Question: How?\nAnswer: up\n\nQuestion: Why?\nAnswer:",
        "Question: Why?\nAnswer: yes\n\nQuestion: How?\nAnswer:",
    ]
    assert plan.choices == [["so", "no", "yes"], ["up", "down"]]
    assert plan.answers == ["2", "0"]


SCORES = {"short": -2.0, "quite long": -3.0, "wrong": -4.0}
CHOICES = {
    "prompt": {"question": "Q: {{q}}\nA:", "choices": "{{choices | tojson}}", "answer": "{{a}}"},
    "metric": {"name": "multiple_choice"},
}
SCORED_ROWS = [
    {"q": "one", "choices": ["short", "quite long"], "a": 0},  # right by the sum only
    {"q": "two", "choices": ["wrong", "short", "quite long"], "a": 2},  # right for each character only
    {"q": "three", "choices": ["wrong", "quite long"], "a": 1},
]


class Scorer(StubEngine):
    """Finds each choice as likely as `SCORES` says, in equal parts for its tokens."""

    def __init__(self) -> None:
        super().__init__(max_prompt_tokens=4000)

    def _complete(self, request: Request) -> Completion:
        tokens = list(request.prompt_token_ids[request.params.prompt_logprobs_start :])
        logprob = SCORES[bytes(tokens).decode().removeprefix(" ")] / len(tokens)
        logprobs = TokenLogprobs.of(TokenLogprob(token, logprob) for token in tokens)
        return Completion(
            request.request_id, [1], FinishReason.LENGTH, None, SpeculationCounts(), prompt_logprobs=logprobs
        )


def test_accuracy_of_choices(tmp_path: Path) -> None:
    """The command from rows to results; with a comparison, and a second time."""
    run = Eval(tmp_path)
    path = write_task(tmp_path, CHOICES, SCORED_ROWS)
    for _ in range(2):
        runtime = Runtime(resolve, lambda *_: Scorer(), lambda _: {})
        assert run.run(runtime, Config(), task_files=(path,), compare="none") == 0
    task = run.results()["tasks"]["mine"]
    assert {name: found["correct"] for name, found in task["accuracy"].items()} == {"acc": 2.0, "acc_norm": 2.0}
    assert task["compare"]["rows_differing"] == 0
    first, second, _ = run.samples()
    assert [(score["text"], round(score["logprob"], 6)) for score in first["choice_scores"]] == [
        (" short", -2.0),
        (" quite long", -3.0),
    ]
    assert first["filters"]["acc"] == {"value": "0", "correct": True}
    assert first["filters"]["acc_norm"] == {"value": "1", "correct": False}
    assert second["filters"]["acc_norm"] == {"value": "2", "correct": True}


@pytest.mark.parametrize(
    ("changes", "rows", "words"),
    [
        ({"metric": {"name": "exact_match"}}, SCORED_ROWS, "prompt.choices and metric multiple_choice belong together"),
        ({"filters": [{"name": "a"}]}, SCORED_ROWS, "multiple_choice generates none"),
        ({}, [{"q": "x", "choices": ["a"], "a": 0}], r"two texts or more, and row 1 gives \['?\"?a"),
        ({}, [{"q": "x", "choices": ["a", ""], "a": 0}], "two texts or more, and row 1"),
        ({}, [{"q": "x", "choices": ["a", "b"], "a": 2}], "must be an index, 0 to 1, and row 1 gives '2'"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, Any], rows: list[dict[str, Any]], words: str) -> None:
    path = write_task(tmp_path, {**CHOICES, **changes}, rows)
    with pytest.raises(SpecbatchError, match=words):
        Eval(tmp_path).run(Runtime(resolve, lambda *_: Scorer(), lambda _: {}), Config(), task_files=(path,))


def test_what_prompts_share_is_counted_before_the_engine_is_built(tmp_path: Path) -> None:
    """A few-shot task shares its examples; the engine that runs all tasks is made for the one that shares the most."""
    longer = [{**MMLU[0], "question": f"{'What is one more than it? ' * 40} {i}"} for i in range(8)]
    few, many = tmp_path / "few", tmp_path / "many"
    few.mkdir()
    many.mkdir()
    plans = [plan_of("arc_easy", few, ARC, 1), plan_of("mmlu", many, longer, 3)]
    config = Config(engine=EngineSection(device="cuda"))
    found = [with_shared_tokens_of(config, some).engine.shared_tokens for some in (plans[:1], plans[1:], plans)]
    assert found[0] == 0
    assert found[1] is not None
    assert found[1] > 256
    assert found[2] == found[1]
    assert with_shared_tokens_of(Config(engine=EngineSection(device="cpu")), plans).engine.shared_tokens is None
