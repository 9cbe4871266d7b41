"""Checks of results that must have equal bits: `kernels/card_checks.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specbatch.errors import ModelError
from specbatch.kernels.card_checks import CardChecks, Pair


def test_a_size_is_checked_once_and_a_difference_is_an_error() -> None:
    checks, ran, one = CardChecks(), list[str](), torch.ones(2)

    def equal() -> Iterator[Pair]:
        ran.append("equal")
        yield Pair(one, one.clone(), "never")

    def other() -> Iterator[Pair]:
        ran.append("other")
        yield Pair(one, one.clone(), "never")
        yield Pair(one, 2 * one, "products differ")

    checks.add((1, 2), equal)
    checks.add((1, 2), other)
    checks.run()
    assert ran == ["equal"]
    checks.run()
    assert ran == ["equal"], "it is forgotten"
    checks.add((1, 2), other)
    checks.launch()
    assert ran == ["equal", "other"], "nothing is compared"
    with pytest.raises(ModelError, match="products differ: this GPU cannot run deterministically"):
        checks.run()
