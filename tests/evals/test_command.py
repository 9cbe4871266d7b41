"""`specbatch eval` over the stub engine and over a tiny real one: results, resume, comparison, mistakes."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import specbatch
from specbatch.config import Config, DataSection, EngineSection, OutputSection, SpeculationSection
from specbatch.config_load import load_config
from specbatch.counts import SpeculationCounts
from specbatch.errors import ConfigError, SpecbatchError
from specbatch.evals.command import EvalOptions, evaluate
from specbatch.evals.sandbox import Verdict
from specbatch.job.worker import Runtime
from specbatch.logprobs import TokenLogprob, TokenLogprobs
from specbatch.results.stats import commit as stats_commit
from specbatch.types import BatchEngine, Completion, FinishReason, Request, SamplingParams
from tests import processes
from tests.evals.test_evals import ROWS, write_task
from tests.stub_engine import EOS, StubEngine, StubRun, StubTokenizer, resolve

EXACT = {
    "sampling": {"max_tokens": 40, "stop": ["Q:"]},
    "filters": [
        {"name": "strict", "steps": [{"regex": {"pattern": "is ([0-9]+)"}}, "take_first"]},
        {"name": "loose", "steps": [{"regex": {"pattern": "[0-9]+", "group_select": -1}}]},
    ],
}
PROGRAMS: dict[str, Any] = {
    "prompt": {"question": "{{q}}"},
    "metric": {"name": "pass@1", "program": "x = {{response}}\nassert x == {{a}}", "timeout_seconds": 20},
    "filters": [{"name": "run"}],
}
SEED = Config(engine=EngineSection(seed=3))
RIGHT = ["the answer is 1", "the answer is 2.", "2 and 1 is 3 Q: next", "no idea", "5", "6, or 7"]


class Answers(StubEngine):
    """Says what it is told: the first text whose key is in the prompt (of a list, each sample its own), with two drafts
    kept in each round."""

    def __init__(self, texts: Mapping[str, str | list[str]], seconds: float = 0.01) -> None:
        super().__init__(max_prompt_tokens=4000)
        self._texts = texts
        self._seconds = seconds  # that a row takes

    def _complete(self, request: Request) -> Completion:
        prompt = bytes(t for t in request.prompt_token_ids if t < 256).decode()
        question = prompt.rsplit("Q: ", 1)[-1]
        text = next(text for key, text in self._texts.items() if key in question)
        text = text if isinstance(text, str) else text[request.rng.sample]
        tokens = [*text.encode(), EOS][: request.params.max_tokens]
        if request.check_stop is not None and (keep := request.check_stop(tokens, 0, len(tokens))) is not None:
            tokens = tokens[:keep]
        counts = SpeculationCounts()
        for _ in range(2):
            counts.record(drafted=3, depth=3, accepted=2, committed=3)
        logprobs = None
        if request.params.logprobs is not None:
            count = request.params.logprobs
            logprobs = TokenLogprobs.of(
                TokenLogprob(token, -0.5, ((token, -0.5), (1, -1.5))[:count]) for token in tokens
            )
        self.stats.generated_tokens += len(tokens)
        self.stats.decode_seconds += self._seconds
        self.stats.speculation.add(counts)
        return Completion(request.request_id, tokens, FinishReason.STOP, logprobs, counts)


class Eval:
    """The command in a folder, over engines that answer as they are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.texts: dict[str, Any] = {row["q"]: text for row, text in zip(ROWS, RIGHT, strict=True)}
        self.plain_texts: dict[str, str] | None = None
        self.engines: list[Answers] = []
        self.log = ""

    def __call__(self, config: Config | None = None, **options: Any) -> int:
        def build(run: StubRun, show: Callable[[str], None]) -> BatchEngine:
            plain = run.config.speculation.method == "none"
            texts = (self.plain_texts or self.texts) if plain else self.texts
            self.engines.append(Answers(texts, 0.02 if plain else 0.01))
            return self.engines[-1]

        return self.run(Runtime(resolve, build, lambda _: {}), config or Config(), **options)

    def run(self, runtime: Runtime, config: Config, **options: Any) -> int:
        console = Console(file=io.StringIO(), width=150)
        try:
            arguments = EvalOptions(**{"output": self.output, **options})
            return evaluate(arguments, config, runtime, console, began=time.perf_counter())
        finally:
            self.log = console.file.getvalue()  # type: ignore[attr-defined]

    def results(self) -> dict[str, Any]:
        return json.loads((self.output / "results.json").read_text())

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Eval:
    return Eval(tmp_path)


def test_results_and_samples(run: Eval) -> None:
    assert run(task_files=(write_task(run.folder, EXACT),)) == 0
    report = run.results()
    task = report["tasks"]["mine"]
    assert task["accuracy"]["strict"] == {
        "value": 0.5, "standard_error": pytest.approx(0.2236, abs=1e-4), "correct": 3.0, "scored": 6,
        "interval": pytest.approx([0.1876, 0.8124], abs=1e-4),
    }  # fmt: skip
    assert task["accuracy"]["loose"]["correct"] == 4  # 1, 2, 3 and 5; of "6, or 7" the last
    assert task["rows"] == {"total": 6, "scored": 6, "failed": 0, "errors": {}, "finish_reasons": {"stop": 6}}
    assert (task["task"]["version"], task["num_fewshot"], task["metric"]) == ("1", 0, "exact_match")
    assert task["acceptance_length"] == 3.0
    assert task["accept_histogram"] == [0, 0, 12]
    assert task["acceptance_rate_by_position"] == [1.0, 1.0, 0.0]
    assert task["sampling"]["stop"] == ["Q:"]
    assert task["output_tokens_per_second"] > 0
    assert {"config", "versions", "commit", "device", "models", "arguments", "notes"} <= report.keys()
    samples = run.samples()
    assert [s["index"] for s in samples] == list(range(6))
    third = samples[2]
    assert third["prompt"] == "Q: 2 + 1?\nA:"
    assert third["text"] == "2 and 1 is 3 "  # cut at its stop string
    assert third["answer"] == "3"
    assert third["filters"]["loose"] == {"value": "3", "correct": True}
    assert samples[3]["filters"]["strict"] == {"value": "[invalid]", "correct": False}
    assert third["speculation"]["acceptance_length"] == 3.0
    assert "50.0% (95%: 18.8% to 81.2%)" in run.log
    assert "100% 100% 0% at depth 1 to 3" in run.log


def test_the_same_again_runs_nothing_and_other_settings_are_refused(run: Eval) -> None:
    path = write_task(run.folder, EXACT)
    run(task_files=(path,))
    before = (run.output / "samples.jsonl").read_bytes()
    assert run(task_files=(path,)) == 0
    assert len(run.engines) == 1
    assert (run.output / "samples.jsonl").read_bytes() == before
    prompts = (run.output / "mine" / "prompts.jsonl").read_bytes()
    refusals = ({"limit": 3}, r"other prompts \(6 then, 3 now\)"), ({"config": SEED}, "engine.seed")
    for options, words in refusals:
        with pytest.raises(SpecbatchError, match=f"different job: .*{words}"):
            run(**{"task_files": (path,), **options})
        assert (run.output / "mine" / "prompts.jsonl").read_bytes() == prompts  # those of the answers that are there
    with pytest.raises(SpecbatchError, match="other tasks: mine"):
        run(tasks=("gsm8k",))
    assert run(task_files=(path,), limit=3, overwrite=True) == 0
    assert run.results()["tasks"]["mine"]["rows"]["total"] == 3
    assert len(run.samples()) == 3


def test_starting_again_drops_results_once_it_really_starts(run: Eval) -> None:
    path = write_task(run.folder, EXACT)
    run(task_files=(path,))

    def refuse(config: Config) -> Any:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        run.run(Runtime(refuse, lambda *_: Answers({}), lambda _: {}), Config(), task_files=(path,), overwrite=True)
    assert run.results()["tasks"]["mine"]["rows"]["total"] == 6
    run.texts = {}
    with pytest.raises(StopIteration):  # the engine breaks
        run(task_files=(path,), overwrite=True)
    assert not (run.output / "results.json").exists()
    assert not (run.output / "samples.jsonl").exists()


def test_results_tell_what_made_the_answers(run: Eval) -> None:
    def noted(config: Config) -> StubRun:
        resolved = resolve(config)
        resolved.notes.append(f"resolved {config.speculation.method}")
        return resolved

    def build(resolved: StubRun, show: Callable[[str], None]) -> BatchEngine:
        resolved.notes.append(f"built {resolved.config.speculation.method}")
        return Answers(run.texts)

    runtime = Runtime(noted, build, lambda _: {})
    path = write_task(run.folder, EXACT)
    # Scored by a later version, with the answers of an earlier one; and not the notes of the run without speculation.
    for compare in (None, "none"):
        assert run.run(runtime, Config(), task_files=(path,), compare=compare) == 0
        assert run.results()["notes"] == ["resolved auto", "built auto"]
        stats_path = run.output / "mine" / "answers.stats.json"
        stats = json.loads(stats_path.read_text())
        stats_path.write_text(json.dumps({**stats, "commit": "earlier", "versions": {"specbatch": "0"}}))
    report = run.results()
    assert (report["commit"], report["versions"]) == ("earlier", {"specbatch": "0"})
    assert report["scored_by"] == {"specbatch": specbatch.__version__, "commit": stats_commit()}


def test_tasks_share_an_engine_and_count_for_themselves(run: Eval) -> None:
    first = write_task(run.folder, EXACT)
    (run.folder / "b").mkdir()
    second = write_task(run.folder / "b", {**EXACT, "name": "other"}, ROWS[:2])
    assert run(task_files=(first, second)) == 0
    assert len(run.engines) == 1
    tasks = run.results()["tasks"]
    assert [tasks[name]["rows"]["total"] for name in ("mine", "other")] == [6, 2]
    sessions = [
        json.loads((run.output / name / "answers.stats.json").read_text())["session"] for name in ("mine", "other")
    ]
    assert [s["output_tokens"] for s in sessions] == [tasks[name]["tokens"]["completion"] for name in ("mine", "other")]
    assert [s["task"] for s in run.samples()] == ["mine"] * 6 + ["other"] * 2


def test_comparison(run: Eval) -> None:
    run.plain_texts = {**run.texts, ROWS[0]["q"]: "the answer is 7", ROWS[3]["q"]: "no way"}
    assert run(task_files=(write_task(run.folder, EXACT),), compare="none") == 0
    assert [engine.is_closed for engine in run.engines] == [True, False], "the first one makes room"
    task = run.results()["tasks"]["mine"]
    other = task["compare"]
    assert task["accuracy"]["strict"]["correct"] == 3
    assert other["accuracy"]["strict"]["correct"] == 2
    assert other["accuracy_difference"]["strict"]["value"] == pytest.approx(1 / 6)
    assert other["accuracy_difference"]["strict"]["standard_error"] == pytest.approx(1 / 6)
    assert (other["rows_compared"], other["rows_differing"]) == (6, 2)
    first, second = other["differences"]
    assert (first["index"], first["id"], first["token"], first["margin"]) == (0, "mine/0", 14, 1.0)
    assert (second["index"], second["token"]) == (3, 3)
    assert other["speed_up"] > 1.5  # twice, but for the lengths of texts and what the stub counts for itself
    speeds = task["output_tokens_per_second"], other["output_tokens_per_second"]
    assert other["speed_up"] == pytest.approx(speeds[0] / speeds[1], abs=1e-3)
    assert run.samples()[0]["text_without_speculation"] == "the answer is 7"
    assert "text_without_speculation" not in run.samples()[1]
    assert "2 of 6 texts differ" in run.log
    # Again: all is there, but for the rows that differ.
    assert run(task_files=(write_task(run.folder, EXACT),), compare="none") == 0
    assert run.results()["tasks"]["mine"]["compare"]["differences"] == other["differences"]


def test_failed_rows_are_no_wrong_answers(run: Eval) -> None:
    rows = [*ROWS, {"q": "x" * 5000, "a": "1"}]
    assert run(task_files=(write_task(run.folder, EXACT, rows),)) == 1
    task = run.results()["tasks"]["mine"]
    assert task["rows"]["failed"] == 1
    assert task["rows"]["errors"] == {"prompt_too_long": 1}
    assert task["accuracy"]["strict"]["scored"] == 6
    last = run.samples()[-1]
    assert last["error"]["type"] == "prompt_too_long"
    assert "filters" not in last
    assert run.log.strip().splitlines()[-1] == "mine: 1 of 7 rows failed: 1 prompt_too_long"


def test_programs_run_only_where_that_is_allowed(run: Eval) -> None:
    run.texts = {row["q"]: text for row, text in zip(ROWS, ["1", "2", "0", "exit(0)", "5", "6"], strict=True)}
    path = write_task(run.folder, {**EXACT, **PROGRAMS})
    with pytest.raises(SpecbatchError) as caught:
        run(task_files=(path,))
    assert "--allow-code-execution" in str(caught.value.hint)
    assert not run.engines
    assert not run.output.exists()
    assert run(task_files=(path,), allow_code_execution=True) == 0
    task = run.results()["tasks"]["mine"]
    assert task["accuracy"]["run"]["correct"] == 4
    assert set(task["programs_kept_from"]) == {"network", "processes", "files"}
    assert run.samples()[2]["filters"]["run"] == {"value": "0", "correct": False, "detail": "AssertionError"}
    assert run.samples()[3]["filters"]["run"]["correct"] is False


@pytest.mark.parametrize(
    ("weak", "words"),
    [
        (
            {"network": "sockets of Python disabled", "processes": "shared", "files": "writable"},
            "network, processes, f",
        ),
        ({"network": "namespace", "processes": "namespace", "files": "writable"}, "for files: programs"),
        ({}, "network, processes, files: programs"),
    ],
)
def test_weaker_isolation_is_said(run: Eval, monkeypatch: pytest.MonkeyPatch, weak: dict[str, str], words: str) -> None:
    verdict = Verdict(True, "", weak)
    monkeypatch.setattr("specbatch.evals.metrics.run_programs", lambda programs, *_: [verdict] * len(programs))
    run.texts = {row["q"]: row["a"] for row in ROWS}
    assert run(task_files=(write_task(run.folder, {**EXACT, **PROGRAMS}),), allow_code_execution=True) == 0
    assert run.results()["tasks"]["mine"]["programs_kept_from"] == weak
    assert words in run.log
    assert "by Python's means alone" in run.log


def test_nothing_is_scored_for_speed(run: Eval) -> None:
    path = write_task(run.folder, {"metric": {"name": "none"}, "prompt": {"question": "{{q}}"}})
    assert run(task_files=(path,)) == 0
    task = run.results()["tasks"]["mine"]
    assert task["accuracy"] == {}
    assert task["acceptance_length"] == 3.0
    assert run.samples()[0]["filters"] == {}


def test_several_answers_to_a_row(run: Eval) -> None:
    config = Config(sampling=SamplingParams(n=3, temperature=0.5))
    run.texts[ROWS[1]["q"]] = ["1", "2", "0"]
    options = {"task_files": (write_task(run.folder, EXACT),), "overrides": ("n", "temperature")}
    assert run(config, **options) == 0
    task = run.results()["tasks"]["mine"]
    assert task["sampling"]["n"] == 3
    assert task["accuracy"]["loose"]["correct"] == pytest.approx(3 + 1 / 3)
    assert run.samples()[0]["filters"]["loose"] == {"value": ["1", "1", "1"], "correct": 1.0}
    assert run.samples()[1]["filters"]["loose"] == {"value": ["1", "2", "0"], "correct": 0.3333}
    assert run.samples()[0]["filters"]["strict"] == {"value": "1", "correct": True}  # take_first


def test_samples_differ_by_right(run: Eval) -> None:
    run.plain_texts = {**run.texts, ROWS[0]["q"]: "the answer is 7"}
    path = write_task(run.folder, {**EXACT, "sampling": {"temperature": 0.5}})
    assert run(task_files=(path,), compare="none") == 0
    (found,) = run.results()["tasks"]["mine"]["compare"]["differences"]
    assert (found["index"], found["token"], found["margin"]) == (0, None, None)  # nothing to be learned from a margin


def test_prompts_run_as_they_stand(run: Eval) -> None:
    data = DataSection(prompts_as_chat=True, prompt_template="{id}")
    config = Config(data=data, output=OutputSection(columns="flat"))
    assert run(config, task_files=(write_task(run.folder, EXACT),)) == 0
    for sample in run.samples():
        assert sample["usage"]["prompt_tokens"] == 1 + len(sample["prompt"])  # BOS and bytes: no chat template


def test_special_tokens_among_stop_strings_stop_the_engine(run: Eval, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.stub_engine.StubTokenizer.all_special_tokens", ("</s>",), raising=False)
    monkeypatch.setattr("tests.stub_engine.StubTokenizer.convert_tokens_to_ids", lambda *_: EOS, raising=False)
    path = write_task(run.folder, {**EXACT, "sampling": {"stop": ["Q:", "</s>"], "stop_token_ids": [7]}})
    assert run(task_files=(path,)) == 0
    stats = json.loads((run.output / "mine" / "answers.stats.json").read_text())
    assert stats["config"]["sampling"]["stop_token_ids"] == [7, EOS]


def test_only_the_command_line_goes_before_the_task(run: Eval) -> None:
    config = Config(sampling=SamplingParams(top_p=0.5, max_tokens=5))
    assert run(config, task_files=(write_task(run.folder, EXACT),), overrides=("max_tokens",)) == 0
    sampling = run.results()["tasks"]["mine"]["sampling"]
    assert (sampling["top_p"], sampling["max_tokens"], sampling["stop"]) == (1.0, 5, ["Q:"])
    assert "sampling.top_p of the configuration: not used" in run.log
    assert "max_tokens of" not in run.log


def test_own_rows_and_examples(run: Eval) -> None:
    data = run.folder / "data.jsonl"
    data.write_text(json.dumps({"q": "0 + 1?", "a": "1"}) + "\n")
    shots = {**EXACT, "few_shot": {"count": 0, "data": {"file": "rows.jsonl"}}}
    assert run(task_files=(write_task(run.folder, shots),), data=data, num_fewshot=2) == 0
    (sample,) = run.samples()
    # A row that is among its own examples is left out there: its answer would stand in its prompt.
    assert sample["prompt"] == "Q: 1 + 1?\nA: 2\n\nQ: 2 + 1?\nA: 3\n\nQ: 0 + 1?\nA:"
    assert run.results()["tasks"]["mine"]["num_fewshot"] == 2
    assert run.results()["tasks"]["mine"]["data"]["source"] == str(data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compare": "ngram"}, "--compare must be none"),
        ({"compare": "none", "config": Config(speculation=SpeculationSection(method="none"))}, "no speculation"),
        ({"num_fewshot": 3}, "has no examples"),
        ({"tasks": ("gsm8k",), "data": Path("x.jsonl")}, "--data replaces the rows of one task"),
        ({"output": Path("/nowhere/x/y")}, "does not exist"),
        ({"data": Path("/nowhere/x.jsonl")}, "does not exist"),
        ({"task_files": ()}, "no task is given"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(run: Eval, options: dict[str, Any], words: str) -> None:
    path = write_task(run.folder, EXACT)
    with pytest.raises(SpecbatchError, match=words):
        run(**{"task_files": (path,), **options})
    assert not run.engines
    assert not run.output.exists()


def test_chat_tasks_want_a_template(run: Eval, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.stub_engine.StubTokenizer.chat_template", None)
    with pytest.raises(SpecbatchError, match="needs a chat template"):
        run(tasks=("mt_bench_speed",))
    assert not run.engines


def test_chat_tasks_give_variables_to_the_template(run: Eval, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def write(self: StubTokenizer, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        seen.append(kwargs)
        return "Q: " + messages[-1]["content"]

    monkeypatch.setattr(StubTokenizer, "apply_chat_template", write)
    monkeypatch.setattr(StubTokenizer, "chat_template", "{{ thinking, effort }}")
    chat = {
        "kind": "chat",
        "question": "{{q}}",
        "answer": "{{a}}",
        "chat_template_kwargs": {"thinking": False, "effort": "low"},
    }
    path = write_task(run.folder, {**EXACT, "prompt": chat})
    config = Config(data=DataSection(chat_template_kwargs={"effort": "high"}))
    assert run(config, task_files=(path,)) == 0
    assert (seen[-1]["thinking"], seen[-1]["effort"]) == (False, "high"), (
        "the configuration has precedence, name by name"
    )
    path = write_task(run.folder, {**EXACT, "prompt": {**chat, "chat_template_kwargs": {"thinkin": 1}}})
    with pytest.raises(SpecbatchError, match="reads effort, thinking; did you mean thinking"):
        run(task_files=(path,), overwrite=True)


def test_the_command_line(tmp_path: Path) -> None:
    refused = processes.run(tmp_path, "eval", "humaneval", "gsm8k")
    assert refused.returncode == 2
    assert "hint: --allow-code-execution" in refused.stderr
    assert "did you mean gsm8k?" in processes.run(tmp_path, "eval", "gms8k").stderr
    assert os.listdir(tmp_path) == []
    done = processes.run(tmp_path, "eval", "mt_bench_speed", "--limit", "4", "--set", "sampling.max_tokens=7")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    report = json.loads((tmp_path / "eval-mt_bench_speed" / "results.json").read_text())
    assert report["tasks"]["mt_bench_speed"]["sampling"]["max_tokens"] == 7
    assert report["tasks"]["mt_bench_speed"]["rows"]["total"] == 4
    assert report["arguments"]["limit"] == 4


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    path = write_task(tmp_path, EXACT, [{"q": f"p{i}", "a": "1"} for i in range(200)])
    arguments = ("eval", "--task", str(path), "--compare", "none", "-o", "out")
    process = processes.Command(tmp_path, *arguments, STUB_SLEEP="0.02")
    process.wait_for_rows(tmp_path / "out" / "mine" / "answers.jsonl.partial", 10)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "run the same command again to continue" in said
    assert not (tmp_path / "out" / "results.json").exists()
    again = processes.run(tmp_path, *arguments)
    assert again.returncode == 0, again.stderr
    assert "resuming: " in again.stderr
    task = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["mine"]
    assert task["rows"]["total"] == 200
    assert 0 < task["resumed_rows"] < 200
    # A part of the rows against all of them would be no comparison.
    assert task["compare"]["speed_up"] is None
    assert f"no speed-up: {task['resumed_rows']} rows" in again.stderr
    processes.run(tmp_path, *arguments[:-1], "other")
    for name in ("samples.jsonl", "mine/answers.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.wide
def test_speculation_changes_nothing_on_a_real_engine(run: Eval) -> None:
    from specbatch.setup.build import build_engine
    from specbatch.setup.resolve import resolve as resolve_really

    def sets(*more: str) -> Config:
        options = [
            "model.target=random:tiny",
            "engine.device=cpu",
            "model.dtype=float32",
            "engine.kv_cache_tokens=2048",
        ]
        return load_config(None, [*options, *more])

    built: list[str] = []
    alive: list[weakref.ref[BatchEngine]] = []

    def build(resolved: Any, show: Callable[[str], None]) -> BatchEngine:
        assert not any(engine() for engine in alive), "there is memory for one engine at a time"
        built.append(resolved.config.speculation.method)
        engine = build_engine(resolved, show)
        alive.append(weakref.ref(engine))
        return engine

    options: dict[str, Sequence[Any]] = {"task_files": (write_task(run.folder, EXACT),), "tasks": ("mt_bench_speed",)}
    config = sets("speculation.method=draft_model", "speculation.draft=random:tiny", "data.chat_template={{messages}}")
    runtime = Runtime(resolve_really, build, lambda _: {})
    overrides = sets("sampling.max_tokens=12")
    config = replace(config, sampling=overrides.sampling)
    code = run.run(runtime, config, compare="none", limit=3, overrides=("max_tokens",), **options)
    assert code == 0, run.log
    assert built == ["draft_model", "none"]
    report = run.results()
    assert report["random_weights"] is True
    for task in report["tasks"].values():
        assert task["compare"]["rows_differing"] == 0
        assert task["compare"]["rows_compared"] == 3
        assert task["acceptance_length"] > 1.5  # the draft is the target itself
        assert task["compare"]["acceptance_length"] == 1.0
    mine = report["tasks"]["mine"]
    assert mine["accuracy"] == mine["compare"]["accuracy"]


def test_the_order_of_rows_is_that_of_the_configuration(run: Eval) -> None:
    assert run(Config(data=DataSection(plan_rows=7)), task_files=(write_task(run.folder, EXACT),)) == 0
    stats = json.loads((run.output / "mine" / "answers.stats.json").read_text())
    assert stats["config"]["data"]["plan_rows"] == 7
