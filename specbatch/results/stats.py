"""stats.json: what a job counted, how long it took, and what made its results."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import specbatch
from specbatch.counts import DraftSources, EngineStats, ExpertCounts, SpeculationCounts
from specbatch.files.local import write_whole
from specbatch.files.stats_types import SCHEMA_VERSION
from specbatch.models.catalog import random_name

K = TypeVar("K")


@dataclass(slots=True)
class RowTotals:
    """Sums over finished rows."""

    ok: int = 0
    failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # error type -> rows
    finish_reasons: dict[str, int] = field(default_factory=dict)  # finish reasons of each row's first completion
    answers: int = 0  # completions
    cut: int = 0  # completions that end at max_tokens, or where the context or the cache ends
    incomplete: int = 0  # cut completions that end before the row's grammar allows an end
    prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)  # lines have no depths
    # (tokens of a completion, or the mean of several; whether it ended before its limit) -> rows
    lengths: dict[tuple[int, bool], int] = field(default_factory=dict)

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> RowTotals:
        """Return the totals of a finished job, without `lengths`. It raises LookupError or TypeError for other
        files."""
        rows, tokens, counts, answers = report["rows"], report["tokens"], report["speculation"], report["answers"]
        rounds = SpeculationCounts(
            counts["rounds"],
            counts["drafted"],
            counts["accepted"],
            counts["committed"],
            list(counts["accept_histogram"]),
        )
        errors, reasons = dict(rows["errors"]), dict(rows["finish_reasons"])
        return cls(
            rows["ok"],
            rows["failed"],
            errors,
            reasons,
            answers["total"],
            answers["cut"],
            answers["incomplete"],
            tokens["prompt"],
            tokens["completion"],
            rounds,
        )

    def report(self) -> dict[str, Any]:
        """Return the part of stats.json with these totals."""
        counts = self.speculation
        return {
            "rows": {
                "total": self.rows,
                "ok": self.ok,
                "failed": self.failed,
                "errors": dict(sorted(self.errors.items())),
                "finish_reasons": dict(sorted(self.finish_reasons.items())),
            },
            "answers": {"total": self.answers, "cut": self.cut, "incomplete": self.incomplete},
            "tokens": {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
            "speculation": {
                "acceptance_length": _ratio(counts.committed, counts.rounds),
                "acceptance_rate": _ratio(counts.accepted, counts.drafted),
                "rounds": counts.rounds,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "committed": counts.committed,
                "accept_histogram": counts.histogram,
            },
        }

    @property
    def rows(self) -> int:
        return self.ok + self.failed

    def add(self, line: dict[str, Any], times: int = 1) -> None:
        """Count one result line, native or OpenAI; `times=-1` takes one back. Raises KeyError or TypeError for
        other lines."""
        # All fields are read before anything is counted: of a damaged line nothing may be counted.
        error, response = line.get("error"), line.get("response")
        kind = str(error["type"] if "type" in error else error["code"]) if error else ""
        if error and "usage" not in line and response is None:
            self._count_failed(kind, times)
            return
        body = line if "usage" in line else line["response"]["body"]
        reason = line["finish_reason"] if body is line else body["choices"][0]["finish_reason"]
        usage, counts = body["usage"], body["speculation"]
        choices = body.get("choices") or [body]
        completions = len(choices)
        finished = sum(choice["finish_reason"] != "error" for choice in choices)
        cut = sum(choice["finish_reason"] == "length" for choice in choices)
        incomplete = sum("incomplete" in choice for choice in choices)
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        # Lines have the quotient with 4 digits: exact below 10,000 rounds, within 0.01% above.
        committed = round((counts["acceptance_length"] or 0) * counts["rounds"])
        rounds = SpeculationCounts(
            counts["rounds"], counts["drafted"], counts["accepted"], committed, counts["accept_histogram"]
        )
        if error:  # a part of the row finished
            self._count_failed(kind, times)
        else:
            self.ok += times
            _count(self.finish_reasons, str(reason), times)
            _count(self.lengths, (completion // completions, reason != "length"), times)
        self.answers += times * finished
        self.cut += times * cut
        self.incomplete += times * incomplete
        self.prompt_tokens += times * prompt
        self.completion_tokens += times * completion
        self.speculation.add(rounds, times)

    def _count_failed(self, kind: str, times: int) -> None:
        self.failed += times
        _count(self.errors, kind, times)

    def merge(self, other: RowTotals) -> None:
        """Add the sums over other rows."""
        self.ok += other.ok
        self.failed += other.failed
        self.answers += other.answers
        self.cut += other.cut
        self.incomplete += other.incomplete
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.speculation.add(other.speculation)
        for kind, rows in other.errors.items():
            _count(self.errors, kind, rows)
        for reason, rows in other.finish_reasons.items():
            _count(self.finish_reasons, reason, rows)
        for length, rows in other.lengths.items():
            _count(self.lengths, length, rows)


def _count(counts: dict[K, int], kind: K, times: int) -> None:
    """A kind without rows is left out."""
    counts[kind] = counts.get(kind, 0) + times
    if not counts[kind]:
        del counts[kind]


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker, for the display and for stats.json."""

    node: str
    device: str
    state: str  # such as "loading", "running" or "lost"
    rows: int
    running: int  # requests
    tokens: int  # generated
    deaths: int
    seconds: float  # since it was loaded


@dataclass(slots=True)
class Session:
    """The work of this process. Seconds are wall time."""

    rows: int = 0
    completion_tokens: int = 0  # completion tokens of the rows of this session
    load_seconds: float = 0.0
    io_seconds: float = 0.0  # reading, detokenizing, writing and the final sort
    run_seconds: float = 0.0  # from the first row to the last
    total_seconds: float = 0.0  # since the command began
    engine: EngineStats = field(default_factory=EngineStats)
    workers: Sequence[WorkerLine] = ()  # state of each worker of a pool


def build_report(
    job: Mapping[str, Any],
    input_name: str,
    output: str | Path,
    totals: RowTotals,
    resumed_rows: int,
    session: Session,
    *,
    config: Mapping[str, Any],
    models: Mapping[str, str],
    made_by: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """`rows`, `tokens` and `speculation` cover the whole file; `session` this process only. `config`: the resolved one;
    `models`: what they are, by option; `made_by`: versions, commit and device."""
    engine = session.engine
    # Workers run at the same time: their seconds are means, and the speed is that of the wall time.
    num_workers = len(session.workers) or 1
    # What a dead worker had begun, and copies of rows, are no output.
    output_tokens = engine.generated_tokens
    if session.workers:
        output_tokens = min(output_tokens, session.completion_tokens)
    busy = session.run_seconds if session.workers else engine.prefill_seconds + engine.decode_seconds
    here = engine.speculation
    refs = (config["model"]["target"], config["speculation"]["draft"])
    return {
        "schema_version": SCHEMA_VERSION,
        # With either of the two, the texts are not answers.
        "simulated": config["speculation"]["simulate_acceptance"] is not None,
        "random_weights": any(random_name(ref) is not None for ref in refs),
        "input": input_name,
        "output": str(output),
        **totals.report(),
        "session": {
            "rows": session.rows,
            "resumed_rows": resumed_rows,
            "seconds": {
                "total": round(session.total_seconds, 3),
                "load": round(session.load_seconds, 3),
                "prefill": round(engine.prefill_seconds / num_workers, 3),
                "decode": round(engine.decode_seconds / num_workers, 3),
                "input_wait": round(engine.input_wait_seconds / num_workers, 3),
                "io": round(session.io_seconds, 3),
            },
            "output_tokens": output_tokens,
            "output_tokens_per_second": _ratio(output_tokens, busy, 2),
            "output_tokens_per_second_of_total": _ratio(output_tokens, session.total_seconds, 2),
            "joules": round(engine.joules, 1) or None,
            "output_tokens_per_joule": _ratio(output_tokens, engine.joules),
            "prompt_tokens": engine.prompt_tokens,
            "prefill_tokens": engine.prefill_tokens,
            "cache_hit_rate": _ratio(engine.cached_prompt_tokens, engine.prompt_tokens),
            "engine_rounds": engine.rounds,
            "preemptions": engine.preemptions,
            "memory_shortages": engine.memory_shortages,
            "late_graphs": engine.late_graphs,
            "late_graph_seconds": round(engine.late_graph_seconds / num_workers, 3),
            "grammars": dict(engine.grammar.requests),
            "acceptance_length": _ratio(here.committed, here.rounds),
            # [i] = share of the drafts at depth i + 1 that were accepted
            "acceptance_rate_by_position": [
                _ratio(*pair) for pair in zip_longest(here.accepted_at, here.proposed_at, fillvalue=0)
            ],
            # [i] = share of the rounds that had a draft at depth i + 1
            "draft_rate_by_position": [_ratio(proposed, here.rounds) for proposed in here.proposed_at],
            "drafts_by_source": _sources(engine.draft_sources),
            "experts": _experts(engine.experts),
            **({"workers": [asdict(line) for line in session.workers]} if session.workers else {}),
        },
        **made_by,
        "models": dict(models),
        "notes": list(notes),
        "config": dict(config),
        "job": dict(job),
    }


def _sources(counts: DraftSources) -> dict[str, Any] | None:
    """Return the part of stats.json about the sources of drafts; None: the draft method has one."""
    sums = sorted(counts.tokens.items())
    return {source: {"drafted": drafted, "accepted": accepted} for source, (drafted, accepted) in sums} or None


def _experts(counts: ExpertCounts) -> dict[str, Any] | None:
    """Return the part of stats.json about experts; None: no round had any."""
    totals = [sum(layer) for layer in counts.load]
    if not totals or not all(totals):
        return None
    shares = [[count / total for count in layer] for layer, total in zip(counts.load, totals, strict=True)]
    peaks = [max(layer) * len(layer) for layer in shares]
    entropies = [-sum(share * math.log(share) for share in layer if share) for layer in shares]
    return {
        "number": len(counts.load[0]),
        "peak_load": round(statistics.fmean(peaks), 4),
        "peak_load_by_layer": [round(peak, 4) for peak in peaks],
        "effective_number": round(statistics.fmean(map(math.exp, entropies)), 2),
        "unused": sum(count == 0 for layer in counts.load for count in layer),
        "distinct": [
            {"tokens": round(one.tokens, 2), "experts": round(one.experts, 2), "rounds": one.num_rounds}
            for one in counts.distinct
        ],
    }


def write_report(path: Path, report: Mapping[str, Any], like: Path | None = None) -> None:
    """Written whole or not at all. A new file has the mode of `like`. Raises InputError for errors of the disk."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    # Names of files that are not UTF-8 have lone surrogates, which are written as \\udcff.
    write_whole(path, text.encode("utf-8", "backslashreplace"), like)


def versions() -> dict[str, str]:
    found = {"specbatch": specbatch.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers", "llguidance"):
        if (version := _installed(package)) is not None:
            found[package] = version
    return found


@functools.cache
def _installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed. What was imported stays as it was."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that this package runs from, `-dirty` if it has changes; None outside a checkout.
    It is read once: later changes of the checkout are not what this process runs."""
    root = Path(specbatch.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: str) -> str:
    """The engine's name of a device, with the name of the processor or the card."""
    if device != "cpu":
        import torch  # here, so that a run on a CPU with the tests' stub engine does without it

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


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None
