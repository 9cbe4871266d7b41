"""Hints for options that a command does not have."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from specbatch.config_load import option_paths
from specbatch.strict.other_names import option_meant


class HintingCommand(typer.core.TyperCommand):
    """A command that names the option of the configuration which an unknown option means: `--device` is
    `--set engine.device=VALUE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Typer has its own copy of click, or click's, by its version: the classes of errors differ.
            if type(error).__name__ == "NoSuchOption":
                self._explain(error)
            raise

    def _explain(self, error: Any) -> None:
        """Add what is meant to the error's text. Options of the command that are alike stay in it, unless the
        configuration has one of that name."""
        own = {name for param in self.params for name in param.opts}
        if "--set" not in own:
            return
        meant = option_meant(error.option_name.lstrip("-"), option_paths(), 1.0 if error.possibilities else 0.75)
        if meant is not None:
            error.possibilities = []
            error.message += f". Did you mean --set {meant}=VALUE?"


class HintingTyper(typer.Typer):
    """A Typer whose commands are `HintingCommand`s."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **(dict[str, Any](cls=HintingCommand) | options))
