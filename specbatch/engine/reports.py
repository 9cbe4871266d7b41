"""What a launch decided, once it is on the host: new tokens, log-probabilities and margins go to their requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from specbatch.batch import Output
from specbatch.counts import EngineStats
from specbatch.engine.append import append_tokens
from specbatch.engine.logprobs import LogprobDownload, ReadLogprobs
from specbatch.engine.prompts import ScoredToken
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Download
from specbatch.types import FinishReason, Margin, TokenLogprob

T = TypeVar("T")
# Plain integers: those of an enumeration take several times as long to index with.
_NUM_NEW, _NUM_DRAFTED, _DEPTH, _NUM_BROKEN, _TOKENS = map(int, Output)


@dataclass(frozen=True, slots=True)
class Report:
    """What a launch will have decided."""

    sequences: Seq[Sequence | None]  # None: nothing to read
    rows: Download  # (B, Z) int32 of a round, (R, 2) of a prompt chunk
    logprobs: LogprobDownload | None
    max_path: int | None  # tokens that the round may commit; None: a prompt chunk
    scored: Seq[ScoredToken] = ()
    scores: LogprobDownload | None = None  # of these


def read_report(
    report: Report, rows_BZ: NDArray[np.int32], logprobs: ReadLogprobs | None, eos: Set[int], stats: EngineStats
) -> list[tuple[Sequence, FinishReason]]:
    """Append what the rows of a report hold, and count it. Returns the requests that end, and why."""
    if report.scores is not None:
        _read_scores(report.scored, report.scores.wait())
    ended = []
    wanted: _ScoredTokens[Sequence] = _ScoredTokens()
    rows = rows_BZ[: len(report.sequences)]  # padding has words, too
    first_margin = 1 if report.max_path is None else _TOKENS + report.max_path
    words_of, margins = rows[:, :first_margin].tolist(), rows[:, first_margin:].view(np.float32)
    lowest = margins.min(axis=1).tolist()
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
        num_top = seq.request.params.logprobs
        if num_top is not None and logprobs is not None:
            wanted.add(num_top, row, count, seq)
        if reason is not None:
            ended.append((seq, reason))
    if logprobs is not None:
        for seq, values, top_ids in wanted.read(logprobs):
            seq.logprobs += values
            seq.top_ids += top_ids
    return ended


def _read_prompt(seq: Sequence, report: list[int], eos: Set[int]) -> FinishReason | None:
    seq.rounds_in_flight -= 1
    return append_tokens(seq, report, eos)


def _read_round(
    seq: Sequence, report: list[int], max_path: int, eos: Set[int], stats: EngineStats
) -> FinishReason | None:
    count = report[_NUM_NEW]
    assert count >= 1, f"request {seq.request.request_id} ended on the device only"
    seq.rounds_in_flight -= 1
    seq.num_in_flight -= max_path
    seq.num_computed_tokens += count
    stats.broken_drafts += report[_NUM_BROKEN]
    before = len(seq.tokens)
    reason = append_tokens(seq, report[_TOKENS : _TOKENS + count], eos)
    committed = len(seq.tokens) - before
    seq.counts.record(
        drafted=report[_NUM_DRAFTED],
        depth=report[_DEPTH],
        accepted=min(count - 1, committed),
        committed=committed,
    )
    return reason


def _lower_margin(margin: Margin, of_new: np.ndarray, position: int) -> Margin:
    """The lower one of a request's margin and those of its new tokens, the first of which has the index `position`."""
    i = int(of_new.argmin())
    return min(margin, Margin(float(of_new[i]), position + i))


def _read_scores(scored: Seq[ScoredToken], scores: ReadLogprobs) -> None:
    tokens: _ScoredTokens[ScoredToken] = _ScoredTokens()
    for i, one in enumerate(scored):
        num_top = one.seq.request.params.prompt_logprobs or 0
        tokens.add(num_top, i, 1, one)
    for one, (own, *others), top_ids in tokens.read(scores):
        top = tuple(zip(top_ids, others, strict=True))
        one.seq.prompt_logprobs[one.position] = TokenLogprob(one.seq.tokens[one.position], own, top)


class _ScoredTokens(Generic[T]):
    """Tokens of a launch whose log-probabilities are wanted, with whom they are for."""

    def __init__(self) -> None:
        self._by_num_top: defaultdict[int, list[tuple[int, int, T]]] = defaultdict(list)

    def add(self, num_top: int, row: int, count: int, owner: T) -> None:
        """The first `count` tokens of a row."""
        if count:
            self._by_num_top[num_top].append((row, count, owner))

    def read(self, logprobs: ReadLogprobs) -> Iterator[tuple[T, list[float], list[int]]]:
        """Each owner with values and ids of likely tokens, as `TokenLogprobs` has them."""
        num_tokens = logprobs.values_BMK.shape[1]
        for num_top, wanted in self._by_num_top.items():
            found = logprobs.of([row for row, _, _ in wanted], num_top)
            k = len(found[1][0]) // num_tokens  # fewer than `num_top` if the vocabulary has fewer
            for (_, count, owner), values, top_ids in zip(wanted, *found, strict=True):
                if count == num_tokens:
                    yield owner, values, top_ids
                else:
                    yield owner, values[: count * (1 + k)], top_ids[: count * k]
