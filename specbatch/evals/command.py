"""`specbatch eval`: tasks through the file job of `generate`, then scores, statistics and, if wanted, a comparison.

Files of a run: DIR/results.json, DIR/samples.jsonl, and for each task DIR/TASK/prompts.jsonl with the file job's
answers.jsonl, answers.stats.json and, while it is unfinished, its partial file; in DIR/TASK/none/ those of the run
without speculation. Running the same command again goes on, or scores again what is there.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.config import Config, SpeculationSection
from specbatch.errors import ConfigError
from specbatch.evals.compare import LOGPROBS, Difference, difference, differing_rows
from specbatch.evals.files import (
    answers_path,
    check_files,
    check_folder,
    differing_paths,
    prompts_path,
    results_path,
    samples_path,
)
from specbatch.evals.load import find_tasks
from specbatch.evals.plan import Plan, make_plan, plan_config, prompt_lines, stop_tokens
from specbatch.evals.report import Measured, closing_table, comparison_lines, task_report, whole_report
from specbatch.evals.sandbox import ISOLATED
from specbatch.evals.schema import Task
from specbatch.evals.score import Scores, read_results, sample_line, score
from specbatch.evals.shared import SharedRuntime
from specbatch.job.command import (
    OK,
    SOME_FAILED,
    GenerateOptions,
    Runtime,
    generate_file,
)
from specbatch.job.files import disk_errors, write_whole
from specbatch.job.jsonl import encode_line
from specbatch.job.paths import files_read, stats_path_of
from specbatch.job.stats import write_report
from specbatch.job.templates import ChatTemplate
from specbatch.job.terminal import print_table
from specbatch.job.tokenizer import TextProcessor, with_chat_template_text
from specbatch.retired import current_statistics
from specbatch.signals import INTERRUPTED
from specbatch.types import SamplingParams

_SHOW_SECONDS = 5.0


@dataclass(frozen=True)
class EvalOptions:
    """The command line. `overrides`: names of the sampling options that --set was given for."""

    tasks: tuple[str, ...] = ()
    task_files: tuple[Path, ...] = ()
    output: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    data: Path | None = None
    compare: str | None = None
    allow_code_execution: bool = False
    overwrite: bool = False
    overrides: tuple[str, ...] = ()
    config_file: Path | None = None  # see `GenerateOptions`


def evaluate(options: EvalOptions, config: Config, runtime: Runtime, console: Console, *, began: float) -> int:
    """Run, or go on with, an evaluation; returns the exit code. `began` is when the command did (time.perf_counter).

    Raises SpecbatchError for everything that no row is to blame for.
    """
    named, config = config, with_chat_template_text(config)
    tasks = find_tasks(options.tasks, options.task_files)
    _check(options, tasks, config)
    folder = options.output if options.output is not None else Path("eval-" + "-".join(task.name for task in tasks))
    check_folder(folder, tasks, overwrite=options.overwrite)
    plans = [
        make_plan(
            task,
            num_examples=options.num_fewshot,
            data=options.data,
            limit=options.limit,
            config=config,
            overrides=options.overrides,
            folder=folder,
        )
        for task in tasks
    ]
    check_files(folder, plans, _reads(options, named), overwrite=options.overwrite)
    _say_unused_sampling(config, options.overrides, console)
    runner = _Runner(folder, options, runtime, console, began)
    if runner.run(plans, config, "") == INTERRUPTED:
        return INTERRUPTED
    runs = {plan.task.name: runner.measure(plan, "") for plan in plans}
    plain: dict[str, Measured] = {}
    differences: dict[str, list[Difference]] = {}
    if options.compare is not None:
        runner.release()
        without = dataclasses.replace(config, speculation=SpeculationSection(method="none"))
        if runner.run(plans, without, "none") == INTERRUPTED:
            return INTERRUPTED
        for plan in plans:
            plain[plan.task.name] = runner.measure(plan, "none")
            found = runner.differences(plan, without)
            if found is None:
                return INTERRUPTED
            differences[plan.task.name] = found
    report = whole_report(
        {
            name: task_report(plan, runs[name], plain.get(name), differences.get(name, []))
            for name, plan in ((plan.task.name, plan) for plan in plans)
        },
        [run.stats for run in runs.values()],
        {
            "tasks": [task.path if options.task_files else task.name for task in tasks],
            "limit": options.limit,
            "num_fewshot": options.num_fewshot,
            "data": None if options.data is None else str(options.data),
            "compare": options.compare,
        },
    )
    _write_samples(folder, plans, runs, plain)
    write_report(results_path(folder), report)
    print_table(closing_table(report), console)
    for line in comparison_lines(report):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"output: {folder / 'results.json'}, {folder / 'samples.jsonl'}", markup=False, soft_wrap=True)
    _say_isolation(report, console)
    return _verdict(report, console)


class _Runner:
    """File jobs of an evaluation, over one engine at a time."""

    def __init__(self, folder: Path, options: EvalOptions, runtime: Runtime, console: Console, began: float) -> None:
        self._folder = folder
        self._options = options
        self._runtime = runtime
        self._console = console
        self._began = began  # the first job's statistics count the start of the program
        self._shared: SharedRuntime | None = None
        self._stop_tokens: dict[str, list[int]] = {}

    def run(self, plans: Sequence[Plan], config: Config, variant: str) -> int:
        """Answer the rows of all plans; `variant` "" or "none" names the folder. INTERRUPTED, or OK where every row has
        a result."""
        # The task says which prompts are chats; those that are text run as they are.
        own = dataclasses.replace(config, data=dataclasses.replace(config.data, prompts_as_chat=False))
        self._shared = SharedRuntime(self._runtime, own)
        tokenizer = self._shared.resolved.tokenizer
        for plan in plans:
            if plan.task.prompt.kind != "chat":
                continue
            template = ChatTemplate(tokenizer, config.data)
            if not template.exists:
                raise ConfigError(
                    f"the task {plan.task.name} wants a chat template, and the model has none",
                    "--set data.chat_template=PATH gives one",
                )
            template.check()
        if self._options.overwrite:  # until this run has its own
            for path in (results_path(self._folder), samples_path(self._folder)):
                with disk_errors(path):
                    path.unlink(missing_ok=True)
        for plan in plans:
            write_whole(prompts_path(plan), prompt_lines(plan.ids, plan.prompts))
            extra = self._stop_tokens[plan.task.name] = stop_tokens(tokenizer, plan.sampling.stop)
            self._console.print(
                f"{plan.task.name}{', without speculation' if variant else ''}: {len(plan.rows):,} rows", markup=False
            )
            code = self._generate(prompts_path(plan), answers_path(plan, variant), plan_config(config, plan, extra))
            if code == INTERRUPTED:
                return INTERRUPTED
        return OK

    def measure(self, plan: Plan, variant: str) -> Measured:
        """Score what a finished job wrote."""
        answers = answers_path(plan, variant)
        stats, notes = current_statistics(json.loads(stats_path_of(answers).read_text(encoding="utf-8")))
        for note in notes:
            self._console.print(note, markup=False, soft_wrap=True)
        return Measured(score(plan, read_results(answers), _progress(self._console)), stats)

    def differences(self, plan: Plan, config: Config) -> list[Difference] | None:
        """Of the run without speculation, whose engine is still there, to the one with it. Rows whose texts differ are
        run once more with log-probabilities, which the timed runs go without. None: interrupted."""
        results = read_results(answers_path(plan, ""))
        plain = read_results(answers_path(plan, "none"))
        rows = differing_rows(results, plain)
        if not rows or plan.sampling.temperature > 0:  # samples differ by right: other draws of the same distribution
            return [Difference(i, plan.ids[i], None, None) for i in rows]
        assert self._shared is not None, "run() comes first"
        own = plan_config(config, plan, self._stop_tokens[plan.task.name])
        own = dataclasses.replace(own, sampling=dataclasses.replace(own.sampling, logprobs=LOGPROBS, n=1))
        prompts, answers = differing_paths(plan)
        write_whole(prompts, prompt_lines([plan.ids[i] for i in rows], [plan.prompts[i] for i in rows]))
        # Quick and derived: made anew each time.
        if self._generate(prompts, answers, own, overwrite=True) == INTERRUPTED:
            return None
        texts = TextProcessor(self._shared.resolved.tokenizer, own.data)
        pairs = zip(rows, read_results(answers), strict=True)
        return [difference(i, results[i]["text"], again, texts.decode) for i, again in pairs]

    def release(self) -> None:
        if self._shared is not None:
            self._shared.release()
            self._shared = None

    def _generate(self, prompts: Path, answers: Path, config: Config, overwrite: bool = False) -> int:
        assert self._shared is not None
        answers.parent.mkdir(parents=True, exist_ok=True)
        options = GenerateOptions(str(prompts), answers, overwrite=overwrite or self._options.overwrite)
        began, self._began = self._began, 0.0
        if not began:
            began = time.perf_counter()
        return generate_file(options, config, self._shared.runtime, self._console, began=began, summary=False)


def _check(options: EvalOptions, tasks: Sequence[Task], config: Config) -> None:
    """What needs neither data nor model."""
    if options.data is not None and len(tasks) > 1:
        raise ConfigError(
            f"--data replaces the rows of one task, and {len(tasks)} are given", "run them one after the other"
        )
    if options.compare not in (None, "none"):
        raise ConfigError(f"--compare must be none, not {options.compare!r}", "none: the same without speculation")
    if options.compare is not None and config.speculation.method == "none":
        raise ConfigError(
            "--compare none: the configuration itself has no speculation", "--set speculation.method=ngram, for one"
        )
    for task in tasks:
        if task.metric.runs_programs and not options.allow_code_execution:
            raise ConfigError(
                f"the task {task.name} runs programs that the model writes",
                "--allow-code-execution lets it: each in a process of its own, with limits of time and memory and "
                "without network; best inside a container or on a machine that holds nothing else",
            )


def _reads(options: EvalOptions, config: Config) -> dict[str, Path]:
    tasks = {f"the task {path}": path for path in options.task_files}
    return files_read(config, options.config_file, data=options.data) | tasks


def _say_unused_sampling(config: Config, overrides: Sequence[str], console: Console) -> None:
    """Tasks say how they sample. A configuration that says otherwise is not passed over in silence."""
    usual = SamplingParams()
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    unused = [n for n in names if n not in overrides and getattr(config.sampling, n) != getattr(usual, n)]
    if unused:
        options = ", ".join(f"sampling.{name}" for name in unused)
        console.print(
            f"{options} of the configuration: not used, for tasks sample in their own way; --set on the command line "
            "goes before both",
            markup=False,
            soft_wrap=True,
        )


def _say_isolation(report: Mapping[str, Any], console: Console) -> None:
    """Where the kernel gave generated programs no world of their own, the user should know."""
    for name, task in report["tasks"].items():
        kept = task.get("programs_kept_from")
        if kept is None:
            continue
        weak = [what for what, how in ISOLATED.items() if kept.get(what) != how]
        if weak:
            console.print(
                f"{name}: the kernel allows no namespaces for {', '.join(weak)}: programs were kept from these by "
                "Python's means alone",
                markup=False,
                soft_wrap=True,
            )


def _progress(console: Console) -> Callable[[int, int], None]:
    """Says every few seconds how many programs have run."""
    last = time.monotonic()

    def shown(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SHOW_SECONDS:
            last = time.monotonic()
            console.print(f"{done:,}/{total:,} programs run", soft_wrap=True)

    return shown


def _write_samples(
    folder: Path, plans: Sequence[Plan], runs: Mapping[str, Measured], plain: Mapping[str, Measured]
) -> None:
    lines = []
    for plan in plans:
        scores: Scores = runs[plan.task.name].scores
        results = read_results(answers_path(plan, ""))
        others = read_results(answers_path(plan, "none")) if plan.task.name in plain else None
        for i, (result, found) in enumerate(zip(results, scores.rows, strict=True)):
            line = sample_line(plan, i, result, found)
            if others is not None and others[i]["text"] != result["text"]:
                line["text_without_speculation"] = others[i]["text"]
            lines.append(encode_line(line))
    write_whole(samples_path(folder), b"".join(lines))


def _verdict(report: Mapping[str, Any], console: Console) -> int:
    code = OK
    for name, task in report["tasks"].items():
        for part, label in ((task, ""), (task.get("compare"), " without speculation")):
            if part is not None and part["rows"]["failed"]:
                kinds = ", ".join(f"{count:,} {kind}" for kind, count in part["rows"]["errors"].items())
                console.print(
                    f"{name}{label}: {part['rows']['failed']:,} of {part['rows']['total']:,} rows failed: {kinds}",
                    markup=False,
                    soft_wrap=True,
                )
                code = SOME_FAILED
    return code
