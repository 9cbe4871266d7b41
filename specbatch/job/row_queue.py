"""Rows are parsed and tokenized on a thread of their own, so that the engine does not wait for it.

Templates and JSON hold the interpreter, a few dozen microseconds at a time. The tokenizer does not.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from specbatch.errors import RowError
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import GRAMMAR_FIELDS, EngineLimits

_BATCH = 32  # rows that are tokenized in one call
_LOOK_SECONDS = 0.5  # between two looks at the bounds of a template, while a row is awaited


class RowPreparer:
    """Raw rows -> prepared ones, in their order. `limits`: of the engine. `no_grammars`: the option with which no
    grammars run, if it is set. `with_predictions`: drafts come from the rows' predictions."""

    def __init__(
        self,
        parser: RowParser,
        texts: TextProcessor,
        limits: EngineLimits,
        no_grammars: str | None = None,
        with_predictions: bool = False,
    ) -> None:
        self._parser = parser
        self._texts = texts
        self._limits = limits
        self._no_grammars = no_grammars
        self._with_predictions = with_predictions

    def __call__(self, raws: Sequence[RawRow]) -> list[Row]:
        rows = [self._parser.parse(raw) for raw in raws]
        self._texts.encode_batch(rows, self._limits)
        for row in rows:
            try:
                if row.error is None:
                    self._prepare(row)
            except RowError as exc:
                row.error = exc
        return rows

    def _prepare(self, row: Row) -> None:
        row.bad_words = self._texts.bad_words(row.params, self._limits)
        row.reader = self._texts.answer_reader(row)
        has_grammar = self._texts.matcher(row) is not None  # it is compiled here, and kept
        if has_grammar and self._no_grammars is not None:
            fields = "a required tool_choice" if row.chat.required else " / ".join(GRAMMAR_FIELDS)
            raise RowError("unsupported_parameter", f"{fields}: not supported with {self._no_grammars}")
        if row.choices:
            row.choice_tokens = self._texts.choice_tokens(row, self._limits)
        row.doubts = self._texts.doubts(row)
        if self._with_predictions:
            row.predicted_ids = self._texts.predicted_ids(row, self._limits)
        elif row.prediction is not None:
            row.doubts = [*row.doubts, "unused_prediction"]


class RowQueue:
    """Rows in, prepared rows out, in the same order. One thread adds and takes; another one prepares them meanwhile.

    The number of rows is not bounded here: the caller asks for it with `len`. `stop_late`: see `TextProcessor`.
    """

    def __init__(
        self,
        prepare: Callable[[Sequence[RawRow]], Sequence[Row]],
        stop_late: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare = prepare
        self._stop_late = stop_late
        self._changed = threading.Condition()
        self._raw: deque[RawRow] = deque()
        self._prepared: deque[tuple[int, Row | BaseException]] = deque()  # the row's index, and the row or an error
        self._num_rows = 0
        self._dropped: set[int] = set()  # indices of dropped rows that the thread is preparing
        self._in_hand: Sequence[int] = ()
        self._is_closed = False
        self._waits_no_more = False
        self._thread: threading.Thread | None = None  # None: there was no row yet
        self.waited_seconds = 0.0  # the time in which `take` waited for rows that were not prepared yet

    def __len__(self) -> int:
        """The number of rows that were added, and neither taken nor dropped."""
        return self._num_rows

    def add(self, row: RawRow) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="specbatch-rows", daemon=True)
            self._thread.start()
        with self._changed:
            self._raw.append(row)
            self._num_rows += 1
            self._changed.notify_all()

    def take(self, seconds: float = math.inf) -> Row | None:
        """The next row, if it is prepared within `seconds`; None: it is not, or `stop_waiting` was called. The queue is
        not empty. Raises what was raised when the row was prepared: that is an error of this program."""
        assert self._num_rows, "nothing would end this wait"
        with self._changed:
            if not self._prepared:
                began = time.perf_counter()
                while not self._prepared and not self._waits_no_more and time.perf_counter() - began < seconds:
                    if self._thread is None or not self._thread.is_alive():
                        raise RuntimeError("no thread prepares this row: the queue is closed")
                    if not self._changed.wait(_LOOK_SECONDS):
                        self._stop_late()
                self.waited_seconds += time.perf_counter() - began
            if not self._prepared:
                return None
            self._num_rows -= 1
            _, prepared = self._prepared.popleft()
        if isinstance(prepared, BaseException):
            raise prepared
        return prepared

    def stop_waiting(self) -> None:
        """`take` does not wait any longer. It can be called by a handler of signals, in the middle of `take`."""
        self._waits_no_more = True

    def prepared(self) -> list[Row]:
        """The next rows, as far as they are prepared."""
        with self._changed:
            return [row for _, row in self._prepared if isinstance(row, Row)]

    def drop(self, indices: Collection[int]) -> None:
        """Leave these rows out, if they have not been taken."""
        with self._changed:
            in_hand = [index for index in self._in_hand if index in indices and index not in self._dropped]
            self._dropped.update(in_hand)
            self._raw = deque(row for row in self._raw if row.index not in indices)
            self._prepared = deque(pair for pair in self._prepared if pair[0] not in indices)
            self._num_rows = len(self._raw) + len(self._prepared) + len(self._in_hand) - len(self._dropped)

    def close(self) -> None:
        """Stop the thread. Rows that it has not prepared are forgotten."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            self._stop_late()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._raw and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                raws = [self._raw.popleft() for _ in range(min(_BATCH, len(self._raw)))]
                self._in_hand = [raw.index for raw in raws]
            prepared = self._prepare_each(raws)
            with self._changed:
                pairs = zip(self._in_hand, prepared, strict=True)
                self._prepared.extend(pair for pair in pairs if pair[0] not in self._dropped)
                self._in_hand = ()
                self._dropped.clear()
                self._changed.notify_all()

    def _prepare_each(self, raws: Sequence[RawRow]) -> Sequence[Row | BaseException]:
        try:
            return self._prepare(raws)
        except BaseException as exc:  # errors of tokenizers in Rust are no Exceptions
            if len(raws) == 1:
                return [exc]
        return [result for raw in raws for result in self._prepare_each([raw])]
