"""How a command ends: mistakes of the user, signals and errors of our own, each with its exit code."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from specbatch.errors import SpecbatchError
from specbatch.signals import INTERRUPTED, interrupt, on_signals

if TYPE_CHECKING:
    from rich.console import Console

USAGE_ERROR, INTERNAL_ERROR = 2, 3


@contextlib.contextmanager
def user_errors() -> Iterator[Console]:
    """The one place where mistakes of the user become `error:` and `hint:` lines; gives the console of stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    try:
        with on_signals(interrupt):
            yield console
    except SpecbatchError as exc:
        console.print("[bold red]error[/]: ", end="")
        console.print(exc.message, markup=False, soft_wrap=True)
        if exc.hint:
            console.print("[bold cyan]hint[/]: ", end="")
            console.print(exc.hint, markup=False, soft_wrap=True)
        raise typer.Exit(USAGE_ERROR) from exc
    except KeyboardInterrupt as exc:  # outside the loop, which has handlers of its own: while loading or sorting
        console.print("interrupted: run the same command again to go on")
        raise typer.Exit(INTERRUPTED) from exc
    except typer.Exit:
        raise
    except Exception as exc:  # not the user's mistake: shown whole, and told apart from "some rows failed"
        console.print(traceback.format_exc(), markup=False, highlight=False)
        console.print("this is an error in specbatch; finished rows are kept, the same command goes on from there")
        raise typer.Exit(INTERNAL_ERROR) from exc
