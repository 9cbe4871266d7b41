"""Checks of the file of a batch, as OpenAI makes them before a batch runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbatch.serve.objects import batch_error

_MAX_ERRORS = 100
_FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}


def check_file(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of requests of a file, and the first errors of it. Mistakes inside of `body` are errors of one
    request; the batch runs without them."""
    count = 0
    errors: list[dict[str, Any]] = []
    first_lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            count += 1
            if (error := _error(line, number, endpoint, first_lines)) is not None:
                errors.append(error)
                if len(errors) == _MAX_ERRORS:
                    break
    if not count:
        errors.append(batch_error("empty_file", "The file has no request."))
    return count, errors


def _error(line: bytes, number: int, endpoint: str, first_lines: dict[str, int]) -> dict[str, Any] | None:
    """Return the first mistake of a line. `first_lines`: the lines of the ids so far."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return batch_error("invalid_json_line", "This line is not parseable as valid JSON.", number)
    if not isinstance(fields, dict):
        return batch_error("invalid_request", "This line is not a JSON object.", number)
    for name, kind in _FIELDS.items():
        if name not in fields:
            return batch_error("missing_required_parameter", f"Missing required parameter: '{name}'.", number, name)
        if not isinstance(fields[name], kind):
            wanted = "an object" if kind is dict else "text"
            return batch_error("invalid_type", f"'{name}' must be {wanted}.", number, name)
    if fields["method"] != "POST":
        return batch_error("invalid_method", "'method' must be POST.", number, "method")
    if fields["url"] != endpoint:
        message = f"The URL of this request is {fields['url'][:80]!r}, and the endpoint of the batch is {endpoint}."
        return batch_error("mismatched_endpoint", message, number, "url")
    if (first := first_lines.setdefault(fields["custom_id"], number)) != number:
        message = f"The custom_id {fields['custom_id'][:80]!r} is already that of line {first}."
        return batch_error("duplicate_custom_id", message, number, "custom_id")
    return None
