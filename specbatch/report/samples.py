"""Rows to read: the longest ones, a random sample, and some that failed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from specbatch.report.collect import Summary
from specbatch.report.html import clipped, paragraph, section, table, text
from specbatch.report.rows import Row

_MAX_CHARS = 6_000  # characters of a text
_MAX_BEGIN = 90  # characters of the beginning in a list
_NUM_OPEN = 2


def longest_rows(summary: Summary) -> str:
    if not summary.longest:
        return ""
    rows = [
        [
            f"{row.index:,}",
            text(clipped(str(row.id), 40) if row.id is not None else ""),
            f"{row.rounds:,}",
            f"{row.completion_tokens:,}",
            f"{row.prompt_tokens:,}",
            "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
            text(row.finish_reason),
            text(_begin(row)),
        ]
        for row in summary.longest
    ]
    columns = ["index", "id", "rounds", "output tokens", "prompt tokens", "tokens a round", "end", "text"]
    return section(
        "Slowest rows",
        paragraph(
            "The rows with the most rounds. Result lines have no times. A round is one pass of the model, so these "
            "rows took the longest after their prompts were read."
        ),
        table(columns, rows, numbers=[0, 2, 3, 4, 5], lines=[7]),
    )


def samples(summary: Summary, prompts: Mapping[int, str] | None) -> str:
    """`prompts`: [index] = a row's prompt; None: the input was not found."""
    words = "Rows that were chosen at random. The same file gives the same rows."
    if prompts is None:
        words += " Their prompts are not here, because the unchanged input was not found; --input names it."
    prompts = prompts or {}
    parts = [paragraph(words)]
    parts += [_sample(row, prompts.get(row.index, ""), is_open=i < _NUM_OPEN) for i, row in enumerate(summary.samples)]
    if summary.failed_samples:
        parts.append("<h3>Rows that failed</h3>")
        parts += [_sample(row, prompts.get(row.index, ""), is_open=False) for row in summary.failed_samples]
    return section("Samples", *parts) if len(parts) > 1 else ""


def _sample(row: Row, prompt: str, *, is_open: bool) -> str:
    name = f"row {row.index:,}" + (f" · {clipped(str(row.id), 60)}" if row.id is not None else "")
    parts = [("prompt", prompt)]
    if row.error is not None:
        note = row.error[0]
        parts.append((note, row.error[1]))
    else:
        note = f"{row.completion_tokens:,} tokens, {row.finish_reason}"
        parts.append(("reasoning", row.reasoning))
        parts.append(("text" if row.reasoning or prompt else "", row.text))
        parts.append(("tool calls", "\n".join(_call(call) for call in row.tool_calls)))
    parts.append(("metadata", json.dumps(row.metadata, ensure_ascii=False) if row.metadata else ""))
    shown = "".join(
        (f'<p class="part">{text(title)}</p>' if title else "")
        + f'<pre dir="auto">{text(clipped(value, _MAX_CHARS))}</pre>'
        for title, value in parts
        if value
    )
    return (
        f'<details{" open" if is_open else ""}><summary>{text(name)} <span class="note">{text(note)} · '
        f"{text(_begin(row))}</span></summary>{shown or paragraph('The text is empty.')}</details>"
    )


def _begin(row: Row) -> str:
    shown = row.error[1] if row.error is not None else row.text or row.reasoning or " ".join(map(_call, row.tool_calls))
    line = " ".join(shown[: 4 * _MAX_BEGIN].split())
    return line if len(line) <= _MAX_BEGIN else line[:_MAX_BEGIN].rstrip() + " …"


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    return f"{function.get('name')}({function.get('arguments')})" if isinstance(function, dict) else str(call)
