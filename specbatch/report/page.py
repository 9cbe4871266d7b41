"""The page: the facts that its template shows, from the summary of the rows and the statistics of the job."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import jinja2

import specbatch
from specbatch.errors import without_secrets
from specbatch.job.progress import duration
from specbatch.report import charts
from specbatch.report.collect import Summary
from specbatch.report.field_facts import answer_facts
from specbatch.report.rows import Results, Row

MARK = '<meta name="generator" content="specbatch report">'
_NOT_IN_HTML = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_MAX_MESSAGE = 500  # characters
_MAX_CHARS = 6_000  # characters of a text
_MAX_BEGIN = 90  # characters of the beginning in a list


def number(value: float | None, form: str = ",") -> str:
    return "" if value is None else format(value, form)


def page(
    results: Results,
    summary: Summary,
    prompts: Mapping[int, str] | None,
    tuned: Mapping[str, Any] | None = None,
    evaluated: Any = None,
) -> str:
    """`prompts`: [index] = a row's prompt; None: the input was not found. `tuned`, `evaluated`: see `linked_runs`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specbatch.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["form"] = number
    stats: Mapping[str, Any] = results.stats or {}
    totals, asked = summary.totals, prompts or {}
    written = environment.get_template("page.html").render(
        mark=MARK,
        title=results.path.name,
        is_finished=results.is_finished,
        ok=totals.ok,
        **_overview(results, summary, stats),
        acceptance=_acceptance(results, summary),
        experts=_experts(stats),
        answers=answer_facts(summary.answers),
        answer_lengths=_histogram(summary.completion_lengths, "output tokens"),
        prompt_lengths=_histogram(summary.prompt_lengths, "prompt tokens"),
        **_endings(results, summary, stats),
        slowest=[_slowest(row) for row in summary.slowest.items],
        has_prompts=prompts is not None,
        has_earlier_templates=bool(stats.get("earlier_templates")),
        samples=_samples(summary, asked),
        tuned=tuned,
        evaluated=evaluated,
        **_made_by(results, stats),
    )
    return _NOT_IN_HTML.sub("\ufffd", written)


def _overview(results: Results, summary: Summary, stats: Mapping[str, Any]) -> dict[str, Any]:
    totals = summary.totals
    session = stats.get("session") or {}
    models = " with ".join(str(name) for name in stats.get("models", {}).values())
    subtitle = [models or results.job.get("model.target"), stats.get("device"), f"{results.path}"]
    warnings = []
    if not results.is_finished:
        warnings.append("This job is not finished: the page shows the rows that it has so far.")
    if stats.get("simulated") or stats.get("random_weights"):
        warnings.append("The texts are not answers: acceptance was simulated, or weights were random.")
    if results.damaged:
        warnings.append(f"Damaged lines of the file, which are not counted here: {results.damaged:,}.")
    if summary.repeated:
        warnings.append(f"Rows that are in the file again, and count once here: {summary.repeated:,}.")
    failed = f"{totals.failed / totals.rows:.2%} of the rows" if totals.failed else "none"
    shown = [
        ("Rows", f"{totals.rows:,}", f"{totals.ok:,} answered"),
        ("Failed", f"{totals.failed:,}", failed),
        ("Output tokens", f"{totals.completion_tokens:,}", f"{totals.prompt_tokens:,} prompt tokens"),
    ]
    counts = totals.speculation
    if counts.acceptance_length is not None:
        accepted = f"{counts.accepted / counts.drafted:.0%} of the drafts accepted" if counts.drafted else "no drafts"
        shown.append(("Acceptance length", f"{counts.acceptance_length:.2f} tokens", accepted))
    if session.get("output_tokens_per_second"):
        hits = session.get("cache_hit_rate")
        note = f"{hits:.0%} of prompts from the cache" if hits else "output, prefill included"
        shown.append(("Speed", f"{session['output_tokens_per_second']:,.0f} tok/s", note))
    if "seconds" in session:
        resumed = session.get("resumed_rows")
        note = f"last session; {resumed:,} rows are older" if resumed else "from start to end"
        shown.append(("Time", duration(session["seconds"]["total"]), note))
    line = " · ".join(str(part) for part in subtitle if part)
    return {"lead": line, "warnings": warnings, "tiles": shown}


def _acceptance(results: Results, summary: Summary) -> dict[str, Any] | None:
    """Return the plots of acceptance, or None if no drafts were made."""
    counts = summary.totals.speculation
    if not counts.drafted:
        return None
    at_least = list(accumulate(reversed(counts.histogram[1:])))[::-1]
    by_position = [
        charts.Bar(
            str(i),
            rounds / counts.rounds,
            f"draft {i}: accepted in {rounds:,} of {counts.rounds:,} rounds",
            (str(i), f"{rounds / counts.rounds:.1%}", f"{rounds:,}"),
        )
        for i, rounds in enumerate(at_least, 1)
    ]
    windows = summary.windows.windows
    starts = [0, *accumulate(window.rows for window in windows)]
    points = [
        (start + window.rows / 2, window.committed / window.rounds if window.rounds else None)
        for start, window in zip(starts, windows, strict=False)
    ]
    dots = [
        (tokens, length, f"row {index:,}: {tokens:,} tokens, {length:.2f} a round")
        for tokens, length, index in summary.points.items
    ]
    position = "position of the draft in its round"
    return {
        "by_position": charts.bars(
            by_position, position, "acceptance by position", ("position", "accepted", "rounds"), share=True
        ),
        "over_file": charts.line(points, (0, starts[-1]), 1, _order(results), "acceptance length over the file"),
        "by_length": charts.scatter(dots, 1, "output tokens of the row", "acceptance length by output tokens"),
        "num_dots": len(dots),
    }


def _experts(stats: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts and plots of a mixture of experts; None: the target has none, or they were not counted."""
    found = (stats.get("session") or {}).get("experts")
    if not found:
        return None
    distinct = [
        charts.Bar(
            charts.number(round(one["tokens"])),
            one["experts"],
            f"{one['rounds']:,} rounds with {one['tokens']:,.1f} tokens in the mean: {one['experts']:,.1f} experts",
            (f"{one['tokens']:,.1f}", f"{one['experts']:,.1f}", f"{one['rounds']:,}"),
        )
        for one in found["distinct"]
    ]
    layers = found["peak_load_by_layer"]
    loads = [
        charts.Bar(
            str(i) if i % math.ceil(len(layers) / 8) == 0 else "",
            load,
            f"layer {i} of those with experts: the busiest expert has {load:.2f} times the mean load",
            (str(i), f"{load:.2f}"),
        )
        for i, load in enumerate(layers)
    ]
    return {
        **{name: found[name] for name in ("number", "peak_load", "effective_number", "unused")},
        "distinct": charts.bars(
            distinct, "tokens of a round", "distinct experts by tokens of a round", ("tokens", "experts", "rounds")
        ),
        "loads": charts.bars(loads, "layer", "load of the busiest expert by layer", ("layer", "load")),
    }


def _order(results: Results) -> str:
    return "rows in the order of the input" if results.is_finished else "rows in the order in which they finished"


def _histogram(lengths: Counter[int], title: str) -> charts.Plot | None:
    return charts.histogram(lengths, title, f"{title} of the rows") if lengths else None


def _endings(results: Results, summary: Summary, stats: Mapping[str, Any]) -> dict[str, Any]:
    totals, failures = summary.totals, None
    reasons = sorted(totals.finish_reasons.items(), key=lambda item: -item[1])
    counts = [*reasons, *([("error", totals.failed)] if totals.failed else [])]
    seconds = dict((stats.get("session") or {}).get("seconds") or {})
    if total := seconds.pop("total", 0):
        seconds["other"] = max(total - sum(seconds.values()), 0)
    if totals.failed and totals.ok:
        windows = summary.windows.windows
        starts = [0, *accumulate(window.rows for window in windows)]
        bars = [
            charts.Bar(
                charts.number(start) if i % math.ceil(len(windows) / 4) == 0 else "",
                window.failed,
                f"rows from number {start:,} on: {window.failed:,} of {window.rows:,} failed",
                (f"{start:,}", f"{window.failed:,}", f"{window.rows:,}"),
            )
            for i, (start, window) in enumerate(zip(starts, windows, strict=False))
        ]
        columns = ("from row", "failed", "rows")
        failures = charts.bars(bars, _order(results), "failed rows over the file", columns)
    return {
        "endings": [(name, count, f"{count:,} ({count / totals.rows:.1%})") for name, count in counts],
        "seconds": total and [(name, n, f"{duration(n)} ({n / total:.0%})") for name, n in seconds.items()],
        "failures": failures,
        "errors": [
            (
                _clipped(kind, _MAX_MESSAGE),
                f"{group.rows:,}",
                [_clipped(message, _MAX_MESSAGE) for message in group.messages],
                ", ".join(f"{index:,}" for index in group.indices) + ", …" * (group.rows > len(group.indices)),
            )
            for kind, group in sorted(summary.errors.items(), key=lambda item: -item[1].rows)
        ],
    }


def _slowest(row: Row) -> list[str]:
    return [
        f"{row.index:,}",
        _clipped(str(row.id), 40) if row.id is not None else "",
        f"{row.rounds:,}",
        f"{row.completion_tokens:,}",
        f"{row.prompt_tokens:,}",
        number(row.acceptance_length, ".2f"),
        row.finish_reason,
        _begin(row),
    ]


def _samples(summary: Summary, prompts: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return groups of rows to look at, each with a title and words about it."""
    invalid = sorted(summary.answers.invalid.items, key=lambda item: item[0].index)
    groups = [
        _group("Chosen at random", "The same file gives the same rows.", _in_order(summary.samples.items), prompts),
        {
            "title": "Answers that do not match",
            "words": "A random sample of those that are no JSON, or do not match their schema.",
            "rows": [_sample(row, prompts, problem) for row, problem in invalid],
        },
        _group("The longest answers", "Answers that repeat themselves are here.", summary.longest.items, prompts),
        _group(
            "The lowest margins",
            "Where the two likeliest tokens were closest: rounding can change these texts.",
            summary.lowest_margins.items,
            prompts,
        ),
        _group(
            "The lowest log-probabilities",
            "The mean over the tokens of the answer.",
            summary.lowest_logprobs.items,
            prompts,
        ),
        _group("Rows that failed", "A random sample.", _in_order(summary.failed.items), prompts),
    ]
    return [group for group in groups if group["rows"]]


def _in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.index)


def _group(title: str, words: str, rows: Iterable[Row], prompts: Mapping[int, str]) -> dict[str, Any]:
    return {"title": title, "words": words, "rows": [_sample(row, prompts) for row in rows]}


def _sample(row: Row, prompts: Mapping[int, str], problem: str = "") -> dict[str, Any]:
    """`problem`: why its answer is not the one that was asked for."""
    prompt = prompts.get(row.index, "")
    parts = [("prompt", prompt)]
    if row.error is not None:
        note = row.error[0]
        parts.append((note, row.error[1]))
    else:
        note = f"{row.completion_tokens:,} tokens, {row.finish_reason}"
        if row.margin is not None:
            note += f", margin {row.margin:.3g}"
        if row.logprob is not None:
            note += f", log-probability {row.logprob:.3g}"
        parts.append(("reasoning", row.reasoning))
        parts.append(("text" if row.reasoning or prompt else "", row.text))
        parts.append(("tool calls", "\n".join(map(_call, row.tool_calls))))
    parts.append(("problem", problem))
    parts.append(("metadata", json.dumps(row.metadata, ensure_ascii=False) if row.metadata else ""))
    return {
        "name": f"row {row.index:,}" + (f" · {_clipped(str(row.id), 60)}" if row.id is not None else ""),
        "note": note,
        "begin": _begin(row),
        "parts": [(title, _clipped(value, _MAX_CHARS)) for title, value in parts],
    }


def _begin(row: Row) -> str:
    shown = row.error[1] if row.error is not None else row.text or row.reasoning or " ".join(map(_call, row.tool_calls))
    line = " ".join(shown[: 4 * _MAX_BEGIN].split())
    return line if len(line) <= _MAX_BEGIN else line[:_MAX_BEGIN].rstrip() + " …"


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    return f"{function.get('name')}({function.get('arguments')})" if isinstance(function, dict) else str(call)


def _clipped(value: str, limit: int) -> str:
    """Return the beginning of a long text, with the number of characters that are left out."""
    return value if len(value) <= limit else f"{value[:limit]} … ({len(value) - limit:,} more characters)"


def _made_by(results: Results, stats: Mapping[str, Any]) -> dict[str, Any]:
    versions = ", ".join(f"{name} {version}" for name, version in stats.get("versions", {}).items())
    session = stats.get("session") or {}
    config = _flat(stats["config"]) if "config" in stats else dict(results.job)
    joules, per_joule = (session.get(name) for name in ("joules", "output_tokens_per_joule"))
    pairs = [
        ("result file", results.path),
        ("input", without_secrets(str(stats["input"])) if stats.get("input") else None),  # earlier versions kept them
        ("device", stats.get("device")),
        ("versions", versions or results.job.get("specbatch")),
        ("commit", stats.get("commit")),
        ("energy", f"{joules:,.0f} J, {per_joule:.3g} output tokens per joule" if joules and per_joule else None),
        ("longest row", f"{stats['longest_row']:,} tokens" if stats.get("longest_row") else None),
        ("written by", f"specbatch {specbatch.__version__}, specbatch report"),
    ]
    return {
        "made_by": [(name, value) for name, value in pairs if value],
        "notes": stats.get("notes") or [],
        "config": [(name, "null" if value is None else value) for name, value in config.items()],
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
