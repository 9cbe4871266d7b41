"""`specbatch merge`: the finished shards of one job become the file that one process would have written.

Each shard is sorted by row index, so the files are read together, a line of each at a time. A shard is compared with
its statistics (bytes, rows, sha256) while it is read: the merged file is put in place only if all are unchanged.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.errors import InputError
from specbatch.files.flat_table import DELIMITERS, FLAT_SUFFIXES
from specbatch.files.line_types import line_index
from specbatch.files.local import FileFacts
from specbatch.files.paths import ELSEWHERE, partial_path, stats_path_of
from specbatch.files.remote import RemoteOutput
from specbatch.files.result_files import identity, is_table, open_results, result_suffix
from specbatch.files.stats_types import SCHEMA_VERSION
from specbatch.files.urls import url_of
from specbatch.job.output import already_finished, checked_output, is_finished, report_of, verdict
from specbatch.job.terminal import closing_table, print_notes, print_table
from specbatch.results.fingerprint import ModelFiles, differences, flat_columns
from specbatch.results.margins import MarginTotals
from specbatch.results.results import ResultFile
from specbatch.results.shard_files import FinishedShard, model_records, read_shards
from specbatch.results.stats import RowTotals, write_report
from specbatch.rows.shard import whole_path

_OF_EACH = ("rows", "session", "commit", "device", "longest_row", "notes")  # statistics that each shard keeps
_IF_ANY = ("earlier_templates",)  # those that a shard can have


@dataclass(frozen=True)
class MergeOptions:
    """The command line."""

    shards: Sequence[Path]
    output: Path | None = None
    overwrite: bool = False


def merge_files(options: MergeOptions, console: Console) -> int:
    """Merge the results of all shards of a job; returns the exit code. Raises SpecbatchError."""
    shards = read_shards(options.shards)
    named = _output_path(options)
    url = url_of(named)
    if url is None:
        code = _merge(options, shards, named, console)
    else:
        store = RemoteOutput(url)
        with store.named():
            store.prepare(overwrite=options.overwrite)
            code = _merge(options, shards, store.path, console, store)
            store.remove_copies()
    for copy in (copy for shard in shards for copy in shard.copies):
        copy.remove()
    return code


def _merge(
    options: MergeOptions,
    shards: Sequence[FinishedShard],
    named: Path,
    console: Console,
    store: RemoteOutput | None = None,
) -> int:
    """Merge shards. `named`: the local file to write. `store`: the remote output that gets the file."""
    output = checked_output(named, _reads(shards), console, overwrite=options.overwrite)
    shown = str(output) if store is None else store.shown
    _check_formats(shards, output)
    first = shards[0]
    if not options.overwrite and is_finished(output):
        verifiable = _is_merged(output, shards) or first.verifiable
        report = already_finished(output, first.job, ModelFiles({}), verifiable=verifiable)
        print_notes([f"{shown} is finished already: nothing to do (--overwrite merges again)"], console)
        return verdict(report, console)
    with closing(ResultFile(output, first.job, overwrite=options.overwrite)) as lock:
        if lock.resumed_rows or lock.damaged_lines:
            raise InputError(
                f"{partial_path(output)} is an unfinished run of the same job, without shards",
                f"finish it: {first.command(None)}; or drop it: --overwrite; {ELSEWHERE}",
            )
        merging = console.status(f"merging {len(shards):,} shards") if console.is_terminal else nullcontext()
        with merging:
            written = lock.write_output(lambda: _in_input_order(shards))
        report = _merged_report(shards, shown, written)
        write_report(stats_path_of(output), report, like=output)
        if store is not None:
            store.upload()
        lock.discard_partial()
    print_table(closing_table(report), console)
    print_notes(_cautions(shards), console)
    return verdict(report, console)


def _output_path(options: MergeOptions) -> Path:
    if options.output is not None:
        return options.output
    paths = {whole_path(path) for path in options.shards}
    path = next(iter(paths))
    if len(paths) > 1 or path is None:
        raise InputError("the names of the shards do not give one name for the merged file", "-o data.results.jsonl")
    return path


def _reads(shards: Sequence[FinishedShard]) -> dict[str, Path]:
    """The files that must not be written over, by their names in messages."""
    reads = {f"shard {shard.shard}": shard.path for shard in shards}
    reads |= {f"the statistics of shard {shard.shard}": shard.stats_path for shard in shards}
    # The input may be named from another folder.
    name = shards[0].report["input"]
    return reads | {"the input": Path(name), "the input of the shards": shards[0].path.parent / Path(name).name}


def _check_formats(shards: Sequence[FinishedShard], output: Path) -> None:
    """Check that the merged file has the columns of the shards, and lines if they have lines: a table of results has
    ids as text, so lines made of it could differ from those of one process. Raises InputError."""
    suffix = result_suffix(output)
    if flat_columns(shards[0].job) is not None:
        if suffix not in FLAT_SUFFIXES:
            named = f"{shards[0].path} has flat columns (output.columns)"
            raise InputError(f"{named}, so the merged file must be a table, too", f"-o NAME{FLAT_SUFFIXES[0]}")
        return
    if suffix in DELIMITERS:
        raise InputError(
            f"{shards[0].path} does not have flat columns, so {output.name} cannot be made of it",
            f"-o NAME.jsonl; or compute the shards with output.columns: flat; {ELSEWHERE}",
        )
    tables = [shard.path for shard in shards if is_table(shard.path)]
    if tables and suffix != ".parquet":
        raise InputError(f"{tables[0]} is a table, so the merged file must be one, too", "-o NAME.parquet")


def _is_merged(output: Path, shards: Sequence[FinishedShard]) -> bool:
    """Return whether `output` was merged from these shards. Raises InputError if one of them was computed again
    since."""
    merged = {entry["shard"]: entry["output_file"] for entry in report_of(output).get("shards", ())}
    again = [shard.path for shard in shards if merged.get(str(shard.shard), shard.written) != shard.written]
    if again:
        raise InputError(
            f"{output} was merged before {again[0]} was computed again", f"--overwrite replaces it; {ELSEWHERE}"
        )
    return len(merged) == len(shards)


def _in_input_order(shards: Sequence[FinishedShard]) -> Iterator[bytes]:
    return (line for _, line in heapq.merge(*map(_indexed_lines, shards)))


def _indexed_lines(shard: FinishedShard) -> Iterator[tuple[int, bytes]]:
    """Yield (row index, line). No two shards have the same index, so lines are never compared."""
    facts = FileFacts()
    last = -1
    try:
        with open_results(shard.path) as lines:
            for line in lines:
                facts.add(line)
                index = _index_of(line)
                if index is None or index <= last or index not in shard.shard:
                    raise shard.changed([f"line {facts.num_newlines} is not the result that belongs there"])
                last = index
                yield index, line
        now = identity(shard.path, facts)
    except (OSError, EOFError, ValueError, zlib.error) as exc:
        raise InputError(f"{shard.path} cannot be read: {exc}") from exc
    if changed := differences(shard.written, now):
        raise shard.changed(changed)


def _index_of(line: bytes) -> int | None:
    try:
        return line_index(line)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _merged_report(shards: Sequence[FinishedShard], output: str, written: dict[str, Any]) -> dict[str, Any]:
    """The statistics. Counts are sums over the shards. Seconds, speeds and remarks on rows are those of each
    shard."""
    totals, margins = RowTotals(), MarginTotals()
    for shard in shards:
        totals.merge(shard.totals)
        margins.merge(shard.margins)
    first = shards[0].report
    of_all = [note for note in first["notes"] if all(note in shard.report["notes"] for shard in shards)]
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: first[name] for name in ("simulated", "random_weights", "input")},
        "output": output,
        **totals.report(),
        "margins": margins.report(),
        "shards": [
            {
                "shard": str(shard.shard),
                "output": shard.name,
                "output_file": shard.written,
                **{name: shard.report[name] for name in _OF_EACH},
                **{name: shard.report[name] for name in _IF_ANY if name in shard.report},
            }
            for shard in shards
        ],
        "versions": first["versions"],
        "models": first["models"],
        "notes": [*of_all, *_cautions(shards)],
        "config": first["config"],
        "job": shards[0].job,
        "output_file": written,
        "weights": model_records(shards),
    }


def _cautions(shards: Sequence[FinishedShard]) -> list[str]:
    """Return warnings about possible differences from the file that one process would write."""
    cautions = []
    for name, why in (("device", "devices, which can round differently"), ("commit", "commits of specbatch")):
        found = sorted({str(shard.report[name]) for shard in shards})
        if len(found) > 1:
            cautions.append(f"warning: the shards ran on different {why}: {', '.join(found)}")
    longest = {shard.report["longest_row"] for shard in shards} - {None}
    if len(longest) > 1:
        cautions.append(
            f"warning: memory allowed rows of {min(longest):,} tokens in one shard and {max(longest):,} in another: "
            "longer rows than the first number were not treated alike"
        )
    if not shards[0].verifiable:
        cautions.append("warning: standard input was long: only its beginning shows that all shards had the same")
    records = [record for shard in shards for record in shard.report["weights"].items()]
    times = {(name, record["mtime_ns"]) for name, record in records}
    unhashed = {name for name, record in records if record["sha256"] is None}
    if len(times) > len({name for name, _ in times}) and unhashed:
        cautions.append(
            "warning: the shards read different copies of the models. Their names and sizes are the same, and so are "
            "samples of their content"
        )
    return cautions
