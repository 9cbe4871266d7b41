"""Launches under way, and what they decided: new tokens, log-probabilities and margins go to their requests."""

from __future__ import annotations

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch.batch import Output
from specbatch.counts import EngineStats
from specbatch.engine.logprobs import LogprobLayout, Logprobs, ReadLogprobs
from specbatch.engine.prefill.packing import ScoredToken
from specbatch.engine.round import NO_HOOK, Launched, RoundHook
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Download, Transfers
from specbatch.logprobs import TokenLogprob
from specbatch.types import FinishReason, Margin

_TOKENS = int(Output.TOKENS)  # a plain integer: those of an enumeration take several times as long to index with


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of prompts whose log-probabilities are under way."""

    tokens: Seq[ScoredToken]
    words: Download  # (K, X) int32
    layout: LogprobLayout

    @classmethod
    def start(cls, tokens: Seq[ScoredToken], logprobs: Logprobs, transfers: Transfers) -> Scored:
        words = torch.cat(logprobs.words(), dim=1)
        return cls(tokens, transfers.download(words), LogprobLayout.of(logprobs))


@dataclass(slots=True)
class Report:
    """A round or a prompt chunk that was launched, until the host has read what it decided."""

    sequences: Seq[Sequence | None]  # None: nothing to read
    max_path: int | None  # tokens that the round may commit; None: a prompt chunk
    # int32: (B, Z) of a round, (R, 2) of a prompt chunk; then the words of log-probabilities. None: not launched yet.
    rows: Download | None = None
    logprobs: LogprobLayout | None = None  # layout of the log-probabilities in `rows`
    scored: Scored | None = None
    rest: Callable[[], Launched] | None = None  # launches the rest of a round; None: all of it is launched
    hook: RoundHook = NO_HOOK

    @classmethod
    def of_round(
        cls, sequences: Seq[Sequence | None], max_path: int, rest: Callable[[], Launched], hook: RoundHook
    ) -> Report:
        """Make the report of a round that has been begun. Its requests have it in flight from now on."""
        for seq in sequences:
            if seq is not None:
                seq.num_in_flight += max_path
                seq.rounds_in_flight += 1
        return cls(sequences, max_path, rest=rest, hook=hook)

    @property
    def is_open(self) -> bool:
        """Return whether `complete` has something to launch."""
        return self.rest is not None

    def complete(self, transfers: Transfers) -> None:
        """Launch the rest of the round, and the copy of what it decides. If that fails, the requests are as they were
        before the round."""
        assert self.rest is not None
        assert self.max_path is not None
        rest, self.rest = self.rest, None
        try:
            launched = rest()
        except BaseException:
            for seq in self.sequences:
                if seq is not None:
                    seq.leave_round(self.max_path)
            raise
        self.rows, self.logprobs = transfers.download(launched.output_BZ), launched.logprobs

    def wait(self) -> NDArray[np.int32]:
        """Wait for what the launch decided; return `rows`."""
        assert self.rows is not None, "it was not completed"
        return self.rows.wait()


def read_report(
    report: Report, rows_BZ: NDArray[np.int32], eos: Set[int], stats: EngineStats
) -> list[tuple[Sequence, FinishReason]]:
    """Append what the rows of a report hold, and count it. Returns the requests that end, and why. A request that has
    left its automaton, and so is done on the device, is marked."""
    if report.scored is not None:
        _read_scores(report.scored)
    ended = []
    rows = rows_BZ[: len(report.sequences)]  # padding has words, too
    max_new = report.max_path or 1
    first_margin = 1 if report.max_path is None else _TOKENS + max_new
    after_margins = first_margin + max_new
    words_of, margins = rows[:, :first_margin].tolist(), rows[:, first_margin:after_margins].view(np.float32)
    lowest = margins.min(axis=1).tolist()
    records = None if report.logprobs is None else _Records(report.logprobs.read(rows[:, after_margins:]))
    for row, (seq, words) in enumerate(zip(report.sequences, words_of, strict=True)):
        if seq is None or seq.is_finished:
            continue
        before = len(seq.tokens)
        if report.max_path is None:
            reason = _read_prompt(seq, words, eos)
        else:
            reason = _read_round(seq, words, report.max_path, eos, stats)
        count = len(seq.tokens) - before
        stats.generated_tokens += count
        if count and lowest[row] < seq.margin.value:  # hardly ever, after a request's first rounds
            seq.margin = _lower_margin(seq.margin, margins[row, :count], before - seq.num_prompt)
        if records is not None and (num_top := seq.request.params.logprobs) is not None:
            of_row = records[num_top][row]
            seq.logprobs += of_row if count == max_new else of_row[: len(of_row) // max_new * count]
        if reason is not None:
            ended.append((seq, reason))
    return ended


def _read_prompt(seq: Sequence, report: list[int], eos: Set[int]) -> FinishReason | None:
    seq.rounds_in_flight -= 1
    return seq.append(report, eos)


def _read_round(
    seq: Sequence, report: list[int], max_path: int, eos: Set[int], stats: EngineStats
) -> FinishReason | None:
    count, drafted, depth, broken, *_ = report[:_TOKENS]  # The order is that of `Output`.
    if not count and seq.automaton is not None:
        seq.leave_round(max_path)
        seq.leaves_automaton = True
        return None
    assert count >= 1, f"request {seq.request.request_id} ended on the device only"
    seq.rounds_in_flight -= 1
    seq.num_in_flight -= max_path
    tokens, num_accepted = report[_TOKENS : _TOKENS + count], count - 1
    if broken:
        stats.broken_drafts += broken
    if seq.grammar is not None and seq.grammar.failure is not None:
        seq.counts.record(drafted, depth, 0, 0)
        return FinishReason.ERROR
    seq.num_computed_tokens += count
    before = len(seq.tokens)
    reason = seq.append(tokens, eos)
    committed = len(seq.tokens) - before
    # A token that comes after a stop was accepted by the device only.
    seq.counts.record(drafted, depth, num_accepted if num_accepted <= committed else committed, committed)
    return reason


def _lower_margin(margin: Margin, of_new: np.ndarray, position: int) -> Margin:
    """The lower one of a request's margin and those of its new tokens, the first of which has the index `position`."""
    i = int(of_new.argmin())
    return min(margin, Margin(float(of_new[i]), position + i))


def _read_scores(scored: Scored) -> None:
    read = scored.layout.read(scored.words.wait())
    values, top_ids = read.values_BMK[:, 0].tolist(), read.top_ids_BMK[:, 0].tolist()
    for one, (own, *others), ids in zip(scored.tokens, values, top_ids, strict=True):
        k = one.seq.request.params.prompt_logprobs or 0
        top = tuple(zip(ids[:k], others[:k], strict=True))
        one.seq.prompt_logprobs[one.position] = TokenLogprob(one.seq.tokens[one.position], own, top)


class _Records(dict[int, list[bytes]]):
    """The records of all rows, by number of likely tokens. They are made at once, because numpy takes about as long for
    one row as for many."""

    def __init__(self, logprobs: ReadLogprobs) -> None:
        super().__init__()
        self._logprobs = logprobs

    def __missing__(self, num_top: int) -> list[bytes]:
        records = self[num_top] = self._logprobs.records(num_top)
        return records
