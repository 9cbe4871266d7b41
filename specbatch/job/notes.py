"""Notes of a run on stderr, a line each."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console


def say(notes: Iterable[str], console: Console) -> None:
    """Warnings, which begin with that word, stand out on a terminal."""
    for note in notes:
        style = "bold yellow" if note.startswith("warning: ") else None
        console.print(note, style=style, markup=False, soft_wrap=True)
