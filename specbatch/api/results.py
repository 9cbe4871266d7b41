"""Results of the Python interface: the dicts of result lines with their objects, and lists of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from specbatch.api.columns import result_columns

if TYPE_CHECKING:
    import pandas


class Result(dict[str, Any]):
    """A result: the dict that the command writes as a line of a result file.

    `parsed`: the object of the answer, if the call has a schema. It is None if the row failed, if the answer was cut,
    and if the class refused the answer. `parse_error` says then why it was refused.
    """

    parsed: Any = None
    parse_error: str | None = None

    @property
    def text(self) -> str | None:
        """The text of the first completion; None if the row failed, or if the answer is a call of a tool."""
        choice = self._choice
        text: str | None = choice["message"]["content"] if "message" in choice else choice.get("text")
        return text

    @property
    def finish_reason(self) -> str:
        return str(self._choice.get("finish_reason", "error"))

    @property
    def error(self) -> str | None:
        """The type and the message of the row's error, or of that of its answer; None if there is none."""
        error = self.get("error")
        if error is not None:
            return f"{error.get('type') or error.get('code')}: {error['message']}"
        return None if self.parse_error is None else f"invalid_answer: {self.parse_error}"

    @property
    def is_whole(self) -> bool:
        """Return whether there is an answer that was not cut."""
        return self.get("error") is None and self.finish_reason == "stop" and not self._choice.get("incomplete")

    @property
    def has_answer(self) -> bool:
        """Return whether there is such an answer, and the schema's class did not refuse it."""
        return self.is_whole and self.parse_error is None

    @property
    def _choice(self) -> Mapping[str, Any]:
        """Return what has the first completion, in either format of lines."""
        if "text" in self:
            return self
        choice: Mapping[str, Any] = self["response"]["body"]["choices"][0] if self.get("response") else {}
        return choice


class Results(list[Result]):
    """The results of a call, in the order of its rows. `response_format`: the format of its answers, as JSON; None:
    they are texts."""

    def __init__(self, results: Iterable[Result], response_format: str | None = None) -> None:
        super().__init__(results)
        self.response_format = response_format

    @overload
    def __getitem__(self, index: SupportsIndex) -> Result: ...

    @overload
    def __getitem__(self, index: slice) -> Results: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Result | Results:
        """Return a result, or the results of a slice, which make tables with the same columns."""
        found = super().__getitem__(index)
        return Results(found, self.response_format) if isinstance(found, list) else found

    @property
    def texts(self) -> list[str | None]:
        return [result.text for result in self]

    @property
    def parsed(self) -> list[Any]:
        return [result.parsed for result in self]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table: the rows' ids and their own fields, a column for each property of the schema, and the
        columns text, finish_reason and error. It needs pandas and pyarrow."""
        import pandas
        import pyarrow as pa

        # Types of pandas that have nulls: others would make floats of integers.
        with_nulls = {pa.int64(): pandas.Int64Dtype(), pa.bool_(): pandas.BooleanDtype()}
        return pa.table(result_columns(self, self.response_format)).to_pandas(types_mapper=with_nulls.get)
