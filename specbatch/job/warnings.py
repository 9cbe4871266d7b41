"""Remarks on rows and drafts: fields that nothing read, repeated ids, other models' names, prompts that can be other
than they were meant, drafts that do not help.

Only rows of this session are counted. Memory is bounded: 200 distinct names, and 8 bytes a row for ids.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Mapping

import numpy as np

from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.errors import NOT_FINITE_HINT
from specbatch.results.finished import Remark
from specbatch.rows.parameters import KNOWN_NAMES, MAX_NAME_CHARS, SAMPLING_NAMES, bare_name, meant_by, shown_name
from specbatch.rows.row import Doubt

_MAX_NAMES = 200  # names that are counted one by one; each is compared with every known name at the end
_MAX_SHOWN = 12
_MAX_IDS = 1 << 24  # rows whose ids are compared: 128 MiB
_MIN_ROUNDS = 200  # rounds with drafts before the acceptance length is judged
_MIN_LENGTH = 1.2  # an acceptance length below this costs more than it saves
_DOUBTS: Mapping[Doubt, str] = {
    "two_bos": "the tokenizer adds a first token (BOS) to prompts, and these have it twice, because their text begins "
    "with it",
    "two_templates": "prompts that begin with a mark of a chat template were written as a message of the user "
    "(data.prompts_as_chat: false runs them as they are)",
    "text_left_out": "the chat template writes the tool calls of a message without the text next to them",
    "unused_prediction": "`prediction` was not used, because only the methods ngram, suffix and hybrid draft from it",
}


class Remarks:
    """Collects while a job runs. `model`: the one that answers. `columns`: prompts are made of the rows' columns. Most
    fields are data then, and only misspelled sampling options are named. `max_tokens`: the job's, if it was given."""

    def __init__(self, model: str, *, columns: bool, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._with_own_max = self._without_own_max = self._closing = 0  # rows
        self._model = model
        self._columns = columns
        self._fields = _Tally()
        self._models = _Tally()
        self._doubts: Counter[Doubt] = Counter()
        self._ids = array("q")  # [row index] = hash of its id; 0: none

    def add(self, index: int, remark: Remark) -> None:
        """Count the row of this index, whether it ran or not."""
        for name in remark.unread_fields:
            self._fields.add(name)
        self._with_own_max += remark.own_max_tokens is True
        self._without_own_max += remark.own_max_tokens is False
        self._closing += remark.closes_objects
        if remark.model is not None and bare_name(remark.model) != bare_name(self._model):
            self._models.add(remark.model)
        self._doubts.update(remark.doubts)
        if remark.id_hash and index < _MAX_IDS:
            self._ids.frombytes(bytes(8 * max(0, index + 1 - len(self._ids))))
            self._ids[index] = remark.id_hash

    def lines(self) -> list[str]:
        """The remarks, a line each."""
        lines = []
        if self._models.rows:
            lines.append(f"{self._model} answered, but body.model names other models: {self._models.shown({})}")
        known = SAMPLING_NAMES if self._columns else KNOWN_NAMES
        meant = {name: near for name in self._fields.names if name not in known and (near := meant_by(name, known))}
        if self._columns:
            self._fields.keep(meant)
        if self._fields.rows:
            lines.append(f"fields that are not used, and come back as metadata: {self._fields.shown(meant)}")
        lines += [f"{words}: {_rows(self._doubts[doubt])}" for doubt, words in _DOUBTS.items() if self._doubts[doubt]]
        if self._closing:
            rows = _rows(self._closing)
            named = f"response_format: objects had only the keys that the schema names ({rows})"
            lines.append(f"{named}; `additionalProperties`, or `strict: false` in json_schema, allows others")
        if self._max_tokens is not None and self._with_own_max and not self._without_own_max:
            lines.append(f"max_tokens {self._max_tokens:,} of the job was not used: each row has its own max_tokens")
        if repeated := self._repeated():
            count, one, other = repeated
            ids = "1 id is" if count == 1 else f"{count:,} ids are"
            lines.append(f"{ids} on more than one row, for example on those with index {one:,} and {other:,}")
        return lines

    def _repeated(self) -> tuple[int, int, int] | None:
        """Return the number of ids that several rows have, and two rows with the same id. Return None if there are
        none."""
        hashes = np.frombuffer(self._ids, dtype=np.int64)
        ids = np.sort(hashes[hashes != 0])
        repeated = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if not len(repeated):
            return None
        first = np.flatnonzero(np.isin(hashes, repeated))[0]
        one, other = np.flatnonzero(hashes == hashes[first])[:2]
        return len(repeated), int(one), int(other)


def draft_remarks(stats: EngineStats) -> list[str]:
    """Remarks on the drafts of a session."""
    if not stats.broken_drafts:
        return []
    return [
        f"speculation.draft: the probabilities of {stats.broken_drafts:,} sampled drafts were not finite (NaN or "
        "infinity). These drafts were rejected, and the target sampled alone: the results are right. "
        f"Likely cause: {NOT_FINITE_HINT}"
    ]


def low_acceptance_warning(counts: SpeculationCounts, causes: str | None) -> str | None:
    """A warning if hardly any draft is accepted. Such a job is slower than plain decoding, and nothing else shows that
    an EAGLE head is read in another way than it was trained. `counts`: of the requests that finished in this process;
    `causes`: the likely ones; None: no warning."""
    if causes is None or not (proposed := counts.proposed_at) or proposed[0] < _MIN_ROUNDS:
        return None
    length = 1 + counts.accepted / proposed[0]  # Rounds without drafts are not counted.
    if length >= _MIN_LENGTH:
        return None
    return (
        f"warning: the acceptance length is {length:.2f} after {proposed[0]:,} rounds. Hardly any draft is accepted, "
        f"and speculation.method: none would be faster. Likely causes: {causes}"
    )


class _Tally:
    """Counts names, the first 200 distinct ones each and the others together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._others = 0

    @property
    def rows(self) -> int:
        return self._counts.total() + self._others

    @property
    def names(self) -> list[str]:
        return list(self._counts)

    def add(self, name: str) -> None:
        # The memory is bounded.
        name = name[:MAX_NAME_CHARS]
        if name in self._counts or len(self._counts) < _MAX_NAMES:
            self._counts[name] += 1
        else:
            self._others += 1

    def keep(self, names: Container[str]) -> None:
        self._counts = Counter({name: count for name, count in self._counts.items() if name in names})
        self._others = 0

    def shown(self, meant: Mapping[str, str]) -> str:
        """`a (12 rows), b (1 row)`, the most frequent first. Before these come names that are
        probably `meant` for another one, with a question."""
        order = sorted(self._counts.items(), key=lambda item: (item[0] not in meant, -item[1]))
        shown = []
        for name, count in order[:_MAX_SHOWN]:
            question = f"; did you mean {meant[name]}?" if name in meant else ""
            shown.append(f"{shown_name(name)} ({_rows(count)}{question})")
        if len(order) > _MAX_SHOWN or self._others:
            shown.append("and others")
        return ", ".join(shown)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
