"""The HTTP requests that the server answers: `/v1/files`, `/v1/batches` and `/v1/models`, as OpenAI's API has them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from specbatch.errors import SpecbatchError
from specbatch.rows.openai_batch import ENDPOINTS, foreign_endpoint
from specbatch.serve.errors import ApiError, error_body
from specbatch.serve.objects import Batch, StoredFile, seconds_of_window
from specbatch.serve.runner import BatchRunner
from specbatch.serve.state import State

_MAX_BODY = 1 << 20  # bytes of a body that is JSON
_MAX_METADATA = 16  # pairs, with keys and values of these characters
_MAX_KEY, _MAX_VALUE = 64, 512
_BATCH_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")
Endpoint = Callable[[Request], Awaitable[Response]]
Listed = TypeVar("Listed", StoredFile, Batch)


def make_app(state: State, runner: BatchRunner, api_key: str | None, hosts: Sequence[str] | None) -> Starlette:
    """Return the application. `api_key`: what clients must send; None: anyone may ask. `hosts`: the names by which
    clients may call this machine; None: any. A page of the web that a browser shows could call it by another name."""
    api = _Api(state, runner)
    table: dict[tuple[str, str], Endpoint] = {
        ("POST", "/v1/files"): api.upload,
        ("GET", "/v1/files"): api.list_files,
        ("GET", "/v1/files/{file_id}"): api.get_file,
        ("DELETE", "/v1/files/{file_id}"): api.delete_file,
        ("GET", "/v1/files/{file_id}/content"): api.get_content,
        ("POST", "/v1/batches"): api.create_batch,
        ("GET", "/v1/batches"): api.list_batches,
        ("GET", "/v1/batches/{batch_id}"): api.get_batch,
        ("POST", "/v1/batches/{batch_id}/cancel"): api.cancel_batch,
        ("GET", "/v1/models"): api.list_models,
        ("GET", "/v1/models/{model:path}"): api.get_model,
    }
    routes = [
        Route(path, _checked(endpoint, api_key, hosts), methods=[verb]) for (verb, path), endpoint in table.items()
    ]
    handlers: dict[Any, Any] = {
        ApiError: lambda request, exc: _Json(exc.body(), exc.status),
        HTTPException: _not_found,
        SpecbatchError: lambda request, exc: _Json(error_body(500, exc.message), 500),
        Exception: lambda request, exc: _Json(error_body(500, "internal error; the server has printed it"), 500),
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _checked(endpoint: Endpoint, api_key: str | None, hosts: Sequence[str] | None) -> Endpoint:
    """Return an endpoint that refuses requests without the key, and those of pages in a browser. See `make_app`."""

    async def answer(request: Request) -> Response:
        if "origin" in request.headers:
            raise ApiError(403, "Requests of web pages are not served.", code="forbidden_origin")
        if hosts is not None and request.url.hostname not in hosts:
            raise ApiError(403, f"The name of this host is one of {', '.join(hosts)}.", code="forbidden_host")
        if api_key is not None:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), api_key.encode()):
                raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return await endpoint(request)

    return answer


def _not_found(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    message = str(exc.detail)
    if exc.status_code in (404, 405):
        message = f"There is no {request.method} {request.url.path} here: files, batches and models are served."
        if request.url.path in ENDPOINTS:
            message += " Put the request into a file, and create a batch of it."
    return _Json(error_body(exc.status_code, message), exc.status_code)


class _Json(JSONResponse):
    """JSON in ASCII: halves of surrogate pairs, which clients can send, are not text."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class _Api:
    """The endpoints."""

    def __init__(self, state: State, runner: BatchRunner) -> None:
        self._state = state
        self._runner = runner
        self._began = int(time.time())

    async def upload(self, request: Request) -> Response:
        async with request.form() as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "'file' is a required part of the form.", "file", "missing_required_parameter")
            if purpose != "batch":
                raise ApiError(400, f"'purpose' must be batch, not {str(purpose)[:60]!r}.", "purpose", "invalid_value")
            if others := sorted(form.keys() - {"file", "purpose"}):
                raise ApiError(400, f"Unknown parameter: '{others[0]}'.", others[0], "unknown_parameter")
            stored = await run_in_threadpool(self._state.add_upload, file.file, file.filename or "upload.jsonl")
        return _Json(stored.json())

    async def list_files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        with self._state.lock:
            files = [file for file in self._state.files.values() if purpose in (None, file.purpose)]
        return _page(request, files, 10_000)

    async def get_file(self, request: Request) -> Response:
        return _Json(self._state.file(request.path_params["file_id"]).json())

    async def get_content(self, request: Request) -> Response:
        file = self._state.file(request.path_params["file_id"])
        return FileResponse(self._state.content(file), media_type="application/octet-stream")

    async def delete_file(self, request: Request) -> Response:
        file = self._state.file(request.path_params["file_id"])
        await run_in_threadpool(self._state.remove, file)
        return _Json({"id": file.id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request) -> Response:
        fields = await _json(request)
        for name in _BATCH_FIELDS[:3]:
            if not isinstance(fields.get(name), str):
                raise ApiError(400, f"'{name}' is required, and must be text.", name, "missing_required_parameter")
        if others := [name for name in fields if name not in _BATCH_FIELDS and fields[name] is not None]:
            raise ApiError(400, f"Unknown parameter: '{others[0][:60]}'.", others[0][:60], "unknown_parameter")
        endpoint, window = fields["endpoint"], fields["completion_window"]
        if endpoint not in ENDPOINTS:
            message, hint = foreign_endpoint(endpoint)
            raise ApiError(400, f"'endpoint' {message}{f'; {hint}' if hint else ''}.", "endpoint", "invalid_value")
        if (seconds := seconds_of_window(window)) is None:
            message = f"'completion_window' must be hours or days, such as 24h or 7d, not {window[:60]!r}."
            raise ApiError(400, message, "completion_window", "invalid_value")
        file = self._state.file(fields["input_file_id"], "input_file_id")
        if file.purpose != "batch":
            raise ApiError(400, f"{file.id} was not uploaded for a batch.", "input_file_id", "invalid_value")
        now = int(time.time())
        batch = Batch(
            f"batch_{secrets.token_hex(12)}", endpoint, file.id, window, now, now + seconds, self._runner.model,
            metadata=_metadata(fields.get("metadata")),
        )  # fmt: skip
        self._runner.add(batch)
        return _Json(batch.json())

    async def list_batches(self, request: Request) -> Response:
        with self._state.lock:
            batches = [self._runner.counted(batch) for batch in self._state.batches.values()]
        return _page(request, batches, 20)

    async def get_batch(self, request: Request) -> Response:
        return _Json(self._runner.counted(self._state.batch(request.path_params["batch_id"])).json())

    async def cancel_batch(self, request: Request) -> Response:
        batch = self._state.batch(request.path_params["batch_id"])
        with self._state.lock:
            if batch.status not in ("validating", "in_progress", "cancelling"):
                raise ApiError(409, f"Cannot cancel a batch with status '{batch.status}'.", code="invalid_status")
            if batch.status != "cancelling":
                self._runner.cancel(batch)
        return _Json(batch.json())

    async def list_models(self, request: Request) -> Response:
        return _Json({"object": "list", "data": [self._model()]})

    async def get_model(self, request: Request) -> Response:
        if (name := request.path_params["model"]) != self._runner.model:
            raise ApiError(404, f"The model '{name[:80]}' does not exist.", "model", "model_not_found")
        return _Json(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self._runner.model, "object": "model", "created": self._began, "owned_by": "specbatch"}


async def _json(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request. It raises ApiError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY:
            raise ApiError(413, f"The body has more than {_MAX_BODY:,} bytes.")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise ApiError(400, "We could not parse the JSON body of your request.") from exc
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return fields


def _metadata(value: Any) -> dict[str, str] | None:
    """Check metadata, which a client gives a batch. It raises ApiError."""
    if value is None:
        return None
    is_map = isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    if not is_map or len(value) > _MAX_METADATA:
        message = f"'metadata' must be an object with at most {_MAX_METADATA} texts."
        raise ApiError(400, message, "metadata", "invalid_type")
    if any(len(key) > _MAX_KEY or len(item) > _MAX_VALUE for key, item in value.items()):
        message = f"'metadata' has a key of more than {_MAX_KEY} characters, or a text of more than {_MAX_VALUE}."
        raise ApiError(400, message, "metadata", "invalid_value")
    return dict(value)


def _page(request: Request, items: Sequence[Listed], default: int) -> Response:
    """Return a page of `items`, the newest first if `order` is not asc. It raises ApiError."""
    asked = request.query_params
    order, after = asked.get("order", "desc"), asked.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, "'order' must be asc or desc.", "order", "invalid_value")
    try:
        limit = int(asked.get("limit", default))
    except ValueError:
        limit = 0
    if not 1 <= limit <= 10_000:
        raise ApiError(400, "'limit' must be a number from 1 to 10000.", "limit", "invalid_value")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise ApiError(400, f"No object found with id '{after[:80]}'.", "after", "invalid_value")
        ordered = ordered[ids.index(after) + 1 :]
    page = [item.json() for item in ordered[:limit]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return _Json({"object": "list", "data": page, **ends, "has_more": len(ordered) > limit})
