"""Standard streams that cannot end a job: what cannot be written to stderr is dropped."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import typer

from specbatch.errors import InputError


class _Dropping(io.FileIO):
    """A full disk, a closed pipe and a terminal that takes no more: what is written is lost, and nothing else."""

    def write(self, data: object) -> int:
        written = None
        with contextlib.suppress(OSError):
            written = super().write(data)  # type: ignore[arg-type]
        return memoryview(data).nbytes if written is None else written  # type: ignore[arg-type]


def guard_streams() -> None:
    """For the whole process; before anything is written."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # A closed one: the next file that is opened would take its number, and get what libraries write to it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is not None:
        raw = io.BufferedWriter(_Dropping(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files that are not UTF-8, as they are


def print_data(text: str) -> None:
    """To stdout. Ends the command quietly where the reader has seen enough (`| head -1`).

    Raises InputError where stdout cannot be written.
    """
    try:
        typer.echo(text, nl=False)
    except OSError as exc:
        # What is left in the buffer must not fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(exc, BrokenPipeError):
            raise typer.Exit() from exc
        raise InputError(f"cannot write to standard output: {exc.strerror}") from exc
