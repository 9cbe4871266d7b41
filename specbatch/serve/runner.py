"""The thread that runs batches, one after the other, on one engine that stays loaded."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from dataclasses import replace
from typing import Any

from rich.console import Console

from specbatch.config import Config
from specbatch.errors import SpecbatchError, without_secrets
from specbatch.files.local import unlink_quietly
from specbatch.files.template_files import with_template_texts
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.generate import JobControl
from specbatch.job.pool import LocalPool
from specbatch.job.terminal import print_notes
from specbatch.job.worker import Runtime, SharedRuntime, Worker
from specbatch.serve.input_check import check_file
from specbatch.serve.objects import Batch, Status, batch_error
from specbatch.serve.outputs import write_outputs
from specbatch.serve.state import State
from specbatch.signals import INTERRUPTED


class BatchRunner:
    """Runs the batches of a server. Those that an earlier process has left go on first. It raises SpecbatchError if the
    configuration cannot run."""

    def __init__(self, state: State, config: Config, runtime: Runtime, console: Console) -> None:
        self._state = state
        self._console = console
        config = with_template_texts(config)
        self._shared = SharedRuntime(runtime, config)
        # A job decides nothing again: the engine is the same for all.
        self._config = replace(self._shared.resolved.config, data=config.data)
        self.model: str = self._config.model.target
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._control = JobControl()  # control of the batch that runs
        self._running: Batch | None = None
        self._is_closed = False
        for batch in state.batches.values():
            if batch.is_unfinished:
                self._queue.put(batch.id)
        self._thread = threading.Thread(target=self._run, name="specbatch-batches", daemon=True)

    def start(self) -> None:
        """Begin to run batches."""
        self._thread.start()

    def add(self, batch: Batch) -> None:
        """Run a batch after those that were added before."""
        self._state.save(batch)
        self._queue.put(batch.id)

    def cancel(self, batch: Batch) -> None:
        """End a batch. One that runs finishes the requests that have started."""
        with self._state.lock:
            batch.change_to("cancelling", int(time.time()))
            self._state.save(batch)
            if self._running is batch:
                self._control.wish = "finish"

    def counted(self, batch: Batch) -> Batch:
        """Return a batch with the numbers of requests that have finished so far."""
        with self._state.lock:
            if self._running is batch:
                failed = self._control.failed
                batch.request_counts.completed, batch.request_counts.failed = self._control.finished - failed, failed
        return batch

    def close(self) -> None:
        """End after the current step. A batch that runs goes on with the next server of this folder."""
        with self._state.lock:
            self._is_closed = True
            self._control.wish = "interrupt"
        self._queue.put("")
        if self._thread.is_alive():
            self._thread.join()
        self._shared.release()

    def _run(self) -> None:
        while (name := self._queue.get()) and not self._is_closed:
            batch = self._state.batches[name]
            try:
                self._run_batch(batch)
            except SpecbatchError as exc:
                hint = f" ({exc.hint})" if exc.hint else ""
                self._fail(batch, [batch_error("server_error", f"{exc.message}{hint}")])
            except Exception:  # an error of specbatch: the server goes on with other batches
                self._console.print(without_secrets(traceback.format_exc()), markup=False, highlight=False)
                self._fail(batch, [batch_error("server_error", "internal error; the server has printed it")])

    def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        """End a batch with errors. The engine is made again for the next one, because this one can have requests."""
        with self._state.lock:
            self._running = None
            batch.fail(errors, int(time.time()))
            self._state.save(batch)
        self._say(batch, errors[0]["message"])
        self._shared.release()

    def _run_batch(self, batch: Batch) -> None:
        source = self._state.content(self._state.file(batch.input_file_id))
        if batch.status == "validating":
            total, errors = check_file(source, batch.endpoint)
            if errors:
                self._fail_validation(batch, errors)
                return
            batch.request_counts.total = total
        if batch.status == "cancelling" and batch.in_progress_at is None:
            self._finish(batch)
            return
        if not self._begin(batch):
            return
        expiry = threading.Timer(max(batch.expires_at - time.time(), 0), self._expire)
        expiry.daemon = True
        expiry.start()
        try:
            # Without a request that may start, the job loads no model, and writes what was finished before.
            options = GenerateOptions(
                str(source), self._state.results(batch), quarantine=True, keep_going=True, control=self._control
            )
            pool = LocalPool(Worker(self._shared.runtime, lambda line: print_notes([line], self._console)))
            began = time.perf_counter()
            outcome = run_file_job(options, self._config, pool, self._console, began=began, summary=False)
        finally:
            expiry.cancel()
        if outcome.exit_code != INTERRUPTED:
            self._finish(batch)

    def _fail_validation(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        with self._state.lock:
            batch.fail(errors, int(time.time()))
            self._state.save(batch)
        self._say(batch, errors[0]["message"])

    def _begin(self, batch: Batch) -> bool:
        """Make a batch the one that runs. Return False if the server ends."""
        with self._state.lock:
            self._control = JobControl()
            if self._is_closed:
                return False
            if batch.status == "validating":
                batch.change_to("in_progress", int(time.time()))
            elif batch.status == "cancelling":
                self._control.wish = "finish"
            self._running = batch
            self._state.save(batch)
        self._say(batch, f"{batch.request_counts.total:,} requests")
        return True

    def _expire(self) -> None:
        with self._state.lock:
            if self._control.wish == "run":
                self._control.wish = "finish"

    def _finish(self, batch: Batch) -> None:
        """Write the files of a batch whose job has ended."""
        with self._state.lock:
            is_cancelled = batch.status == "cancelling"
            if not is_cancelled:
                batch.change_to("finalizing", int(time.time()))
            self._running = None
            self._state.save(batch)
        num_left_out = write_outputs(self._state, batch)
        with self._state.lock:
            ended: Status = "cancelled" if is_cancelled else "expired" if num_left_out else "completed"
            batch.change_to(ended, int(time.time()))
            self._state.save(batch)
        unlink_quietly(self._state.results(batch))
        counts = batch.request_counts
        self._say(batch, f"{counts.completed:,} completed, {counts.failed:,} failed")

    def _say(self, batch: Batch, what: str) -> None:
        print_notes([f"{batch.id}: {batch.status}: {what}"], self._console)
