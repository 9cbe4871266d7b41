"""Acceptance length of a finished head, by running held-out rows through the engine in several draft shapes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.answers import run_rows
from specbatch.errors import ConfigError
from specbatch.speculation.tree import DraftShape


@dataclass(frozen=True)
class EvalJob:
    """One set of rows. `name` tells sets apart in file names and tables."""

    name: str
    rows: Path


def parse_shapes(text: str) -> list[DraftShape | None]:
    """`3/1/4,5/4/8,none`: steps/topk/tokens, None for plain decoding. Raises ConfigError."""
    shapes: list[DraftShape | None] = []
    for part in text.split(","):
        if part == "none":
            shapes.append(None)
            continue
        try:
            steps, topk, tokens = map(int, part.split("/"))
        except ValueError as error:
            raise ConfigError(f"{part!r} is no draft shape", "steps/topk/tokens, such as 3/1/4, or none") from error
        shape = DraftShape(steps, topk, tokens)
        shape.check()
        shapes.append(shape)
    return shapes


def evaluate(
    head: Path,
    jobs: Sequence[EvalJob],
    shapes: Sequence[DraftShape | None],
    sets: Sequence[str],
    config: Path | None,
    report_path: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run what `report_path` does not hold yet for this head, and return the report.

    The acceptance length is tokens per round, the one from the target itself included.
    """
    digest = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()[:16]
    report: dict[str, Any] = {}
    if report_path.is_file():
        report = json.loads(report_path.read_text(encoding="utf-8"))
    settings = [*sets, *([] if config is None else [config.read_text(encoding="utf-8")])]
    if report.get("head") != digest or report.get("settings") != settings:
        report = {"head": digest, "settings": settings, "runs": []}
    for job in jobs:
        rows = hashlib.sha256(job.rows.read_bytes()).hexdigest()[:16]
        for shape in shapes:
            name = "none" if shape is None else f"{shape.num_steps}/{shape.topk}/{shape.num_draft_tokens}"
            if any((r["data"], r["rows_digest"], r["shape"]) == (job.name, rows, name) for r in report["runs"]):
                continue
            say(f"evaluation: {job.name}, {name}")
            output = job.rows.with_name(f"{job.rows.stem}.{name.replace('/', '-')}.results.jsonl")
            chosen = [*sets, *_speculation(head, shape)]
            stats = run_rows(job.rows, output, chosen, config, overwrite=True)
            session, speculation = stats["session"], stats["speculation"]
            report["runs"].append(
                {
                    "data": job.name,
                    "rows_digest": rows,
                    "shape": name,
                    "rows": stats["rows"]["ok"],
                    "acceptance_length": speculation["acceptance_length"],
                    "acceptance_rate_by_position": session["acceptance_rate_by_position"],
                    "rounds": speculation["rounds"],
                    "completion_tokens": stats["tokens"]["completion"],
                    "output_tokens_per_second": session["output_tokens_per_second"],
                    "seconds": session["seconds"],
                    "device": stats["device"],
                    "commit": stats["commit"],
                }
            )
            report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def table(report: dict[str, Any]) -> str:
    """The report for the reader at the terminal."""
    lines = [f"{'data':24} {'shape':>8} {'rows':>6} {'tokens per round':>17} {'tok/s':>10}"]
    for r in report["runs"]:
        length, speed = r["acceptance_length"], r["output_tokens_per_second"]
        lines.append(
            f"{r['data'][:24]:24} {r['shape']:>8} {r['rows']:6,} {'' if length is None else f'{length:.3f}':>17}"
            f" {'' if speed is None else f'{speed:,.0f}':>10}"
        )
    return "\n".join(lines)


def _speculation(head: Path, shape: DraftShape | None) -> list[str]:
    if shape is None:
        return ["speculation.method=none"]
    return [
        "speculation.method=eagle3",
        f"speculation.draft={head.resolve()}",
        f"speculation.num_steps={shape.num_steps}",
        f"speculation.topk={shape.topk}",
        f"speculation.num_draft_tokens={shape.num_draft_tokens}",
    ]
