"""What is worth saying of the rows once they have run: fields that nothing read, ids given twice, other models' names.

Only rows of this session are counted, and the memory is bounded: 200 distinct names, and 8 bytes a row for ids.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Container, Mapping

import numpy as np

from specbatch.errors import NOT_FINITE_HINT
from specbatch.job.parameters import KNOWN_NAMES, LONGEST_NAME, SAMPLING_NAMES, meant_by, shown_name
from specbatch.job.rows import RowHead
from specbatch.types import EngineStats, SpeculationCounts

_MOST_NAMES = 200  # distinct ones that are counted each; each is compared with every known name at the end
_MOST_SHOWN = 12
_MOST_IDS = 1 << 24  # rows whose ids are compared: 128 MiB


class Remarks:
    """Collects while a job runs. `model`: the one that answers; `columns`: prompts are made of the rows' columns, so
    that most fields are data, and only slips of the pen for a sampling option are worth a word."""

    def __init__(self, model: str, *, columns: bool) -> None:
        self._model = model
        self._columns = columns
        self._fields = _Tally()
        self._models = _Tally()
        self._ids = array("q")  # [row index] = hash of its id; 0: none

    def add(self, head: RowHead) -> None:
        """Count a row, whether it runs or not."""
        for name in head.kept_fields:
            self._fields.add(name)
        id = head.id
        if head.envelope is not None:
            id = head.envelope.custom_id
            model = head.envelope.model
            if model is not None and _bare(str(model)) != _bare(self._model):
                self._models.add(str(model))
        if id is not None and head.index < _MOST_IDS:
            self._ids.frombytes(bytes(8 * max(0, head.index + 1 - len(self._ids))))
            self._ids[head.index] = hash((id,)) or 1  # not hash(0), which is 0 itself

    def lines(self) -> list[str]:
        """The remarks, a line each."""
        lines = []
        if self._models.rows:
            lines.append(f"body.model is not the model that answers, {self._model}: {self._models.shown({})}")
        known = SAMPLING_NAMES if self._columns else KNOWN_NAMES
        meant = {name: near for name in self._fields.names if name not in known and (near := meant_by(name, known))}
        if self._columns:
            self._fields.keep(meant)
        if self._fields.rows:
            lines.append(f"kept as metadata, and not used: {self._fields.shown(meant)}")
        if repeated := self._repeated():
            count, one, other = repeated
            ids = "1 id is" if count == 1 else f"{count:,} ids are"
            lines.append(f"{ids} on more than one row, for example on those with index {one:,} and {other:,}")
        return lines

    def _repeated(self) -> tuple[int, int, int] | None:
        """How many ids are on several rows, and two rows that share one; None where every id is on one row."""
        hashes = np.frombuffer(self._ids, dtype=np.int64)
        ids = np.sort(hashes[hashes != 0])
        repeated = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if not len(repeated):
            return None
        first = np.flatnonzero(np.isin(hashes, repeated))[0]
        one, other = np.flatnonzero(hashes == hashes[first])[:2]
        return len(repeated), int(one), int(other)


def draft_remarks(stats: EngineStats) -> list[str]:
    """What is worth saying of the drafts of a session."""
    if not stats.broken_drafts:
        return []
    return [
        f"speculation.draft: the probabilities of {stats.broken_drafts:,} sampled drafts were not finite (NaN or "
        "infinity). They were rejected, and the target sampled alone: the results are right. "
        f"Likely cause: {NOT_FINITE_HINT}"
    ]


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
        name = name[:LONGEST_NAME]  # the memory is bounded
        if name in self._counts or len(self._counts) < _MOST_NAMES:
            self._counts[name] += 1
        else:
            self._others += 1

    def keep(self, names: Container[str]) -> None:
        self._counts = Counter({name: count for name, count in self._counts.items() if name in names})
        self._others = 0

    def shown(self, meant: Mapping[str, str]) -> str:
        """`a (12 rows), b (1 row)`, the most frequent before the others. Those that are `meant` for another name come
        before all, with a question."""
        order = sorted(self._counts.items(), key=lambda item: (item[0] not in meant, -item[1]))
        shown = []
        for name, count in order[:_MOST_SHOWN]:
            rows = "1 row" if count == 1 else f"{count:,} rows"
            question = f"; did you mean {meant[name]}?" if name in meant else ""
            shown.append(f"{shown_name(name)} ({rows}{question})")
        if len(order) > _MOST_SHOWN or self._others:
            shown.append("and others")
        return ", ".join(shown)


def _bare(model: str) -> str:
    """A model's name without what says where it comes from: org/Name, ./Name.gguf and builtin:name are alike."""
    return model.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1].lower().removesuffix(".gguf")


_ROUNDS = 200
_LENGTH = 1.2


class LowAcceptance:
    """`causes`: the likely ones; None: nothing is said. `say` is given the warning."""

    def __init__(self, causes: str | None, say: Callable[[str], None]) -> None:
        self._causes = causes
        self._say = say

    def look(self, counts: SpeculationCounts) -> None:
        """At the counts of all requests that finished in this process."""
        if self._causes is None or not (proposed := counts.proposed_at) or proposed[0] < _ROUNDS:
            return
        length = 1 + counts.accepted / proposed[0]  # rounds without drafts are none of the drafts' making
        if length < _LENGTH:
            self._say(
                f"warning: the acceptance length is {length:.2f} after {proposed[0]:,} rounds: hardly any draft is "
                f"right, and speculation.method none would be faster. Likely causes: {self._causes}"
            )
            self._causes = None
