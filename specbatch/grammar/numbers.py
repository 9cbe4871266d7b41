"""Regexes of numbers within bounds, as llguidance writes them (`parser/src/json/numeric.rs`, MIT licence)."""

from __future__ import annotations

from specbatch.grammar.characters import NotRegularError

INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"


def _any_of(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _empty() -> NotRegularError:
    return NotRegularError("no number is within its bounds")


def integers(low: int | None, high: int | None) -> str:
    """Return the regex of the integers from `low` to `high`; None: there is no bound."""
    if low is None and high is None:
        return INTEGER
    if low is None:
        assert high is not None
        if high >= 0:
            return _any_of([integers(0, high), integers(None, -1)])
        return f"-{integers(-high, None)}"
    if high is None:
        if low < 0:
            return _any_of([integers(low, -1), integers(0, None)])
        count = len(str(low))
        return _any_of([integers(low, int("9" * count)), f"[1-9][0-9]{{{count},}}"])
    if low > high:
        raise _empty()
    if low < 0:
        if high < 0:
            return f"(?:-{integers(-high, -low)})"
        return f"(?:-{integers(0, -low)}|{integers(0, high)})"
    return _same_sign(low, high)


def _same_sign(low: int, high: int) -> str:
    first, last = str(low), str(high)
    if len(first) != len(last):
        middle = 10 ** len(first) - 1
        return _any_of([integers(low, middle), integers(middle + 1, high)])
    if low == high:
        return f"(?:{first})"
    if first[:-1] == last[:-1]:
        return f"(?:{first[:-1]}[{first[-1]}-{last[-1]}])"
    above, below, parts = int(first[:-1] or 0), int(last[:-1] or 0), []
    if first[-1] != "0":
        above += 1
        parts.append(f"{first[:-1]}[{first[-1]}-9]")
    if last[-1] != "9":
        below -= 1
        parts.append(f"{last[:-1]}[0-{last[-1]}]")
    if above <= below:
        parts.append(f"{integers(above, below)}[0-9]")
    return _any_of(parts)


def _from(digits: str, inclusive: bool) -> str:
    """Return the regex of the digits after the point from these on."""
    if not digits:
        return "[0-9]*" if inclusive else "[0-9]*[1-9]"
    if inclusive and len(digits) == 1:
        return f"[{digits}-9][0-9]*"
    parts = [digits[0] + _from(digits[1:], inclusive)]
    if digits[0] < "9":
        parts.append(f"[{int(digits[0]) + 1}-9][0-9]*")
    return _any_of(parts)


def _up_to(digits: str, inclusive: bool) -> str:
    if not digits:
        if not inclusive:
            raise _empty()
        return ""
    first = int(digits[0])
    if not inclusive and len(digits) == 1:
        if first == 0:
            raise _empty()
        return f"[0-{first - 1}][0-9]*"
    parts = [digits[0] + _up_to(digits[1:], inclusive)]
    if first > 0:
        parts.append(f"[0-{first - 1}][0-9]*")
    return _any_of(parts)


def _between(low: str, high: str, has_low: bool, has_high: bool) -> str:
    if low == high:
        if not (has_low and has_high):
            raise _empty()
        return low
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _between(low[1:], high[1:], has_low, has_high)
    if first > last:
        raise _empty()
    parts = [low[0] + _from(low[1:].rstrip("0"), has_low)]
    if first + 1 < last:
        parts.append(f"[{first + 1}-{last - 1}][0-9]*")
    rest = high[1:].rstrip("0")
    if rest or has_high:
        parts.append(high[0] + _up_to(rest, has_high))
    return _any_of(parts)


def _text(value: float) -> str:
    """Return a number as Rust writes it: without an exponent, and whole numbers without a point."""
    text = repr(float(value))
    if "e" in text or "n" in text:
        raise NotRegularError("its bounds have exponents")
    return text.removesuffix(".0")


def decimals(low: float | None, high: float | None, has_low: bool, has_high: bool) -> str:
    """Return the regex of the numbers between `low` and `high`. `has_low`, `has_high`: the bounds are among them."""
    if low is None and high is None:
        return NUMBER
    if low is None:
        assert high is not None
        if high == 0:
            below = f"-{decimals(0.0, None, False, False)}"
            return _any_of([below, "0"]) if has_high else below
        if high > 0:
            return _any_of([f"-{decimals(0.0, None, False, False)}", decimals(0.0, high, True, has_high)])
        return f"-{decimals(-high, None, has_high, False)}"
    if high is None:
        if low < 0:
            return _any_of([decimals(low, 0.0, has_low, False), decimals(0.0, None, True, False)])
        count = len(str(int(low)))
        return _any_of([decimals(low, 10.0**count, has_low, False), rf"[1-9][0-9]{{{count},}}(?:\.[0-9]+)?"])
    if low > high:
        raise _empty()
    if low == high:
        if not (has_low and has_high):
            raise _empty()
        return f"(?:{_text(low)})".replace(".", r"\.")
    if low < 0:
        if high < 0:
            return f"(?:-{decimals(-high, -low, has_high, has_low)})"
        parts = [f"(?:-{decimals(0.0, -low, False, has_low)})"]
        if high > 0 or has_high:
            parts.append(decimals(0.0, high, True, has_high))
        return _any_of(parts)
    return _positive(low, high, has_low, has_high)


def _positive(low: float, high: float, has_low: bool, has_high: bool) -> str:
    (whole, _, digits), (last, _, end) = _text(low).partition("."), _text(high).partition(".")
    first, past = int(whole), int(last)
    if first == past:
        width = max(len(digits), len(end))
        digits, end = digits.ljust(width, "0"), end.ljust(width, "0")
        part = rf"\.{_between(digits, end, has_low, has_high)}"
        return f"(?:{first}(?:{part})?)" if int(digits or 0) == 0 else f"(?:{first}{part})"
    parts = []
    if digits or not has_low:
        parts.append(rf"(?:{first}\.{_from(digits, has_low)})")
        first += 1
    if past > first:
        parts.append(rf"(?:{integers(first, past - 1)}(?:\.[0-9]+)?)")
    if end:
        parts.append(rf"(?:{past}(?:\.{_up_to(end, has_high)})?)")
    elif has_high:
        parts.append(rf"{past}(?:\.0+)?")
    return _any_of(parts)
