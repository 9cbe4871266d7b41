"""Record of a sample of rows, from which every draft shape is replayed. It has the target's own continuation of each
prompt and, for each position of it, the drafts that one wide and deep pass proposed there.

Position p is a round whose root is continuation token p: the drafts are guesses of tokens p + 1, p + 2, ... The last
token of a continuation is the root of no round, so nothing is drafted at its position.

Shape suffixes: R rows, P positions of a continuation or of all of them, S draft steps, C = topk + (S - 1) * topk^2
candidates of the wide tree in the order in which they are drafted.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError

_VERSION = 2  # version of the file
# After the last token of a continuation: no draft is equal to it, not even one that was not made (-1).
PAST_END = -2


@dataclass(frozen=True, slots=True, eq=False)
class RowTrace:
    """One traced row. The arrays of drafts are None where nothing was drafted, and those of trees where chains alone
    were drafted."""

    num_prompt: int
    tokens: NDArray[np.int32]  # the prompt's, then the P of the target's continuation
    chain_PS: NDArray[np.int32] | None = None  # target token ids of the greedy chain; -1: the draft was not run here
    # The wide tree. Step 0 has topk candidates by falling probability; each later step has, for each of the topk beam
    # nodes by falling cumulative score, its topk children by falling probability.
    tokens_PC: NDArray[np.int32] | None = None  # target token ids; -1: the draft was not run here
    scores_PC: NDArray[np.float32] | None = None  # cumulative log probability; a child's is at most its parent's
    parents_PC: NDArray[np.int16] | None = None  # index of the candidate it hangs on; -1: the root

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1, self.tokens.shape
        assert 1 <= self.num_prompt <= len(self.tokens), (self.num_prompt, len(self.tokens))
        tree = (self.tokens_PC, self.scores_PC, self.parents_PC)
        for arrays in ((self.chain_PS,), tree):
            lengths = {None if array is None else len(array) for array in arrays}
            assert lengths in ({None}, {self.num_output}), (lengths, self.num_output)
        assert self.chain_PS is not None or self.tokens_PC is None, "trees without chains"

    @property
    def num_output(self) -> int:
        """P: tokens of the continuation."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Traced rows. All of them were drafted with the same width and depth.

    `topk` 0: no drafts were recorded, which is all that n-grams need. `topk` 1: chains were, and no trees. `sampled`:
    the continuations were drawn at a positive temperature.

    `drawn`: counts of a run of the same rows with the longest chain, which drew its drafts: the rounds, then for each
    step the rounds that accepted a draft of it. None: there was no such run.
    """

    rows: tuple[RowTrace, ...] = ()
    topk: int = 0
    depth: int = 0  # S, draft steps
    sampled: bool = False
    drawn: NDArray[np.int64] | None = None  # (1 + S,)

    def __post_init__(self) -> None:
        num_candidates = DraftShape(self.depth, self.topk, 2).num_candidates
        for row in self.rows:
            if row.chain_PS is not None:
                assert row.chain_PS.shape[1] == self.depth, (row.chain_PS.shape, self.depth)
                assert (row.tokens_PC is None) == (self.topk == 1), self.topk
            if row.tokens_PC is not None:
                assert row.tokens_PC.shape[1] == num_candidates, (row.tokens_PC.shape, num_candidates)

    def save(self, path: Path) -> None:
        """Write one .npz, whole or not at all: a trace that is saved after every few rows loses only those after the
        last save."""
        header = [_VERSION, self.topk, self.depth, self.sampled, len(self.rows)]
        arrays = {"header": np.array(header, dtype=np.int64)}
        for i, row in enumerate(self.rows):
            values = {field.name: getattr(row, field.name) for field in fields(row)}
            arrays |= {f"{name}_{i}": np.asarray(value) for name, value in values.items() if value is not None}
        if self.drawn is not None:
            arrays["drawn"] = self.drawn
        unfinished = path.with_name(path.name + ".part")
        try:
            with unfinished.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Trace:
        """Raises TuningError for a file that `save` did not write."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                version, topk, depth, sampled, num_rows = arrays["header"].tolist()
                if version != _VERSION:
                    raise ValueError(f"it is of version {version}, not {_VERSION}")
                names, stored, rows = [field.name for field in fields(RowTrace)], set(arrays.files), []
                for i in range(num_rows):
                    row = {name: arrays[f"{name}_{i}"] for name in names if f"{name}_{i}" in stored}
                    rows.append(RowTrace(int(row.pop("num_prompt")), **row))
                drawn = arrays["drawn"] if "drawn" in stored else None
                return Trace(tuple(rows), topk, depth, bool(sampled), drawn)
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, AssertionError) as error:
            raise TuningError(
                f"cannot read the trace {path}: {error or type(error).__name__}", hint="delete it and tune again"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Row r's positions are [first_R[r], first_R[r] + num_outputs_R[r])."""

    num_outputs_R: NDArray[np.int64]
    first_R: NDArray[np.int64]

    @staticmethod
    def of(trace: Trace) -> Positions:
        """Raises TuningError where no row has a round to replay: one whose continuation is longer than a token."""
        sizes_R = np.array([row.num_output for row in trace.rows], dtype=np.int64)
        if not (sizes_R > 1).any():
            raise TuningError(
                f"none of the {len(trace.rows)} traced rows has a continuation of two tokens: nothing to learn from",
                hint="trace more rows, or raise sampling.max_tokens",
            )
        return Positions(sizes_R, np.concatenate(([0], np.cumsum(sizes_R)[:-1])))

    @property
    def count(self) -> int:
        """P."""
        return int(self.num_outputs_R.sum())

    @property
    def num_committed_R(self) -> NDArray[np.int64]:
        """The tokens that rounds commit: all but the first, which the prefill drew."""
        return np.maximum(self.num_outputs_R - 1, 0)

    @property
    def last_R(self) -> NDArray[np.int64]:
        """The position at which a row has ended."""
        return self.first_R + self.num_committed_R


def true_tokens(trace: Trace, positions: Positions, depth: int) -> NDArray[np.int32]:
    """Return the tokens after each root, (P, S), with PAST_END after the row's last token."""
    true_PS = np.full((positions.count, depth), PAST_END, dtype=np.int32)
    for row, first in zip(trace.rows, positions.first_R.tolist(), strict=True):
        text = row.tokens[row.num_prompt :]
        for step in range(min(depth, len(text) - 1)):
            true_PS[first : first + len(text) - 1 - step, step] = text[step + 1 :]
    return true_PS


def leading(right_PS: NDArray[np.bool_]) -> NDArray[np.int16]:
    """Count the right drafts before the first wrong one, (P,)."""
    wrong_PS = ~right_PS
    first = wrong_PS.argmax(axis=1)
    return np.where(wrong_PS.any(axis=1), first, right_PS.shape[1]).astype(np.int16)


def stacked(trace: Trace, name: str, num_columns: int) -> NDArray[np.generic]:
    """Stack the arrays `name` of all rows, (P, num_columns). At least one row has drafts. A row without drafts, such as
    one that ended with its first token, gets -1."""
    parts = [getattr(row, name) for row in trace.rows]
    dtype = next(part.dtype for part in parts if part is not None)
    return np.concatenate(
        [
            np.full((row.num_output, num_columns), -1, dtype) if part is None else part
            for row, part in zip(trace.rows, parts, strict=True)
        ]
    )
