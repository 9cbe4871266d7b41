"""The exit of a process whose GPU waits for a dead rank. Nothing can interrupt that wait, and code that frees a group's
memory would wait for the GPU. So the operating system frees the memory."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

from specbatch.errors import USAGE_ERROR, SpecbatchError


def end_process(error: SpecbatchError) -> None:
    """Now: its thread waits for the GPU. Finished rows are kept, as they are when it is killed."""
    hint = "" if error.hint is None else f"hint: {error.hint}\n"
    os.write(2, f"error: {error.message}\n{hint}".encode())
    os._exit(USAGE_ERROR)


def end_without_gpu(error: SpecbatchError) -> None:
    """When its program is done: the interpreter would free objects, and NCCL's wait for the GPU.

    Until then the frames of `error`, which came in the middle of a call, keep those objects."""
    atexit.register(_leave, error)


def _leave(kept: SpecbatchError) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(USAGE_ERROR)
