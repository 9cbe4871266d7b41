"""What tells whether a finished output file is still as it was written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


class FileFacts:
    """Counts and hashes the parts of a file."""

    def __init__(self) -> None:
        self._bytes = self._rows = 0
        self._digest = hashlib.sha256()

    def add(self, part: bytes) -> None:
        self._bytes += len(part)
        self._rows += part.count(b"\n")
        self._digest.update(part)

    def found(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "rows": self._rows, "sha256": self._digest.hexdigest()}


def file_facts(path: Path) -> dict[str, Any]:
    """Bytes, rows and sha256 of an output file."""
    facts = FileFacts()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_CHUNK):
            facts.add(part)
    return facts.found()
