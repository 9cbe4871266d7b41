"""The acceptance length of a finished drafter: held-out rows run through the engine with several ways to draft.

All rows run together, once for each way. The figures of each file come from its result rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.config_load import dump_config
from specbatch.draft import METHODS
from specbatch.draft.shape import DraftShape
from specbatch.errors import ConfigError, InputError
from specbatch.results.stats import RowTotals
from specbatch.train.answers import Pipeline, run_rows
from specbatch.train.prompts import PromptFile, read_lines, read_prompts, rows_of, write_lines

_PLAIN = ("none", "ngram")


@dataclass(frozen=True)
class Way:
    """A way to draft: with the drafter (`model` None), another one, or by one of `_PLAIN`."""

    name: str  # as the user wrote it
    shape: DraftShape | None
    model: str | None
    method: str = "draft_model"  # how `model` drafts

    def sets(self, drafter: Path, method: str) -> list[str]:
        """Return the options for `specbatch generate`. `method`: that of the drafter. They include all options for
        drafting, because a configuration may hold a schedule, or sizes that n-gram drafting cannot have."""
        unset = ("draft", "schedule", "num_steps", "num_draft_tokens")
        options: dict[str, Any] = {"method": self.name, "topk": 1} | dict.fromkeys(unset, "null")
        if self.shape is not None:
            name, draft = (method, drafter.resolve()) if self.model is None else (self.method, self.model)
            options |= {"method": name, "draft": draft} | {
                name: getattr(self.shape, name) for name in ("num_steps", "topk", "num_draft_tokens")
            }
        return [f"speculation.{key}={value}" for key, value in options.items()]


def parse_ways(text: str) -> list[Way]:
    """Parse `none,ngram,3/1/4,DRAFT:5/4/8`: plain decoding, n-grams, and steps/topk/tokens of the drafter or of a draft
    model. It raises ConfigError."""
    ways = []
    for part in text.split(","):
        if part in _PLAIN:
            ways.append(Way(part, None, None))
            continue
        model, _, shape_text = part.rpartition(":")
        try:
            steps, topk, tokens = map(int, shape_text.split("/"))
        except ValueError as error:
            hint = "steps/topk/tokens, such as 3/1/4, DRAFT:3/1/4, eagle3=DRAFT:3/1/4, ngram or none"
            raise ConfigError(f"{part!r} is no draft shape", hint) from error
        shape = DraftShape(steps, topk, tokens)
        shape.check()
        method, _, named = model.rpartition("=")
        if method in METHODS:
            ways.append(Way(part, shape, named, method))
        else:
            ways.append(Way(part, shape, model or None))
    return ways


def held_out_rows(files: Sequence[PromptFile], as_text: bool) -> list[dict[str, Any]]:
    """Make greedy rows of all files. Each row names its file, by the stem, or by the path if stems repeat. It raises
    InputError for a file that cannot be read, has no prompts, or is given twice."""
    stems = Counter(file.path.stem for file in files)
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        name = file.path.stem if stems[file.path.stem] == 1 else str(file.path)
        if name in rows:
            raise InputError(f"--eval: {name} is given twice")
        found = rows_of(read_prompts([file]), [0.0], as_text)
        if not found:
            raise InputError(f"--eval: {file.path} has no prompts")
        rows[name] = [row | {"id": f"{name}-{row['id']}", "metadata": {"file": name}} for row in found]
    return [row for of_file in rows.values() for row in of_file]


def evaluate(
    drafter: Path,
    method: str,
    rows: Sequence[Mapping[str, Any]],
    ways: Sequence[Way],
    pipeline: Pipeline,
    report_path: Path,
) -> dict[str, Any]:
    """Run the ways that `report_path` does not hold yet for this drafter and these `held_out_rows`. Return the report.

    The acceptance length is tokens per round, the bonus token included; all answers are greedy. It raises
    SpecbatchError, for example if there is no drafter.
    """
    weights = drafter / "model.safetensors"
    if not weights.is_file():
        raise InputError(f"there is no drafter in {drafter}", "run the stage training first")
    rows_path = drafter / "training" / "eval.jsonl"
    write_lines(rows_path, rows)
    made_by = {
        "drafter": hashlib.sha256(weights.read_bytes()).hexdigest()[:16],
        "rows": hashlib.sha256(rows_path.read_bytes()).hexdigest()[:16],
        "settings": dump_config(pipeline.config()),
    }
    report: dict[str, Any] = {}
    if report_path.is_file():
        report = _read_report(report_path)
    if any(report.get(key) != value for key, value in made_by.items()):
        report = {**made_by, "runs": []}
    for way in ways:
        if any(run["way"] == way.name for run in report["runs"]):
            continue
        pipeline.say(f"evaluation: {way.name}")
        output = rows_path.with_name(f"eval.{len(report['runs'])}.results.jsonl")
        stats = run_rows(rows_path, output, way.sets(drafter, method), pipeline, overwrite=True)
        totals = {row["metadata"]["file"]: RowTotals() for row in rows}
        for result in read_lines(output):
            totals[result["metadata"]["file"]].add(result)
        session = stats["session"]
        report["runs"].append(
            {
                "way": way.name,
                "results": output.name,
                "files": {name: _figures(total) for name, total in totals.items()},
                "output_tokens_per_second": session["output_tokens_per_second"],
                "seconds": session["seconds"],
                **{key: stats[key] for key in ("device", "versions", "commit")},
            }
        )
        report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _read_report(path: Path) -> dict[str, Any]:
    """Read an earlier report. Raise InputError for a damaged one."""
    with contextlib.suppress(ValueError):
        report = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(report, dict) and isinstance(report.get("runs"), list):
            return report
    raise InputError(f"{path} is damaged", "delete it, and run the same command again")


def _figures(total: RowTotals) -> dict[str, Any]:
    counts = total.speculation
    length = counts.acceptance_length
    return {
        "rows": total.ok,
        "acceptance_length": None if length is None else round(length, 4),
        "rounds": counts.rounds,
        "completion_tokens": total.completion_tokens,
        "accept_histogram": counts.histogram,
    }


def table(report: dict[str, Any]) -> str:
    """Format the tokens per round by way and file as a table for the terminal."""
    names = list(report["runs"][0]["files"]) if report["runs"] else []
    lines = [f"{'tokens per round':24}" + "".join(f" {name[-18:]:>18}" for name in names) + f" {'tok/s':>10}"]
    for run in report["runs"]:
        lengths = [run["files"][name]["acceptance_length"] for name in names]
        cells = "".join(f" {'' if length is None else f'{length:.3f}':>18}" for length in lengths)
        speed = run["output_tokens_per_second"]
        lines.append(f"{run['way'][-24:]:24}{cells} {'' if speed is None else f'{speed:,.0f}':>10}")
    return "\n".join(lines)
