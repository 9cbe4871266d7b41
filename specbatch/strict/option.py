"""An option: a field of a dataclass with its default, its description and its legal values.

`strict/reader.py` reads options from YAML; docs/options.md and the commented default.yaml are made from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, TypeVar

from specbatch.errors import FieldError, shown

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The legal values of a number. A call with an option's path and value raises FieldError if it is not legal."""

    words: str  # the range in words, such as ">= 1"
    test: Callable[[Any], bool]

    def __call__(self, path: str, value: Any) -> None:
        if not self.test(value):
            raise FieldError("invalid_value", f"{path} must be {self.words}, not {shown(value)}")


AT_LEAST_0 = Range(">= 0", lambda v: v >= 0)
AT_LEAST_1 = Range(">= 1", lambda v: v >= 1)
SEED = Range(">= 0 and < 2^63", lambda v: 0 <= v < 2**63)


def option(default: T, doc: str, legal: Callable[[str, Any], None] | None = None, read: Any = None) -> T:
    """Make a dataclass field with `default` and a description of one to three plain sentences.

    `legal` raises ConfigError, with the path, for a value that is not legal. `read(reader, value, path)` replaces the
    reading by type. For a list, both are called for each element.
    """
    return field(default=default, metadata={"doc": doc, "legal": legal, "read": read})


def required(doc: str, legal: Callable[[str, Any], None] | None = None, read: Any = None) -> Any:
    """Declare an option without a default. See `option`."""
    return option(MISSING, doc, legal, read)


def option_doc(of: Field[Any]) -> str:
    """Return the description of a field made by `option`, or an empty text for other fields."""
    return str(of.metadata.get("doc", ""))


def option_range(of: Field[Any]) -> str:
    """Return the legal values in words, such as ">= 1", or an empty text if all values of the type are legal."""
    return str(getattr(of.metadata.get("legal"), "words", ""))
