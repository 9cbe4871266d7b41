"""The commands.

Slow imports are in the functions, and torch is imported only when a model is needed: `--help`, `models`, and errors in
the command line, the input or the output do not need it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import specbatch
from specbatch.cli import startup
from specbatch.cli.endings import user_errors
from specbatch.cli.examples import FIRST_RUN, examples
from specbatch.cli.models import models_app
from specbatch.cli.options import (
    ConfigOption,
    DraftOption,
    MaxTokensOption,
    MethodOption,
    ModelOption,
    OverwriteOption,
    SetsOption,
    TaskNames,
    TemperatureOption,
    all_sets,
    named_path,
)
from specbatch.cli.startup import import_engine, prepare_libraries, resolving
from specbatch.cli.streams import guard_streams, print_data
from specbatch.errors import InputError

app = typer.Typer(
    name="specbatch",
    help="Offline batch inference with large language models, built around speculative decoding.",
    no_args_is_help=True,
    epilog=examples(""),
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(models_app, name="models")


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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=examples("generate"))
def generate(
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT", help="JSONL (.gz, .zst), parquet, CSV, a data set of the hub, or - for standard input."
        ),
    ] = None,
    config: ConfigOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", parser=named_path, help="Default: data.jsonl -> data.results.jsonl."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    method: MethodOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    set_: SetsOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Run every row of INPUT through the model. Running the same command again resumes an unfinished job."""
    began = time.perf_counter()
    with user_errors() as console:
        if input is None:
            raise InputError("no input is given", FIRST_RUN)
        from specbatch.config_load import load_config
        from specbatch.job.command import GenerateOptions, generate_file

        settings = load_config(config, all_sets(set_, model, draft, method, max_tokens, temperature))
        prepare_libraries()
        options = GenerateOptions(input, output, limit, overwrite, config)
        raise typer.Exit(generate_file(options, settings, startup.runtime(console), console, began=began))


@app.command("eval", epilog=examples("eval"))
def evaluate(
    tasks: TaskNames = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    method: MethodOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    set_: SetsOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of each task.")] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Examples before each question. Default: the task's number."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=named_path, help="JSONL rows instead of the task's.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", parser=named_path, help="Default: eval-TASK in the current folder."
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="none", help="none: also run without speculation, and report the differences.")
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option("--task", metavar="FILE", parser=named_path, help="Your own task, a YAML file; can be repeated."),
    ] = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that the model writes (humaneval).")
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Run known tasks and score them: accuracy, speed, acceptance. The same command again resumes an unfinished run."""
    began = time.perf_counter()
    with user_errors() as console:
        from specbatch.config_load import load_config
        from specbatch.evals.command import EvalOptions
        from specbatch.evals.command import evaluate as evaluate_tasks

        sets = all_sets(set_, model, draft, method, max_tokens, temperature)
        settings = load_config(config, sets)
        prepare_libraries()
        sampling = [item.split("=", 1)[0].strip() for item in sets if item.strip().startswith("sampling.")]
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
            overrides=tuple(name.removeprefix("sampling.") for name in sampling),
            config_file=config,
        )
        raise typer.Exit(evaluate_tasks(options, settings, startup.runtime(console), console, began=began))


@app.command(epilog=examples("tune"))
def tune(
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="As for generate. Default: packaged example rows."),
    ] = None,
    config: ConfigOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", parser=named_path, help="The configuration to write.")
    ] = Path("tuned.yaml"),
    rows: Annotated[
        int | None, typer.Option(min=4, help="Rows to trace.", show_default="64; on a GPU 8 batches, 64 to 256")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time to take: 90s, 5m, 1h.")] = "5m",
    model: ModelOption = None,
    draft: DraftOption = None,
    method: MethodOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    set_: SetsOption = None,
) -> None:
    """Find the fastest num_steps, topk and num_draft_tokens for your rows, by batch size."""
    with user_errors() as console:
        from specbatch.config_load import load_config
        from specbatch.tune.options import TuneOptions, example_rows, seconds_of
        from specbatch.tune.start import open_rows

        settings = load_config(config, all_sets(set_, model, draft, method, max_tokens, temperature))
        prepare_libraries()
        options = TuneOptions(example_rows(console) if data is None else data, output, rows, seconds_of(budget), config)
        opened = open_rows(options, settings)

        # All checks that need no torch are done.
        import_engine()
        from specbatch.engine.build import build
        from specbatch.job.stats import commit, device_name, versions
        from specbatch.tune.command import tune_file
        from specbatch.tune.output import write_tuned

        tuned = tune_file(options, opened, resolving(console), build, startup.model_paths, console)
        made_by: dict[str, object] = {
            "data": options.data,
            "rows": rows,
            "traced_rows": len(tuned.requests),
            "budget": budget,
        }
        made_by |= {
            "models": tuned.run.description,
            "versions": versions(),
            "commit": commit(),
            "device": device_name(tuned.run.config.engine.device),
        }
        write_tuned(tuned, settings, opened.output, made_by, console)


@app.command("config", epilog=examples("config"))
def show_config(
    config: ConfigOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    method: MethodOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    set_: SetsOption = None,
) -> None:
    """Print the configuration with every `auto` decided; the reasons go to stderr."""
    with user_errors() as console:
        from specbatch.config_load import dump_config, load_config
        from specbatch.job.terminal import print_notes

        settings = load_config(config, all_sets(set_, model, draft, method, max_tokens, temperature))
        prepare_libraries()
        run = resolving(console)(settings)
        print_notes(run.notes, console)
        print_data(dump_config(run.config))


@app.command(epilog=examples("init"))
def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", parser=named_path, help="The file to write.")] = Path(
        "specbatch.yaml"
    ),
) -> None:
    """Write the default configuration with its comments, to edit. All commands read ./specbatch.yaml."""
    with user_errors() as console:
        from specbatch.config_load import write_template

        write_template(path)
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
