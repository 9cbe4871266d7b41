"""Options as keywords of Python: the last part of an option's name, its whole name, or `model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbatch.config import Config
from specbatch.config_load import load_config, option_paths
from specbatch.errors import ConfigError
from specbatch.strict.other_names import option_meant

_MODEL = "model"  # the name of model.target in Python, as in vLLM and on the command line


def given(**named: str | None) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in named.items() if value is not None}


def configured(config: str | Path | None, options: Mapping[str, Any]) -> Config:
    """Load a configuration, with the options that are given by keywords. It raises ConfigError."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        path = _full_name(name)
        if path in values:
            raise ConfigError(f"{name} gives the option {path} a second time", "leave one of the two out")
        values[path] = value
    return load_config(config, values=values)


def _full_name(name: str) -> str:
    """Return the full name of the option that a keyword names. It raises ConfigError."""
    paths = option_paths()
    if name in paths:
        return name
    if name == _MODEL:
        return "model.target"
    ends = [path for path in paths if path.rpartition(".")[2] == name]
    if len(ends) == 1:
        return ends[0]
    if ends:
        both = " and ".join(ends)
        raise ConfigError(f"the option {name} could be {both}", f'give the whole name: **{{"{ends[0]}": ...}}')
    near = option_meant(name.rpartition(".")[2], paths)
    raise ConfigError(f"there is no option {name}", f"did you mean {near}?" if near else "see docs/options.md")
