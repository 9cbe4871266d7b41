"""The command line: exit codes, signals, kill -9, what goes to stdout. In another process where that is the point."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import specbatch
from specbatch import startup
from specbatch.cli import app
from specbatch.types import Completion
from tests import processes, stub_engine
from tests.processes import Command
from tests.stub_engine import StubEngine, stub_modules

ROOT = Path(specbatch.__file__).resolve().parent.parent


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


@pytest.fixture
def inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command over the stub engine in this process, in `tmp_path`: no start of Python, no imports."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("TERM", "dumb"), ("COLUMNS", "200")):
        monkeypatch.setenv(name, value)
    for name, module in stub_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(startup, "model_paths", lambda config: {})
    return lambda *arguments, stdin=None: CliRunner().invoke(app, list(arguments), input=stdin)


def write_rows(folder: Path, count: int, bad: int = 0) -> None:
    lines = [json.dumps({"prompt": f"p{i}", "temperature": 1.0}) for i in range(count)] + ["broken"] * bad
    (folder / "d.jsonl").write_text("\n".join(lines) + "\n")


def test_exit_codes_and_streams(tmp_path: Path, inline: Callable[..., Any]) -> None:
    write_rows(tmp_path, 5)
    done = processes.run(tmp_path, "generate", "d.jsonl")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "5 ok, 0 failed" in done.stderr
    assert all(line == line.rstrip() for line in done.stderr.splitlines()), "a table is padded with blanks"
    assert sorted(os.listdir(tmp_path)) == ["d.jsonl", "d.results.jsonl", "d.results.stats.json"]
    write_rows(tmp_path, 5, bad=2)
    refused = inline("generate", "d.jsonl")
    assert refused.exit_code == 2
    assert "error: " in refused.stderr
    assert "hint: --overwrite" in refused.stderr
    failed = processes.run(tmp_path, "generate", "d.jsonl", "--overwrite")
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1] == "2 of 7 rows failed: 2 invalid_json"


def test_quiet(tmp_path: Path, inline: Callable[..., Any]) -> None:
    """Only errors, and how many rows failed."""
    write_rows(tmp_path, 3)
    done = inline("generate", "d.jsonl", "-q")
    assert (done.exit_code, done.output) == (0, "")
    write_rows(tmp_path, 3, bad=2)
    failed = inline("generate", "d.jsonl", "--quiet", "--overwrite")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert failed.stderr == "2 of 5 rows failed: 2 invalid_json\n"
    refused = inline("generate", "d.jsonl", "-q", "--limit", "2")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ")


def test_shards_and_their_merge(tmp_path: Path, inline: Callable[..., Any]) -> None:
    write_rows(tmp_path, 30, bad=2)
    mistaken = inline("generate", "d.jsonl", "--shard", "3/3")
    assert mistaken.exit_code == 2
    assert "hint: shards are numbered from 0: the last of 3 is 2/3" in mistaken.stderr
    codes = [inline("generate", "d.jsonl", "--shard", f"{number}/3").exit_code for number in (0, 2)]
    assert codes == [1, 0], "rows 30 and 31 are bad"
    shards = [f"d.results.{number}-of-3.jsonl" for number in range(3)]
    missing = inline("merge", shards[0], shards[2])
    assert missing.exit_code == 2
    assert "error: 1 of 3 shards are missing: 1/3 (no d.results.1-of-3.jsonl)" in missing.stderr
    assert "hint: specbatch generate d.jsonl --shard 1/3, with the options of the other shards" in missing.stderr
    assert not (tmp_path / "d.results.jsonl").exists()
    assert inline("generate", "d.jsonl", "--shard", "1/3").exit_code == 1
    merged = inline("merge", *shards)
    assert (merged.exit_code, merged.stdout) == (1, "")
    assert "30 ok, 2 failed" in merged.stderr
    assert "time" not in merged.stderr, "the shards may have run at the same time"
    whole = inline("generate", "d.jsonl", "-o", "whole.jsonl")
    assert whole.exit_code == 1
    assert (tmp_path / "d.results.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert "is finished already" in inline("generate", "d.jsonl").stderr
    assert inline("merge").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "nope.jsonl"], ["nope.jsonl does not exist", "did you mean note.jsonl"]),
        (["generate", "note.jsonl", "--set", "sampling.temprature=1"], ["sampling.temprature", "sampling.temperature"]),
        (["generate", "note.jsonl", "-c", "no.yaml"], ["cannot read the configuration no.yaml"]),
        (["generate", "note.jsonl", "-o", "no/x.jsonl"], ["does not exist"]),
        (["generate", "note.jsonl", "--set", "data.prompt_template={}"], ["prompt_template"]),
        (["generate", "-"], ["standard input", "-o"]),
        (["generate", "note.jsonl", "--limit", "0"], ["--limit"]),
        (["generate"], ["no input is given"]),
        (["frobnicate"], ["No such command"]),
        (["models", "path", "smollm"], ["smollm"]),
    ],
)
def test_mistakes_exit_with_2_before_a_model_is_loaded(
    tmp_path: Path,
    arguments: list[str],
    words: list[str],
    inline: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "note.jsonl").write_text('{"prompt": "x"}\n')
    built = tmp_path / "built"
    monkeypatch.setenv("STUB_BUILT", str(built))
    done = inline(*arguments)
    assert done.exit_code == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not built.exists()
    assert sorted(os.listdir(tmp_path)) == ["note.jsonl"]


def test_config_prints_yaml_on_stdout(tmp_path: Path, inline: Callable[..., Any]) -> None:
    done = inline("config", "--set", "sampling.n=3")
    assert done.exit_code == 0
    (tmp_path / "c.yaml").write_text(done.stdout)
    assert "dtype: float32" in done.stdout  # decided
    again = inline("config", "-c", "c.yaml")
    assert again.stdout == done.stdout


def test_version_models_and_help_need_no_torch(inline: Callable[..., Any]) -> None:
    assert inline("--version").stdout == f"specbatch {specbatch.__version__}\n"
    target, *heads = inline("models", "list").stdout.splitlines()
    assert target.startswith("builtin:smollm2-135m-instruct\t98 MB\t")
    for head, method in zip(heads, ("eagle3", "block"), strict=True):
        name = f"smollm2-135m-instruct-{method}"
        assert head.startswith(f"builtin:{name}\t16 MB\tApache-2.0\tcomes with specbatch\t")
        path = Path(inline("models", "path", name).stdout.strip())
        assert (path / "model.safetensors").is_file()
        assert inline("models", "pull", f"builtin:{name}").stdout.strip() == str(path)
    commands = [["--version"], ["models", "list"], ["models", "path", path.name], ["generate", "--help"]]
    code = (
        "import sys; from specbatch import cli\n"
        f"for words in {commands}:\n"
        "    try: cli.app(words)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True)


def test_standard_input(tmp_path: Path, inline: Callable[..., Any]) -> None:
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    done = processes.run(tmp_path, "generate", "-", "-o", "out.jsonl", stdin=text)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out.stats.json").exists()
    assert "nothing to do" in inline("generate", "-", "-o", "out.jsonl", stdin=text).stderr
    assert inline("generate", "-", "-o", "out.jsonl", stdin=text * 2).exit_code == 2


def test_parquet_with_a_template(tmp_path: Path, inline: Callable[..., Any]) -> None:
    pq.write_table(pa.table({"q": ["a", None, "c"], "answer": [1, 2, 3]}), tmp_path / "d.parquet")
    done = inline("generate", "d.parquet", "--set", "data.prompt_template=Q: {q}")
    assert done.exit_code == 1, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "d.results.jsonl").read_text().splitlines()]
    assert [r["finish_reason"] == "error" for r in rows] == [False, True, False]
    assert rows[0]["metadata"] == {"q": "a", "answer": 1}


def test_files_that_cannot_be_read_end_the_command_at_once(tmp_path: Path, inline: Callable[..., Any]) -> None:
    for name, content, words in (
        ("a.csv", b'prompt,k\na,1\n"b,2\n', "a quote that opens in the row at line 3 is not closed"),
        ("b.csv", b"prompt,k\na,1,x\nb,2,x\n", "line 2 has 3 fields, but the header has 2"),
        ("c.jsonl", b"\x1f\x8b\x08\0", "is gzip, not JSON lines"),
        ("d.json", b'[{"prompt": "a"},]', "is not valid JSON in row 1"),
        ("e.parquet", b"PAR1", "is not parquet"),
    ):
        (tmp_path / name).write_bytes(content)
        done = inline("generate", name)
        assert done.exit_code == 2
        assert words in done.stderr.splitlines()[0]
        assert len(done.stderr.splitlines()) <= 2
        assert not (tmp_path / name).with_suffix(".results.jsonl.partial").exists()


def test_a_damaged_data_set_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` logs what it raises, too. In a new process: its import decides what it logs."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.xml").write_bytes(b"\xff\xfe<a>")  # a kind of file that only `datasets` reads
    monkeypatch.delenv("DATASETS_VERBOSITY", raising=False)  # which an earlier command of this process has set
    command = [sys.executable, "-m", "tests.stub_engine", "generate", "d"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(USE_TORCH="0"), text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 2, done.stderr
    assert "d cannot be read past row 0: " in done.stderr.splitlines()[0]


def test_kill_9_at_random_moments_changes_no_byte(tmp_path: Path, inline: Callable[..., Any]) -> None:
    kill_and_compare(tmp_path, inline, kills=3, rows=300)


@pytest.mark.slow
def test_kill_9_at_25_random_moments_changes_no_byte(tmp_path: Path, inline: Callable[..., Any]) -> None:
    kill_and_compare(tmp_path, inline, kills=25, rows=2000)


def kill_and_compare(folder: Path, inline: Callable[..., Any], kills: int, rows: int) -> None:
    write_rows(folder, rows, bad=3)
    assert inline("generate", "d.jsonl", "-o", "whole.jsonl").exit_code == 1
    rng = random.Random(0)
    partial = folder / "d.results.jsonl.partial"
    for kill in range(kills):
        process = Command(folder, "generate", "d.jsonl", STUB_SLEEP="0.004")
        process.wait_for_rows(partial, rows * kill // (kills + 1) + rng.randrange(rows // (kills + 1)))
        time.sleep(rng.random() * 0.01)
        process.kill()
        process.communicate()
        if kill % 2:  # as if the line had been torn while it was written
            with partial.open("r+b") as file:
                file.truncate(partial.stat().st_size - rng.randrange(1, 40))
        assert not (folder / "d.results.jsonl").exists()
    done = inline("generate", "d.jsonl")
    assert done.exit_code == 1, done.stderr
    assert "resuming" in done.stderr
    assert (folder / "d.results.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert not partial.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_flush_and_say_how_to_resume(
    tmp_path: Path, number: signal.Signals, inline: Callable[..., Any]
) -> None:
    write_rows(tmp_path, 200)
    inline("generate", "d.jsonl", "-o", "whole.jsonl")
    process = Command(tmp_path, "generate", "d.jsonl", STUB_SLEEP="0.01")
    process.wait_for_rows(tmp_path / "d.results.jsonl.partial", 20)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run the same command again" in stderr
    assert "Traceback" not in stderr
    assert inline("generate", "d.jsonl").exit_code == 0
    assert (tmp_path / "d.results.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    class Slow(StubEngine):
        """Sleeps in each step after the first."""

        def step(self) -> list[Completion]:
            self._sleep = 2.0 * (self._steps > 0)
            return super().step()

    def main() -> None:
        stub_engine.build_engine = lambda run, show: Slow()  # type: ignore[assignment]
        stub_engine.main()

    write_rows(tmp_path, 50)
    process = Command(tmp_path, "generate", "d.jsonl", main=main)
    process.wait_for_rows(tmp_path / "d.results.jsonl.partial", 1)  # one step is over: the loop owns the signals
    time.sleep(0.2)  # into the next one
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 1.5, "it waited for the step"


def test_engine_bugs_are_seen_and_lose_no_row(tmp_path: Path, inline: Callable[..., Any]) -> None:
    write_rows(tmp_path, 100)
    done = processes.run(tmp_path, "generate", "d.jsonl", STUB_FAIL_AT="5")
    assert done.returncode == 3
    assert "RuntimeError: the stub engine broke" in done.stderr
    assert (tmp_path / "d.results.jsonl.partial").read_bytes().count(b"\n") > 8
    assert inline("generate", "d.jsonl").exit_code == 0


def test_examples_are_valid_input(inline: Callable[..., Any]) -> None:
    folder = ROOT / "examples"
    if not folder.is_dir():
        pytest.skip("no checkout")
    for name in ("questions", "chat", "openai_batch"):
        done = inline("generate", str(folder / f"{name}.jsonl"), "-o", f"{name}.jsonl")
        assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("command", ["tune", "eval"])
def test_commands_with_one_engine_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """cluster.workers is in a configuration that generate uses, too. A Ray is not started."""
    monkeypatch.chdir(tmp_path)
    arguments = {"tune": ["tune", "no.jsonl"], "eval": ["eval", "gsm8k", "--data", "no.jsonl"]}[command]
    done = CliRunner().invoke(app, [*arguments, "--set", "cluster.workers=2"])
    assert done.exit_code == 2, done.output
    assert "cluster.workers is for generate: this command runs one engine" in done.output
    assert "no.jsonl" in done.output
