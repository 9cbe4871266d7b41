"""The commands. What needs torch is imported in the functions: --help, usage errors and `models` do without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import specbatch
from specbatch.cli import startup
from specbatch.cli.endings import user_errors
from specbatch.cli.startup import download_bar, quiet_libraries, resolving
from specbatch.errors import SpecbatchError

app = typer.Typer(
    name="specbatch",
    help="Offline batch inference with large language models, built around speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The built-in models.", no_args_is_help=True)
app.add_typer(models_app, name="models")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file; default: ./specbatch.yaml, else the packaged default."),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Set one option; may be repeated.")
]


def main() -> None:
    """Entry point of the `specbatch` command."""
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


@app.command()
def generate(
    input: Annotated[
        str, typer.Argument(help="JSONL (.gz, .zst), parquet, CSV, a data set of the hub, or - for standard input.")
    ],
    config: ConfigOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: data.jsonl -> data.results.jsonl.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")] = None,
    set_: SetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop earlier results and start again.")] = False,
) -> None:
    """Run every row of INPUT through the model. Running the same command again resumes an unfinished job."""
    began = time.perf_counter()
    with user_errors() as console:
        from specbatch.config_load import load_config
        from specbatch.pipeline.command import GenerateOptions, Runtime, generate_file

        settings = load_config(config, set_ or [])
        quiet_libraries()

        # Imported here: --help, usage errors and `models` need no torch.
        from specbatch.engine.build import build_engine

        runtime = Runtime(resolving(console), build_engine, startup.model_paths)
        code = generate_file(GenerateOptions(input, output, limit, overwrite), settings, runtime, console, began=began)
        raise typer.Exit(code)


@app.command("eval")
def evaluate(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="TASK...", help="gsm8k, gsm8k_chat, humaneval, mt_bench_speed.")
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of each task.")] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Examples before each question; else the task's number."),
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="JSONL rows instead of the task's.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Default: eval-TASK in the current folder.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="none", help="none: the same without speculation too, and what differs.")
    ] = None,
    task: Annotated[
        list[Path] | None, typer.Option("--task", metavar="FILE", help="A task of your own, YAML; may be repeated.")
    ] = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that the model writes (humaneval).")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop earlier results and start again.")] = False,
) -> None:
    """Run known tasks and score them: accuracy, speed, acceptance. The same command again resumes an unfinished run."""
    began = time.perf_counter()
    with user_errors() as console:
        from specbatch.config_load import load_config
        from specbatch.evals.load import find_tasks

        find_tasks(tasks or (), task or ())  # a wrong name is told before torch is imported, which takes seconds
        from specbatch.evals.command import EvalOptions
        from specbatch.evals.command import evaluate as evaluate_tasks
        from specbatch.pipeline.command import Runtime

        settings = load_config(config, set_ or [])
        quiet_libraries()
        sampling = [item.split("=", 1)[0].strip() for item in set_ or [] if item.strip().startswith("sampling.")]
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
        )

        from specbatch.engine.build import build_engine

        runtime = Runtime(resolving(console), build_engine, startup.model_paths)
        raise typer.Exit(evaluate_tasks(options, settings, runtime, console, began=began))


@app.command()
def tune(
    data: Annotated[
        str | None, typer.Argument(help="As for generate; without it, packaged examples stand in for your rows.")
    ] = None,
    config: ConfigOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The configuration to write.")] = Path("tuned.yaml"),
    rows: Annotated[
        int | None, typer.Option(min=4, help="Rows to trace.", show_default="64; on a GPU 8 batches, but 64 to 256")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time to take: 90s, 5m, 1h.")] = "5m",
    set_: SetOption = None,
) -> None:
    """Find num_steps, topk and num_draft_tokens for your own rows, by the number of running rows."""
    with user_errors() as console:
        from specbatch.config_load import load_config
        from specbatch.tuning.options import TuneOptions, example_rows, seconds_of

        settings = load_config(config, set_ or [])
        quiet_libraries()
        options = TuneOptions(data or example_rows(console), output, rows, seconds_of(budget))
        options.check()

        from specbatch.engine.build import build
        from specbatch.pipeline.stats import commit, device_name, versions
        from specbatch.tuning.command import tune_file
        from specbatch.tuning.output import write_tuned

        tuned = tune_file(options, settings, resolving(console), build, startup.model_paths, console)
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
        write_tuned(tuned, settings, output, made_by, console)


@app.command("config")
def show_config(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Print the configuration with every `auto` decided; the reasons go to stderr."""
    with user_errors() as console:
        from specbatch.config_load import dump_config, load_config

        settings = load_config(config, set_ or [])
        quiet_libraries()
        from specbatch.engine.resolve import resolve

        with download_bar(console) as show:
            run = resolve(settings, progress=show)
        for note in run.notes:
            console.print(note, markup=False, soft_wrap=True)
        typer.echo(dump_config(run.config), nl=False)


@models_app.command("list")
def models_list() -> None:
    """The built-in models: name, size of the file, licence, whether it is here."""
    with user_errors():
        from specbatch.models.catalog import BUILTIN_PREFIX, cached_path, catalog

        for name, entry in catalog().items():
            here = "not fetched"
            if cached_path(name) is not None:
                here = "cached" if entry.package is not None else "comes with specbatch"
            size = f"{entry.size_bytes / 1e6:.0f} MB"
            typer.echo(f"{BUILTIN_PREFIX}{name}\t{size}\t{entry.licence}\t{here}\t{entry.description}")


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help="As `specbatch models list` shows it.")]) -> None:
    """Fetch a built-in model and print its path."""
    with user_errors() as console:
        from specbatch.models.catalog import BUILTIN_PREFIX, pull

        with download_bar(console) as show:
            path = pull(name.removeprefix(BUILTIN_PREFIX), show)
        typer.echo(str(path))


@models_app.command("path")
def models_path(name: Annotated[str, typer.Argument(help="As `specbatch models list` shows it.")]) -> None:
    """Print where a fetched model lies."""
    with user_errors():
        from specbatch.models.catalog import BUILTIN_PREFIX, cached_path

        name = name.removeprefix(BUILTIN_PREFIX)
        path = cached_path(name)
        if path is None:
            raise SpecbatchError(f"{name} has not been fetched", f"specbatch models pull {name}")
        typer.echo(str(path))
