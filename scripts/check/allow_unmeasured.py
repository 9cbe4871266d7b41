"""Runs a script or a module with one thing that is off on CUDA until it is measured; can be imported.

python scripts/check/allow_unmeasured.py lanes -m specbatch generate ...

`lanes`: the `auto` of engine.two_batch_overlap, the default of that option: it changes every run.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from specbatch.engine import resolve_lanes

REFUSED = {"lanes": resolve_lanes}


def allow(what: str) -> None:
    REFUSED[what].MEASURED_ON_CUDA = True


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in REFUSED:
        sys.exit(__doc__)
    allow(sys.argv[1])
    name, is_module = (sys.argv[3], True) if sys.argv[2] == "-m" else (sys.argv[2], False)
    sys.argv = sys.argv[3:] if is_module else sys.argv[2:]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
