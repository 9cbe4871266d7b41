"""The output file and the error file of a batch, from the results of its file job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specbatch.files.jsonl import encode_line
from specbatch.files.result_files import result_rows
from specbatch.serve.errors import error_body
from specbatch.serve.objects import Batch, Counts
from specbatch.serve.state import State

_EXPIRED = "This request could not be executed before the completion window expired."
# Errors that are none of the request.
_SERVER_ERRORS = ("non_finite", "no_token_left", "worker_died")


def write_outputs(state: State, batch: Batch) -> int:
    """Write both files, and note them in `batch`. A file without a line is not written. A second call writes the same.

    Return the number of requests without a result. They are errors, if the batch was not cancelled."""
    results = state.results(batch)
    output, errors = results.with_name(f"{batch.id}.output"), results.with_name(f"{batch.id}.error")
    counts = Counts(batch.request_counts.total)
    finished: set[str] = set()
    with output.open("wb") as good, errors.open("wb") as bad:
        for line in result_rows(results) if results.exists() else ():
            finished.add(line["custom_id"])
            if line["response"] is None:
                counts.failed += 1
                bad.write(encode_line(_failed(line)))
            else:
                counts.completed += 1
                good.write(encode_line(line))
        left_out = 0
        for custom_id in () if batch.status == "cancelling" else _custom_ids(state, batch):
            if custom_id not in finished:
                left_out += 1
                counts.failed += 1
                error = {"code": "batch_expired", "message": _EXPIRED}
                number = f"batch_req_{batch.id}_{counts.failed}"
                bad.write(encode_line({"id": number, "custom_id": custom_id, "response": None, "error": error}))
    batch.request_counts = counts
    batch.output_file_id = state.add_output(batch, "output", output).id if counts.completed else None
    batch.error_file_id = state.add_output(batch, "error", errors).id if counts.failed else None
    for path in (output, errors):
        path.unlink(missing_ok=True)
    return left_out


def _failed(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a request that failed, as OpenAI has it: a response with another status than 200."""
    error = line["error"]
    status = 500 if error["code"] in _SERVER_ERRORS else 400
    body = error_body(status, error["message"], code=error["code"])
    request_id = line["id"].replace("batch_req_", "req_")
    return {**line, "response": {"status_code": status, "request_id": request_id, "body": body}, "error": None}


def _custom_ids(state: State, batch: Batch) -> Iterator[str]:
    with state.content(state.file(batch.input_file_id)).open("rb") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)["custom_id"]
