"""A look at the first rows, before a model is loaded: do they have the fields that prompts are made of?"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from dataclasses import replace

from specbatch.errors import InputError, RowError
from specbatch.job.jsonl import decode_line
from specbatch.job.openai_batch import is_openai_line
from specbatch.job.parameters import shown_name
from specbatch.job.rows import RowParser
from specbatch.job.sources import RawRow, Source

_MOST_ROWS = 100  # that are looked at where the first does not have all
_MOST_SHOWN = 12


def with_checked_fields(source: Source, parser: RowParser) -> Source:
    """`source`, whose first rows are known to have what prompts are made of: the first with all of it ends the search,
    and a table is known by its first row. No row is lost where a source can be read but once.

    Raises InputError where none of the first rows has a field that is needed.
    """
    rows = source.rows()
    head: list[RawRow] = []
    needs = parser.needs
    names: dict[str, None] = {}
    count = 0
    for raw in itertools.islice(rows, _MOST_ROWS):
        head.append(raw)
        if isinstance(raw.data, dict):
            fields = raw.data
        else:
            try:
                fields = decode_line(raw.data)
            except RowError:  # becomes this row's own error
                continue
            if is_openai_line(fields):  # prompts come in their bodies
                continue
        count += 1
        names.update(dict.fromkeys(fields))
        needs = {words: anyone for words, anyone in needs.items() if not fields.keys() & set(anyone)}
        if not needs or isinstance(raw.data, dict):
            break
    if needs and count:
        raise _missing(source, needs, list(names), count)
    rest = iter([itertools.chain(head, rows)])
    return replace(source, rows=lambda: _first_of(rest, source))


def _first_of(rest: Iterator[Iterator[RawRow]], source: Source) -> Iterator[RawRow]:
    """What has been opened, at the first time; later, what the source opens anew."""
    opened = next(rest, None)
    yield from source.rows() if opened is None else opened


def _missing(source: Source, needs: dict[str, tuple[str, ...]], names: list[str], count: int) -> InputError:
    words, wanted = next(iter(needs.items()))
    lower = {name.lower(): name for name in names}
    near = [lower[n] for w in wanted for n in difflib.get_close_matches(w.lower(), lower, n=1)]
    hint = f"did you mean {shown_name(near[0])}? " if near else ""
    shown = ", ".join(shown_name(name) for name in names[:_MOST_SHOWN]) or "none"
    hint += f"the fields there: {shown}{', ...' * (len(names) > _MOST_SHOWN)}"
    if len(wanted) > 1:  # neither a template nor a column was given
        hint += "; data.prompt_column and data.prompt_template make prompts of them"
    rows = "the first row" if count == 1 else f"none of the first {count} rows"
    has = "has no" if count == 1 else "has"
    return InputError(f"{rows} of {source.name} {has} {words}", hint)
