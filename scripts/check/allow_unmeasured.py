"""Runs a script or a module with what `resolve` refuses on CUDA until it is measured: FP8, engine.tensor_parallel,
and the `auto` of engine.two_batch_overlap. It can also be imported.

python scripts/check/allow_unmeasured.py scripts/bench/bench.py --set model.quantization=fp8 ...
python scripts/check/allow_unmeasured.py -m specbatch generate ... --set model.quantization=fp8
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from specbatch.engine import resolve_lanes, resolve_model, resolve_ranks


def allow() -> None:
    for module in (resolve_lanes, resolve_model, resolve_ranks):
        module.MEASURED_ON_CUDA = True


def main() -> None:
    allow()
    name, is_module = (sys.argv[2], True) if sys.argv[1] == "-m" else (sys.argv[1], False)
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
