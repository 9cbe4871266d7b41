"""`BatchMap`: a function for `datasets.Dataset.map` and other tools that run over tables batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbatch.api.call import Schema
from specbatch.api.columns import columns_of_answers
from specbatch.api.llm import LLM

if TYPE_CHECKING:
    import pyarrow as pa


class BatchMap:
    """A function that runs the rows of a batch, and returns the batch with the columns of their answers.

        dataset.map(BatchMap(llm, schema=Ticket, max_tokens=64), batched=True, batch_size=1000)

    A batch is an Arrow table, or a mapping of columns. The new columns are the properties of the schema, `text`,
    `finish_reason` and `error`. A name that the batch has already gets a suffix: `text_answer`. `first_index`: the
    index of the first row of the first batch; the rows of later batches are counted on.
    """

    def __init__(self, llm: LLM, *, schema: Schema | None = None, first_index: int = 0, **sampling: Any) -> None:
        self._llm = llm
        self._call = {"schema": schema, **sampling}
        self._next_index = first_index

    def __call__(self, batch: pa.Table | Mapping[str, Any]) -> pa.Table:
        table = _table(batch)
        results = self._llm.generate(table, first_index=self._next_index, **self._call)
        self._next_index += len(results)
        for name, column in columns_of_answers(results, results.response_format, table.column_names).items():
            table = table.append_column(name, column)
        return table


def _table(batch: Any) -> pa.Table:
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return batch
    if hasattr(batch, "pa_table"):  # the batches of `datasets`: their columns would be decoded, images too
        return batch.pa_table
    return pa.table({name: _values(column) for name, column in batch.items()})


def _values(column: Any) -> Any:
    """Return a column as Arrow can read it: tensors as arrays, and arrays of several dimensions as lists."""
    column = column.numpy() if hasattr(column, "numpy") else column
    return [_values(item) for item in column] if getattr(column, "ndim", 1) > 1 else column
