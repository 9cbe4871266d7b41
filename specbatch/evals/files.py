"""The files of an evaluation, and the checks that no other file is overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specbatch.errors import InputError
from specbatch.evals.plan import Plan
from specbatch.evals.schema import Task
from specbatch.files.paths import (
    Written,
    check_can_write,
    check_written,
    holds_results,
    is_partial,
    job_files,
    partial_path,
    read_stats,
    refuse_remote,
    stats_path_of,
    unless,
    usable,
)

ELSEWHERE = "-o DIR writes elsewhere"


def results_path(folder: Path) -> Path:
    return folder / "results.json"


def samples_path(folder: Path) -> Path:
    return folder / "samples.jsonl"


def prompts_path(plan: Plan) -> Path:
    return plan.folder / "prompts.jsonl"


def answers_path(plan: Plan, variant: str) -> Path:
    """Return the path of the answers. `variant`: "", or "none" for the run without speculation."""
    return plan.folder / variant / "answers.jsonl"


def differing_paths(plan: Plan) -> tuple[Path, Path]:
    """The rows that run once more, and their results."""
    return plan.folder / "none" / "differing.prompts.jsonl", plan.folder / "none" / "differing.jsonl"


def check_folder(folder: Path, tasks: Sequence[Task], *, overwrite: bool) -> None:
    """Check the output folder before any row is read. It raises InputError."""
    refuse_remote(folder)
    with usable(folder, "the output"):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"the output {folder} is not a folder", "-o DIR names one")
    if not folder.parent.is_dir():
        raise InputError(f"the folder of the output, {folder.parent}, does not exist", "make it, or use -o DIR")
    results = results_path(folder)
    check_written([_results(results)], {}, ELSEWHERE)
    if overwrite or not results.exists():
        return
    found = set(_tasks(results))
    if found != {task.name for task in tasks}:
        raise InputError(
            f"{results} is the result of other tasks: {', '.join(sorted(found))}",
            "-o DIR writes elsewhere; --overwrite replaces it",
        )


def check_files(folder: Path, plans: Sequence[Plan], reads: Mapping[str, Path], *, overwrite: bool) -> None:
    """Check the files that the command writes. `reads`: the files that it reads, by name. It raises InputError."""
    files = [_results(results_path(folder)), Written("the samples", samples_path(folder), unless(_holds_samples))]
    for plan in plans:
        lines = plan.lines()
        prompts, answers = prompts_path(plan), [answers_path(plan, variant) for variant in ("", "none")]
        again, found = differing_paths(plan)
        files.append(Written("the prompts", prompts, unless(_prompts_of(answers, lines))))
        files.append(Written("the differing prompts", again, unless(_prompts_of([found], b""))))
        for output in (*answers, found):
            files.append(Written("the answers", output, unless(holds_results)))
            files += job_files(output)[1:]
    check_written(files, reads, ELSEWHERE)
    check_can_write([file for file in files if file.path.parent.is_dir()] or [Written("", folder, unless(bool))])
    if not overwrite:
        _check_prompts(plans)


def _check_prompts(plans: Sequence[Plan]) -> None:
    """Other prompts are another job. The file job would find that by the digest of its input, which explains nothing,
    and only after the prompts of the existing answers were overwritten."""
    for plan in plans:
        outputs = answers_path(plan, ""), answers_path(plan, "none")
        if not prompts_path(plan).is_file() or not any(o.exists() or partial_path(o).exists() for o in outputs):
            continue
        before = prompts_path(plan).read_bytes()
        if before != plan.lines():
            count = len(before.splitlines())
            raise InputError(
                f"{plan.folder} holds a run of a different job: other prompts ({count:,} then, {len(plan.rows):,} now)",
                "--limit, --num-fewshot, --data or the task's file is not what it was; -o DIR writes elsewhere, "
                "--overwrite starts again",
            )


def _results(path: Path) -> Written:
    return Written("the results", path, unless(lambda found: bool(_tasks(found))))


def _tasks(results: Path) -> list[str]:
    """The tasks of results.json; none if it is another file."""
    try:
        tasks = json.loads(results.read_bytes())["tasks"]
        return list(tasks) if isinstance(tasks, dict) else []
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


def _holds_samples(path: Path) -> bool:
    with path.open("rb") as file:
        line = file.readline(64 << 20)
    try:
        return not line or {"task", "index", "prompt", "text"} <= set(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return False


def _prompts_of(outputs: Sequence[Path], lines: bytes) -> Callable[[Path], bool]:
    """Return a test of whether a file has prompts of an evaluation: they are `lines`, those of this run, or the folder
    has the answers of an earlier run. The file alone looks like any input."""
    return lambda path: path.read_bytes() == lines or any(map(_has_job, outputs))


def _has_job(output: Path) -> bool:
    partial = partial_path(output)
    return (partial.is_file() and is_partial(partial)) or read_stats(stats_path_of(output)) is not None
