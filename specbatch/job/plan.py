"""The order in which the rows of a file start.

Rows whose prompts begin alike start one after the other, so that the pages that they share are computed once and stay
in use. Of the last rows, as many as run at the same time, the one that may write the most tokens starts first: a long
row that starts last would run almost alone at the end of the job. If all rows started in this order, the long ones
would run at the same time, and the KV cache would be too small for them.

The order is decided before prompts are tokenized. Texts that begin alike have tokens that begin alike, but for one
token at the end of what they share. So the job needs no tokenizer, and the rows of a group go to the same worker.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any

from specbatch.config import Config
from specbatch.errors import InputError
from specbatch.files.jsonl import encode_line
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row, has_grammar
from specbatch.rows.sources import RawRow, Source

# Of a prompt: 64 token ids, or text of about that number of tokens. Prompts that share less are no group.
_BLOCK_BYTES, _BLOCK_TOKENS = 256, 64
_MAX_BLOCKS = 64  # blocks of a prompt that are compared
_MIN_ALIKE = 4  # requests that begin alike, at least
_HASH_BYTES = 8
_FIRST_ROWS = 1024  # rows that are read before the first one starts; they take 20 to 40 ms
_READ_AHEAD = 4  # rows that are read for each one that starts
_MAX_BYTES = 64 << 20  # bytes of rows that are read and have not started
_SAMPLE = 1024  # rows whose limits are counted for an estimate
_ROW_BYTES = 512  # bytes of the objects of a row, in addition to its text


def prefix_of(content: bytes) -> bytes:
    """A hash of each of the first blocks of a prompt, joined. Two prompts that share N blocks share 8 N bytes of it."""
    ends = range(_BLOCK_BYTES, min(len(content), _MAX_BLOCKS * _BLOCK_BYTES) + 1, _BLOCK_BYTES)
    return array("q", (hash(content[end - _BLOCK_BYTES : end]) for end in ends)).tobytes()


def start_order(prefixes: Sequence[bytes], lengths: Sequence[int], num_last: int) -> list[int]:
    """The indices of rows in the order in which they should start. `prefixes`: of `prefix_of`. `lengths`: the tokens
    that each may write. The order is that of the rows, but for those that begin alike, and for the last `num_last`."""
    rows = _grouped(prefixes, [0] * len(prefixes))
    num_first = max(len(rows) - num_last, 0)
    last = rows[num_first:]
    order = _grouped([prefixes[row] for row in last], [lengths[row] for row in last])
    return rows[:num_first] + [last[i] for i in order]


def _grouped(prefixes: Sequence[bytes], lengths: Sequence[int]) -> list[int]:
    """Rows that begin alike together; of these, and of such groups, the longest first.

    Sorted by prefix, the rows are the leaves of the tree of all prefixes, from left to right. The inner nodes are found
    on the way, as a suffix array's are by its common prefixes (Abouelhoda, Kurtz and Ohlebusch, 2004).
    """
    if not prefixes:
        return []
    rows = sorted(range(len(prefixes)), key=prefixes.__getitem__)
    open_nodes: list[_Node] = []  # from the root on, each below the one before
    for row, following in pairwise(rows):
        shared = _common_bytes(prefixes[row], prefixes[following])
        branch = _Branch(-lengths[row], row)
        while open_nodes and open_nodes[-1].depth > shared:
            branch = open_nodes.pop().closed_with(branch)
        if not open_nodes or open_nodes[-1].depth < shared:
            open_nodes.append(_Node(shared))
        open_nodes[-1].branches.append(branch)
    branch = _Branch(-lengths[rows[-1]], rows[-1])
    while open_nodes:
        branch = open_nodes.pop().closed_with(branch)
    return list(branch.rows())


def shared_tokens(prompts: Iterable[tuple[bytes, int]]) -> int:
    """The number of tokens with which a prompt begins as at least three others do, on average over requests; roughly,
    where prompts are text. `prompts`: of `prefix_of`, and the number of requests."""
    others = _MIN_ALIKE - 1
    found = sorted(prefix for prefix, count in prompts for _ in range(min(count, _MIN_ALIKE)))
    alike = [0] * len(found)
    for first, last in enumerate(range(others, len(found))):
        shared = _common_bytes(found[first], found[last])
        alike[first : last + 1] = [max(shared, more) for more in alike[first : last + 1]]
    return sum(alike) // max(len(alike), 1) // _HASH_BYTES * _BLOCK_TOKENS


@dataclass(frozen=True, slots=True, order=True)
class _Branch:
    """A row, or all rows that share a prefix, by the longest of these: it is the first of equal ones."""

    minus_length: int
    row: int
    branches: Sequence[_Branch] = field(default=(), compare=False)

    def rows(self) -> Iterator[int]:
        stack = [self]
        while stack:
            branch = stack.pop()
            if branch.branches:
                stack.extend(reversed(branch.branches))
            else:
                yield branch.row


class _Node:
    """A prefix of `depth` bytes, and what was found below it."""

    __slots__ = ("branches", "depth")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.branches: list[_Branch] = []

    def closed_with(self, last: _Branch) -> _Branch:
        branches = sorted([*self.branches, last])
        return _Branch(branches[0].minus_length, branches[0].row, branches)


def _common_bytes(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the whole hashes that both begin with."""
    least, most = 0, min(len(one), len(other)) // _HASH_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        if one[: middle * _HASH_BYTES] == other[: middle * _HASH_BYTES]:
            least = middle
        else:
            most = middle - 1
    return least * _HASH_BYTES


@dataclass(frozen=True, slots=True)
class _HeldRow:
    raw: RawRow
    num_bytes: int
    prefix: bytes = b""
    num_requests: int = 0  # 0: the row is an error
    max_tokens: int = 0


class RowPlan:
    """Iterates over `rows` in the order in which they should start.

    At most `max_rows` rows are held, and 64 MiB of them. The first ones start at once, while the next ones are read.
    The order is decided again when as many rows are new as are left, and when the input ends: the last `num_last` rows
    are known then, see `start_order`. It depends on nothing but the rows.

    An InputError of `rows` is raised after all rows before it.
    """

    def __init__(self, rows: Iterator[RawRow], parser: RowParser, max_rows: int, num_last: int) -> None:
        self._rows = rows
        self._parser = parser
        self._max_rows = max_rows
        self._num_last = num_last
        self._ordered: deque[_HeldRow] = deque()
        self._new: list[_HeldRow] = []
        self._num_bytes = 0
        self._exhausted = False
        self._error: InputError | None = None
        self._num_to_read = _FIRST_ROWS

    def __iter__(self) -> Iterator[RawRow]:
        return self

    def __next__(self) -> RawRow:
        was_exhausted = self._exhausted
        self._read()
        if self._exhausted > was_exhausted:
            self._order(self._num_last)
        elif self._new and len(self._new) >= len(self._ordered):
            self._order(0)
        if not self._ordered:
            if self._error is not None:
                raise self._error
            raise StopIteration
        row = self._ordered.popleft()
        self._num_bytes -= row.num_bytes
        return row.raw

    def limits(self) -> list[int]:
        """The most tokens of requests of the rows that were read and have not started. Of many rows, of some: for an
        estimate of their time."""
        step = self._num_held // _SAMPLE + 1
        held = islice(chain(self._ordered, self._new), 0, None, step)
        return [row.max_tokens for row in held for _ in range(row.num_requests)]

    @property
    def _num_held(self) -> int:
        return len(self._ordered) + len(self._new)

    def _read(self) -> None:
        for _ in range(self._num_to_read):
            is_full = self._num_held >= self._max_rows or self._num_bytes >= _MAX_BYTES
            if self._exhausted or (is_full and self._num_held):
                break
            try:
                raw = next(self._rows, None)
            except InputError as error:
                self._error, raw = error, None
            if raw is None:
                self._exhausted = True
                break
            row = self._held(raw)
            self._new.append(row)
            self._num_bytes += row.num_bytes
        self._num_to_read = _READ_AHEAD

    def _held(self, raw: RawRow) -> _HeldRow:
        num_bytes = _ROW_BYTES + _text_bytes(raw.data)
        row = self._parser.parse(raw)
        if row.error is not None:
            return _HeldRow(raw, num_bytes)
        return _HeldRow(raw, num_bytes, prefix_of(_content(row)), row.num_requests, row.params.max_tokens)

    def _order(self, num_last: int) -> None:
        # A group of which some rows have started stays the first one.
        held = [*self._ordered, *self._new]
        order = start_order([row.prefix for row in held], [row.max_tokens for row in held], num_last)
        self._ordered, self._new = deque(held[i] for i in order), []


def with_shared_tokens(config: Config, source: Source, parser: RowParser) -> Config:
    """Return `config` with the tokens that prompts share, counted in the first rows of an input that can be read twice,
    where they decide something."""
    section = config.engine
    if (
        section.cascade_attention != "auto"
        or source.reopen is None
        or section.device == "cpu"
        or not section.prefix_cache
    ):
        return config
    found = [(prefix_of(_content(row)), row.num_requests) for row in _first_rows(source, parser)]
    return replace(config, engine=replace(section, shared_tokens=shared_tokens(found)))


def with_facts_of_rows(config: Config, source: Source, parser: RowParser, notes: list[str]) -> Config:
    """Return `config` with what the first rows of the input decide. Decisions are added to `notes`."""
    return with_shared_tokens(_with_method(config, source, parser, notes), source, parser)


def _with_method(config: Config, source: Source, parser: RowParser, notes: list[str]) -> Config:
    """Return `config` with method ngram instead of auto, if most of the first rows of a file predict their answers."""
    if config.speculation.method != "auto" or config.speculation.draft is not None or source.path is None:
        return config
    rows = [row.prediction is not None for row in _first_rows(source, parser)]
    if 2 * sum(rows) <= len(rows):
        return config
    notes.append("speculation.method: ngram (most of the first rows have a `prediction`)")
    return replace(config, speculation=replace(config.speculation, method="ngram"))


def has_grammars(config: Config, source: Source, parser: RowParser) -> bool:
    """Return whether the job's options, or one of the first rows of a file, ask for a grammar."""
    if has_grammar(config.sampling):
        return True
    return source.path is not None and any(row.has_grammar for row in _first_rows(source, parser))


def _first_rows(source: Source, parser: RowParser) -> Iterator[Row]:
    """Yield those of the first rows that can run."""
    with contextlib.suppress(InputError):  # the job will report it
        for raw in islice(source.rows(), _FIRST_ROWS):
            row = parser.parse(raw)
            if row.error is None:
                yield row


def _text_bytes(value: Any) -> int:
    """Return the number of bytes of a line, or the characters of all texts of a table's row. Messages are in lists."""
    if isinstance(value, bytes | str):
        return len(value)
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_text_bytes, values))


def _content(row: Row) -> bytes:
    """Return bytes of a row's prompt. They begin alike if the prompts' tokens do."""
    max_bytes = _MAX_BLOCKS * _BLOCK_BYTES
    if row.kind == "token_ids":
        try:
            return array("i", row.content[: max_bytes // 4]).tobytes()
        except OverflowError:  # not a token; the row will be an error
            return b""
    if row.kind == "messages":  # those of a table can have dates and other values that JSON lacks
        return encode_line({"messages": row.content})[:max_bytes]
    return str(row.content)[:max_bytes].encode("utf-8", "surrogatepass")
