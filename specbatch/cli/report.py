"""`specbatch report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbatch.cli.commands import app, examples
from specbatch.cli.endings import user_errors
from specbatch.cli.options import named_path


@app.command(
    epilog=examples("specbatch report data.results.jsonl", "specbatch report data.results.jsonl --tune tuned.yaml")
)
def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            parser=named_path,
            help="The output of generate, also of a job that is not finished.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            parser=named_path,
            help="The page. Default for data.results.jsonl: data.results.report.html.",
        ),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            "--input", metavar="FILE", parser=named_path, help="The job's input, for the prompts of the samples."
        ),
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            "--tune", metavar="PATH", parser=named_path, help="Add what tune found: tuned.yaml or its folder."
        ),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", metavar="DIR", parser=named_path, help="Add what eval found: the folder that it wrote."),
    ] = None,
) -> None:
    """Write one HTML page about a job: acceptance, lengths, errors, the slowest rows, samples."""
    with user_errors() as console:
        from specbatch.report.command import ReportOptions, write_page

        write_page(ReportOptions(results, output, tune, evaluation, input), console)
