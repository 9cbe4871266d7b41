"""Tasks: what their files may hold, prompts and scores against lm-evaluation-harness', filters, metrics."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import specbatch
from specbatch.cli import app
from specbatch.config import Config, DataSection
from specbatch.config_load import packaged_tasks
from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.errors import ConfigError, InputError, SpecbatchError
from specbatch.evals.compare import difference, differing_rows
from specbatch.evals.data import DATA_FOLDER, example_rows, task_rows
from specbatch.evals.filters import CodeBlock, Filter, Lowercase, MajorityVote, Regex, Remove, Strip, TakeFirst
from specbatch.evals.load import find_tasks, load_task
from specbatch.evals.metrics import ExactMatch, Value
from specbatch.evals.plan import make_plan, stop_tokens
from specbatch.evals.prompts import prompts
from specbatch.evals.schema import Task
from specbatch.evals.score import accuracy
from specbatch.job.worker import counts_since
from specbatch.rows.sources import RawRow, Source

# Made with lm-eval 0.4.13 itself: prompts of its task gsm8k, and what its filters and exact_match made of answers.
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "fixtures" / "lm_eval_gsm8k.json").read_text(encoding="utf-8")
)
MINE: dict[str, Any] = {
    "name": "mine",
    "version": 1,
    "data": {"file": "rows.jsonl"},
    "prompt": {"question": "Q: {{q}}\nA:", "answer": "{{a}}"},
    "metric": {"name": "exact_match"},
}
ROWS = [{"q": f"{i} + 1?", "a": str(i + 1)} for i in range(6)]


def write_task(folder: Path, changes: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**MINE, **(changes or {})}))
    return path


def written(task: Task, count: int, limit: int | None = None) -> list[Any]:
    return list(prompts(task, task_rows(task, None, limit).rows, example_rows(task), count))


def is_match(metric: ExactMatch, text: str, answer: str) -> bool:
    (score,) = metric.score([Value(text, {}, "row 1", answer)], lambda done, total: None)
    return score.correct == 1


def test_packaged_tasks_can_be_read() -> None:
    tasks = find_tasks(packaged_tasks(), [])
    assert [task.name for task in tasks] == list(packaged_tasks())
    found = {task.name: len(task_rows(task, None, None).rows) for task in tasks if task.data.packaged is not None}
    assert {"gsm8k": 1319, "gsm8k_chat": 1319, "humaneval": 164, "mt_bench_speed": 80}.items() <= found.items()
    for task in tasks:
        assert task.sha256 == hashlib.sha256(Path(task.path).read_bytes()).hexdigest()


def test_packaged_data_has_its_licences_and_is_small() -> None:
    packaged = sorted(DATA_FOLDER.glob("*.gz"))
    assert sum(path.stat().st_size for path in packaged) < 6e6
    for path in packaged:
        licence = DATA_FOLDER / f"{path.name.split('.')[0].removesuffix('_test').removesuffix('_train')}.LICENSE"
        assert "icen" in licence.read_text()


def test_prompts_are_those_of_lm_eval_to_the_byte() -> None:
    (task,) = find_tasks(["gsm8k"], [])
    assert task.version == str(GOLDEN["task_version"])
    ours = written(task, 5)
    for index, prompt in GOLDEN["prompts_5shot"].items():
        assert ours[int(index)] == prompt
    assert hashlib.sha256("\0".join(ours).encode()).hexdigest() == GOLDEN["sha256_of_all_5shot_prompts"]
    eight = written(task, 8, limit=3)
    assert hashlib.sha256("\0".join(eight).encode()).hexdigest() == GOLDEN["sha256_of_first_3_8shot_prompts"]
    assert written(task, 5, limit=4) == ours[:4]


@pytest.mark.parametrize("number", range(len(GOLDEN["answers"])))
def test_scores_are_those_of_lm_eval(number: int) -> None:
    golden = GOLDEN["answers"][number]
    for name in ("gsm8k", "gsm8k_chat"):
        (task,) = find_tasks([name], [])
        assert isinstance(task.metric, ExactMatch)
        answer = task_rows(task, None, golden["row"] + 1).rows[-1]["answer"]
        for f in task.filters:
            (value,) = f.apply([golden["text"]])
            assert [value, int(is_match(task.metric, value, answer))] == golden[f.name]


def test_gsm8k_samples_as_lm_eval_does() -> None:
    (task,) = find_tasks(["gsm8k"], [])
    assert task.sampling.stop == ("Question:", "</s>", "<|im_end|>")
    assert (task.sampling.max_tokens, task.sampling.temperature) == (256, 0.0)


def test_chat_examples_are_turns() -> None:
    (task,) = find_tasks(["gsm8k_chat"], [])
    assert [m["role"] for m in written(task, 0, limit=1)[0]] == ["user"]
    messages = written(task, 8, limit=2)[1]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 8 + ["user"]
    assert messages[0]["content"].startswith("Natalia sold clips")
    assert messages[1]["content"].endswith("#### 72")
    assert "<<" not in messages[1]["content"]
    assert messages[-1]["content"].startswith("A robe takes 2 bolts")


def test_chat_may_have_a_system_message(tmp_path: Path) -> None:
    prompt = {"kind": "chat", "system": "Be brief.", "question": "{{q}}", "answer": "{{a}}"}
    shots = {"count": 1, "examples": [{"q": "x?", "a": "y"}]}
    (messages,) = written(load_task(write_task(tmp_path, {"prompt": prompt, "few_shot": shots})), 1, limit=1)
    roles = ["system", "user", "assistant", "user"]
    assert messages == [
        {"role": role, "content": text} for role, text in zip(roles, ["Be brief.", "x?", "y", "0 + 1?"], strict=True)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrc": 1}, ["unknown option metrc", "did you mean metric"]),
        ({"prompt": {"question": "x", "anser": "y"}}, ["unknown option prompt.anser", "prompt.answer"]),
        ({"prompt": {"answer": "y"}}, ["prompt.question is missing"]),
        ({"prompt": {"question": "{{x", "answer": "y"}}, ["prompt.question is not a valid template"]),
        ({"prompt": {"question": "{{q | uper}}", "answer": "y"}}, ["prompt.question is not a valid template", "uper"]),
        ({"prompt": {"question": "x"}}, ["prompt.answer is missing"]),
        ({"prompt": {"question": "question.jinja", "answer": "y"}}, ["prompt.question names no field"]),
        (
            {"metric": {"name": "none"}, "prompt": {"question": "x"}, "few_shot": {"count": 1, "examples": [{}]}},
            ["prompt.answer is missing: few_shot"],
        ),
        ({"prompt": {"question": "x", "answer": "y", "kind": "chatt"}}, ["prompt.kind must be one of", "mean chat"]),
        ({"prompt": {"question": "x", "answer": "y", "system": "z"}}, ["prompt.system is for chat"]),
        ({"metric": {"name": "exact_mach"}}, ["metric.name must be one of", "exact_match"]),
        ({"metric": {"name": "exact_match", "ignore_cas": True}}, ["unknown option metric.ignore_cas", "ignore_case"]),
        ({"metric": {"name": "exact_match", "ignore_case": "maybe"}}, ["metric.ignore_case must be true or false"]),
        ({"metric": {"name": "exact_match", "regexes_to_ignore": ["("]}}, ["not a regular expression"]),
        ({"metric": "none"}, ["metric must be a mapping"]),
        ({"filters": [{"name": "f", "steps": ["take_frist"]}]}, ["filters[0].steps[0]", "did you mean take_first"]),
        ({"filters": [{"name": "f", "steps": [{"regex": {"patern": "x"}}]}]}, ["unknown option", "pattern"]),
        ({"filters": [{"name": "f", "steps": ["regex"]}]}, ["filters[0].steps[0].regex.pattern is missing"]),
        ({"filters": [{"name": "f", "steps": [{"regex": {"pattern": "("}}]}]}, ["not a regular expression"]),
        ({"filters": [{"name": "f"}, {"name": "f"}]}, ["two are named f"]),
        ({"filters": []}, ["filters must name one"]),
        ({"sampling": {"max_token": 3}}, ["unknown option sampling.max_token", "sampling.max_tokens"]),
        ({"sampling": {"max_tokens": 0}}, ["sampling.max_tokens must be"]),
        ({"data": {"file": "a", "hub": "b"}}, ["exactly one of packaged, file and hub; it has file and hub"]),
        ({"data": {"file": "a", "split": "train"}}, ["data: subset and split are for data of the hub"]),
        ({"few_shot": {"count": 2}}, ["few_shot must have either data or examples"]),
        ({"few_shot": {"count": -1, "examples": [{"q": "1"}]}}, ["few_shot.count must be >= 0"]),
        ({"few_shot": {"count": 2, "examples": [{"q": "1"}]}}, ["there are 1 examples"]),
        ({"few_shot": {"count": 1, "examples": [{}], "sampler": "rand"}}, ["few_shot.sampler", "random"]),
        ({"name": "a/b"}, ["cannot name files"]),
        ({"version": None}, ["version must be text, not null"]),
        ({"path": "x"}, ["unknown option path"]),
    ],
)
def test_mistakes_in_a_task_are_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = write_task(tmp_path, changes)
    with pytest.raises(ConfigError) as caught:
        load_task(path)
    said = f"{caught.value.message} {caught.value.hint}"
    assert said.startswith(str(path))
    for word in words:
        assert word in said


@pytest.mark.parametrize("text", ["[]", "name: a\nname: b", "a: [", ""])
def test_files_that_are_no_task(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_task(tmp_path / "t.yaml")
    with pytest.raises(ConfigError, match=r"cannot read the task .*u\.yaml"):
        load_task(tmp_path / "u.yaml")


def test_unknown_tasks_name_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        find_tasks(["gsm8"], [])
    assert f"known: {', '.join(packaged_tasks())}" in caught.value.message
    assert caught.value.hint == "did you mean gsm8k?"
    for names in ([], ["gsm8k", "gsm8k"]):
        with pytest.raises(ConfigError):
            find_tasks(names, [])
    with pytest.raises(ConfigError) as caught:
        find_tasks(["mine.yaml"], [])
    assert "--task" in str(caught.value.hint)


def test_first_and_own_examples(tmp_path: Path) -> None:
    shots = {"count": 1, "examples": [{"q": "x?", "a": "y"}, {"q": "z?", "a": "w"}]}
    task = load_task(write_task(tmp_path, {"few_shot": shots}))
    assert written(task, 1, limit=1) == ["Q: x?\nA: y\n\nQ: 0 + 1?\nA:"]
    assert written(task, 2, limit=1)[0].startswith("Q: x?\nA: y\n\nQ: z?\nA: w\n\nQ: 0")
    # From its own rows: never the row itself.
    task = load_task(write_task(tmp_path, {"few_shot": {"count": 2, "data": MINE["data"]}}))
    assert written(task, 2)[0] == "Q: 1 + 1?\nA: 2\n\nQ: 2 + 1?\nA: 3\n\nQ: 0 + 1?\nA:"
    task = load_task(write_task(tmp_path, {"few_shot": {"count": 5, "data": MINE["data"], "sampler": "random"}}))
    for row, prompt in zip(ROWS, written(task, 5), strict=True):
        assert prompt.count(row["q"]) == 1
        assert prompt.count("Q: ") == 6
    with pytest.raises(InputError, match="6 examples are wanted, and there are 5 rows"):
        written(task, 6)


@pytest.mark.parametrize("sampler", ["first", "random"])
def test_a_row_is_never_its_own_example(tmp_path: Path, sampler: str) -> None:
    # Not where it is there several times, and not where the rows are others than the task's (--data).
    again = [*ROWS[:3], ROWS[0], ROWS[0]]
    shots = {"count": 2, "data": {"file": "again.jsonl"}, "sampler": sampler}
    (tmp_path / "again.jsonl").write_text("".join(json.dumps(row) + "\n" for row in again))
    task = load_task(write_task(tmp_path, {"few_shot": shots}))
    for row, prompt in zip(ROWS, written(task, 2), strict=True):
        assert (prompt.count(row["q"]), prompt.count("Q: ")) == (1, 3)
    task = load_task(write_task(tmp_path, {"data": {"file": "again.jsonl"}, "few_shot": shots}))
    for row, prompt in zip(again, written(task, 2), strict=True):
        assert (prompt.count(row["q"]), prompt.count("Q: ")) == (1, 3)
    with pytest.raises(InputError, match="3 examples are wanted, and there are 2 rows"):
        written(task, 3)


def test_rows_that_do_not_fit_are_mistakes(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path, rows=[{"q": "x", "a": "y"}, {"q": "x"}]))

    def plan(data: Path | None = None) -> None:
        make_plan(task, num_examples=None, data=data, limit=None, config=Config(), overrides=(), folder=tmp_path)

    with pytest.raises(InputError, match=r"prompt\.answer does not fit row 2"):
        plan()
    (tmp_path / "other.jsonl").write_text('{"q": "x", "a": "y"}\nbroken\n')
    with pytest.raises(InputError, match=r"other\.jsonl, line 2: "):
        plan(tmp_path / "other.jsonl")
    for missing in (tmp_path / "no.jsonl", tmp_path):
        with pytest.raises(SpecbatchError):
            plan(missing)


def test_rows_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(ref: str, data: DataSection) -> Source:
        asked.append((ref, data.subset, data.split))
        return Source(ref, {"kind": "data set"}, True, 6, None, lambda: iter(RawRow(i, r) for i, r in enumerate(ROWS)))

    monkeypatch.setattr("specbatch.evals.data.open_source", opened)
    source = {"hub": "org/name", "subset": "main", "split": "test"}
    shots = {"count": 1, "data": {**source, "split": "train"}}
    task = load_task(write_task(tmp_path, {"data": source, "few_shot": shots}))
    assert written(task, 1, limit=2) == ["Q: 1 + 1?\nA: 2\n\nQ: 0 + 1?\nA:", "Q: 0 + 1?\nA: 1\n\nQ: 1 + 1?\nA:"]
    assert asked == [("org/name", "main", "test"), ("org/name", "main", "train")]


def test_templates_cannot_reach_out(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path, {"prompt": {"question": "{{q.__class__.__mro__}}", "answer": "{{a}}"}}))
    with pytest.raises(InputError):
        written(task, 0)


@pytest.mark.parametrize(
    ("steps", "answers", "values"),
    [
        ([], ["a b "], ["a b "]),
        ([Strip(), Lowercase()], [" A "], ["a"]),
        ([Remove((",", "$"))], ["$1,000"], ["1000"]),
        ([Regex(r"\d+")], ["a 12 b 34", "none"], ["12", "[invalid]"]),
        ([Regex(r"\d+", group_select=-1)], ["a 12 b 34"], ["34"]),
        ([Regex(r"\d+", group_select=1, fallback="?")], ["a 12 b 34", "1"], ["34", "?"]),
        ([Regex(r"(x)?(y)?")], ["", "zy"], ["[invalid]", "[invalid]"]),
        ([Regex(r"(a)|(b)", group_select=-1)], ["ab"], ["b"]),
        ([TakeFirst()], ["p", "q"], ["p"]),
        ([Regex(r"\d"), MajorityVote()], ["1", "2", "2", "3"], ["2"]),
        ([MajorityVote()], ["b", "a"], ["b"]),
        ([CodeBlock()], ["so:\n```python\nx = 1\n```\ndone", "x = 2", "```\ny"], ["x = 1\n", "x = 2", "y"]),
    ],
)
def test_filter_steps(steps: list[Any], answers: list[str], values: list[str]) -> None:
    assert Filter("f", tuple(steps)).apply(answers) == values


def test_exact_match_and_accuracy() -> None:
    assert is_match(ExactMatch(), "a", "a")
    assert not is_match(ExactMatch(), "a", "A")
    assert is_match(ExactMatch(ignore_case=True), "a", "A")
    assert is_match(ExactMatch(ignore_punctuation=True), "a.b!", "ab")
    found = accuracy([1.0, 0.0, 1.0, 1.0])
    assert (found.value, found.correct, found.scored) == (0.75, 3.0, 4)
    assert found.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))  # the sample's deviation: over n - 1
    assert found.interval == pytest.approx((0.3006, 0.9544), abs=1e-4)
    assert accuracy([0.0] * 8).interval == pytest.approx((0, 0.3244), abs=1e-4)  # the standard error is 0
    assert accuracy([1.0] * 8).interval == pytest.approx((0.6756, 1), abs=1e-4)
    assert accuracy([]).value is accuracy([]).interval is None
    assert accuracy([1.0]).standard_error is None


def test_differences_are_found_with_their_margin() -> None:
    def plain(text: str) -> dict[str, Any]:
        other = {"token": "y", "token_id": 121, "logprob": -0.75}
        taken = [{"token": c, "token_id": ord(c), "logprob": -0.5} for c in text]
        return {"id": 7, "text": text, "logprobs": [{**one, "top": [one, other]} for one in taken]}

    def decode(ids: Any) -> str:
        return "".join(map(chr, ids))

    found = difference(3, {"text": "abXd"}, plain("abcd"), decode)
    assert (found.index, found.id, found.token, found.margin, found.tokens) == (3, 7, 2, 0.25, ("c", "y"))
    assert difference(3, {"text": "Xbcd"}, plain("abcd"), decode).token == 0
    assert difference(3, {"text": "abcdef"}, plain("abcd"), decode).token == 3  # where this one ended
    assert difference(3, {"text": "ab"}, plain("abcd"), decode).token == 2
    assert difference(3, {"text": "abcd"}, plain("abcd"), decode).token is None  # not the same text again
    thinks = {**plain("(a)cd"), "reasoning_content": "a", "text": "cd"}
    assert difference(3, {"reasoning_content": "X", "text": "cd"}, thinks, decode).token == 1
    assert difference(3, {"reasoning_content": "a", "text": "cX"}, thinks, decode).token == 4
    assert difference(3, {"text": "abcd"}, {"id": 7, "text": None, "error": {}}, decode).token is None


def test_tokens_that_part_before_texts_do() -> None:
    pieces = {1: "of", 2: " the", 3: " theory", 4: " art", 5: " sea", 6: "", 7: "é"}

    def decode(ids: Any) -> str:
        return "".join(pieces[i] for i in ids)

    def entry(token: int, other: int, margin: float) -> dict[str, Any]:
        top = [{"token": pieces[t], "token_id": t, "logprob": p} for t, p in ((token, -0.1), (other, -0.1 - margin))]
        return {**top[0], "top": top}

    ended = entry(6, 1, 9.0)
    plain = {"id": 7, "text": "of the art", "logprobs": [entry(1, 4, 8.0), entry(2, 3, 0.5), entry(4, 5, 7.0), ended]}
    found = difference(3, {"text": "of theory of"}, plain, decode)  # and not at " art", which "ory" is not
    assert (found.token, found.margin, found.tokens) == (1, 0.5, (" the", " theory"))
    assert difference(3, {"text": "of the sea"}, plain, decode).token == 2
    assert difference(3, {"text": "of the art of"}, plain, decode).token == 3  # where this one ended
    assert difference(3, {"text": "of thé"}, plain, decode).token == 1  # neither of the two: as the texts part
    plain["logprobs"][2] = last = entry(4, 6, 0.25)
    last["top"].insert(1, {"token": pieces[5], "token_id": 5, "logprob": -0.2})
    assert difference(3, {"text": "of the"}, plain, decode).tokens == (" art", "")  # where the other one ended


def test_a_third_token_as_likely_as_two_others() -> None:
    """Not where a space in front of "$" would have led on as well."""
    pieces = {1: "costs", 2: " $", 3: " ", 4: "3", 5: "4", 6: "5"}

    def decode(ids: Any) -> str:
        return "".join(pieces[i] for i in ids)

    def entry(*tops: tuple[int, float]) -> dict[str, Any]:
        top = [{"token": pieces[t], "token_id": t, "logprob": p} for t, p in tops]
        return {**top[0], "top": top}

    logprobs = [entry((1, -0.1), (3, -9.0)), entry((2, -0.01), (3, -5.01)), entry((4, -1.0), (5, -1.0), (6, -1.125))]
    plain = {"id": 7, "text": "costs $3", "logprobs": logprobs}
    found = difference(3, {"text": "costs $5"}, plain, decode)
    assert (found.token, found.margin, found.tokens) == (2, 0.125, ("3", "5"))
    # Of two that are equal to the last bit, the one that was not taken may be told first.
    logprobs[2]["top"] = [logprobs[2]["top"][i] for i in (1, 0, 2)]
    logprobs[2]["top"][0]["logprob"] = -0.875  # by arithmetic that rounds
    assert difference(3, {"text": "costs $4"}, plain, decode).margin == 0.125
    logprobs[2]["top"][0]["logprob"] = -1.0
    found = difference(3, {"text": "costs $4"}, plain, decode)
    assert (found.token, found.margin, found.tokens) == (2, 0.0, ("3", "4"))
    found = difference(3, {"text": "costs $9"}, plain, decode)  # which is none of the likeliest
    assert (found.token, found.margin, found.tokens) == (2, 0.0, ("3", "4"))


def test_rows_that_differ() -> None:
    a = [{"text": "p"}, {"text": "q"}, {"text": None, "error": {}}, {"text": "s"}]
    b = [{"text": "p"}, {"text": "r"}, {"text": "t"}, {"text": None, "error": {}}]
    assert differing_rows(a, b) == [1]


def test_stop_strings_that_are_special_tokens_stop_as_tokens() -> None:
    class Tokenizer:
        all_special_tokens = ("</s>", "<pad>")

        def convert_tokens_to_ids(self, token: str) -> int:
            return {"</s>": 2, "<pad>": 0}[token]

    assert stop_tokens(Tokenizer(), ["Question:", "</s>"]) == [2]
    assert stop_tokens(object(), ["</s>"]) == []


def test_counts_of_one_job_of_a_shared_engine() -> None:
    now, own = EngineStats(rounds=5), SpeculationCounts()
    now.speculation.record(drafted=3, depth=3, accepted=3, committed=4)
    before = copy.deepcopy(now)
    for counts in (now.speculation, own):
        counts.record(drafted=1, depth=1, accepted=0, committed=1)
    now.rounds += 2
    assert counts_since(now, before) == EngineStats(rounds=2, speculation=own)


def test_every_packaged_task_is_named_in_the_help() -> None:
    said = CliRunner().invoke(app, ["eval", "--help"]).output
    for name in packaged_tasks():
        assert re.search(rf"\b{name}\b", said), name


def test_every_packaged_task_is_named_in_the_docs() -> None:
    page = Path(specbatch.__file__).parent.parent / "docs" / "eval.md"
    if not page.is_file():
        pytest.skip("no checkout")
    for name in packaged_tasks():
        assert f"`{name}`" in page.read_text(encoding="utf-8")


def test_rules_for_tokens_in_a_task(tmp_path: Path) -> None:
    rules = {"presence_penalty": 0.5, "logit_bias": {"5": 2, 7: -1.5}, "bad_words": "no", "min_tokens": 3}
    sampling = load_task(write_task(tmp_path, {"sampling": rules})).sampling
    assert (sampling.presence_penalty, sampling.bad_words, sampling.min_tokens) == (0.5, ("no",), 3)
    assert sampling.logit_bias == {5: 2.0, 7: -1.5}
    for wrong, words in (
        ({"min_tokens": 300}, "min_tokens must be <= max_tokens, which is 256, not 300"),
        ({"logit_bias": {5: 200}}, r"sampling.logit_bias\[5\] must be >= -100 and <= 100, not 200"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_task(write_task(tmp_path, {"sampling": wrong}))
