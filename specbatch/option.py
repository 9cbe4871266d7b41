"""A field of a configuration with its description: docs/options.md and the commented default.yaml are made from it."""

from __future__ import annotations

from dataclasses import Field, field
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: T, doc: str) -> T:
    """A dataclass field with `default` and a description: one to three plain sentences."""
    return field(default=default, metadata={"doc": doc})


def option_doc(of: Field[Any]) -> str:
    """The description of a field made by `option`; empty for other fields."""
    return str(of.metadata.get("doc", ""))
