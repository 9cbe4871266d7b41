"""Results of `specbatch tune` and `specbatch eval` on the page of a report."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbatch.errors import InputError
from specbatch.report.page import number

_PLOTS = {
    "acceptance": "Tokens that a round gives, by draft shape. Higher is better.",
    "throughput": "Predicted tokens per second by batch size. The highest line is the best shape at that size.",
    "predicted": "Predicted and measured speed. Points near the diagonal were predicted well.",
}
_MAX_PLOT_BYTES = 2 << 20


def tune_facts(given: Path) -> dict[str, Any]:
    """`given`: tuned.yaml, its report, or the folder of the report. Raises InputError."""
    path = _tune_report(given)
    report = _read(path, "verdict")
    stem = path.name.removesuffix(".report.json")
    pictures = [(name, how, _picture(path.with_name(f"{stem}.{name}.png"))) for name, how in _PLOTS.items()]
    return {
        "verdict": report["verdict"],
        "live": [
            [one["what"], *(f"{one[name]:,.1f}" for name in ("predicted", "measured", "low", "high"))]
            for one in report.get("live") or []
        ],
        "ranked": [_ranking(one) for one in report.get("by_batch") or []],
        "pictures": [picture for picture in pictures if picture[-1]],
    }


def eval_rows(given: Path) -> list[list[str]]:
    """`given`: the folder that eval wrote, or its results.json. Raises InputError."""
    report = _read(given / "results.json" if given.is_dir() else given, "tasks")
    rows = []
    for name, task in report["tasks"].items():
        compare = task.get("compare") or {}
        for metric, found in (task["accuracy"] or {"": {"value": None}}).items():
            accuracy = number(found["value"], ".1%")
            if interval := found.get("interval"):
                accuracy += f" ({interval[0]:.1%} to {interval[1]:.1%})"
            rows.append(
                [
                    f"{name}, {metric}" if metric else name,
                    accuracy,
                    number(task["rows"]["total"]),
                    number(task["rows"]["failed"]),
                    number(task.get("output_tokens_per_second"), ",.0f"),
                    number(task.get("acceptance_length"), ".2f"),
                    number(compare.get("speed_up"), ".2f"),
                ]
            )
    return rows


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
        shape["label"] if shape else "plain",
        number(best.get("tokens_per_round"), ".2f"),
        number(best["tokens_per_second"], ",.0f"),
        number(plain["tokens_per_second"], ",.0f"),
        number(gain, ".2f"),
    ]


def _picture(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > _MAX_PLOT_BYTES:
        return ""
    return base64.b64encode(path.read_bytes()).decode()
