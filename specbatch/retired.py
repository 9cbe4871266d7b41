"""Names of options that earlier versions had: reading one is an error that names its successor, or what to do."""

from __future__ import annotations

RETIRED_OPTIONS: dict[str, str] = {  # full path: hint
    "engine.tuned_products": "leave it out: it saved 1% of a job's time",
}
