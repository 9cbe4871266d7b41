"""Options that several commands share, and the short forms of --set."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from specbatch.errors import ConfigError


def all_sets(
    given: Sequence[str] | None,
    model: str | None,
    draft: str | None,
    method: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> list[str]:
    """All settings as `a.b=c`: those of --set, and the short forms. Raises ConfigError if both set the same option."""
    short_forms = {
        "--model": ("model.target", model),
        "--draft": ("speculation.draft", draft),
        "--method": ("speculation.method", method),
        "--max-tokens": ("sampling.max_tokens", max_tokens),
        "--temperature": ("sampling.temperature", temperature),
    }
    sets = list(given or ())
    paths = {item.partition("=")[0].strip() for item in sets}
    for flag, (path, value) in short_forms.items():
        if value is not None and path in paths:
            raise ConfigError(f"{flag} and --set {path} are both given", "give one of the two")
        if value is not None:
            sets.append(f"{path}={value}")
    return sets


def named_path(text: str | Path) -> Path:
    """Refuses "", which Path takes for the current folder: usually an unset variable of a script."""
    if not str(text).strip():
        raise typer.BadParameter("the name is empty")
    return Path(text)


def config_path(text: str | Path) -> Path:
    """A file, or a packaged configuration by name."""
    from specbatch.config_load import find_config

    return find_config(named_path(text))


def _methods() -> list[str]:
    from specbatch.config import SpeculationSection

    return list(typing.get_args(typing.get_type_hints(SpeculationSection)["method"]))


def _settable() -> list[str]:
    from specbatch.config_load import option_paths

    return [f"{path}=" for path in option_paths()]


def _tasks() -> list[str]:
    from specbatch.evals.load import task_names

    return task_names()


def _models() -> list[str]:
    from specbatch.models.catalog import catalog

    return list(catalog())


def _starting(names: typing.Callable[[], list[str]]) -> typing.Callable[[str], list[str]]:
    """Completion for the shell: the names that begin with the typed text."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        parser=config_path,
        help="YAML file, or the name of a packaged one; default: ./specbatch.yaml, else the packaged default.",
    ),
]
SetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=VALUE", help="Set one option; can be repeated.", autocompletion=_starting(_settable)
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Folder, hub id, .gguf file or builtin:NAME (--set model.target)."),
]
DraftOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The draft model or head (--set speculation.draft).")
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="none, ngram, draft_model, eagle, eagle3 or auto (--set speculation.method).",
        autocompletion=_starting(_methods),
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(metavar="N", help="Most tokens of a completion (--set sampling.max_tokens).")
]
TemperatureOption = Annotated[float | None, typer.Option(metavar="T", help="0 is greedy (--set sampling.temperature).")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Delete earlier results and start again.")]
TaskNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TASK...",
        help="gsm8k, gsm8k_chat, humaneval, mt_bench_speed.",
        autocompletion=_starting(_tasks),
    ),
]
BuiltinModel = Annotated[
    str, typer.Argument(help="A name of `specbatch models list`.", autocompletion=_starting(_models))
]
