"""`specbatch eval`: tasks through the file job of `generate`, then scores, statistics and, if wanted, a comparison.

Files of a run: DIR/results.json, DIR/samples.jsonl, those of DIR/lm-eval (see `lm_eval_layout`), and for each task
DIR/TASK/prompts.jsonl with the file job's answers.jsonl, answers.stats.json and, while it is unfinished, its partial
file. DIR/TASK/none/ has those of the run without speculation. The same command again resumes, or scores again what
exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.config import Config, SpeculationSection
from specbatch.errors import ConfigError
from specbatch.evals.compare import Difference
from specbatch.evals.files import answers_path, check_files, check_folder, results_path, samples_path
from specbatch.evals.lm_eval_layout import write_lm_eval_files
from specbatch.evals.load import find_tasks
from specbatch.evals.plan import Plan, make_plan
from specbatch.evals.report import (
    Measured,
    closing_table,
    comparison_lines,
    failure_notes,
    isolation_notes,
    task_report,
    whole_report,
)
from specbatch.evals.runner import Interrupted, Runner
from specbatch.evals.schema import Task
from specbatch.evals.score import read_results, sample_line
from specbatch.files.jsonl import encode_line
from specbatch.files.local import write_whole
from specbatch.files.paths import files_read
from specbatch.files.template_files import with_template_texts
from specbatch.job.output import OK, SOME_FAILED
from specbatch.job.terminal import print_notes, print_table
from specbatch.job.worker import Runtime
from specbatch.results.stats import write_report
from specbatch.signals import INTERRUPTED
from specbatch.types import SamplingParams


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
    quarantine: bool = False  # see `GenerateOptions`
    overrides: tuple[str, ...] = ()
    config_file: Path | None = None  # see `GenerateOptions`


def evaluate(options: EvalOptions, config: Config, runtime: Runtime, console: Console, *, began: float) -> int:
    """Run or resume an evaluation; returns the exit code. `began`: when the command did (time.perf_counter).

    Raises SpecbatchError for every mistake that is not a row's.
    """
    named, config = config, with_template_texts(config)
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
    print_notes(_unused_sampling(config, options.overrides), console)
    runner = Runner(folder, runtime, console, began=began, overwrite=options.overwrite, quarantine=options.quarantine)
    plain: dict[str, Measured] = {}
    differences: dict[str, list[Difference]] = {}
    try:
        runs = runner.run(plans, config, "")
        if options.compare is not None:
            without = dataclasses.replace(config, speculation=SpeculationSection(method="none"))
            plain = runner.run(plans, without, "none")
            differences = {plan.task.name: runner.differences(plan, without) for plan in plans}
    except Interrupted:
        return INTERRUPTED
    arguments = {
        "tasks": [task.path if options.task_files else task.name for task in tasks],
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "data": None if options.data is None else str(options.data),
        "compare": options.compare,
    }
    report = whole_report(
        {
            name: task_report(plan, run, plain.get(name), differences.get(name, []))
            for plan, (name, run) in zip(plans, runs.items(), strict=True)
        },
        [run.stats for run in runs.values()],
        arguments,
    )
    answers = {plan.task.name: read_results(answers_path(plan, "")) for plan in plans}
    _write_samples(folder, plans, runs, plain, answers)
    write_lm_eval_files(folder, plans, runs, answers, arguments, datetime.now())
    write_report(results_path(folder), report)
    print_table(closing_table(report), console)
    print_notes(comparison_lines(report), console)
    print_notes([f"output: {folder / 'results.json'}, {folder / 'samples.jsonl'}"], console)
    print_notes(isolation_notes(report), console)
    failures = failure_notes(report)
    print_notes(failures, console)
    return SOME_FAILED if failures else OK


def _check(options: EvalOptions, tasks: Sequence[Task], config: Config) -> None:
    """Check the options that need neither data nor model. Raises ConfigError."""
    if options.data is not None and len(tasks) > 1:
        raise ConfigError(
            f"--data replaces the rows of one task, and {len(tasks)} are given", "run them one after the other"
        )
    if options.compare not in (None, "none"):
        raise ConfigError(f"--compare must be none, not {options.compare!r}", "none: the same without speculation")
    if options.compare is not None and config.speculation.method == "none":
        raise ConfigError(
            "--compare none: the configuration itself has no speculation", "such as --set speculation.method=ngram"
        )
    for task in tasks:
        if task.metric.runs_programs and not options.allow_code_execution:
            raise ConfigError(
                f"the task {task.name} runs programs that the model writes",
                "--allow-code-execution allows it: each in its own process, with limits of time and memory and without "
                "network; best inside a container or on a machine that holds nothing else",
            )


def _reads(options: EvalOptions, config: Config) -> dict[str, Path]:
    tasks = {f"the task {path}": path for path in options.task_files}
    return files_read(config, options.config_file, data=options.data) | tasks


def _unused_sampling(config: Config, overrides: Sequence[str]) -> list[str]:
    """Tasks fix how they sample: a note if the configuration has other sampling options."""
    usual = SamplingParams()
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    unused = [n for n in names if n not in overrides and getattr(config.sampling, n) != getattr(usual, n)]
    if not unused:
        return []
    options = ", ".join(f"sampling.{name}" for name in unused)
    return [
        f"{options} of the configuration: not used, because a task fixes its sampling options; --set on the command "
        "line overrides both"
    ]


def _write_samples(
    folder: Path,
    plans: Sequence[Plan],
    runs: Mapping[str, Measured],
    plain: Mapping[str, Measured],
    answers: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    lines = []
    for plan in plans:
        results = answers[plan.task.name]
        others = read_results(answers_path(plan, "none")) if plan.task.name in plain else None
        for i, (result, found) in enumerate(zip(results, runs[plan.task.name].scores.rows, strict=True)):
            line = sample_line(plan, i, result, found)
            if others is not None and others[i]["text"] != result["text"]:
                line["text_without_speculation"] = others[i]["text"]
            lines.append(encode_line(line))
    write_whole(samples_path(folder), b"".join(lines))
