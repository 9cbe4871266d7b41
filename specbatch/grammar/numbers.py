"""Regexes of the JSON numbers within bounds: the texts that llguidance accepts.

A text is a whole part, and perhaps a point and digits. Texts with an exponent have no bounds. llguidance accepts some
numbers in fewer spellings than JSON has: 0.2 and not 0.20 for a bound of 0.2, for example. Each rule below that does
not follow from arithmetic is one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from specbatch.grammar.characters import NotRegularError

INTEGER = "-?(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?"
NUMBER = rf"{INTEGER}{_FRACTION}(?:[eE][+-]?[0-9]+)?"


class Bound(NamedTuple):
    """A bound of numbers of one sign, without the sign. `is_in`: it is itself allowed."""

    value: float
    is_in: bool


def integers(low: int | None, high: int | None) -> str:
    """Return the regex of the integers from `low` to `high`; None: there is no bound. -0 is one of them only between a
    negative bound and another one. It raises NotRegularError if there are none."""
    if low is None and high is None:
        return INTEGER
    signs = []
    if low is None or low < 0:
        least = -high if high is not None and high < 0 else int(low is None or high is None)
        signs.append("-" + _naturals(least, None if low is None else -low))
    if high is None or high >= 0:
        signs.append(_naturals(max(low or 0, 0), high))
    return _union(signs)


def decimals(low: float | None, high: float | None, has_low: bool, has_high: bool) -> str:
    """Return the regex of the numbers between `low` and `high`. `has_low`, `has_high`: the bounds are allowed. It
    raises NotRegularError if there are none, or if a bound has an exponent."""
    if low is None and high is None:
        return NUMBER
    signs = []
    if low is None or low < 0:
        least = Bound(-high, has_high) if high is not None and high < 0 else Bound(0.0, False)
        signs.append("-" + _positive(least, None if low is None else Bound(-low, has_low)))
    if high is None or high > 0 or (high == 0 and has_high):
        least = Bound(0.0, True) if low is None or low < 0 else Bound(low, has_low)
        signs.append(_positive(least, None if high is None else Bound(high, has_high)))
    return _union(signs)


def _union(parts: Iterable[str]) -> str:
    """Return the regex of any of these. It raises NotRegularError if there are none."""
    if not (found := list(parts)):
        raise NotRegularError("no number is within its bounds")
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _digits(first: int, last: int) -> list[str]:
    """Return the class of the digits from `first` to `last`, if there are any."""
    return [f"[{first}-{last}]"] if first <= last else []


def _naturals(low: int, high: int | None) -> str:
    """Return the regex of the natural numbers from `low` to `high`: those of each length."""
    parts, length = [], len(str(low))
    while high is None or length <= len(str(high)):
        least, most = max(low, 10 ** (length - 1) if length > 1 else 0), 10**length - 1
        parts += _of_one_length(str(least), str(most if high is None else min(most, high)))
        length += 1
        if high is None:
            parts.append(f"[1-9][0-9]{{{length - 1},}}")
            break
    return _union(parts)


def _of_one_length(low: str, high: str) -> list[str]:
    """Return regexes of the numbers from `low` to `high`, which have the same number of digits: first those that begin
    as `low` does, then those between, then those that begin as `high` does."""
    if low > high:
        return []
    if len(low) == 1 or (not low.strip("0") and not high.strip("9")):
        return [f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{len(low) - 1}}}" if len(low) > 1 else "")]
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return [low[0] + _union(_of_one_length(low[1:], high[1:]))]
    return [
        low[0] + _union(_of_one_length(low[1:], "9" * rest)),
        *(middle + f"[0-9]{{{rest}}}" for middle in _digits(first + 1, last - 1)),
        high[0] + _union(_of_one_length("0" * rest, high[1:])),
    ]


def _parts(value: float) -> tuple[int, str]:
    """Return the whole part of a number, and the digits after its point, without zeros at the end."""
    text = repr(float(value))
    if "e" in text or "n" in text:
        raise NotRegularError("its bounds have exponents")
    whole, _, digits = text.partition(".")
    return int(whole), digits.rstrip("0")


def _at_least(digits: str, is_in: bool) -> list[str]:
    """Return regexes of the digits after a point that make no smaller number than `digits`. They go beyond at some
    digit, or begin with all of them. If these are not allowed, what follows ends with another digit than 0."""
    beyond = [
        f"{digits[:place]}{larger}[0-9]*" for place, digit in enumerate(digits) for larger in _digits(int(digit) + 1, 9)
    ]
    return [*beyond, digits + ("[0-9]*" if is_in else "[0-9]*[1-9]")]


def _at_most(digits: str, is_in: bool) -> list[str]:
    """Return regexes of the digits after a point that make no larger number than `digits`: they stay below at some
    digit, or are these, without further zeros."""
    below = [
        f"{digits[:place]}{smaller}[0-9]*"
        for place, digit in enumerate(digits)
        for smaller in _digits(0, int(digit) - 1)
    ]
    return [*below, digits] if is_in else below


def _between(low: str, high: str, has_low: bool, has_high: bool) -> str:
    """Return the regex of the digits after a point between `low` and `high`, which have the same number of digits."""
    place = next((i for i, (one, other) in enumerate(zip(low, high, strict=True)) if one != other), None)
    if place is None:
        return _union([low] if has_low and has_high else [])
    first, last, rest = int(low[place]), int(high[place]), high[place + 1 :].rstrip("0")
    parts = [f"{first}{_union(_at_least(low[place + 1 :].rstrip('0'), has_low))}"]
    parts += [middle + "[0-9]*" for middle in _digits(first + 1, last - 1)]
    if rest or has_high:
        parts.append(f"{last}{_union(_at_most(rest, has_high))}")
    return low[:place] + _union(parts)


def _positive(low: Bound, high: Bound | None) -> str:
    """Return the regex of the numbers without a sign between two bounds."""
    whole, digits = _parts(low.value)
    if high is None:  # all whole parts of as many digits, and all longer ones
        count = len(str(whole))
        return _union([_positive(low, Bound(10.0**count, False)), f"[1-9][0-9]{{{count},}}{_FRACTION}"])
    last, end = _parts(high.value)
    if (low.value, last, end) == (high.value, whole, digits):
        text = rf"{whole}\.{digits}" if digits else str(whole)
        return _union([text] if low.is_in and high.is_in else [])
    if low.value > high.value:
        return _union([])
    if whole == last:
        width = max(len(digits), len(end))
        fraction = rf"\.{_between(digits.ljust(width, '0'), end.ljust(width, '0'), low.is_in, high.is_in)}"
        # The whole part alone is accepted even if it is a bound that is not allowed.
        return f"{whole}{fraction}" if digits else f"{whole}(?:{fraction})?"
    parts = []
    if digits or not low.is_in:
        parts.append(rf"{whole}\.{_union(_at_least(digits, low.is_in))}")
        whole += 1
    if whole < last:
        parts.append(integers(whole, last - 1) + _FRACTION)
    if end:
        parts.append(rf"{last}(?:\.{_union(_at_most(end, high.is_in))})?")
    elif high.is_in:
        parts.append(rf"{last}(?:\.0+)?")
    return _union(parts)
