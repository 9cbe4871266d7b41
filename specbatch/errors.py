"""The errors that users see: what is wrong (`message`), and what to do about it if that is known (`hint`)."""

from __future__ import annotations

import re
import reprlib
from typing import Literal

_CUT = "***"
# Patterns for URLs in a text. One slash is enough, because Path() turns "s3://" into "s3:/". A password can have "/",
# "?" and "#", although it should not; a port cannot. Marks after a URL belong to the sentence.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+:/+"
_USER = re.compile(rf"({_SCHEME})(?:[^/?#\s]+|[^/?#\s]*:(?!\d+[/?#])\S*)@")
_QUERY = re.compile(rf"({_SCHEME}[^?#\s]*)([?#]\S*?)(?=[.,:;)'\"]*(?:\s|$))")
_VALUE = re.compile(r"([?&#;])([^&#;=]*)(=?)([^&#;]*)")
USAGE_ERROR, INTERNAL_ERROR, TOO_MANY_FAILED = 2, 3, 4  # exit codes


class SpecbatchError(Exception):
    """A mistake of the user or the environment. It is printed as `error: ...` and `hint: ...`, never as a traceback.
    The secrets of URLs are removed from both."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = without_secrets(message)
        self.hint = None if hint is None else without_secrets(hint)
        super().__init__(self.message)


class ConfigError(SpecbatchError):
    """The configuration or the command line is wrong. It is raised before any model is loaded; exit code 2."""


class FieldError(ConfigError):
    """One value is wrong: its type (`invalid_type`), a value of the right type (`invalid_value`), or a text that is not
    Unicode (`invalid_text`)."""

    def __init__(
        self,
        type: Literal["invalid_type", "invalid_value", "invalid_text"],
        message: str,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.type = type


class ModelError(SpecbatchError):
    """A model's files are missing, inconsistent or unsupported, or it does not fit: raised before rows run; exit code
    2."""


class RankDied(ModelError):
    """A rank that computes a part of the model has ended. Finished rows are kept. One of several workers is replaced; a
    job without workers ends with exit code 2."""


class InputError(SpecbatchError):
    """The input or output *file* as a whole cannot be used (not: one bad row); exit code 2."""


class MemoryShortage(SpecbatchError):
    """Memory ran out during the run, and making batches smaller did not help. Finished rows are kept; exit code 2."""


class TooManyFailed(SpecbatchError):
    """More rows failed than the user allows. Finished rows are kept; exit code 4."""


class TuningError(SpecbatchError):
    """The trace, the measurements or the limits leave nothing to choose from; exit code 2."""


class WorkerFailed(Exception):
    """An error of specbatch in one of several workers, or a row that ends their processes. Finished rows are kept; exit
    code 3."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RowError(Exception):
    """One row cannot run. It becomes an error line; other rows are not affected.

    `type` is a stable machine-readable word such as `invalid_json`, `missing_prompt`, `invalid_type`,
    `prompt_too_long`, `unsupported_parameter`, `empty_prompt`, `invalid_text`, `non_finite`, `no_token_left`.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type
        self.message = message


NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOT_FINITE_HINT = "a damaged checkpoint, or an overflow in float16: try model.dtype: bfloat16 or float32"

SHOWN_CHARS = 60


def shown(value: object) -> str:
    """Format a value for a message. A long one is cut."""
    if type(value) is int and abs(value) >= 10**SHOWN_CHARS:  # str() refuses integers of thousands of digits
        return f"an integer of more than {SHOWN_CHARS} digits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # Only the beginning of a long text or list is formatted.
    return cut(repr(value[: SHOWN_CHARS + 1]) if isinstance(value, str | bytes) else reprlib.repr(value))


def cut(text: str) -> str:
    """Return the beginning of a user's text, for messages and did-you-mean."""
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def without_secrets(text: str) -> str:
    """Return the text without the passwords and keys of its URLs. Everything that is written or printed goes through
    it.

    The user and the password before `@` are cut, and the values of all parameters after `?` and `#`, because it differs
    from store to store which of them are a signature or a token. The names of the parameters stay.
    """
    text = _USER.sub(rf"\1{_CUT}@", text)
    return _QUERY.sub(lambda found: found[1] + _VALUE.sub(_without_value, found[2]), text)


def _without_value(found: re.Match[str]) -> str:
    begin, name, equals, value = found.groups()
    if equals:
        return f"{begin}{name}={_CUT if value else ''}"
    return f"{begin}{_CUT if name else ''}"  # a parameter without a name is a value
