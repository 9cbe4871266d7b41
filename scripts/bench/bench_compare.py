"""Figures of other engines next to ours: JSON files with one engine and method each.

    {"engine": "vllm", "k": 3, "acc": 2.5, "ready_s": 57.0, "rows": [{"concurrency": 1, "tok_s": 411.0, ...}, ...]}
    {"engine": "vllm", "k": 0, "acc": 1.0, "ready_s": 43.0, "jobs": {"mixed-1k-512": {"wall_s": 35.2, ...}, ...}}

`k` is the number of draft tokens of a chain (0: plain decoding), `acc` the simulated tokens per round. One file may
hold both `rows` (by concurrency, tok/s) and `jobs` (by name, wall seconds).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One engine's figures for one method."""

    engine: str
    num_drafts: int  # 0: plain decoding
    acceptance: float
    tokens_per_second: dict[int, float]  # the key is the concurrency
    job_seconds: dict[str, float]  # the key is the name of the file job

    def same_method(self, num_steps: int, topk: int, acceptance: float | None) -> bool:
        if self.num_drafts == 0:
            return num_steps == 0
        return topk == 1 and num_steps == self.num_drafts and acceptance == self.acceptance


def read_peer(path: Path) -> Peer:
    """Read the figures of an engine. It raises ValueError, with the reason, for a file that is missing or holds
    something else."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Peer(
            raw["engine"],
            raw["k"],
            float(raw["acc"]),
            {row["concurrency"]: row["tok_s"] for row in raw.get("rows", [])},
            {name: job["wall_s"] for name, job in raw.get("jobs", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no figures of another engine: {type(error).__name__}: {error}") from error


def ratios(peers: Sequence[Peer], workload: str, concurrency: int, tok_s: float, wall_s: float) -> dict[str, float]:
    """Return how many times faster we are than each engine: in tok/s for `uniform`, in wall seconds for a file job.
    `peers`: the figures of the same method. If an engine has several files, its best figure counts."""
    found: dict[str, float] = {}
    for peer in peers:
        ratio = None
        if workload == "uniform" and concurrency in peer.tokens_per_second:
            ratio = tok_s / peer.tokens_per_second[concurrency]
        elif workload in peer.job_seconds:
            ratio = peer.job_seconds[workload] / wall_s
        if ratio is not None:
            found[peer.engine] = round(min(ratio, found.get(peer.engine, ratio)), 3)
    return found
