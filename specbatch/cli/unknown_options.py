"""Hints for options that a command does not have."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from typing import Any

import typer
import typer.core

from specbatch.config_load import option_paths
from specbatch.strict.other_names import option_meant

# Options of other tools that are not options of the configuration here.
_WORDS: Mapping[str, str] = {
    "resume": "The same command resumes",
    "force": "Did you mean --overwrite?",
    "format": "The name of the output says it, such as -o answers.parquet",
    "output-format": "The name of the output says it, such as -o answers.parquet",
    "m": "Did you mean --model?",
    "num-workers": "Did you mean --workers?",
    "json": "Results are JSON lines; -o answers.csv or answers.parquet writes a table",
    "verbose": "All notes are printed without it, and -q leaves them out",
    "v": "All notes are printed without it, and -q leaves them out; --version is an option of specbatch itself",
    "cuda": "Did you mean --set engine.device=cuda?",
    "cpu": "Did you mean --set engine.device=cpu?",
}
_ALIKE = 0.7  # similarity of names without their hyphens, from 0 to 1


class HintingCommand(typer.core.TyperCommand):
    """A command that names the option of the configuration which an unknown option means: `--device` is
    `--set engine.device=VALUE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [*args]  # the parser takes them from the list
        try:
            return super().parse_args(ctx, args)
        except Exception as exc:
            error: Any = exc
            # Typer has its own copy of click, or click's, by its version: the classes of errors differ.
            if type(error).__name__ == "NoSuchOption":
                self._explain(error)
            elif "unexpected extra argument" in str(error) and (without := _set_without_value(given)) is not None:
                error.message = f"--set {without} has no value. Write --set {without}=VALUE, without a space"
            raise

    def _explain(self, error: Any) -> None:
        """Add what is meant to the error's text. Options of the command that are alike stay in it, unless the
        configuration has one of that name."""
        own = {name for param in self.params for name in param.opts}
        if "--set" not in own:
            return
        name = error.option_name.lstrip("-")
        if (own_name := f"--{name.replace('_', '-')}") in own:
            error.possibilities = [own_name]
            return
        error.possibilities = [one for one in error.possibilities or () if _is_like(name, one.lstrip("-"))]
        if (words := _WORDS.get(name.replace("_", "-"))) is not None:
            error.possibilities = []
            error.message += f". {words}"
            return
        meant = option_meant(name, option_paths(), 1.0 if error.possibilities else 0.75)
        if meant is not None:
            error.possibilities = []
            error.message += f". Did you mean --set {meant}=VALUE?"


def _set_without_value(args: list[str]) -> str | None:
    """Return the option that --set names without a value, if there is one."""
    return next((name for flag, name in itertools.pairwise(args) if flag == "--set" and "=" not in name), None)


def _is_like(name: str, other: str) -> bool:
    return other.startswith(name) or difflib.SequenceMatcher(None, name, other).ratio() >= _ALIKE


class HintingTyper(typer.Typer):
    """A Typer whose commands are `HintingCommand`s."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **(dict[str, Any](cls=HintingCommand) | options))
