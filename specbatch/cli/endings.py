"""How a command ends: mistakes of the user, signals and errors of our own, each with its exit code."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import typer

from specbatch.errors import SpecbatchError

if TYPE_CHECKING:
    from rich.console import Console

USAGE_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 3, 130


@contextlib.contextmanager
def user_errors() -> Iterator[Console]:
    """The one place where mistakes of the user become `error:` and `hint:` lines; gives the console of stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    try:
        with _sigterm_as_interrupt():
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


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does: files are closed, a half-done download is removed."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
