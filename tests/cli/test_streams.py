"""Standard streams that are closed, full or no longer read, and signals at the start: exit codes stay what they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import processes
from tests.cli.test_cli import environment, write_rows

STUB = f"{sys.executable} -m tests.stub_engine"


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which SPECBATCH is the command line over the stub engine."""
    return subprocess.run(
        ["bash", "-c", line.replace("SPECBATCH", STUB)],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "redirection",
    [
        "2>&-",
        pytest.param("2>&- >&- <&-", marks=pytest.mark.slow),
        pytest.param("2> >(head -c1 >/dev/null)", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_without_stderr(tmp_path: Path, redirection: str) -> None:
    write_rows(tmp_path, 20, bad=1)
    done = shell(tmp_path, f"SPECBATCH generate d.jsonl {redirection}")
    assert done.returncode == 1, done.stderr  # one row failed
    assert_21_results(tmp_path)


def test_a_job_goes_on_on_a_full_disk_for_stderr(tmp_path: Path) -> None:
    write_rows(tmp_path, 20, bad=1)
    assert processes.run(tmp_path, "generate", "d.jsonl", stderr="/dev/full").returncode == 1
    assert_21_results(tmp_path)


def assert_21_results(folder: Path) -> None:
    lines = (folder / "d.results.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(21)), "and nothing else was written there"
    assert not (folder / "d.results.jsonl.partial").exists()


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Libraries write to number 2."""
    program = "from specbatch.cli.streams import guard_streams as g; g(); f = open('f', 'w'); f.write(str(f.fileno()))"
    done = shell(tmp_path, f'{sys.executable} -c "{program}" <&- >&- 2>&-')
    assert done.returncode == 0
    assert int((tmp_path / "f").read_text()) > 2


def test_mistakes_keep_their_exit_code_without_stderr(tmp_path: Path) -> None:
    for arguments in (["generate", "no.jsonl"], ["frobnicate"]):
        assert processes.run(tmp_path, *arguments, stderr="/dev/full").returncode == 2


def test_a_reader_of_data_that_has_seen_enough(tmp_path: Path) -> None:
    done = shell(tmp_path, "SPECBATCH config | true; echo ${PIPESTATUS[0]}")
    assert done.stdout == "0\n", done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_data_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    done = shell(tmp_path, "SPECBATCH models list > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("redirection", ["<&-", "0>written"])
def test_standard_input_that_cannot_be_read(tmp_path: Path, redirection: str) -> None:
    done = shell(tmp_path, f"SPECBATCH generate - -o out.jsonl {redirection}")
    assert done.returncode == 2
    assert "error: standard input " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_few_open_files(tmp_path: Path) -> None:
    """A low limit is raised where the hard one allows it."""
    write_rows(tmp_path, 3)
    refused = shell(tmp_path, "ulimit -n 6; SPECBATCH generate d.jsonl")
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        "error: at most 6 files can be open at once, and 64 are needed\nhint: ulimit -n 1024\n"
    )
    assert os.listdir(tmp_path) == ["d.jsonl"]
    raised = shell(tmp_path, "ulimit -Sn 6; SPECBATCH generate d.jsonl")
    assert raised.returncode == 0, raised.stderr


def test_signals_during_imports(tmp_path: Path) -> None:
    """At several moments of the start, with the real engine's libraries."""
    write_rows(tmp_path, 1)
    job = ["-m", "specbatch", "generate", "d.jsonl", "--set", "model.target=random:tiny"]
    for seconds, number in ((0.0, signal.SIGINT), (0.2, signal.SIGTERM), (0.6, signal.SIGINT)):
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", *job],
            cwd=tmp_path, env=environment(), text=True, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith("specbatch.signals"):
                break
        time.sleep(seconds + 0.05)  # the handlers are set a moment after
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr[-2000:]
        assert "Traceback" not in stderr
        assert "interrupted" in stderr
    assert os.listdir(tmp_path) == ["d.jsonl"]


def test_an_interrupt_within_exec_keeps_the_exit_code(tmp_path: Path) -> None:
    """Where KeyboardInterrupt itself passes through an exec(), Python ends by SIGINT, whatever the code says then."""
    code = """
import os, signal, sys
from specbatch.signals import interrupt, on_signals
with on_signals(interrupt):
    try:
        exec("os.kill(os.getpid(), signal.SIGTERM)\\nsignal.pause()")
    except KeyboardInterrupt:
        sys.exit(130)
"""
    (tmp_path / "command.py").write_text(code)
    command = [sys.executable, "-m", "command"]
    assert subprocess.run(command, cwd=tmp_path, env=environment(), timeout=30).returncode == 130
