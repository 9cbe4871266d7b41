"""`specbatch estimate`."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from specbatch import startup
from specbatch.cli.commands import app, examples
from specbatch.cli.endings import user_errors
from specbatch.cli.options import ConfigOptions, flag, with_config_options
from specbatch.cli.streams import print_data
from specbatch.startup import prepare_libraries


@app.command(epilog=examples("specbatch estimate data.jsonl -c tuned.yaml", "specbatch estimate data.jsonl --json"))
@with_config_options
def estimate(
    given: ConfigOptions,
    input: Annotated[str, typer.Argument(metavar="INPUT", help="As for generate.")],
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N rows.")] = None,
    trial_rows: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Rows of the trial. Default: two batches, or more if these take less than 5 s."
        ),
    ] = None,
    trial_seconds: Annotated[float, typer.Option(min=1, metavar="S", help="The longest time of the trial.")] = 60.0,
    as_json: Annotated[bool, flag("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the time, the tokens and the memory of a job, from a short trial run. Leaves no file."""
    began = time.perf_counter()
    with user_errors() as console:
        from specbatch.job.estimate_command import EstimateOptions, estimate_file, estimate_table
        from specbatch.job.terminal import print_notes, table_text

        config = given.load()
        prepare_libraries()
        options = EstimateOptions(input, limit, trial_rows, trial_seconds)
        report = estimate_file(options, config, startup.runtime(console), console, began=began)
        if config.cluster.workers is not None:
            print_notes(["the time is that of one worker: N workers take about 1/N of what follows loading"], console)
        print_data(f"{json.dumps(report, indent=2)}\n" if as_json else table_text(estimate_table(report)))
