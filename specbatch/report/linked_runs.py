"""Results of `specbatch tune` and `specbatch eval` on the page of a report."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbatch.errors import InputError
from specbatch.report.html import figure, figures, paragraph, section, table, text

_PLOTS = {
    "acceptance": "Tokens that a round gives, by draft shape. Higher is better.",
    "throughput": "Predicted tokens per second by batch size. The highest line is the best shape at that size.",
    "predicted": "Predicted and measured speed. Points near the diagonal were predicted well.",
}
_MAX_PLOT_BYTES = 2 << 20


def tune_section(given: Path) -> str:
    """Make the section about a tuning. `given`: tuned.yaml, its report, or the folder of the report. It raises
    InputError."""
    path = _tune_report(given)
    report = _read(path, "verdict")
    parts = [paragraph(str(report["verdict"]))]
    if live := report.get("live"):
        rows = [
            [text(one["what"]), *(f"{one[name]:,.1f}" for name in ("predicted", "measured", "low", "high"))]
            for one in live
        ]
        parts.append("<h3>Live runs, in tokens per second</h3>")
        parts.append(table(["schedule", "predicted", "measured", "low", "high"], rows, numbers=range(1, 5)))
    if ranked := report.get("by_batch"):
        rows = [_ranking(one) for one in ranked]
        parts.append("<h3>The best draft shape by batch size</h3>")
        columns = ["batch", "shape", "tokens a round", "tok/s", "plain tok/s", "gain"]
        parts.append(table(columns, rows, numbers=[0, 2, 3, 4, 5]))
    stem = path.name.removesuffix(".report.json")
    plots = [_picture(path.with_name(f"{stem}.{name}.png"), name, how) for name, how in _PLOTS.items()]
    if any(plots):
        parts.append(figures([plot for plot in plots if plot], "pictures"))
    return section("Tuning", *parts)


def eval_section(given: Path) -> str:
    """Make the section about an evaluation. `given`: the folder that eval wrote, or its results.json. It raises
    InputError."""
    report = _read(given / "results.json" if given.is_dir() else given, "tasks")
    rows = []
    for name, task in report["tasks"].items():
        compare = task.get("compare") or {}
        for metric, found in (task["accuracy"] or {"": {"value": None}}).items():
            error = found.get("standard_error")
            score = "" if found["value"] is None else f"{found['value']:.1%}" + (f" ± {error:.1%}" if error else "")
            rows.append(
                [
                    text(f"{name}, {metric}" if metric else name),
                    score,
                    f"{task['rows']['total']:,}",
                    f"{task['rows']['failed']:,}",
                    _number(task.get("output_tokens_per_second"), ",.0f"),
                    _number(task.get("acceptance_length"), ".2f"),
                    _number(compare.get("speed_up"), ".2f"),
                ]
            )
    columns = ["task", "accuracy", "rows", "failed", "tok/s", "tokens a round", "speed-up"]
    return section(
        "Evaluation",
        paragraph("Accuracy with its standard error. Speed-up is that against plain decoding, if it was measured."),
        table(columns, rows, numbers=range(1, 7)),
    )


def _tune_report(given: Path) -> Path:
    if given.is_dir():
        found = sorted(given.glob("*.report.json"))
        if len(found) != 1:
            raise InputError(
                f"{given} has {len(found)} files *.report.json", "name the report: --tune tuned.report.json"
            )
        return found[0]
    return given if given.suffix == ".json" else given.with_suffix(".report.json")


def _read(path: Path, name: str) -> Mapping[str, Any]:
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise InputError(f"cannot read {path}: {exc}") from exc
    if not isinstance(report, dict) or name not in report:
        raise InputError(f"{path} is no report: it has no {name!r}")
    return report


def _ranking(one: Mapping[str, Any]) -> list[str]:
    best, plain = one["ranked"][0], one["plain"]
    gain = best["tokens_per_second"] / plain["tokens_per_second"] if plain["tokens_per_second"] else None
    shape = best["candidate"]
    return [
        f"{one['batch']:,}",
        text(shape["label"] if shape else "plain"),
        _number(best.get("tokens_per_round"), ".2f"),
        _number(best["tokens_per_second"], ",.0f"),
        _number(plain["tokens_per_second"], ",.0f"),
        _number(gain, ".2f"),
    ]


def _picture(path: Path, name: str, how: str) -> str:
    if not path.is_file() or path.stat().st_size > _MAX_PLOT_BYTES:
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return figure(name.capitalize(), f'<img alt="{text(name)}" src="data:image/png;base64,{data}">', how)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
