"""Names of earlier versions and their successors: options, values of options, options of eval tasks, statistics.

An old option or value is an error. An old statistic, in a file that an earlier version wrote, is a note.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbatch.errors import ConfigError


@dataclass(frozen=True)
class Retired:
    """A name that is no longer read."""

    successor: str | None = None  # the new name; None: there is none
    hint: str | None = None  # what to do
    default: Any = None  # of an option: the value that all jobs have now


# By full path; a retired value as path=value. [] is any element of a list.
OPTIONS: Mapping[str, Retired] = {
    "engine.tuned_products": Retired(hint="leave it out: it saved 1% of a job's time", default=False),
}
TASK_OPTIONS: Mapping[str, Retired] = {}
# Of stats.json and results.json, by full path. The value of an old name is read under the new one.
STATISTICS: Mapping[str, Retired] = {}


def retired_error(name: str, entry: Retired) -> ConfigError:
    """The error for the use of `name`: a path, or path=value."""
    if entry.successor is None:
        return ConfigError(f"{name} was removed", entry.hint)
    return ConfigError(f"{name} is now {entry.successor}", entry.hint or f"write {entry.successor}")


def current_statistics(
    found: Mapping[str, Any], table: Mapping[str, Retired] = STATISTICS
) -> tuple[dict[str, Any], list[str]]:
    """Statistics that an earlier version can have written, under today's names, and a note for each old name."""
    tree = copy.deepcopy(dict(found))
    notes = []
    for path, entry in table.items():
        *sections, name = path.split(".")
        node = _section(tree, sections)
        if node is None or name not in node:
            continue
        value = node.pop(name)
        if entry.successor is None:
            notes.append(f"{path}, a statistic of an earlier version, is not read" + _because(entry))
            continue
        *sections, name = entry.successor.split(".")
        target = _section(tree, sections, make=True)
        if target is not None:
            target.setdefault(name, value)
        notes.append(f"{path}, a statistic of an earlier version, is now {entry.successor}" + _because(entry))
    return tree, notes


def _section(tree: dict[str, Any], names: list[str], make: bool = False) -> dict[str, Any] | None:
    node: Any = tree
    for name in names:
        node = node.setdefault(name, {}) if make else node.get(name)
        if not isinstance(node, dict):
            return None
    return node


def _because(entry: Retired) -> str:
    return f": {entry.hint}" if entry.hint else ""
