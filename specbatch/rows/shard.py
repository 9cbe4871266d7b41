"""One of n parts of an input, for schedulers that start many processes: Slurm arrays, Kubernetes jobs.

The rows are dealt out in turn, so that each shard has its share of every part of the input. A row keeps its index, on
which its seed and its result line depend. So its result is the same in any shard.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from specbatch.errors import InputError
from specbatch.files.result_files import RESULT_SUFFIXES, result_suffix
from specbatch.rows.sources import RawRow, Source

_TEXT = re.compile(r"([0-9]{1,9})/([0-9]{1,9})", re.ASCII)
_SUFFIX = "|".join(map(re.escape, RESULT_SUFFIXES))
_NAME = re.compile(rf"(.+)\.[0-9]+-of-[0-9]+({_SUFFIX})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows whose index leaves the remainder `number` when it is divided by `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse a shard such as `3/16`. Raises InputError."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise InputError(f"--shard {text[:40]!r} is not a shard", "--shard 0/4 is the first of four")
        number, count = int(found[1]), int(found[2])
        if number >= count:
            last = f"the last of {count} is {count - 1}/{count}" if count else "there is at least one shard: 0/1"
            raise InputError(f"--shard {text} does not exist", f"shards are numbered from 0: {last}")
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def __contains__(self, row: int) -> bool:
        """Return whether the row with this index is in the shard."""
        return row % self.count == self.number

    def path(self, whole: Path) -> Path:
        """data.results.jsonl -> data.results.03-of-16.jsonl. The number is padded with zeros, so that names are listed
        in the order of the shards."""
        number = str(self.number).zfill(len(str(self.count)))
        suffix = result_suffix(whole)
        return whole.with_name(f"{whole.name.removesuffix(suffix)}.{number}-of-{self.count}{suffix}")


def whole_path(path: Path) -> Path | None:
    """The argument of `Shard.path`; None if the name is not that of a shard."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else path.with_name(f"{found[1]}{found[2]}")


def part_of(source: Source, limit: int | None, shard: Shard | None) -> Source:
    """The first `limit` rows, and of these the shard. None: all."""
    if limit is None and shard is None:
        return source
    total, reopen = source.total, source.reopen
    if total is not None:
        total = total if limit is None else min(total, limit)
        total = total if shard is None else len(range(shard.number, total, shard.count))

    def rows() -> Iterator[RawRow]:
        first = itertools.islice(source.rows(), limit)
        return first if shard is None else (row for row in first if row.index in shard)

    return replace(
        source,
        total=total,
        rows=rows,
        stride=1 if shard is None else shard.count,
        reopen=None if reopen is None else lambda: part_of(reopen(), limit, shard),
    )
