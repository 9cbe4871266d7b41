"""A parsed row as tests read it."""

from __future__ import annotations

from specbatch.errors import RowError
from specbatch.rows.row import Row


def asked(row: Row) -> tuple[Row, Row | RowError]:
    """The row, and its error or else the row itself."""
    return row, row.error or row
