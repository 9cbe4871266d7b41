"""A row that crashes the process, in real processes over the stub engine: it is found, and no other row is lost."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specbatch.files.paths import partial_path, running_path
from specbatch.types import Completion, Request
from tests import stub_engine
from tests.processes import Command
from tests.stub_engine import StubEngine, StubRun

BATCH = 4
DEADLY: dict[str, Callable[[], Any]] = {
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "error": lambda: 1 // 0,
}


class Dying(StubEngine):
    """Prompts with one of `words` do what that word means while they run."""

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self._words = words

    def _complete(self, request: Request) -> Completion:
        prompt = bytes(token for token in request.prompt_token_ids if token < 256)
        for word in self._words:
            if word.encode() in prompt:
                DEADLY[word]()
        return super()._complete(request)


class Job:
    """A job in a folder; each call of `run` is a process. `log`: the stderr of the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.partial = partial_path(folder / "o.jsonl")
        self.log = ""

    def write(self, **deadly: int) -> None:
        """40 rows. `deadly`: the index of the row that begins with a word."""
        rows: list[dict[str, Any]] = [{"prompt": f"p{i}", "n": 1 + (i % 5 == 0)} for i in range(40)]
        rows[7] = {"prompt": ""}
        for word, index in deadly.items():
            rows[index]["prompt"] = f"{word} {index}"
        (self.folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, *options: str, deadly: Sequence[str] = (), output: str = "o.jsonl", sleep: float = 0) -> Command:
        def main() -> None:
            stub_engine.build_engine = build  # type: ignore[assignment]
            stub_engine.main()

        def build(run: StubRun, show: object) -> Dying:
            Path("built").touch()
            return Dying(deadly, batch=BATCH, sleep=sleep)

        arguments = ["generate", "d.jsonl", "-o", output, "--set", f"engine.max_batch_size={BATCH}", *options]
        return Command(self.folder, *arguments, main=main)

    def run(self, *options: str, **how: Any) -> int:
        """The exit code; minus the signal that ended the process."""
        return self.end(self.start(*options, **how))

    def end(self, command: Command) -> int:
        _, log = command.communicate()
        self.log = " ".join(log.split())
        assert command.returncode is not None
        return command.returncode

    def undisturbed(self) -> list[bytes]:
        """The lines of a run in which no row is deadly."""
        assert self.run(output="whole.jsonl") == 1  # row 7
        return self.lines("whole.jsonl")

    def lines(self, name: str = "o.jsonl") -> list[bytes]:
        return (self.folder / name).read_bytes().splitlines()

    def num_done(self) -> int:
        return self.partial.read_bytes().count(b'","row":{')


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_sigkill_blames_no_row(job: Job) -> None:
    job.write(kill=20)
    for _ in range(4):  # one more than a row that crashes has
        assert job.run(deadly=["kill"]) == -signal.SIGKILL
        assert running_path(job.folder / "o.jsonl").exists()
        assert "crash" not in job.log
    assert job.run() == 1
    assert job.lines() == job.undisturbed()
    assert sorted(file.name for file in job.folder.iterdir() if file.name.startswith("o.")) == [
        "o.jsonl",
        "o.stats.json",
    ]


@pytest.mark.parametrize(
    ("word", "index", "exit_code", "cause"),
    [
        ("segv", 21, -signal.SIGSEGV, "segmentation fault in string_at, __init__.py line"),
        ("segv", 20, -signal.SIGSEGV, "segmentation fault in string_at"),  # n=2
        ("abort", 30, -signal.SIGABRT, "aborted in _complete, test_crash_retry.py line"),
        ("error", 0, 3, "ZeroDivisionError"),
    ],
)
def test_a_row_that_crashes_the_process(job: Job, word: str, index: int, exit_code: int, cause: str) -> None:
    """It dies alone in the third run. The fourth runs what is left and names it, and the fifth makes an error row of
    it."""
    job.write(**{word: index})
    for run in range(3):
        assert job.run(deadly=[word]) == exit_code
        assert (f"the last run crashed ({cause}" in job.log) == (run > 0)
        if run == 1:
            assert "while it ran 1 row;" not in job.log
            assert "rows that crash twice run alone at the end" in job.log
    assert job.num_done() >= 37, "of the small group that died in the second run"
    assert job.run(deadly=[word]) == 3
    assert job.num_done() == 39
    (job.folder / "built").unlink()
    assert "while it ran 1 row;" in job.log
    assert f"error: the row with index {index} ends the process each time, also alone ({cause}" in job.log
    assert "all other rows are finished and kept hint: change these rows, or make error rows of them" in job.log
    assert "Traceback" not in job.log
    assert job.run("--quarantine", deadly=[word]) == 1
    assert not (job.folder / "built").exists(), "no model is needed for that"
    lines, whole = job.lines(), job.undisturbed()
    killer = json.loads(lines.pop(index))
    del whole[index]
    assert lines == whole
    assert killer["index"] == index
    assert killer["error"]["type"] == "worker_died"
    message = f"the process died 3 times while it ran this row, the last time with no other row: {cause}"
    assert killer["error"]["message"].startswith(message)
    assert json.loads((job.folder / "o.stats.json").read_text())["rows"]["errors"]["worker_died"] == 1
    assert not running_path(job.folder / "o.jsonl").exists()


@pytest.mark.parametrize("indices", [(20, 21), pytest.param((3, 33), marks=pytest.mark.wide)])
def test_two_rows_that_crash_the_process(job: Job, indices: tuple[int, int]) -> None:
    job.write(segv=indices[0], abort=indices[1])
    deadly = ["segv", "abort"]
    runs = 0
    while job.run(deadly=deadly) < 0:
        runs += 1
        assert runs <= 6
    assert "2 rows end the process each time, also alone" in job.log
    assert f"those with index {indices[0]}, {indices[1]};" in job.log
    assert job.num_done() == 38
    assert job.run("--quarantine", deadly=deadly) == 1
    lines, whole = job.lines(), job.undisturbed()
    for index in sorted(indices, reverse=True):
        assert json.loads(lines.pop(index))["error"]["type"] == "worker_died"
        del whole[index]
    assert lines == whole


def test_a_row_that_crashed_the_process_can_succeed_later(job: Job) -> None:
    """Such as after a driver was repaired: alone, and after a count was reset by --overwrite."""
    job.write(segv=12)
    for _ in range(2):
        assert job.run(deadly=["segv"]) == -signal.SIGSEGV
    assert job.run() == 1
    whole = job.undisturbed()
    assert job.lines() == whole
    (job.folder / "o.jsonl").unlink()
    for _ in range(3):
        assert job.run(deadly=["segv"]) == -signal.SIGSEGV
    assert job.run("--overwrite") == 1
    assert "crash" not in job.log
    assert job.lines() == whole


def test_a_row_that_crashed_the_process_can_be_changed(job: Job) -> None:
    """All other rows stay. The new row begins without a count: it is not left out, and runs with the others."""
    job.write(segv=12, abort=25)
    while job.run(deadly=["segv", "abort"]) < 0:
        pass
    assert "those with index 12, 25;" in job.log
    job.write(abort=25)
    assert job.run(deadly=["segv", "abort"]) == 3
    assert "the row with index 25 ends" in job.log
    job.write()
    assert job.run() == 1
    assert "resuming: 39 rows are done" in job.log
    assert job.lines() == job.undisturbed()


def test_a_second_process_leaves_the_table_alone(job: Job) -> None:
    job.write(segv=30)
    assert job.run(deadly=["segv"]) == -signal.SIGSEGV
    first = job.start(sleep=0.02, deadly=["segv"])
    running = running_path(job.folder / "o.jsonl")
    first.wait_for_rows(job.partial, job.num_done())
    first.send_signal(signal.SIGSTOP)
    table = running.read_bytes()
    assert job.run() == 2
    assert "another process is writing" in job.log
    assert running.read_bytes() == table
    first.send_signal(signal.SIGCONT)
    assert job.end(first) == -signal.SIGSEGV
    assert job.run() == 1
    assert "the last run crashed (segmentation fault" in job.log
    assert job.lines() == job.undisturbed()
