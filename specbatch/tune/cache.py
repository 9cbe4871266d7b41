"""Traces and timings of a tuning, cached next to its output: an interrupted run resumes from them, and so does another
budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbatch.errors import TuningError
from specbatch.tune.costs import Measurement
from specbatch.tune.files import COSTS, IDENTITY, TRACE, UNFINISHED_COSTS
from specbatch.tune.trace import Trace


class TuneCache:
    """The folder of one tuning. Measurements of another model, other rows or another device are deleted: `is_stale`.

    Raises TuningError for a folder that cannot be written to.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        text = json.dumps(identity, indent=1, sort_keys=True, default=str)
        try:
            folder.mkdir(exist_ok=True)
            known = folder / IDENTITY
            has_other = known.is_file() and known.read_text(encoding="utf-8") != text
            self.is_stale = has_other and any((folder / name).exists() for name in (TRACE, COSTS))
            if has_other or not known.is_file():
                for name in (TRACE, COSTS):
                    (folder / name).unlink(missing_ok=True)
                known.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TuningError(
                f"cannot write to {folder}: {error.strerror or error}", hint="-o names another"
            ) from error

    def load_trace(self) -> Trace | None:
        path = self._folder / TRACE
        return Trace.load(path) if path.is_file() else None

    def save_trace(self, trace: Trace) -> None:
        trace.save(self._folder / TRACE)

    def load_costs(self) -> list[Measurement]:
        path = self._folder / COSTS
        if not path.is_file():
            return []
        try:
            return [Measurement(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, TypeError) as error:
            raise TuningError(f"cannot read {path}: {error}", hint="delete it and tune again") from error

    def save_costs(self, measurements: Sequence[Measurement]) -> None:
        unfinished = self._folder / UNFINISHED_COSTS
        unfinished.write_text(json.dumps([asdict(m) for m in measurements], indent=0), encoding="utf-8")
        unfinished.replace(self._folder / COSTS)
