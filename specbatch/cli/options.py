"""Options that several commands share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specbatch.config import Config, SpeculationSection
from specbatch.config_load import find_config, load_config, option_paths, packaged_configs, packaged_tasks
from specbatch.errors import ConfigError
from specbatch.schemas.short_schema import response_format_of

_option = functools.partial(typer.Option, rich_help_panel="Configuration")
_SHORT_CUTS = {  # fields of `ConfigOptions`, and the options that they set
    "model": "model.target",
    "draft": "speculation.draft",
    "method": "speculation.method",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "seed": "sampling.seed",
    "system": "data.system_prompt",
    "schema": "sampling.response_format",
    "certificate": "output.certificate",
    "workers": "cluster.workers",
    "cluster": "cluster.address",
}


def named_path(text: str | Path) -> Path:
    """Refuses "", which Path takes for the current folder: usually an unset variable of a script."""
    if not str(text).strip():
        raise typer.BadParameter("the name is empty")
    return Path(text)


# An option without a value. Without the empty metavar, the help shows it as `<bool>`.
flag = functools.partial(typer.Option, metavar="")
# An option or an argument that names a file or a folder.
path_option = functools.partial(typer.Option, parser=named_path)
path_argument = functools.partial(typer.Argument, parser=named_path)


def config_path(text: str | Path) -> Path:
    """A file, or a packaged configuration by name."""
    return find_config(named_path(text))


def _methods() -> list[str]:
    return list(typing.get_args(typing.get_type_hints(SpeculationSection)["method"]))


def _settable() -> list[str]:
    return [f"{path}=" for path in option_paths()]


def _tasks() -> list[str]:
    return list(packaged_tasks())


def _models() -> list[str]:
    from specbatch.models.catalog import catalog

    return list(catalog())


def _targets() -> list[str]:
    from specbatch.models.catalog import BUILTIN_PREFIX, catalog

    return [f"{BUILTIN_PREFIX}{entry.name}" for entry in catalog().values() if entry.draft_for is None]


def _heads() -> list[str]:
    from specbatch.models.catalog import BUILTIN_PREFIX, catalog

    return [f"{BUILTIN_PREFIX}{entry.name}" for entry in catalog().values() if entry.draft_for is not None]


def _config_names() -> list[str]:
    return list(packaged_configs())


def _files_like(incomplete: str, *suffixes: str) -> list[str]:
    """Return the folders, and the files with these suffixes, whose paths begin with the typed text."""
    folder, _, begin = incomplete.rpartition("/")
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(f"{folder}/" if folder or incomplete.startswith("/") else "."), key=_name):
            is_hidden = entry.name.startswith(".") and not begin.startswith(".")
            if entry.name.startswith(begin) and not is_hidden and (entry.is_dir() or entry.name.endswith(suffixes)):
                found.append(incomplete[: len(incomplete) - len(begin)] + entry.name + "/" * entry.is_dir())
    return found


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _starting(names: typing.Callable[[], list[str]], *suffixes: str) -> typing.Callable[[str], list[str]]:
    """Return a completion for the shell: the names that begin with the typed text, and files with these suffixes."""
    return lambda incomplete: [
        *(name for name in names() if name.startswith(incomplete)),
        *(_files_like(incomplete, *suffixes) if suffixes else ()),
    ]


@dataclass(frozen=True)
class ConfigOptions:
    """The configuration file, and the options that change it, as they were given."""

    config: Annotated[
        Path | None,
        _option(
            "--config",
            "-c",
            metavar="FILE",
            parser=config_path,
            autocompletion=_starting(_config_names, ".yaml", ".yml"),
            help="YAML file, or the name of a packaged one. Default: ./specbatch.yaml, else the packaged default.",
        ),
    ] = None
    model: Annotated[
        str | None,
        _option(
            metavar="NAME",
            help="model.target: folder, hub id, .gguf file or builtin:NAME.",
            autocompletion=_starting(_targets, ".gguf"),
        ),
    ] = None
    draft: Annotated[
        str | None,
        _option(
            metavar="NAME",
            help="speculation.draft: the draft model or EAGLE head.",
            autocompletion=_starting(_heads, ".gguf"),
        ),
    ] = None
    method: Annotated[
        str | None,
        _option(
            metavar="NAME",
            help=f"speculation.method: {', '.join(_methods())}.",
            autocompletion=_starting(_methods),
        ),
    ] = None
    max_tokens: Annotated[int | None, _option(metavar="N", help="sampling.max_tokens: the longest completion.")] = None
    temperature: Annotated[float | None, _option(metavar="T", help="sampling.temperature: 0 is greedy.")] = None
    top_p: Annotated[float | None, _option(metavar="P", help="sampling.top_p: the likeliest tokens of this share.")] = (
        None
    )
    seed: Annotated[int | None, _option(metavar="N", help="sampling.seed of rows that are sampled.")] = None
    system: Annotated[
        str | None, _option(metavar="TEXT", help="data.system_prompt: a system message for rows that have none.")
    ] = None
    schema: Annotated[
        str | None,
        _option(
            metavar="SCHEMA",
            help="sampling.response_format: a file with a JSON Schema, or fields such as "
            '"label: one of billing, bug, other; urgent: bool".',
        ),
    ] = None
    certificate: Annotated[
        bool | None,
        _option(
            "--certificate",
            metavar="",
            help="output.certificate: results have the row's smallest logit margin.",
        ),
    ] = None
    workers: Annotated[
        int | None, _option(metavar="N", help="cluster.workers, for generate: N engines share the file, on Ray.")
    ] = None
    cluster: Annotated[
        str | None, _option(metavar="ADDRESS", help="cluster.address of a Ray cluster: auto or HOST:PORT.")
    ] = None
    set: Annotated[
        list[str] | None,
        _option(
            "--set",
            metavar="A.B=VALUE",
            help="Any option, such as sampling.top_p=0.9. Can be repeated. `specbatch config` prints all.",
            autocompletion=_starting(_settable),
        ),
    ] = None

    @property
    def sets(self) -> list[str]:
        """--set, and the other options in the same form. Raises ConfigError if an option is given in both ways."""
        sets = list(self.set or ())
        paths = [item.partition("=")[0].strip() for item in sets]
        for name, path in _SHORT_CUTS.items():
            value = getattr(self, name)
            if value is not None and path in paths:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} and --set {path} are both given", "give one of the two")
            if value is not None:
                sets.append(f"{path}={response_format_of(value) if name == 'schema' else value}")
        return sets

    def load(self) -> Config:
        """The configuration. Raises ConfigError."""
        return load_config(self.config, self.sets)


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Typer makes options of a function's parameters. This decorator replaces the parameter `given` of a command by the
    fields of `ConfigOptions`, so that they are written once for all commands."""
    hints = typing.get_type_hints(ConfigOptions, include_extras=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in hints.items()
    ]
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(given=ConfigOptions(**{name: values.pop(name) for name in hints}), **values)

    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *shared]}
    return run


OverwriteOption = Annotated[bool, flag("--overwrite", help="Delete earlier results and start again.")]
QuarantineOption = Annotated[
    bool,
    flag("--quarantine", help="If a row ends the process each time that it runs, write an error for it and go on."),
]
TaskNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TASK",
        help=f"{', '.join(_tasks())}.",
        autocompletion=_starting(_tasks),
    ),
]
BuiltinModel = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A name that `specbatch models list` prints.", autocompletion=_starting(_models)
    ),
]
