"""The errors that users see. Each says what is wrong and, where one is known, what to do about it (`hint`)."""

from __future__ import annotations


class SpecbatchError(Exception):
    """A mistake of the user or the environment: shown as `error: ...` and `hint: ...`, never as a traceback."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(SpecbatchError):
    """The configuration or the command line is wrong. Raised before any model is loaded; exit code 2."""


class ModelError(SpecbatchError):
    """A model's files are missing, inconsistent or unsupported. Raised before its weights are read; exit code 2."""


class InputError(SpecbatchError):
    """The input or output *file* as a whole cannot be used (not: one bad row); exit code 2."""


class MemoryShortage(SpecbatchError):
    """Memory has run out while rows ran, and nothing was left to do without. Finished rows are kept; exit code 2."""


class RowError(Exception):
    """One row cannot be run. It becomes that row's error line; no other row is disturbed.

    `type` is a stable machine-readable word such as `invalid_json`, `missing_prompt`, `invalid_type`,
    `prompt_too_long`, `unsupported_parameter`, `empty_prompt`, `invalid_text`, `non_finite`.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type
        self.message = message


NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOT_FINITE_HINT = "a damaged checkpoint, or an overflow in float16: try model.dtype: bfloat16 or float32"
