"""What a job counts, how long it takes and what made its results: stats.json."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import specbatch
from specbatch.job.files import write_whole
from specbatch.models.catalog import random_name
from specbatch.types import EngineStats, SpeculationCounts

K = TypeVar("K")


@dataclass(slots=True)
class RowTotals:
    """Sums over finished rows."""

    ok: int = 0
    failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # error type -> rows
    finish_reasons: dict[str, int] = field(default_factory=dict)  # of each row's first completion
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    histogram: list[int] = field(default_factory=list)  # [a] = rounds that kept `a` draft tokens
    # (tokens of a completion, of several their mean; whether it ended before its limit) -> rows
    lengths: dict[tuple[int, bool], int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.ok + self.failed

    def add(self, row: dict[str, Any], times: int = 1) -> None:
        """Count one result line, native or OpenAI; `times=-1` takes one back. Raises KeyError or TypeError for what is
        neither."""
        # Everything is looked up before anything is counted: a damaged line must not be counted in part.
        if row.get("error"):
            error = row["error"]
            kind = str(error["type"] if "type" in error else error["code"])
            self.failed += times
            _count(self.errors, kind, times)
            return
        body = row if "usage" in row else row["response"]["body"]
        reason = row["finish_reason"] if body is row else body["choices"][0]["finish_reason"]
        usage, counts = body["usage"], body["speculation"]
        completions = len(body.get("choices") or "1")
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        rounds, drafted, accepted = counts["rounds"], counts["drafted"], counts["accepted"]
        # Lines hold the quotient to 4 digits: exact below 10,000 rounds, and within 0.01% above.
        committed = round((counts["acceptance_length"] or 0) * rounds)
        histogram = counts["accept_histogram"]
        self.ok += times
        _count(self.finish_reasons, str(reason), times)
        _count(self.lengths, (completion // completions, reason == "stop"), times)
        self.prompt_tokens += times * prompt
        self.completion_tokens += times * completion
        self.rounds += times * rounds
        self.drafted += times * drafted
        self.accepted += times * accepted
        self.committed += times * committed
        self.histogram.extend([0] * (len(histogram) - len(self.histogram)))
        for kept, count in enumerate(histogram):
            self.histogram[kept] += times * count
        while times < 0 and self.histogram and not self.histogram[-1]:
            self.histogram.pop()


def _count(counts: dict[K, int], kind: K, times: int) -> None:
    """A kind that all its rows were taken back from is as if it had never been."""
    counts[kind] = counts.get(kind, 0) + times
    if not counts[kind]:
        del counts[kind]


@dataclass(slots=True)
class Session:
    """What this process did. Seconds are wall time."""

    rows: int = 0
    load_seconds: float = 0.0
    io_seconds: float = 0.0  # reading, tokenising, detokenising, writing and the final sort
    total_seconds: float = 0.0  # since the command began
    engine: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made the results."""

    config: Mapping[str, Any]  # resolved
    models: Mapping[str, str]
    notes: tuple[str, ...]
    device: str


def build_report(
    job: Mapping[str, Any],
    input_name: str,
    output: Path,
    totals: RowTotals,
    resumed_rows: int,
    session: Session,
    made_by: Provenance,
) -> dict[str, Any]:
    """`rows`, `tokens` and `speculation` cover the whole file; `session` this process only."""
    engine = session.engine
    busy = engine.prefill_seconds + engine.decode_seconds
    by_position = [
        round(kept / proposed, 4) if proposed else None
        for kept, proposed in zip(_padded(engine.speculation), engine.speculation.proposed_at, strict=False)
    ]
    refs = (made_by.config["model"]["target"], made_by.config["speculation"]["draft"])
    return {
        # Either makes the texts no answers: for measurements only.
        "simulated": made_by.config["speculation"]["simulate_acceptance"] is not None,
        "random_weights": any(random_name(ref) is not None for ref in refs),
        "input": input_name,
        "output": str(output),
        "rows": {
            "total": totals.rows,
            "ok": totals.ok,
            "failed": totals.failed,
            "errors": dict(sorted(totals.errors.items())),
            "finish_reasons": dict(sorted(totals.finish_reasons.items())),
        },
        "tokens": {"prompt": totals.prompt_tokens, "completion": totals.completion_tokens},
        "speculation": {
            "acceptance_length": _ratio(totals.committed, totals.rounds),
            "acceptance_rate": _ratio(totals.accepted, totals.drafted),
            "rounds": totals.rounds,
            "drafted": totals.drafted,
            "accepted": totals.accepted,
            "accept_histogram": totals.histogram,
        },
        "session": {
            "rows": session.rows,
            "resumed_rows": resumed_rows,
            "seconds": {
                "total": round(session.total_seconds, 3),
                "load": round(session.load_seconds, 3),
                "prefill": round(engine.prefill_seconds, 3),
                "decode": round(engine.decode_seconds, 3),
                "io": round(session.io_seconds, 3),
            },
            "output_tokens": engine.generated_tokens,
            "output_tokens_per_second": _ratio(engine.generated_tokens, busy, 2),
            "output_tokens_per_second_of_total": _ratio(engine.generated_tokens, session.total_seconds, 2),
            "prompt_tokens": engine.prompt_tokens,
            "prefill_tokens": engine.prefill_tokens,
            "cache_hit_rate": _ratio(engine.cached_prompt_tokens, engine.prompt_tokens),
            "engine_rounds": engine.rounds,
            "preemptions": engine.preemptions,
            "memory_shortages": engine.memory_shortages,
            "acceptance_length": _ratio(engine.speculation.committed, engine.speculation.rounds),
            # [i] = share of the drafts at depth i+1 that were kept
            "acceptance_rate_by_position": by_position,
            # [i] = share of the rounds that had a draft at depth i+1
            "draft_rate_by_position": [
                round(rounds / engine.speculation.rounds, 4) for rounds in engine.speculation.proposed_at
            ],
        },
        "versions": versions(),
        "commit": commit(),
        "device": made_by.device,
        "models": dict(made_by.models),
        "notes": list(made_by.notes),
        "config": dict(made_by.config),
        "job": dict(job),
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Atomically. Raises InputError where the disk refuses."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    # Names of files that are not UTF-8 hold lone surrogates: as \\udcff they are JSON, too.
    write_whole(path, text.encode("utf-8", "backslashreplace"))


def versions() -> dict[str, str]:
    found = {"specbatch": specbatch.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that this package runs from, `-dirty` where it has changes; None outside one."""
    root = Path(specbatch.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
        changes = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


def device_name(device: str) -> str:
    """A device as the engine calls it, with the name of the processor or the card."""
    if device != "cpu":
        import torch  # in this module for this alone, and the stub engine's tests do without

        return f"{device} ({torch.cuda.get_device_name(device)})" if torch.cuda.is_available() else device
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"cpu ({name}, {os.cpu_count()} logical cores)"


def _padded(counts: SpeculationCounts) -> list[int]:
    """`accepted_at`, as long as `proposed_at`."""
    return counts.accepted_at + [0] * (len(counts.proposed_at) - len(counts.accepted_at))


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None
