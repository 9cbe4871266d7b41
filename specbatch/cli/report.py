"""`specbatch report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from specbatch.cli.commands import app, examples
from specbatch.cli.endings import user_errors
from specbatch.cli.options import path_argument, path_option


@app.command(
    epilog=examples("specbatch report data.results.jsonl", "specbatch report data.results.jsonl --tune tuned.yaml")
)
def report(
    results: Annotated[
        Path, path_argument(metavar="RESULTS", help="The output of generate, also of a job that is not finished.")
    ],
    output: Annotated[
        Path | None,
        path_option(
            "--output", "-o", metavar="PATH", help="The page. Default for data.results.jsonl: data.results.report.html."
        ),
    ] = None,
    input: Annotated[
        Path | None, path_option("--input", metavar="FILE", help="The job's input, for the prompts of the samples.")
    ] = None,
    tune: Annotated[
        Path | None, path_option("--tune", metavar="PATH", help="Add what tune found: tuned.yaml or its folder.")
    ] = None,
    evaluation: Annotated[
        Path | None, path_option("--eval", metavar="DIR", help="Add what eval found: the folder that it wrote.")
    ] = None,
) -> None:
    """Write one HTML page about a job: acceptance, lengths, errors, the slowest rows, samples."""
    with user_errors() as console:
        from specbatch.report.command import ReportOptions, write_page

        write_page(ReportOptions(results, output, tune, evaluation, input), console)
