"""The costs of shared reading, against what an H200 took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.cache.cascade_costs import CascadeCosts

EVIDENCE = Path(__file__).parents[2] / "docs/bench/2026-11-23-h200-cascade.json"
COSTS = CascadeCosts(32, 128, 4096)
FIXED_US = 12.6


def measured() -> list[tuple[list[int], list[int], dict[str, Any]]]:
    """Sizes of groups, their tokens, and the line."""
    lines = json.loads(EVIDENCE.read_text(encoding="utf-8"))["lines"]
    return [
        ([line["batch"] // line["groups"]] * line["groups"], [line["shared"] // 64 * 64] * line["groups"], line)
        for line in lines
    ]


def test_the_fit_is_as_good_as_it_says() -> None:
    errors = [
        abs(
            COSTS.gains_us(np.array(sizes), np.array(tokens), line["queries"]).sum()
            - FIXED_US
            - (line["now_us"] - line["cascade_us"])
        )
        / line["now_us"]
        for sizes, tokens, line in measured()
    ]
    assert len(errors) == 28
    assert np.mean(errors) < 0.06
    assert max(errors) < 0.22


def test_what_loses_is_not_chosen_and_what_gains_is() -> None:
    for sizes, tokens, line in measured():
        chosen = COSTS.chosen(sizes, tokens, line["queries"])
        assert chosen.all() == chosen.any() == (line["gain"] > 1), line


def test_groups_are_judged_one_by_one() -> None:
    """A small group is left out next to one that pays; two that gain less than a launch costs are left out, too."""
    assert COSTS.chosen([256, 2], [1024, 64], 4).tolist() == [True, False]
    assert COSTS.chosen([8, 8], [256, 256], 1).tolist() == [False, False]
