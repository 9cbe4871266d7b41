"""Jobs in shards, and rows of all kinds, for tests."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specbatch.errors import InputError
from specbatch.job.merge import MergeOptions, merge_files
from specbatch.rows.shard import Shard
from tests.files.test_jsonl import BAD_LINES, BAD_ROWS
from tests.job.test_generate import Run
from tests.rows.test_openai_batch import BAD_REQUESTS


class Shards(Run):
    """A job in shards, in a folder of its own, and `merge` of what is there."""

    def compute(self, count: int, *numbers: int, **options: Any) -> None:
        for number in numbers or range(count):
            self(shard=Shard(number, count), **options)

    def paths(self) -> list[Path]:
        """As `d.results.*.jsonl` of a shell."""
        return sorted(self.folder.glob("d.results.*.jsonl"))

    def merge(self, *paths: Path, output: Path | None = None, overwrite: bool = False) -> int:
        console = Console(file=io.StringIO(), width=200)
        try:
            return merge_files(MergeOptions(paths or self.paths(), output, overwrite), console)
        finally:
            self.log = console.file.getvalue()  # type: ignore[attr-defined]

    def refused(self, *paths: Path, **options: Any) -> str:
        """The error of a merge, with its hint. It changes no file."""
        before = {path: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}
        with pytest.raises(InputError) as caught:
            self.merge(*paths, **options)
        assert {path: path.read_bytes() for path in self.folder.iterdir() if path.is_file()} == before
        return f"{caught.value.message}\n{caught.value.hint}".replace(f"{self.folder}/", "")

    def stats_of(self, number: int, count: int) -> dict[str, Any]:
        return json.loads((self.folder / f"d.results.{number}-of-{count}.stats.json").read_text())

    def edit_stats(self, number: int, count: int, edit: Callable[[dict[str, Any]], object]) -> None:
        report = self.stats_of(number, count)
        edit(report)
        (self.folder / f"d.results.{number}-of-{count}.stats.json").write_text(json.dumps(report))


def native(count: int) -> list[Any]:
    ids: list[Any] = [None, 7, -1.5e3, 'quoted "x" \\', "batch_req_000000000007", 'x", "index": 3, "', "\ud800", True]
    good = [
        {"prompt": f"p{i}", "id": ids[i % len(ids)], "n": 1 + i % 2, "logprobs": i % 3, "k": i} for i in range(count)
    ]
    bad = [line for line, _ in BAD_LINES] + [row for row, _ in BAD_ROWS]
    rows = good + bad + [b""] * 30
    random.Random(5).shuffle(rows)
    return rows


def openai(count: int) -> list[Any]:
    url = "/v1/completions"
    body = {"method": "POST", "url": url, "body": {"prompt": "p", "n": 2, "max_tokens": 9}}
    rows = (
        [{"custom_id": f'c", "index": {i}', **body} for i in range(count)]
        + [row for row, _ in BAD_REQUESTS]
        + [b""] * 9
    )
    random.Random(5).shuffle(rows)
    return rows
