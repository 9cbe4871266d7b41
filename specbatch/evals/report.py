"""results.json, and its main figures at the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

import specbatch
from specbatch.evals.compare import Difference
from specbatch.evals.metrics import metric_name
from specbatch.evals.plan import Plan
from specbatch.evals.sandbox import ISOLATED
from specbatch.evals.score import Scores, accuracy, standard_error
from specbatch.files.stats_types import SCHEMA_VERSION
from specbatch.job.terminal import acceptance_text
from specbatch.results.stats import commit

_SHOWN_MARGINS = 4


@dataclass(frozen=True)
class Measured:
    """One way (with speculation or without) of running a task."""

    scores: Scores
    stats: Mapping[str, Any]  # statistics of the file job


def task_report(plan: Plan, run: Measured, plain: Measured | None, differences: Sequence[Difference]) -> dict[str, Any]:
    """The entry of one task in results.json. `plain`: the run without speculation, if there was one; `differences`:
    rows whose texts differ."""
    task = plan.task
    report = {
        "task": {"name": task.name, "version": task.version, "sha256": task.sha256, "description": task.description},
        "data": {"source": plan.source, **plan.identity},
        "num_fewshot": plan.num_examples,
        "metric": metric_name(task.metric),
        "sampling": {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(plan.sampling).items()},
        **_measured(plan, run),
    }
    if plain is not None:
        report["compare"] = {
            "without": "speculation",
            **_measured(plan, plain),
            "accuracy_difference": {f: _paired(run.scores, plain.scores, f) for f in _filters(plan)},
            "rows_compared": sum(a is not None and b is not None for a, b in _pairs(run.scores, plain.scores)),
            "rows_differing": len(differences),
            "differences": [dataclasses.asdict(d) for d in differences],
            "speed_up": _speed_up(run.stats, plain.stats),
        }
    return report


def whole_report(
    tasks: Mapping[str, Any], stats: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """results.json. `stats`: of the tasks' file jobs; they share configuration and models."""
    first = stats[0]
    config = {section: options for section, options in first["config"].items() if section != "sampling"}  # tasks' own
    return {
        "schema_version": SCHEMA_VERSION,
        "tasks": dict(tasks),
        "simulated": first["simulated"],
        "random_weights": first["random_weights"],
        "arguments": dict(arguments),
        "config": config,
        "models": first["models"],
        "device": first["device"],
        # What made the answers, and what scored them: a later command can score them again.
        "versions": first["versions"],
        "commit": first["commit"],
        "scored_by": {"specbatch": specbatch.__version__, "commit": commit()},
        "notes": list(dict.fromkeys(note for each in stats for note in each["notes"])),
    }


def closing_table(report: Mapping[str, Any]) -> Table:
    """The main figures of results.json."""
    tasks: Mapping[str, Mapping[str, Any]] = report["tasks"]
    compared = any("compare" in task for task in tasks.values())
    table = Table(title=_warning(report), show_header=compared, box=None, pad_edge=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    if compared:
        table.add_column("without speculation")
    for name, task in tasks.items():
        examples = f", {task['num_fewshot']} examples" if task["num_fewshot"] else ""
        table.add_row(escape(name), f"version {escape(task['task']['version'])}{examples}")
        columns = [_figures(task)] + ([_figures(task["compare"])] if "compare" in task else [])
        for label, value in columns[0].items():
            table.add_row(f"  {escape(label)}", value, *(other.get(label, "") for other in columns[1:]))
    return table


def comparison_lines(report: Mapping[str, Any]) -> list[str]:
    """One line for each task that ran without speculation too."""
    lines = []
    for name, task in report["tasks"].items():
        if "compare" not in task:
            continue
        other = task["compare"]
        parts = [f"{other['rows_differing']:,} of {other['rows_compared']:,} texts differ"]
        margins = sorted((d["margin"] for d in other["differences"] if d["margin"] is not None), reverse=True)
        if margins:
            shown = ", ".join(f"{m:.2g}" for m in margins[:_SHOWN_MARGINS])
            more = ", ..." if len(margins) > _SHOWN_MARGINS else ""
            parts[0] += f" (logit margin at the first difference, in nats: {shown}{more})"
        for f, change in other["accuracy_difference"].items():
            if change["value"] is not None:
                error = f" ± {100 * change['standard_error']:.2f}" if change["standard_error"] is not None else ""
                parts.append(f"{f} {100 * change['value']:+.2f}{error} points")
        if other["speed_up"] is not None:
            parts.append(f"speed-up {other['speed_up']:.2f}")
        elif resumed := task["resumed_rows"] + other["resumed_rows"]:
            parts.append(f"no speed-up: {resumed:,} rows are from earlier sessions")
        lines.append(f"{name}, with speculation against without: " + "; ".join(parts))
    return lines


def isolation_notes(report: Mapping[str, Any]) -> list[str]:
    """Warns where the kernel could not isolate generated programs."""
    notes = []
    for name, task in report["tasks"].items():
        kept = task.get("programs_kept_from", ISOLATED)
        weak = [what for what, how in ISOLATED.items() if kept.get(what) != how]
        if weak:
            notes.append(
                f"{name}: the kernel allows no namespaces for {', '.join(weak)}: programs were kept from these by "
                "Python's means alone"
            )
    return notes


def failure_notes(report: Mapping[str, Any]) -> list[str]:
    """One for each run with failed rows."""
    notes = []
    for name, task in report["tasks"].items():
        for part, label in ((task, ""), (task.get("compare"), " without speculation")):
            if part is not None and part["rows"]["failed"]:
                kinds = ", ".join(f"{count:,} {kind}" for kind, count in part["rows"]["errors"].items())
                failed, total = part["rows"]["failed"], part["rows"]["total"]
                notes.append(f"{name}{label}: {failed:,} of {total:,} rows failed: {kinds}")
    return notes


def _measured(plan: Plan, run: Measured) -> dict[str, Any]:
    stats = run.stats
    session = stats["session"]
    report: dict[str, Any] = {
        "accuracy": {f: dataclasses.asdict(accuracy(run.scores.of(f))) for f in _filters(plan)},
        "rows": {
            "total": stats["rows"]["total"],
            "scored": sum(row is not None for row in run.scores.rows) if _filters(plan) else 0,
            "failed": stats["rows"]["failed"],
            "errors": stats["rows"]["errors"],
            "finish_reasons": stats["rows"]["finish_reasons"],
        },
        "tokens": stats["tokens"],
        # Speed and acceptance by position are of the last session; `resumed_rows` are from earlier ones.
        "output_tokens_per_second": session["output_tokens_per_second"],
        "seconds": session["seconds"],
        "resumed_rows": session["resumed_rows"],
        **{name: stats["speculation"][name] for name in ("acceptance_length", "acceptance_rate", "accept_histogram")},
        "acceptance_rate_by_position": session["acceptance_rate_by_position"],
        "draft_rate_by_position": session.get("draft_rate_by_position", []),  # earlier versions wrote none
    }
    if run.scores.isolation is not None:
        report["programs_kept_from"] = dict(run.scores.isolation)
    return report


def _filters(plan: Plan) -> list[str]:
    return [f.name for f in plan.task.scored_filters]


def _pairs(a: Scores, b: Scores) -> list[tuple[Any, Any]]:
    return list(zip(a.rows, b.rows, strict=True))


def _paired(a: Scores, b: Scores, name: str) -> dict[str, float | None]:
    """Mean of the rows' differences with its standard error: less noise than in the difference of two accuracies."""
    changes = [x[name].correct - y[name].correct for x, y in _pairs(a, b) if x is not None and y is not None]
    if not changes:
        return {"value": None, "standard_error": None}
    return {"value": sum(changes) / len(changes), "standard_error": standard_error(changes)}


def _speed_up(stats: Mapping[str, Any], plain: Mapping[str, Any]) -> float | None:
    """Ratio of output tokens per second, with prefill, without loading. None if either run was resumed: its speed is
    that of the remaining rows, in other batches than those of the other run."""
    if stats["session"]["resumed_rows"] or plain["session"]["resumed_rows"]:
        return None
    fast, slow = (s["session"]["output_tokens_per_second"] for s in (stats, plain))
    return round(fast / slow, 3) if fast and slow else None


def _figures(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures that the table shows for one way of running a task."""
    shown = {}
    for name, found in task["accuracy"].items():
        shown[name] = "no row scored"
        if found["value"] is not None:
            low, high = found["interval"]
            shown[name] = f"{found['value']:.1%} (95%: {low:.1%} to {high:.1%})"
    rows = task["rows"]
    shown["rows"] = f"{rows['total'] - rows['failed']:,} ok, {rows['failed']:,} failed"
    if cut := rows["finish_reasons"].get("length"):
        shown["rows"] += f", {cut:,} cut at their length"
    if task["output_tokens_per_second"]:
        shown["speed"] = f"{task['output_tokens_per_second']:,.1f} output tok/s"
    if (acceptance := acceptance_text(task, task["draft_rate_by_position"])) is not None:
        shown["acceptance"] = acceptance
    kept = [f"{rate:.0%}" for rate in task["acceptance_rate_by_position"] if rate is not None]
    if kept:
        shown["drafts kept"] = f"{' '.join(kept)} at depth 1{f' to {len(kept)}' if len(kept) > 1 else ''}"
    return shown


def _warning(report: Mapping[str, Any]) -> str | None:
    whys = [why for why in ("simulated", "random_weights") if report[why]]
    texts = {"simulated": "SIMULATED acceptance", "random_weights": "random weights"}
    return f"{', '.join(texts[why] for why in whys)}: the texts are no answers" if whys else None
