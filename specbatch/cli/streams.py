"""Standard streams that cannot end a job: text that stderr does not take is dropped."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import typer

from specbatch.errors import InputError


class _Dropping(io.FileIO):
    """Drops what cannot be written: on a full disk, a closed pipe or a terminal that is gone."""

    def write(self, data: object) -> int:
        written = None
        with contextlib.suppress(OSError):
            written = super().write(data)  # type: ignore[arg-type]
        return memoryview(data).nbytes if written is None else written  # type: ignore[arg-type]


def guard_streams() -> None:
    """For the whole process. Call it before anything is written."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It is closed. The next file would get its number, and then the text that libraries write to it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is not None:
        raw = io.BufferedWriter(_Dropping(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files that are not UTF-8 are printed unchanged


def print_data(text: str) -> None:
    """Print to stdout. Ends the command quietly if the reader has closed it (`| head -1`).

    Raises InputError if stdout cannot be written.
    """
    try:
        typer.echo(text, nl=False)
    except OSError as exc:
        # The rest of the buffer must not fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(exc, BrokenPipeError):
            raise typer.Exit() from exc
        raise InputError(f"cannot write to standard output: {exc.strerror}") from exc
