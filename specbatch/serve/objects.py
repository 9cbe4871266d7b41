"""The objects of the API, with the fields that OpenAI's clients read."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")


@dataclass
class StoredFile:
    """A file that a client uploaded, or that a batch wrote. All times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"

    def json(self) -> dict[str, Any]:
        """Return the fields of the API."""
        return asdict(self)


@dataclass
class Counts:
    """Numbers of requests. `completed` and `failed` have a result."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass
class Batch:
    """The state of a batch. All times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    model: str
    status: Status = "validating"
    object: Literal["batch"] = "batch"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = field(default_factory=Counts)
    metadata: dict[str, str] | None = None

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Batch:
        """Return the batch with these fields."""
        return cls(**{**fields, "request_counts": Counts(**fields["request_counts"])})

    def json(self) -> dict[str, Any]:
        """Return the fields of the API."""
        return asdict(self)

    @property
    def is_unfinished(self) -> bool:
        return self.status in UNFINISHED

    def change_to(self, status: Status, now: int) -> None:
        """Change the status, and note the time."""
        self.status = status
        setattr(self, f"{status}_at", now)

    def fail(self, errors: list[dict[str, Any]], now: int) -> None:
        """End the batch with errors of the whole file."""
        self.errors = {"object": "list", "data": errors}
        self.change_to("failed", now)


def seconds_of_window(text: Any) -> int | None:
    """Return the seconds of a completion window, such as 24h or 7d. Return None if it is none."""
    found = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else int(found[1]) * (3600 if found[2] == "h" else 86400)


def batch_error(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error of a file. `line`: from 1 on."""
    return {"code": code, "line": line, "message": message, "param": param}
