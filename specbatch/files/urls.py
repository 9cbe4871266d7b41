"""Names of files that are URLs, and what their stores need."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote


@dataclass(frozen=True)
class Store:
    """The package and the login that a scheme of URLs needs."""

    package: str  # package that fsspec imports, and pip installs
    writes: bool
    login: str  # how to give credentials
    check: Literal["upload", "token"] | None = None  # check of the right to write: see RemoteFile.check_can_write


_WEB = Store("requests", False, "download the file with its credentials, and name the copy")
STORES = {
    "s3": Store("s3fs", True, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run aws configure", "upload"),
    "gs": Store("gcsfs", True, "run gcloud auth application-default login", "upload"),
    "hf": Store("huggingface_hub", True, "set HF_TOKEN, or run hf auth login", "token"),
    "https": _WEB,
    "http": _WEB,
}
# At least two letters before the colon. One slash: Path() has made "s3://" "s3:/".
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def scheme_of(name: str | Path) -> str | None:
    """Such as "ftp", also of a URL that is not supported; None: the name of a file here."""
    found = _URL.fullmatch(str(name))
    return None if found is None or os.path.exists(name) else found[1]


def url_of(name: str | Path) -> str | None:
    """The URL that a name is; None: the name of a file here, or of a scheme that is not supported."""
    scheme = scheme_of(name)
    if scheme is None or scheme.lower() not in STORES:
        return None
    found = _URL.fullmatch(str(name))
    if found is None:
        return None
    # Blanks in a web address are sent so, and an address without blanks can be found in a text, see `without_secrets`.
    path = re.sub(r"\s", lambda blank: quote(blank[0]), found[2]) if scheme.lower().startswith("http") else found[2]
    return f"{scheme.lower()}://{path}"


def parent_url(url: str) -> str:
    """The folder of a file."""
    return _path_of(url).rpartition("/")[0]


def url_name(url: str) -> str:
    """The name of a file; "" for a folder. The part after "?" of a web address is none of it."""
    return _path_of(url).partition("://")[2].partition("/")[2].rpartition("/")[2]


def _path_of(url: str) -> str:
    return re.split(r"[?#]", url, maxsplit=1)[0] if url.startswith("http") else url
