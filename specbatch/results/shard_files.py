"""The files of finished shards: which files these are, and whether they are all shards of one job."""

from __future__ import annotations

import itertools
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.errors import InputError, without_secrets
from specbatch.files.paths import partial_path, read_stats, stats_path_of
from specbatch.files.remote import RemoteCopy, fetch
from specbatch.files.urls import parent_url, url_of
from specbatch.results.fingerprint import SHARD, differences
from specbatch.results.margins import MarginTotals
from specbatch.results.stats import RowTotals
from specbatch.rows.shard import Shard, whole_path

_MAX_NAMED = 8  # shards that a message names
_ALL_SHARDS = "specbatch merge data.results.*-of-16.jsonl"
_SAME_OPTIONS = "with the options of the other shards"


@dataclass(frozen=True)
class FinishedShard:
    name: str  # the path or URL that was given
    path: Path  # the file, or the local copy of a remote one
    stats_path: Path
    report: dict[str, Any]  # its statistics
    shard: Shard
    job: dict[str, Any]  # without the shard
    totals: RowTotals
    margins: MarginTotals
    written: dict[str, Any]  # bytes, rows and sha256 of the file
    copies: tuple[RemoteCopy, ...] = ()  # local copies of a remote file and its statistics

    @property
    def verifiable(self) -> bool:
        """See `Source`."""
        return bool(self.job.get("input.head_is_all", True)) or "input.sha256" in self.job

    def command(self, shard: Shard | None) -> str:
        """The one that computes a shard of this job, as far as it is known; None: the whole job."""
        name = self.report["input"]
        words = ["specbatch", "generate", "-" if self.job.get("input.kind") == "stdin" else name]
        if (limit := self.job.get("limit")) is not None:
            words += ["--limit", str(limit)]
        return shlex.join(words if shard is None else [*words, "--shard", str(shard)])

    def changed(self, what: Sequence[str]) -> InputError:
        return InputError(
            f"{self.path} was changed after it was finished: {'; '.join(what)}",
            f"compute it again: {self.command(self.shard)} --overwrite, {_SAME_OPTIONS}",
        )


def read_shards(paths: Iterable[Path]) -> list[FinishedShard]:
    """Read the shards of a job, in the order of their numbers. It raises InputError unless they are all shards of one
    job, finished, each once, and as long as when they were written."""
    problems = []
    shards = []
    for path in paths:
        try:
            shards.append(_read_shard(path))
        except _NoShard as exc:
            problems.append(exc)
    if problems:
        hint = problems[0].hint
        raise InputError("; ".join(_first([problem.message for problem in problems])), hint)
    _check_one_job(shards)
    _check_complete(shards)
    for shard in shards:
        if (size := shard.path.stat().st_size) != shard.written["bytes"]:
            raise shard.changed(differences({"bytes": shard.written["bytes"]}, {"bytes": size}))
    return sorted(shards, key=lambda shard: shard.shard.number)


def model_records(shards: Iterable[FinishedShard]) -> dict[str, Any]:
    """The records of the long model files, see `ModelFiles`. One that has a hash says more."""
    found: dict[str, Any] = {}
    for shard in shards:
        for name, record in shard.report["weights"].items():
            if name not in found or (found[name]["sha256"] is None and record["sha256"] is not None):
                found[name] = record
    return found


class _NoShard(InputError):
    """A file is not a finished shard."""


def _read_shard(path: Path) -> FinishedShard:
    """Raises _NoShard."""
    name = str(path)
    copies: tuple[RemoteCopy, ...] = ()
    if (url := url_of(path)) is not None:
        name = without_secrets(url)
        copies = _fetched(url)
        path = copies[0].path
    if path.name.endswith(".partial") or partial_path(path).exists():
        raise _NoShard(f"{path} is not finished", "run the command of this shard again: it resumes")
    if not path.exists():
        raise _NoShard(f"{path} does not exist", "specbatch generate data.jsonl --shard 0/16 writes shard 0 of 16")
    if not path.is_file():
        raise _NoShard(f"{path} is not a file", _ALL_SHARDS)
    if path.name.endswith(".stats.json"):
        raise _NoShard(f"{path} has statistics, not results", f"leave it out: {_ALL_SHARDS}")
    stats_path = copies[1].path if copies else stats_path_of(path)
    if not stats_path.exists():  # `generate` writes to the file that a link names, and the statistics to its folder
        stats_path = stats_path_of(path.resolve())
    report = read_stats(stats_path)
    if report is None:
        raise _NoShard(
            f"{path} is not a shard: it has no {stats_path_of(path).name}",
            f"name results of `generate --shard`: {_ALL_SHARDS}; the statistics must be in their folder",
        )
    job = report["job"]
    if SHARD not in job:
        raise _NoShard(f"{path} is the result of a whole job, not of a shard", f"leave it out: {_ALL_SHARDS}")
    try:
        shard = Shard.parse(job[SHARD])
        totals, written = RowTotals.of_report(report), report["output_file"]
        margins = MarginTotals.of_report(report["margins"])
        needed = ("simulated", "random_weights", "input", "session", "commit", "device", "longest_row", "versions")
        _ = [report[name] for name in (*needed, "models", "notes", "config", "weights")], written["bytes"]
    except (LookupError, TypeError, AttributeError, InputError) as exc:
        raise _NoShard(
            f"{stats_path} is damaged, or of another version of specbatch", "compute the shard again with --overwrite"
        ) from exc
    job = {name: value for name, value in job.items() if name != SHARD}
    return FinishedShard(name, path, stats_path, report, shard, job, totals, margins, written, copies)


def _fetched(url: str) -> tuple[RemoteCopy, RemoteCopy]:
    """Copies of a remote shard and of its statistics. Raises _NoShard."""
    try:
        results = fetch(url)
        return results, fetch(f"{parent_url(url)}/{stats_path_of(results.path).name}")
    except InputError as exc:
        raise _NoShard(exc.message, exc.hint) from exc


def _check_one_job(shards: Sequence[FinishedShard]) -> None:
    """Raises InputError that names the shards that differ from most."""
    records = model_records(shards)
    identities = [_identity(shard, records) for shard in shards]
    keys = [json.dumps(identity, sort_keys=True) for identity in identities]
    usual = keys.index(Counter(keys).most_common(1)[0][0])
    others = [number for number, key in enumerate(keys) if key != keys[usual]]
    if not others:
        return
    reference, other = shards[usual], shards[others[0]]
    problems = []
    for number in others:
        changed = _first(differences(identities[usual], identities[number]))
        problems.append(f"{shards[number].path} ({'; '.join(changed)})")
    hint = f"leave out the others, or compute them again: {reference.command(other.shard)} --overwrite, {_SAME_OPTIONS}"
    if other.shard.count != reference.shard.count:
        hint = f"leave out the others: specbatch merge data.results.*-of-{reference.shard.count}.jsonl"
    raise InputError(f"not of the same job as {reference.path}: {'; '.join(_first(problems))}", hint)


def _identity(shard: FinishedShard, records: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that all shards of a job have in common. `records`: the records of all shards. A file without a
    hash is taken for the same."""
    versions = {f"version of {name}": version for name, version in shard.report["versions"].items()}
    hashes = {
        f"sha256 of {name}": record["sha256"] or records[name]["sha256"]
        for name, record in shard.report["weights"].items()
    }
    return {"number of shards": shard.shard.count, **shard.job, **versions, **hashes}


def _check_complete(shards: Sequence[FinishedShard]) -> None:
    """Check that each shard is there exactly once. Raises InputError."""
    first = shards[0]
    count = first.shard.count
    found: dict[int, FinishedShard] = {}
    for shard in shards:
        if (other := found.get(shard.shard.number)) is not None:
            raise InputError(f"shard {shard.shard} is given twice: {other.path} and {shard.path}", "leave one out")
        found[shard.shard.number] = shard
    num_missing = count - len(found)
    if num_missing:
        numbers = (number for number in range(count) if number not in found)
        missing = [Shard(number, count) for number in itertools.islice(numbers, _MAX_NAMED)]
        named = _first([_where(shard, first) for shard in missing], num_missing)
        raise InputError(
            f"{num_missing:,} of {count:,} shards are missing: {', '.join(named)}",
            f"{first.command(missing[0])}, {_SAME_OPTIONS}",
        )


def _where(missing: Shard, given: FinishedShard) -> str:
    """A shard that is not given, and what there is of it."""
    whole = whole_path(given.path)
    if whole is None:
        return str(missing)
    path = missing.path(whole)
    if partial_path(path).exists():
        return f"{missing} (not finished: {partial_path(path)} exists)"
    return f"{missing} ({path} exists: name it, too)" if path.exists() else f"{missing} (no {path.name})"


def _first(parts: list[str], count: int | None = None) -> list[str]:
    """The first parts of `count`, and how many more there are."""
    more = (len(parts) if count is None else count) - _MAX_NAMED
    return parts if more <= 0 else [*parts[:_MAX_NAMED], f"and {more:,} more"]
