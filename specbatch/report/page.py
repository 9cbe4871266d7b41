"""The page: its sections, from the summary of the rows and the statistics of the job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import accumulate
from typing import Any

import specbatch
from specbatch.errors import without_secrets
from specbatch.job.progress import duration
from specbatch.report import charts, samples
from specbatch.report.collect import Summary
from specbatch.report.html import clipped, facts, figure, figures, paragraph, section, table, text, tiles
from specbatch.report.rows import Results

MARK = '<meta name="generator" content="specbatch report">'
# Nothing is loaded from anywhere, and no script runs.
_MAX_MESSAGE = 500  # characters
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(results: Results, summary: Summary, prompts: Mapping[int, str] | None, others: Sequence[str]) -> str:
    """Make the page. `prompts`: see `samples`. `others`: sections about tune and eval, see `linked_runs`."""
    stats: Mapping[str, Any] = results.stats or {}
    parts = [
        _overview(results, summary, stats),
        _acceptance(results, summary),
        _lengths(summary),
        _endings(results, summary, stats),
        samples.longest_rows(summary),
        samples.samples(summary, prompts),
        *others,
        _made_by(results, stats),
    ]
    css = resources.files("specbatch.report").joinpath("page.css").read_text(encoding="utf-8")
    title = text(results.path.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{css}</style></head><body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )


def _overview(results: Results, summary: Summary, stats: Mapping[str, Any]) -> str:
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
    heads = "".join(f'<p class="warning">{text(words)}</p>' for words in warnings)
    line = text(" · ".join(str(part) for part in subtitle if part))
    return f'<h1>{text(results.path.name)}</h1><p class="lead">{line}</p>{heads}{tiles(shown)}'


def _acceptance(results: Results, summary: Summary) -> str:
    counts = summary.totals.speculation
    if not counts.drafted:
        return section("Acceptance", paragraph("No drafts were made: every round gives one token."))
    at_least = list(accumulate(reversed(counts.histogram[1:])))[::-1]
    by_position = [
        charts.Bar(str(i), rounds / counts.rounds, f"draft {i}: accepted in {rounds:,} of {counts.rounds:,} rounds")
        for i, rounds in enumerate(at_least, 1)
    ]
    found = [
        figure(
            "Acceptance by position",
            charts.bars(by_position, "position of the draft in its round", "acceptance by position", share=True),
            "Each bar is the share of rounds in which the draft at this position was accepted. If the last bars are "
            "low, deeper drafts would seldom help.",
        )
    ]
    windows = summary.windows.windows
    starts = [0, *accumulate(window.rows for window in windows)]
    points = [
        (start + window.rows / 2, window.committed / window.rounds if window.rounds else None)
        for start, window in zip(starts, windows, strict=False)
    ]
    found.append(
        figure(
            "Acceptance length over the file" if results.is_finished else "Acceptance length over time",
            charts.line(points, (0, starts[-1]), 1, _order(results), "acceptance length over the file"),
            "Tokens that a round gives, for groups of rows that follow each other. A drop shows where the rows change "
            "to a kind that is harder to draft.",
        )
    )
    sampled = summary.points
    dots = [
        (tokens, length, f"row {index:,}: {tokens:,} tokens, {length:.2f} a round")
        for tokens, length, index in sampled.items
    ]
    sample = f", from a random sample of {len(dots):,}" if len(dots) < summary.totals.ok else ""
    found.append(
        figure(
            "Acceptance by answer length",
            charts.scatter(dots, 1, "output tokens of the row", "acceptance length by output tokens"),
            f"Each dot is a row{sample}. Rows far up gain most from drafts. Long answers far down take most of the "
            "time.",
        )
    )
    return section("Acceptance", figures(found))


def _order(results: Results) -> str:
    return "rows in the order of the input" if results.is_finished else "rows in the order in which they finished"


def _lengths(summary: Summary) -> str:
    if not summary.totals.ok:
        return ""
    answers = charts.histogram(summary.completion_lengths, "output tokens", "output tokens of the rows")
    prompts = charts.histogram(summary.prompt_lengths, "prompt tokens", "prompt tokens of the rows")
    how = "The height is the number of rows with this length."
    end = " A last bar that is high can mean that max_tokens cut many answers."
    return section(
        "Lengths",
        figures([figure("Length of the answers", answers, how + end), figure("Length of the prompts", prompts, how)]),
    )


def _endings(results: Results, summary: Summary, stats: Mapping[str, Any]) -> str:
    totals, order = summary.totals, _order(results)
    reasons = sorted(totals.finish_reasons.items(), key=lambda item: -item[1])
    rows = [(name, count, f"{count:,} ({count / totals.rows:.1%})") for name, count in reasons]
    if totals.failed:
        rows.append(("error", totals.failed, f"{totals.failed:,} ({totals.failed / totals.rows:.1%})"))
    found = []
    if rows:
        found.append(
            figure(
                "How rows ended",
                charts.shares(rows),
                "stop: the model ended its answer. length: max_tokens or the end of the context cut it. tool_calls: it "
                "calls tools. error: the row has no answer.",
            )
        )
    seconds = dict((stats.get("session") or {}).get("seconds") or {})
    if total := seconds.pop("total", 0):
        seconds["other"] = max(total - sum(seconds.values()), 0)
        found.append(
            figure(
                "Where the time went",
                charts.shares(
                    [(name, value, f"{duration(value)} ({value / total:.0%})") for name, value in seconds.items()]
                ),
                "load: start and weights. prefill: prompts. decode: rounds. input_wait: for rows that were not "
                "tokenized yet. io: files. Only the last session is counted.",
            )
        )
    if totals.failed and totals.ok:
        windows = summary.windows.windows
        starts = [0, *accumulate(window.rows for window in windows)]
        bars = [
            charts.Bar(
                charts.number(start) if i % math.ceil(len(windows) / 4) == 0 else "",
                window.failed,
                f"rows from number {start:,} on: {window.failed:,} of {window.rows:,} failed",
            )
            for i, (start, window) in enumerate(zip(starts, windows, strict=False))
        ]
        found.append(
            figure(
                "Failed rows over the file",
                charts.bars(bars, order, "failed rows over the file"),
                "The height is the number of failed rows in a group of rows. High bars next to each other show a "
                "damaged part of the input.",
            )
        )
    parts = [figures(found)]
    if summary.errors:
        parts.append("<h3>Errors</h3>")
        groups = sorted(summary.errors.items(), key=lambda item: -item[1].rows)
        cells = [
            [
                f'<span class="bad">{text(clipped(kind, _MAX_MESSAGE))}</span>',
                f"{group.rows:,}",
                "<br>".join(text(clipped(message, _MAX_MESSAGE)) for message in group.messages),
                text(", ".join(f"{index:,}" for index in group.indices) + ", …" * (group.rows > len(group.indices))),
            ]
            for kind, group in groups
        ]
        parts.append(table(["code", "rows", "messages, the first that differ", "index"], cells, numbers=[1], wide=[2]))
    return section("Endings and errors", *parts)


def _made_by(results: Results, stats: Mapping[str, Any]) -> str:
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
    parts = [facts([(name, text(value)) for name, value in pairs if value])]
    if notes := stats.get("notes"):
        parts.append("<h3>Notes of the job</h3><ul>" + "".join(f"<li>{text(note)}</li>" for note in notes) + "</ul>")
    if config:
        cells = [(name, text("null" if value is None else value)) for name, value in config.items()]
        parts.append(f"<details><summary>Configuration: {len(cells)} options</summary>{facts(cells)}</details>")
    return section("Configuration and versions", *parts)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
