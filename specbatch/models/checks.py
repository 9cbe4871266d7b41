"""Values that come from a model's files: each is checked for type and range before anything is computed from it.

`name` is what the error calls the value, such as "config.json: rope_theta".
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from specbatch.errors import ModelError

MAX_SIZE = 2**31 - 1  # limit of everything that is counted: positions and token ids have 32 bits on the device
MAX_LAYERS = 1_000


def whole_number(value: object, name: str, *, at_least: int = 1, at_most: int = MAX_SIZE) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise ModelError(f"{name} must be a whole number from {at_least} to {at_most}, not {shown(value)}")
    return value


def number(value: object, name: str) -> float:
    """A finite number."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        pass
    raise ModelError(f"{name} must be a finite number, not {shown(value)}")


def norm_eps(value: object, name: str) -> float:
    """Check the number that a norm adds to the mean of squares before it divides by the root; return it."""
    eps = number(value, name)
    if not 0 < eps < 1:
        raise ModelError(f"{name} is {eps:g}; it must be above 0 and below 1")
    return eps


def flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ModelError(f"{name} must be true or false, not {shown(value)}")
    return value


def mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{name} must be a JSON object, not {shown(value)}")
    return value


def is_one_of(value: object, values: Sequence[object]) -> bool:
    """True for an equal value; 0 and false are not equal here, nor 1 and true."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def shown(value: object) -> str:
    """The value as text, cut where it is long or deep."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short.repr(value)


def first_names(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and the number of the others. Control characters of a file's names are escaped."""
    rest = len(names) - limit
    return ", ".join(name if name.isprintable() else shown(name) for name in names[:limit]) + (
        f" and {rest} more" if rest > 0 else ""
    )


def tensor_problems(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Describe how the tensors of a checkpoint differ from the expected ones; empty if they do not."""
    missing = [name for name in expected if name not in found]
    unknown = sorted(name for name in found if name not in expected)
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = {"missing": missing, "of the wrong shape": wrong, "unknown": unknown}
    return "; ".join(
        f"{len(names)} tensors are {problem}: {first_names(names)}" for problem, names in problems.items() if names
    )
