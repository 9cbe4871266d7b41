"""Names of linear layers, briefly: for notes. A name is such as "model.layers.0.mlp.up_proj"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from specbatch.models.checks import first_names

_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


def chosen_layers(chosen: Sequence[str], names: Sequence[str]) -> str:
    """Describe which of the layers `names` are chosen: list those that are chosen or those that are not, whichever is
    shorter."""
    if len(chosen) == len(names) or not chosen:
        return "all" if chosen else "none"
    taken = set(chosen)
    left_out = [name for name in names if name not in taken]
    if len(chosen) < len(left_out):
        return f"only {_brief(chosen, names)}"
    return f"all but {_brief(left_out, names)}"


def _brief(some: Sequence[str], names: Sequence[str]) -> str:
    """Layers of the same kinds as one name, with the numbers of the decoder's layers: "*" for all of them."""
    kinds, all_kinds = _numbers_of_kinds(some), _numbers_of_kinds(names)
    whole = set.intersection(*(set(kinds.get(kind, ())) for kind in all_kinds)) if all_kinds else set()
    parts = [name for name in some if not _NAME.fullmatch(name)]
    if whole:
        parts.append(f"model.layers.{_runs(whole)}")
    for kind, numbers in kinds.items():
        if rest := set(numbers) - whole:
            parts.append(f"model.layers.{'*' if numbers == all_kinds[kind] else _runs(rest)}.{kind}")
    return first_names(parts)


def _numbers_of_kinds(names: Iterable[str]) -> dict[str, list[int]]:
    """Return for each kind, such as "mlp.up_proj", the numbers of the decoder's layers that have it."""
    kinds: dict[str, list[int]] = {}
    for match in filter(None, map(_NAME.fullmatch, names)):
        kinds.setdefault(match[2], []).append(int(match[1]))
    return kinds


def _runs(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: 0, 1, 2, 3 and 7 are "0-3+7"."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        first, *others = (number for _, number in run)
        runs.append(f"{first}-{others[-1]}" if others else str(first))
    return "+".join(runs)
