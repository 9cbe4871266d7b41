"""What can go wrong in tuning that the user can do something about."""

from __future__ import annotations

from specbatch.errors import SpecbatchError


class TuningError(SpecbatchError):
    """The trace, the measurements or the limits leave nothing to choose from; exit code 2."""
