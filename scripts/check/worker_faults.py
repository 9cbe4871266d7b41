"""The check `faults` of check_workers.py: a job with workers after signals, crashes and hangs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from check_faults import count_rows, write_lines
from worker_jobs import DEADLY, Jobs, Session, different, mixed_rows, title

_NUM_ROWS = 600
_DEADLY_ROW = 300
_NUM_STARTS = 10
_STUCK_SECONDS = 3
_GONE_SECONDS = 30.0


class Faults:
    """A job over the stub engine, and the results of one process. Each method returns its figures, and problems."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = Jobs("stub", folder, sleep=0.02)
        self.rows = mixed_rows(_NUM_ROWS)
        write_lines(folder / "data.jsonl", self.rows)
        one = self.jobs.run("data.jsonl", "one.jsonl")
        self.code = one.process.returncode
        self.whole = (folder / "one.jsonl").read_bytes()

    def check(self) -> tuple[list[dict[str, Any]], list[str]]:
        figures, problems = [], []
        for fault in (self.interrupted, self.interrupted_at_start, self.one_output, self.stuck, self.deadly_row):
            figure, found = fault()
            figures.append({"engine": "stub", "fault": fault.__name__, **figure, "problems": found})
            print(figures[-1], flush=True)
            problems += [f"{fault.__name__}: {problem}" for problem in found]
        return figures, problems

    def interrupted(self) -> tuple[dict[str, Any], list[str]]:
        """Send SIGINT: running rows are finished, and the command can be resumed."""
        session, processes = self.at_work("interrupted.jsonl", 2)
        session.interrupt()
        code = session.wait()
        kept = count_rows(self.folder / "interrupted.jsonl.partial")
        remains, _ = session.remains(processes, _GONE_SECONDS)
        problems = [f"{name} remains" for name in remains]
        if code != 130 or "run the same command again" not in session.stderr:
            problems.append(f"exit code {code}:\n{session.stderr}")
        problems += self.problems_of(self.jobs.run("data.jsonl", "interrupted.jsonl", 1), "interrupted.jsonl")
        return {"exit_code": code, "rows_kept": kept}, problems

    def interrupted_at_start(self) -> tuple[dict[str, Any], list[str]]:
        """Send SIGINT while Ray and workers start."""
        codes, problems = [], []
        for i in range(_NUM_STARTS):
            session = self.jobs.start("data.jsonl", f"start.{i}.jsonl", 2)
            session.wait_until(lambda: any("raylet/raylet" in title(p) for p in session.processes()))  # noqa: B023
            session.wait_until(lambda: False, 3.0 * i / _NUM_STARTS)
            processes = session.processes()
            session.interrupt()
            codes.append(session.wait())
            if codes[-1] != 130 or "Traceback" in session.stderr:
                problems.append(f"exit code {codes[-1]}:\n{session.stderr}")
            problems += [f"{name} remains" for name in session.remains(processes, _GONE_SECONDS)[0]]
        return {"exit_codes": codes}, problems

    def one_output(self) -> tuple[dict[str, Any], list[str]]:
        """Run two commands with one output: the second one ends with an error."""
        slow = Jobs("stub", self.folder, sleep=0.5)
        first, _ = self.at_work("both.jsonl", 2, slow)
        second = self.jobs.run("data.jsonl", "both.jsonl", 1)
        still = first.process.poll() is None
        first.wait()
        problems = self.problems_of(first, "both.jsonl")
        if second.process.returncode != 2 or "Traceback" in second.stderr or not still:
            problems.append(f"exit code {second.process.returncode}, first runs: {still}:\n{second.stderr}")
        return {"exit_code": second.process.returncode, "message": errors_of(second)}, problems

    def stuck(self) -> tuple[dict[str, Any], list[str]]:
        """Let a worker hang: it is killed and replaced. Steps are slow, because otherwise the other worker has finished
        its rows by then, and the job ends without it."""
        slow = Jobs("stub", self.folder, sleep=0.5)
        session, processes = self.at_work("stuck.jsonl", 2, slow, "--set", f"cluster.stuck_seconds={_STUCK_SECONDS}")
        session.workers()[0].send_signal(signal.SIGSTOP)
        session.wait()
        problems = self.problems_of(session, "stuck.jsonl")
        if f"no answer for {_STUCK_SECONDS} seconds" not in session.stderr:
            problems.append(f"it was not killed:\n{session.stderr}")
        remains, seconds = session.remains(processes, _GONE_SECONDS)
        problems += [f"{name} remains" for name in remains]
        return {"gone_after_seconds": seconds, "seconds": round(session.seconds, 1)}, problems

    def deadly_row(self) -> tuple[dict[str, Any], list[str]]:
        """Run a row that ends its worker by SIGSEGV: it is named, or quarantined, and the other rows have results."""
        rows = [*self.rows]
        rows[_DEADLY_ROW] = {"prompt": DEADLY}
        write_lines(self.folder / "deadly.jsonl", rows)
        refused = self.jobs.run("deadly.jsonl", "deadly.results.jsonl", 2)
        problems = []
        if refused.process.returncode != 3 or f"index {_DEADLY_ROW} " not in refused.stderr:
            problems.append(f"exit code {refused.process.returncode}:\n{refused.stderr}")
        kept = count_rows(self.folder / "deadly.results.jsonl.partial")
        if kept != _NUM_ROWS - 1:
            problems.append(f"{kept} rows are kept")
        resumed = self.jobs.run("deadly.jsonl", "deadly.results.jsonl", 2, "--quarantine")
        at_once = self.jobs.run("deadly.jsonl", "at_once.jsonl", 2, "--quarantine")
        wanted = self.whole.splitlines()
        for session, name in ((resumed, "deadly.results.jsonl"), (at_once, "at_once.jsonl")):
            if session.process.returncode != 1:
                problems.append(f"{name}: exit code {session.process.returncode}:\n{session.stderr}")
                continue
            lines = (self.folder / name).read_bytes().splitlines()
            error = json.loads(lines[_DEADLY_ROW]).get("error", {})
            if error.get("type") != "worker_died":
                problems.append(f"{name}: the row's error is {error}")
            wanted[_DEADLY_ROW] = lines[_DEADLY_ROW]
            if lines != wanted:
                problems.append(f"{name}: other rows differ")
        return {"exit_codes": [s.process.returncode for s in (refused, resumed, at_once)], "rows_kept": kept,
                "message": errors_of(refused), "row": error}, problems  # fmt: skip

    def at_work(self, output: str, workers: int, jobs: Jobs | None = None, *more: str) -> tuple[Session, list[Any]]:
        """Start a command, and return it with its processes once it has results."""
        session = (jobs or self.jobs).start("data.jsonl", output, workers, *more)
        partial = self.folder / f"{output}.partial"
        assert session.wait_until(lambda: count_rows(partial) > 0 and len(session.workers()) == workers), session.stderr
        return session, session.processes()

    def problems_of(self, session: Session, output: str) -> list[str]:
        problem = different(session, self.folder / output, self.code, self.whole)
        return [problem] if problem else []


def errors_of(session: Session) -> str:
    return " ".join(line for line in session.stderr.splitlines() if line.startswith(("error:", "hint:")))
