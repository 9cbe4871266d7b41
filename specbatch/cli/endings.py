"""End of a command: mistakes of the user, signals and internal errors, each with its exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from specbatch.errors import (
    INTERNAL_ERROR,
    TOO_MANY_FAILED,
    USAGE_ERROR,
    SpecbatchError,
    TooManyFailed,
    WorkerFailed,
    without_secrets,
)
from specbatch.signals import INTERRUPTED, interrupt, on_signals

if TYPE_CHECKING:
    from rich.console import Console

_MORE_MEMORY = "free memory, or raise the limit (ulimit -v); finished rows are kept"
# What no check before the work finds. Most are reported where they happen, with the name of the file.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE)
_DISK_HINT = "finished rows are kept; run the same command again to continue"
# Texts of ImportError and OSError if there is no memory to load a library.
_NO_MEMORY = ("cannot allocate memory", "failed to map segment")


@contextlib.contextmanager
def user_errors() -> Iterator[Console]:
    """Yields the console of stderr. Mistakes of the user become `error:` and `hint:` lines here and nowhere else."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    try:
        with on_signals(interrupt):
            yield console
    except SpecbatchError as exc:
        _print_error(exc, console)
        raise typer.Exit(TOO_MANY_FAILED if isinstance(exc, TooManyFailed) else USAGE_ERROR) from exc
    except WorkerFailed as exc:  # its message has the traceback
        _print_error(exc, console)
        raise typer.Exit(INTERNAL_ERROR) from exc
    except KeyboardInterrupt as exc:  # while loading or sorting; the job's loop has its own handlers
        console.print("interrupted: run the same command again to continue")
        raise typer.Exit(INTERRUPTED) from exc
    except typer.Exit:
        raise
    except Exception as exc:
        if _memory_ran_out(exc):
            _print_error(SpecbatchError(f"memory ran out: {exc or 'this process gets no more'}", _MORE_MEMORY), console)
            raise typer.Exit(USAGE_ERROR) from exc
        if isinstance(exc, OSError) and exc.errno in _DISK_ERRORS:
            where = "" if exc.filename is None else f" at {exc.filename}"
            _print_error(SpecbatchError(f"the disk failed{where}: {exc.strerror}", _DISK_HINT), console)
            raise typer.Exit(USAGE_ERROR) from exc
        # Not the user's mistake: a traceback, and another exit code than that of "some rows failed".
        console.print(without_secrets(traceback.format_exc()), markup=False, highlight=False)
        console.print("this is an error in specbatch; finished rows are kept, and the same command continues")
        raise typer.Exit(INTERNAL_ERROR) from exc


def _print_error(error: SpecbatchError | WorkerFailed, console: Console) -> None:
    lines = {"[bold red]error[/]: ": error.message} | ({"[bold cyan]hint[/]: ": error.hint} if error.hint else {})
    try:
        for title, text in lines.items():
            console.print(title, end="")
            console.print(text, markup=False, soft_wrap=True)
    except MemoryError:  # rich loads parts of itself when it prints
        os.write(2, f"error: {error.message}\nhint: {error.hint}\n".encode())


def _memory_ran_out(error: Exception) -> bool:
    """Return whether memory ran out, which can happen during the import of a library too. The engine has its own errors
    for that."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, ImportError | OSError) and any(text in str(error).lower() for text in _NO_MEMORY)
