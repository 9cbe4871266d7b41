"""Opening the files of a model: only regular ones, and JSON only of a size and depth that a model has."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from specbatch.errors import ModelError

_MAX_JSON_BYTES = 64 << 20  # the index of a model of 1,000 shards has some megabytes


def is_there(path: Path) -> bool:
    """Return whether there is such a file. Raise ModelError if it is not a regular file: reading a pipe or a device may
    never end."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # no permission, a name that is too long, a NUL in it
        raise ModelError(f"cannot open {path}: {error}") from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is no regular file", hint="pipes, devices and folders cannot be read as one")
    return True


def read_json(path: Path) -> dict[str, Any]:
    if not is_there(path):
        raise ModelError(f"{path} does not exist")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
        if len(data) > _MAX_JSON_BYTES:
            raise ModelError(f"{path} is longer than {_MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ModelError(f"{path} is not valid JSON: it is nested too deep") from error
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no JSON, a number of thousands of digits
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
