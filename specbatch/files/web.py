"""One file of the web, over http and https.

A download has no time limit: it goes on while bytes arrive. It counts as complete only if the server has announced its
size. What is missing is asked for again, from the byte on where the last answer ended. Only what can succeed later is
tried again: answers 429 and 5xx, silence, and connections that break.
"""

from __future__ import annotations

import gzip
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from specbatch.errors import InputError, without_secrets
from specbatch.files.local import unlink_quietly
from specbatch.files.urls import STORES, url_name

if TYPE_CHECKING:
    import requests

T = TypeVar("T")
_CHUNK = 1 << 20
_CHECK_NETWORK = "check the network, and run the same command again"
_EXPIRED = "a signed URL works for a limited time"
_BYTES = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@dataclass(frozen=True)
class Patience:
    """Limits of the time that a request waits for a server."""

    silence_seconds: float = 60.0  # longest time without a byte
    num_tries: int = 5  # number of tries without a new byte
    first_wait: float = 1.0  # seconds before the second try; each next wait is twice as long
    longest_wait: float = 120.0  # longest wait in seconds that a server may ask for


class _Later(Exception):
    """The server can have a better answer later."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait  # seconds that the server asks to wait


class _Missing(Exception):
    """There is no such file."""


class WebFile:
    """Errors are InputErrors that say what the server did."""

    def __init__(self, url: str, patience: Patience) -> None:
        import requests

        self.url = url
        self._shown = without_secrets(url)
        self._patience = patience
        self._session = requests.Session()
        self._answered = False

    def state(self) -> dict[str, str] | None:
        """Return values that change with the content, and the size if the server announces it. Returns None if there is
        no such file."""
        try:
            return self._patiently(self._state)
        except _Missing:
            return None

    def download(self, to: Path, size: int | None, on_bytes: Callable[[int, int | None], None]) -> int | None:
        """Write the content to an existing file; returns how many bytes came, or None if they were compressed on the
        way. `size`: what `state` has announced. `on_bytes`: is called with the bytes so far and the bytes in total."""
        with to.open("r+b") as file:
            download = _Download(file, size, on_bytes)
            try:
                self._patiently(lambda: self._continue(download), lambda: download.furthest)
            except _Missing as exc:
                raise InputError(f"{self._shown} was removed while it was downloaded") from exc
        if not download.encoding:
            return download.num_bytes
        if not url_name(self.url).lower().endswith(".gz"):  # else it is read as gzip, so it stays as it is
            _unpack(to, download.encoding, self._shown)
        return None

    def _state(self) -> dict[str, str]:
        with self._request("HEAD") as answer:
            size = _size(answer) if answer.ok else None
            if size:
                return _state(answer, size)
        # Signed URLs are often for GET only, and some servers announce no size, or none that is right, to HEAD.
        with self._request("GET", Range="bytes=0-0") as answer:
            if answer.status_code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # an empty file has no byte 0
                self._check(answer)
            return _state(answer, _size(answer))

    def _continue(self, download: _Download) -> None:
        headers = {}
        if download.num_bytes:
            # Only if it is still the same version: else the answer is the whole file.
            headers = {"Range": f"bytes={download.num_bytes}-", "If-Range": download.version}
        with self._request("GET", **headers) as answer:
            if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and download.num_bytes:
                download.restart()
                raise _Later("the server has fewer bytes than before")
            self._check(answer)
            download.begin(answer, self._shown)
            read1 = answer.raw.read1
            while chunk := read1(_CHUNK, decode_content=False):
                download.add(chunk)
        download.end()

    def _patiently(self, attempt: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """The result of `attempt`, which is called again while it can succeed. `progress`: increases while attempts
        are of use."""
        furthest, misses = progress(), 0
        while True:
            try:
                return attempt()
            except _Later as exc:
                misses = 0 if progress() > furthest else misses
                furthest = max(furthest, progress())
                misses += 1
                if misses >= self._patience.num_tries:
                    raise InputError(f"{self._shown} cannot be read: {exc} ({misses} times)", _CHECK_NETWORK) from exc
                wait = max(self._patience.first_wait * 2 ** (misses - 1), exc.wait)
                time.sleep(min(wait, self._patience.longest_wait))

    @contextmanager
    def _request(self, method: str, **headers: str) -> Iterator[requests.Response]:
        """Raises InputError, and _Later where another attempt can succeed."""
        import requests
        import urllib3

        silence = self._patience.silence_seconds
        try:
            answer = self._session.request(
                method,
                self.url,
                headers={"Accept-Encoding": "identity", **headers},
                stream=True,
                timeout=silence,
                allow_redirects=True,
            )
            self._answered = True
            with closing(answer):
                yield answer
        except requests.TooManyRedirects as exc:
            raise self._error("it redirects in a circle, or too often", "name the URL that has the file") from exc
        except requests.ConnectTimeout as exc:
            if not self._answered:
                raise self._error(f"its host does not answer for {silence:g} seconds", _CHECK_NETWORK) from exc
            raise _Later(f"its host does not answer for {silence:g} seconds") from exc
        except (requests.Timeout, urllib3.exceptions.TimeoutError) as exc:
            raise _Later(f"its server sent nothing for {silence:g} seconds") from exc
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as exc:
            raise self._error(f"its server cannot be trusted: {_reason(exc)}", "check the name, and the clock") from exc
        except requests.exceptions.ProxyError as exc:
            raise self._error(f"the proxy cannot be used: {_reason(exc)}", "check HTTPS_PROXY and NO_PROXY") from exc
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as exc:
            if not self._answered and not _is_broken(exc):  # a wrong name, or no server
                raise self._error(f"its host does not answer: {_reason(exc)}", _CHECK_NETWORK) from exc
            raise _Later(f"the connection broke: {_reason(exc)}") from exc
        except (requests.RequestException, UnicodeError) as exc:
            raise self._error(f"it is not a valid URL: {_reason(exc)}", None) from exc
        except (urllib3.exceptions.HTTPError, ConnectionError) as exc:  # while the content is read
            raise _Later(f"the connection broke: {_reason(exc)}") from exc

    def _check(self, answer: requests.Response) -> None:
        """Raises InputError or _Later if the answer is no content."""
        status = answer.status_code
        if answer.ok and status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            return
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            raise _Missing
        words = _words(status)
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            after = answer.headers.get("Retry-After", "")
            raise _Later(f"its server answers {words}", float(after) if after.isdecimal() else 0.0)
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
            login = STORES[self.url.partition(":")[0]].login
            raise self._error(f"its server refuses access ({words})", f"{login}; {_EXPIRED}")
        raise self._error(f"its server answers {words}", _EXPIRED if status == HTTPStatus.BAD_REQUEST else None)

    def _error(self, what: str, hint: str | None) -> InputError:
        return InputError(f"{self._shown} cannot be read: {what}", hint)


class _Download:
    """The bytes of a file that have arrived, over several answers of the server."""

    def __init__(self, file: BinaryIO, size: int | None, on_bytes: Callable[[int, int | None], None]) -> None:
        self._file = file
        self._announced = size
        self._size = size
        self._ends_itself = False  # The encoding of the transfer marks its end.
        self._on_bytes = on_bytes
        self.num_bytes = 0
        self.furthest = 0  # the most bytes that any answer reached
        self.version = ""  # value of If-Range; "": the server has none
        self.encoding = ""

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self.num_bytes = 0

    def begin(self, answer: requests.Response, shown: str) -> None:
        """The content of an answer follows. Raises InputError if it cannot be known whether it is complete."""
        first = _BYTES.fullmatch(answer.headers.get("Content-Range", "")) if answer.status_code == 206 else None
        if self.num_bytes and (first is None or int(first[1] or 0) != self.num_bytes):
            self.restart()
        self.encoding = _encoding(answer)
        # That of HEAD may be the size without the encoding.
        self._size = _size(answer)
        if self._size is None and not self.encoding:
            self._size = self._announced
        self._ends_itself = "chunked" in answer.headers.get("Transfer-Encoding", "").lower()
        if self._size is None and not self._ends_itself:
            raise InputError(
                f"{shown}: its server does not say how long the file is, so it could end early without a sign",
                "download it with another tool, and name the copy",
            )
        self.version = _version(answer)

    def add(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self.num_bytes += len(chunk)
        self.furthest = max(self.furthest, self.num_bytes)
        self._on_bytes(self.num_bytes, self._size)

    def end(self) -> None:
        """The answer ended. Raises _Later if bytes are missing."""
        self._file.flush()
        got, size = self.num_bytes, self._size
        if size is None or got == size:
            return
        if got > size or not self.version:
            self.restart()
        raise _Later(f"{got:,} bytes came of {size:,}")


def _state(answer: requests.Response, size: int | None) -> dict[str, str]:
    known = {"size": size, "ETag": answer.headers.get("ETag"), "Last-Modified": answer.headers.get("Last-Modified")}
    return {name: str(value) for name, value in known.items() if value is not None}


def _size(answer: requests.Response) -> int | None:
    """The length of the whole file, as far as the answer announces it."""
    found = _BYTES.fullmatch(answer.headers.get("Content-Range", ""))
    if found is not None:
        return int(found[2]) if found[2].isdecimal() else None
    length = answer.headers.get("Content-Length", "")
    encoded = _encoding(answer) and answer.request.method == "HEAD"
    return int(length) if length.isdecimal() and not encoded else None


def _version(answer: requests.Response) -> str:
    """A weak ETag does not promise the same bytes."""
    tag = answer.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified", "")


def _encoding(answer: requests.Response) -> str:
    """The compression on the way, which is not a part of the file; "": none."""
    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


def _unpack(file: Path, encoding: str, shown: str) -> None:
    if encoding not in ("gzip", "x-gzip"):
        raise InputError(
            f"{shown}: its server compresses with {encoding}, which was not asked for",
            "download it with another tool, and name the copy",
        )
    packed = file.with_name(f"{file.name}-packed")
    file.rename(packed)
    try:
        file.touch(0o600)
        with gzip.open(packed, "rb") as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
    except (EOFError, gzip.BadGzipFile) as exc:
        raise InputError(f"{shown}: the compressed answer of its server is damaged", _CHECK_NETWORK) from exc
    finally:
        unlink_quietly(packed)


def _words(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _is_broken(error: BaseException) -> bool:
    """Return whether a connection existed and broke."""
    import http.client

    broken = (ConnectionResetError, BrokenPipeError, http.client.IncompleteRead)
    return any(isinstance(cause, broken) for cause in _causes(error))


def _reason(error: BaseException) -> str:
    """The innermost one. The texts of the outer ones have the URL."""
    *_, last = _causes(error)
    text = last.strerror if isinstance(last, OSError) and last.strerror else str(last)
    return without_secrets((text.strip() or type(last).__name__).splitlines()[0])


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it is made of: libraries keep that as a reason, an argument or a cause."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            return
        yield cause
        inner = [getattr(cause, "reason", None), *cause.args, cause.__cause__, cause.__context__]
        cause = next((each for each in inner if isinstance(each, BaseException) and each is not cause), None)
