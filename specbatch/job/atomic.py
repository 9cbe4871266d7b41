"""Small files, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from specbatch.job.results import disk_errors, replace_durably


def write_whole(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one; the folder is made. Raises InputError where the disk refuses."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Short, and a name that no file has: "x" refuses one that exists.
        temporary = path.with_name(f".specbatch-{secrets.token_hex(6)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            replace_durably(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
