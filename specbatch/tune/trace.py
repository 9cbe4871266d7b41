"""What is measured once of a sample of rows, for every candidate to be replayed from: the target's own continuation of
each prompt and, for each of its positions, what one wide and deep pass of the draft proposed there.

Position p is a round whose root is continuation token p: the drafts are guesses of tokens p + 1, p + 2, ... The last
token of a continuation is the root of no round, so nothing is drafted at its position.

Shape suffixes: P positions of a continuation, S draft steps, C = topk + (S - 1) * topk^2 candidates of the wide tree in
the order in which `NeuralProposer` makes them.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specbatch.tune.errors import TuningError

_VERSION = 1
# Arrays of a row that are stored end to end, and the type of each.
_DRAFTS: dict[str, type[np.generic]] = {
    "chain_PS": np.int32,
    "accept_PS": np.float32,
    "tokens_PC": np.int32,
    "scores_PC": np.float32,
    "parents_PC": np.int16,
}


def num_candidates(topk: int, depth: int) -> int:
    """C: nodes that drafting a tree scores."""
    return topk + (depth - 1) * topk**2


@dataclass(frozen=True, slots=True, eq=False)
class RowTrace:
    """One traced row. The arrays of drafts are None where the method or the width has none of them."""

    num_prompt: int
    tokens: NDArray[np.int32]  # the prompt's, then the P of the target's continuation
    chain_PS: NDArray[np.int32] | None = None  # target token ids of the greedy chain; -1: the draft was not run here
    # The wide tree. Step 0 has topk candidates by falling probability; each later step has, for each of the topk beam
    # nodes by falling cumulative score, its topk children by falling probability.
    tokens_PC: NDArray[np.int32] | None = None  # target token ids; -1: the draft was not run here
    scores_PC: NDArray[np.float32] | None = None  # cumulative log probability; a child's is at most its parent's
    parents_PC: NDArray[np.int16] | None = None  # index of the candidate it hangs on; -1: the root
    # For sampled text: with what probability a chain's draft of step s is kept if those before it were. With draft
    # probabilities q and target probabilities p, both behind the true tokens, that is min(1, q(y) / p(y)) of the true
    # token y: rejection sampling couples the text to the drafts in just that way (Leviathan et al. 2023).
    accept_PS: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1, self.tokens.shape
        assert 1 <= self.num_prompt <= len(self.tokens), (self.num_prompt, len(self.tokens))
        for name in _DRAFTS:
            array = getattr(self, name)
            assert array is None or (array.ndim == 2 and len(array) == self.num_output), (name, self.num_output)
        trees = {array is None for array in (self.tokens_PC, self.scores_PC, self.parents_PC)}
        assert len(trees) == 1, "a tree has tokens, scores and parents"

    @property
    def num_output(self) -> int:
        """P: tokens of the continuation."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Traced rows. All of them were drafted with the same width and depth.

    `topk` 0: no drafts were recorded, which is all that n-grams need; 1: chains only. `sampled`: the continuations were
    drawn at a positive temperature.
    """

    rows: tuple[RowTrace, ...] = ()
    topk: int = 0
    depth: int = 0  # S, draft steps
    sampled: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            self._check(row)

    def _check(self, row: RowTrace) -> None:
        for name in ("chain_PS", "accept_PS"):
            array = getattr(row, name)
            assert array is None or array.shape[1] == self.depth, (name, array.shape, self.depth)
        if row.tokens_PC is not None:
            assert row.tokens_PC.shape[1] == num_candidates(self.topk, self.depth), row.tokens_PC.shape

    def save(self, path: Path) -> None:
        """Write one .npz, whole or not at all: a trace that is saved after every few rows loses only those behind the
        last save."""
        arrays: dict[str, NDArray[np.generic]] = {
            "header": np.array([_VERSION, self.topk, self.depth, self.sampled, len(self.rows)], dtype=np.int64),
            "num_prompt": np.array([row.num_prompt for row in self.rows], dtype=np.int64),
            "num_tokens": np.array([len(row.tokens) for row in self.rows], dtype=np.int64),
            "tokens": _joined([row.tokens for row in self.rows], np.int32),
        }
        for name, dtype in _DRAFTS.items():
            present = [getattr(row, name) for row in self.rows]
            arrays[f"has_{name}"] = np.array([array is not None for array in present], dtype=np.bool_)
            arrays[name] = _joined([array.reshape(-1) for array in present if array is not None], dtype)
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
                return _from_arrays({name: arrays[name] for name in arrays.files})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, AssertionError) as error:
            raise TuningError(
                f"cannot read the trace {path}: {error or type(error).__name__}", hint="delete it and tune again"
            ) from error


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _from_arrays(arrays: dict[str, NDArray[np.generic]]) -> Trace:
    version, topk, depth, sampled, num_rows = (int(value) for value in arrays["header"])  # type: ignore[call-overload]
    if version != _VERSION:
        raise ValueError(f"it is of version {version}, not {_VERSION}")
    columns = {name: num_candidates(topk, depth) if name.endswith("_PC") else depth for name in _DRAFTS}
    places = dict.fromkeys(("tokens", *_DRAFTS), 0)
    rows = []

    def take(name: str, size: int) -> NDArray[np.generic]:
        first = places[name]
        places[name] += size
        assert places[name] <= len(arrays[name]), f"{name} is cut short"
        return arrays[name][first : first + size]

    for i in range(num_rows):
        num_prompt, num_tokens = int(arrays["num_prompt"][i]), int(arrays["num_tokens"][i])  # type: ignore[call-overload]
        tokens = take("tokens", num_tokens)
        num_output = num_tokens - num_prompt
        drafts = {
            name: take(name, num_output * columns[name]).reshape(num_output, columns[name])
            for name in _DRAFTS
            if arrays[f"has_{name}"][i]
        }
        rows.append(RowTrace(num_prompt, tokens, **drafts))  # type: ignore[arg-type]
    return Trace(tuple(rows), topk, depth, bool(sampled))
