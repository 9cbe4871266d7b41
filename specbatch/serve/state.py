"""The files and batches of a server, in a folder: they are there after a restart."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal

from specbatch.errors import InputError
from specbatch.files.local import disk_errors, open_locked, unlink_quietly, write_whole
from specbatch.serve.errors import ApiError
from specbatch.serve.objects import Batch, StoredFile


class State:
    """The folder of one server. It raises InputError if another server has it, or if it cannot be read or written.

    `files` and `batches` are in the order in which they were made. Hold `lock` to change them.
    """

    def __init__(self, folder: Path) -> None:
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        self.lock = threading.RLock()
        with disk_errors(folder):
            for path in (folder, self._files_folder, self._batches_folder):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_file = open_locked(folder / "lock", os.O_RDWR)
        if self._lock_file is None:
            raise InputError(f"another server uses {folder}", "--dir names another folder")
        files = [StoredFile(**fields) for fields in _objects(self._files_folder)]
        batches = [Batch.of_json(fields) for fields in _objects(self._batches_folder)]
        self.files = {file.id: file for file in sorted(files, key=lambda file: file.created_at)}
        self.batches = {batch.id: batch for batch in sorted(batches, key=lambda batch: batch.created_at)}

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def content(self, file: StoredFile) -> Path:
        """Return the path of a file's content."""
        return self._files_folder / f"{file.id}.jsonl"

    def results(self, batch: Batch) -> Path:
        """Return the path of the results of a batch's file job."""
        return self._batches_folder / f"{batch.id}.results.jsonl"

    def file(self, name: str, param: str = "file_id") -> StoredFile:
        """Return a file. It raises ApiError if there is none."""
        if (found := self.files.get(name)) is None:
            raise ApiError(404, f"No such File object: {name}", param, "not_found")
        return found

    def batch(self, name: str) -> Batch:
        """Return a batch. It raises ApiError if there is none."""
        if (found := self.batches.get(name)) is None:
            raise ApiError(404, f"No batch found with id '{name}'.", "batch_id", "not_found")
        return found

    def add_upload(self, content: BinaryIO, filename: str) -> StoredFile:
        """Keep a file that a client has uploaded."""
        file = StoredFile(f"file-{secrets.token_hex(12)}", 0, int(time.time()), filename, "batch")
        path = self.content(file)
        try:
            with disk_errors(path), path.open("xb") as copy:
                shutil.copyfileobj(content, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
        except BaseException:
            unlink_quietly(path)
            raise
        return self._add(file)

    def add_output(self, batch: Batch, kind: Literal["output", "error"], content: Path) -> StoredFile:
        """Keep a file of a batch. A second call replaces the file of the first. `content` is moved."""
        name = f"{batch.id}_{kind}"
        file = StoredFile(f"file-{name}", 0, int(time.time()), f"{name}.jsonl", "batch_output")
        with disk_errors(content):
            os.replace(content, self.content(file))
        return self._add(file)

    def _add(self, file: StoredFile) -> StoredFile:
        file.bytes = self.content(file).stat().st_size
        write_whole(self._files_folder / f"{file.id}.json", json.dumps(file.json()).encode())
        with self.lock:
            self.files[file.id] = file
        return file

    def remove(self, file: StoredFile) -> None:
        """Delete a file. It raises ApiError if a batch needs it."""
        with self.lock:
            users = [b.id for b in self.batches.values() if b.is_unfinished and b.input_file_id == file.id]
            if users:
                raise ApiError(409, f"The batch {users[0]} is not finished, and {file.id} is its input.", "file_id")
            with disk_errors(self.content(file)):
                (self._files_folder / f"{file.id}.json").unlink(missing_ok=True)
                self.content(file).unlink(missing_ok=True)
            self.files.pop(file.id, None)

    def save(self, batch: Batch) -> None:
        """Write the state of a batch, which can be a new one."""
        with self.lock:
            write_whole(self._batches_folder / f"{batch.id}.json", json.dumps(batch.json()).encode())
            self.batches[batch.id] = batch


def _objects(folder: Path) -> list[dict[str, Any]]:
    """Return the objects in a folder. It raises InputError for a file that is damaged."""
    found = []
    for path in folder.glob("*.json"):
        if path.name.endswith(".stats.json"):
            continue
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as exc:
            raise InputError(f"{path} is damaged: {exc}", "remove it, and start again") from exc
    return found
