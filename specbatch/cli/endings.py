"""How a command ends: mistakes of the user, signals and errors of our own, each with its exit code."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from specbatch.errors import SpecbatchError
from specbatch.signals import INTERRUPTED, interrupt, on_signals

if TYPE_CHECKING:
    from rich.console import Console

USAGE_ERROR, INTERNAL_ERROR = 2, 3
_MORE_MEMORY = "free memory, or raise the limit (ulimit -v); finished rows are kept"
# Of ImportError and OSError, where a library cannot be loaded.
_NO_MEMORY = ("cannot allocate memory", "failed to map segment")


@contextlib.contextmanager
def user_errors() -> Iterator[Console]:
    """The one place where mistakes of the user become `error:` and `hint:` lines; gives the console of stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    try:
        with on_signals(interrupt):
            yield console
    except SpecbatchError as exc:
        _tell(exc, console)
        raise typer.Exit(USAGE_ERROR) from exc
    except KeyboardInterrupt as exc:  # outside the loop, which has handlers of its own: while loading or sorting
        console.print("interrupted: run the same command again to go on")
        raise typer.Exit(INTERRUPTED) from exc
    except typer.Exit:
        raise
    except Exception as exc:
        if _memory_ran_out(exc):
            _tell(SpecbatchError(f"memory ran out: {exc or 'no more is given to this process'}", _MORE_MEMORY), console)
            raise typer.Exit(USAGE_ERROR) from exc
        # not the user's mistake: shown whole, with an exit code other than that of "some rows failed"
        console.print(traceback.format_exc(), markup=False, highlight=False)
        console.print("this is an error in specbatch; finished rows are kept, the same command goes on from there")
        raise typer.Exit(INTERNAL_ERROR) from exc


def _tell(error: SpecbatchError, console: Console) -> None:
    lines = {"[bold red]error[/]: ": error.message} | ({"[bold cyan]hint[/]: ": error.hint} if error.hint else {})
    try:
        for title, text in lines.items():
            console.print(title, end="")
            console.print(text, markup=False, soft_wrap=True)
    except MemoryError:  # rich loads parts of itself when it prints
        os.write(2, f"error: {error.message}\nhint: {error.hint}\n".encode())


def _memory_ran_out(error: Exception) -> bool:
    """Also while a library was loaded. The engine's own errors say so themselves."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, ImportError | OSError) and any(text in str(error).lower() for text in _NO_MEMORY)
