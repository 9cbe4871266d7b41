"""The commands.

Slow imports are in the functions, and torch is imported only when a model is needed: `--help`, `models`, and errors in
the command line, the input or the output do not need it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import specbatch
from specbatch import startup
from specbatch.cli.endings import user_errors
from specbatch.cli.options import (
    ConfigOptions,
    OverwriteOption,
    QuarantineOption,
    TaskNames,
    flag,
    path_argument,
    path_option,
    with_config_options,
)
from specbatch.cli.streams import guard_streams, print_data
from specbatch.cli.unknown_options import HintingTyper
from specbatch.errors import InputError, without_secrets
from specbatch.startup import allow_open_files, import_engine, prepare_libraries, resolving

if TYPE_CHECKING:
    from rich.console import Console

    from specbatch.config import Config

# For users who have no file yet. It works without changes.
_FIRST_RUN = (
    """for example: echo '{"prompt": "What is the capital of France?"}' > data.jsonl && specbatch generate data.jsonl"""
)


def examples(*commands: str) -> str:
    """The end of a command's --help."""
    return "\n".join(["Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in commands)])


app = HintingTyper(
    name="specbatch",
    help="Offline batch inference with large language models: a file of prompts in, a file of answers out. "
    "Lossless speculative decoding makes it faster.",
    no_args_is_help=True,
    epilog=examples("specbatch generate data.jsonl"),
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `specbatch` command."""
    guard_streams()
    app(prog_name="specbatch")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specbatch {specbatch.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, flag("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command(
    epilog=examples(
        "specbatch generate data.jsonl",
        "specbatch generate data.jsonl --model org/name -o answers.jsonl",
        "specbatch generate data.jsonl -c llama-3.1-8b-eagle3",
        "specbatch generate data.jsonl --workers 8",
        "specbatch generate data.jsonl --shard 3/16",
    )
)
@with_config_options
def generate(
    given: ConfigOptions,
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="JSON lines, JSON, CSV or TSV (also .gz, .zst), parquet, a URL (s3, gs, hf, https) of these, a data "
            "set of the Hugging Face hub, or - for standard input.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        path_option(
            "--output",
            "-o",
            metavar="PATH",
            help="The results: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .csv or .tsv, here or at a URL (s3, gs, hf). "
            "Default for data.jsonl: data.results.jsonl.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Run only the first N rows.")] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Run part I of N: row I and every N-th row after it. I is 0 to N - 1. Default output for 3/16: "
            "data.results.03-of-16.jsonl. `specbatch merge` joins the results.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    quarantine: QuarantineOption = False,
    retry_errors: Annotated[
        bool,
        flag(
            "--retry-errors",
            help="Of a finished output, run only the rows that failed. The prompt template can be another one.",
        ),
    ] = False,
    max_failed: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%",
            help="End the job with exit code 4 if more rows fail: 50, or 0.1% of all. Finished rows are kept.",
        ),
    ] = None,
    keep_going: Annotated[
        bool, flag("--keep-going", help="Continue even if each of the first 100 rows fails.")
    ] = False,
    quiet: Annotated[
        bool, flag("--quiet", "-q", help="Print only errors, and how many rows failed: no notes, progress or figures.")
    ] = False,
) -> None:
    """Run every row of INPUT through the model. The same command again resumes an unfinished job."""
    began = time.perf_counter()
    with user_errors() as console:
        if input is None:
            raise InputError("no input is given", _FIRST_RUN)
        from rich.console import Console

        from specbatch.job.command import GenerateOptions, run_file_job
        from specbatch.job.failures import MaxFailed
        from specbatch.job.output import verdict
        from specbatch.rows.shard import Shard

        part = None if shard is None else Shard.parse(shard)
        config = given.load()
        prepare_libraries()
        options = GenerateOptions(
            input,
            output,
            limit,
            overwrite,
            given.config,
            part,
            quarantine,
            retry_errors,
            None if max_failed is None else MaxFailed.parse(max_failed),
            keep_going,
        )
        shown = Console(stderr=True, quiet=True) if quiet else console
        outcome = run_file_job(options, config, startup.open_pool(config, shown), shown, began=began)
        if quiet and outcome.report is not None:
            verdict(outcome.report, console)
        raise typer.Exit(outcome.exit_code)


@app.command(
    epilog=examples("specbatch merge data.results.*.jsonl", "specbatch merge a/*.jsonl b/*.jsonl -o all.jsonl")
)
def merge(
    shards: Annotated[
        list[Path],
        path_argument(metavar="SHARD", help="The results of all shards, with their statistics in the same folder."),
    ],
    output: Annotated[
        Path | None,
        path_option(
            "--output",
            "-o",
            metavar="PATH",
            help="The merged results. Default for data.results.03-of-16.jsonl: data.results.jsonl.",
        ),
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", help="Replace an earlier merged file.")] = False,
) -> None:
    """Join the results of `generate --shard` to the file that one process would have written."""
    with user_errors() as console:
        from specbatch.job.merge import MergeOptions, merge_files

        allow_open_files(len(shards))
        raise typer.Exit(merge_files(MergeOptions(shards, output, overwrite), console))


@app.command(
    "eval", epilog=examples("specbatch eval gsm8k --limit 100", "specbatch eval gsm8k --method ngram --compare none")
)
@with_config_options
def evaluate(
    given: ConfigOptions,
    tasks: TaskNames = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run only the first N rows of each task.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="Examples before each question. Default: the task's number.")
    ] = None,
    data: Annotated[Path | None, path_option(metavar="FILE", help="JSONL rows instead of the task's.")] = None,
    output: Annotated[
        Path | None, path_option("--output", "-o", metavar="DIR", help="The results. Default: ./eval-TASK.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="none", help="Also run without speculation, and report the differences.")
    ] = None,
    task: Annotated[
        list[Path] | None,
        path_option("--task", metavar="FILE", help="Your own task, a YAML file. Can be given several times."),
    ] = None,
    allow_code_execution: Annotated[
        bool, flag("--allow-code-execution", help="Run programs that the model writes (humaneval).")
    ] = False,
    overwrite: OverwriteOption = False,
    quarantine: QuarantineOption = False,
) -> None:
    """Run known tasks and score them: accuracy, speed, acceptance. The same command again resumes."""
    began = time.perf_counter()
    with user_errors() as console:
        from specbatch.evals.command import EvalOptions
        from specbatch.evals.command import evaluate as evaluate_tasks

        config = given.load()
        note_one_engine(config, console)
        prepare_libraries()
        names = [item.partition("=")[0].strip() for item in given.sets]
        options = EvalOptions(
            tasks=tuple(tasks or ()),
            task_files=tuple(task or ()),
            output=output,
            limit=limit,
            num_fewshot=num_fewshot,
            data=data,
            compare=compare,
            allow_code_execution=allow_code_execution,
            overwrite=overwrite,
            quarantine=quarantine,
            overrides=tuple(name.removeprefix("sampling.") for name in names if name.startswith("sampling.")),
            config_file=given.config,
        )
        raise typer.Exit(evaluate_tasks(options, config, startup.runtime(console), console, began=began))


@app.command(
    "serve-batches", epilog=examples("specbatch serve-batches", "specbatch serve-batches --model org/name --port 9000")
)
@with_config_options
def serve_batches(
    given: ConfigOptions,
    folder: Annotated[
        Path, path_option("--dir", metavar="DIR", help="The files and batches. A later server goes on with them.")
    ] = Path("specbatch-batches"),
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen at. Others than loopback need an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port. 0: a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="SPECBATCH_API_KEY", help="Clients must send this key. Other users see it in `ps`."
        ),
    ] = None,
) -> None:
    """Serve OpenAI's API of files and batches on this machine, for OpenAI's own client."""
    with user_errors() as console:
        from specbatch.serve.command import ServeOptions, serve

        config = given.load()
        note_one_engine(config, console)
        prepare_libraries()
        serve(ServeOptions(folder, host, port, api_key), config, startup.runtime(console), console)


@app.command(epilog=examples("specbatch tune data.jsonl -o tuned.yaml", "specbatch generate data.jsonl -c tuned.yaml"))
@with_config_options
def tune(
    given: ConfigOptions,
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="As for generate. Default: packaged example rows.")
    ] = None,
    output: Annotated[Path, path_option("--output", "-o", metavar="PATH", help="The configuration to write.")] = Path(
        "tuned.yaml"
    ),
    rows: Annotated[
        int | None,
        typer.Option(min=4, metavar="N", help="Rows to trace.", show_default="64; on a GPU 8 batches, 64 to 256"),
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time to take: 90s, 5m, 1h.")] = "5m",
) -> None:
    """Find the fastest num_steps, topk and num_draft_tokens for your rows, by batch size."""
    with user_errors() as console:
        from specbatch.tune.start import TuneOptions, example_rows, open_input, seconds_of

        config = given.load()
        note_one_engine(config, console)
        prepare_libraries()
        data = example_rows(console) if data is None else data
        options = TuneOptions(data, output, rows, seconds_of(budget), given.config)
        opened = open_input(options, config)

        # All checks that need no torch are done.
        import_engine()
        from specbatch.results.stats import commit, device_name, versions
        from specbatch.setup.build import build
        from specbatch.tune.command import tune_file
        from specbatch.tune.output import write_tuned

        tuned = tune_file(options, opened, resolving(console), build, startup.model_paths, console)
        made_by: dict[str, object] = {
            "data": without_secrets(data),
            "rows": rows,
            "traced_rows": len(tuned.requests),
            "budget": budget,
            "models": tuned.run.description,
            "versions": versions(),
            "commit": commit(),
            "device": device_name(tuned.run.config.engine.device),
        }
        write_tuned(tuned, config, opened.output, made_by, console)


def note_one_engine(config: Config, console: Console) -> None:
    if config.cluster.workers is not None:
        console.print("cluster.workers is for generate: this command runs one engine", soft_wrap=True)


@app.command("config", epilog=examples("specbatch config -c builtin-cpu", "specbatch config --check data.jsonl"))
@with_config_options
def show_config(
    given: ConfigOptions,
    schemas: Annotated[
        bool, flag("--schemas", help="Print JSON Schemas of configurations, result lines and stats.json.")
    ] = False,
    check: Annotated[
        str | None,
        typer.Option(metavar="INPUT", help="Prepare the first rows of this input, and show the first prompt."),
    ] = None,
) -> None:
    """Print the configuration with every `auto` decided. The reasons go to stderr. Templates and schemas are checked as
    `generate` does; no weights are loaded."""
    with user_errors() as console:
        if schemas:
            from specbatch.results.schema import schemas as json_schemas

            print_data(f"{json.dumps(json_schemas(), indent=2)}\n")
            return
        from specbatch.config_load import dump_config
        from specbatch.files.template_files import with_template_texts
        from specbatch.job.terminal import print_notes
        from specbatch.rows.parser import RowParser

        config = given.load()
        prepare_libraries()
        read = with_template_texts(config)
        RowParser(read.sampling, read.data)  # raises the error that a run of rows would end with
        run = resolving(console)(config)
        from specbatch.job.check import ConfigCheck

        checked = ConfigCheck.of_run(run)
        print_notes(run.notes, console)
        if check is not None:
            print_notes(checked.rows(check).lines(check), console)
        print_data(dump_config(run.config))


@app.command(
    epilog=examples("specbatch init", 'specbatch init --for tickets.csv --schema "label: one of billing, bug, other"')
)
def init(
    path: Annotated[Path, path_argument(metavar="PATH", help="The file to write.")] = Path("specbatch.yaml"),
    data: Annotated[
        str | None,
        typer.Option("--for", metavar="INPUT", help="Write a short one for this file: a template of its columns."),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            metavar="SCHEMA",
            help="With --for: a file with a JSON Schema, or fields such as "
            '"label: one of billing, bug, other; urgent: bool".',
        ),
    ] = None,
) -> None:
    """Write the default configuration with its comments, to edit. All commands read ./specbatch.yaml."""
    with user_errors() as console:
        from specbatch.config_load import default_config_text, write_template
        from specbatch.schemas.short_schema import response_format_of

        if data is None and schema is not None:
            raise InputError("--schema needs --for", "specbatch init --for data.csv --schema ...")
        if data is None:
            write_template(path, default_config_text())
        else:
            from specbatch.rows.suggested_config import suggested_config

            wanted = None if schema is None else response_format_of(schema)
            write_template(path, suggested_config(data, wanted))
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
        if data is not None:
            named = "" if path == Path("specbatch.yaml") else f" -c {path}"  # a file of this name is read without -c
            console.print(
                f"say in its prompt_template what you want to know; then: specbatch generate {data}{named}",
                markup=False,
                soft_wrap=True,
            )
