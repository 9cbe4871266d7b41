"""The command line of `specbatch tune`, the files that it reads and writes, and what it checks before it loads a model.
It needs no torch, whose import takes seconds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.config import Config
from specbatch.errors import ConfigError, InputError
from specbatch.files.paths import (
    Written,
    check_can_write,
    check_input_name,
    check_written,
    files_read,
    output_file,
    unless,
)
from specbatch.files.template_files import with_template_texts
from specbatch.rows.parser import RowParser, with_checked_fields
from specbatch.rows.sources import Source, open_source
from specbatch.tune.sample import check_enough

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
ROWS, _MAX_ROWS, _BATCHES = 64, 256, 8
MARK = "Written by `specbatch tune`."  # the first line of the configuration, in a comment
PLOTS = ("acceptance", "throughput", "predicted")
IDENTITY, TRACE, COSTS = "identity.json", "trace.npz", "costs.json"  # names of files in the folder of measurements


@dataclass(frozen=True)
class TuneOptions:
    data: str
    output: Path
    rows: int | None  # to trace; None: see `rows_to_trace`
    budget_seconds: float
    config_file: Path | None = None  # see `GenerateOptions`


def rows_to_trace(on_cuda: bool, max_batch_size: int) -> int:
    """Return the default number of rows to trace. 64 rows give the gain of one shape over another within about a
    percent, 256 within half of that. A GPU takes seconds for eight batches."""
    return max(ROWS, min(_MAX_ROWS, _BATCHES * max_batch_size)) if on_cuda else ROWS


def seconds_of(text: str) -> float:
    """90s, 5m, 1h -> seconds. Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is not None and not match.group(2):
        number = match.group(1)
        hint = f"{number}s is seconds, {number}m minutes, {number}h hours"
        raise InputError(f"--budget {text}: a time needs a unit", hint)
    if match is None or match.group(2) not in _UNITS or float(match.group(1)) == 0:
        raise InputError(f"--budget {text}: not a time", "for example 90s, 5m or 1h")
    return float(match.group(1)) * _UNITS[match.group(2)]


def example_rows(console: Console) -> str:
    """The packaged rows, with a line that says so."""
    path = str(resources.files("specbatch.tune").joinpath("examples.jsonl"))
    console.print("no data given: tuning on packaged examples; your own rows may need other drafts", markup=False)
    return path


@dataclass(frozen=True)
class TuneInput:
    """The data and models to tune on, and the path of the result."""

    output: Path  # no link
    config: Config  # The text of the template is in data.chat_template.
    parser: RowParser
    source: Source


def open_input(options: TuneOptions, config: Config) -> TuneInput:
    """Raises SpecbatchError for an output that cannot be written, a configuration that leaves nothing to tune, and rows
    that cannot be read or are too few."""
    output = _checked_output(options, config)
    if config.speculation.method == "none":
        raise ConfigError(
            "there is nothing to tune: speculation.method is none", hint="use ngram, which needs no model"
        )
    if config.speculation.simulate_acceptance is not None:
        raise ConfigError(
            "speculation.simulate_acceptance accepts drafts at random: there is nothing to tune", hint="set it to null"
        )
    config = with_template_texts(config)
    parser, source = (
        RowParser(config.sampling, config.data, config.model.target),
        open_source(options.data, config.data),
    )
    check_enough(source)
    return TuneInput(output, config, parser, with_checked_fields(source, parser))


def _checked_output(options: TuneOptions, config: Config) -> Path:
    check_input_name(options.data)
    if options.output.suffix not in (".yaml", ".yml"):
        raise InputError(f"the output {options.output} is no .yaml file", "it is a configuration: -o tuned.yaml")
    output = output_file(options.output, formats="")
    files = tuned_files(output)
    check_written(files, files_read(config, options.config_file, input=Path(options.data)))
    check_can_write(file for file in files if file.path.parent.is_dir())
    return output


def report_path(output: Path) -> Path:
    return output.with_suffix(".report.json")


def plot_paths(output: Path) -> list[Path]:
    return [output.with_suffix(f".{name}.png") for name in PLOTS]


def cache_folder(output: Path) -> Path:
    """tuned.yaml -> tuned.measured"""
    return output.with_suffix(".measured")


def tuned_files(output: Path) -> list[Written]:
    """All that a tuning writes."""
    report, folder = report_path(output), cache_folder(output)
    # A plot or a measurement does not name its job: other files of the same folder do.
    has_report = unless(lambda path: _keys(report) >= {"verdict", "made_by"})
    has_identity = unless(lambda path: _keys(folder / IDENTITY) >= {"kinds", "widest"})
    return [
        Written("the tuned configuration", output, unless(_is_tuned)),
        Written("the report", report, has_report),
        *(Written("a plot", path, has_report) for path in plot_paths(output)),
        *(Written("what is measured", folder / n, has_identity) for n in (IDENTITY, TRACE, COSTS)),
    ]


def _is_tuned(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(1 << 10)
    return not head or head.startswith(f"# {MARK}".encode())


def _keys(path: Path) -> set[str]:
    """Return the keys of the JSON object in a file. There are none if the file has no JSON object."""
    if not path.is_file():
        return set()
    try:
        found: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return set()
    return set(found) if isinstance(found, dict) else set()
