"""The partial file: what is damaged or foreign in it never reaches the output, and costs no more than its rows."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from specbatch.errors import InputError
from specbatch.files.jsonl import encode_line
from specbatch.files.paths import partial_path
from specbatch.results.partial import FORMAT, PartialLines
from specbatch.results.results import ResultFile
from specbatch.results.stats import RowTotals
from specbatch.rows.sources import RawRow
from tests.job.finished import finished
from tests.job.test_generate import Run
from tests.stub_engine import StubEngine

JOB = {"limit": None, "sampling.temperature": 0.5, "input.sha256": "0" * 64}
ROWS = [RawRow(index, b'{"prompt": "p%d"}' % index) for index in range(9)]


def result_of(row: RawRow) -> dict[str, Any]:
    """A native result, an OpenAI one and an error in turn; a function of the row."""
    index = row.index
    usage = {"prompt_tokens": index, "completion_tokens": 2}
    counts = {"rounds": 1, "drafted": 3, "accepted": 1, "acceptance_length": 2.0, "accept_histogram": [0, 1]}
    if index % 3 == 0:
        return {"id": None, "index": index, "text": None, "finish_reason": "error", "error": {"type": "invalid_json"}}
    if index % 3 == 1:
        body = {"choices": [{"finish_reason": "length"}], "usage": usage, "speculation": counts}
        return {"id": f"batch_req_{index:012d}", "response": {"body": body}, "error": None}
    return {"id": "é", "index": index, "text": "t", "finish_reason": "stop", "usage": usage, "speculation": counts}


WHOLE = b"".join(encode_line(result_of(row)) for row in ROWS)


class Job:
    """A job that a crash has ended after five of its nine rows."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "o.jsonl"
        self.partial = partial_path(self.output)
        self.begin()
        self.header, *self.lines = self.partial.read_bytes().splitlines(keepends=True)
        self.content = self.header + b"".join(self.lines)

    def begin(self) -> None:
        results = ResultFile(self.output, JOB, overwrite=True)
        for index in (4, 1, 0, 8, 5):
            results.append(finished(index, ROWS[index].digest(), result_of(ROWS[index])))
        results.close()

    def resume(self, content: bytes, job: dict[str, Any] | None = None) -> tuple[int, ResultFile]:
        """(rows that were computed again, the file), after a check that nothing in the output tells of the damage."""
        self.partial.write_bytes(content)
        results = ResultFile(self.output, job or JOB, overwrite=False)
        computed = 0
        for row in ROWS:
            if not results.is_done(row):
                results.append(finished(row.index, row.digest(), result_of(row)))
                computed += 1
        results.finish()
        assert self.output.read_bytes() == WHOLE
        expected = RowTotals()
        for row in ROWS:
            expected.add(result_of(row))
        assert asdict(results.totals) == asdict(expected)
        results.discard_partial()
        return computed - 4, results


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield Job(tmp_path_factory.mktemp("job"))


def test_lines_are_json_with_the_result_inside(job: Job) -> None:
    assert json.loads(job.header)["format"] == FORMAT
    for line in job.lines:
        row = json.loads(line)["row"]
        assert encode_line(row) in WHOLE
    again, results = job.resume(job.content)
    assert (again, results.resumed_rows, results.damaged_lines, results.stale_rows) == (0, 5, 0, 0)


def test_flipped_bits(job: Job) -> None:
    rng = random.Random(0)
    ends = [at for at, byte in enumerate(job.content) if byte == ord("\n")]
    for at in [*range(40), *ends, *rng.sample(range(len(job.content)), 160)]:
        damaged = bytearray(job.content)
        damaged[at] ^= 1 << rng.randrange(8)
        again, results = job.resume(bytes(damaged))
        if at == len(job.content) - 1:  # without its newline a last line is torn, as a crash leaves it
            assert (again, results.damaged_lines) == (1, 0)
        elif at < len(job.header) - 1:
            assert (again, results.damaged_lines) == (0, 1), at
        else:  # a flipped newline joins two lines, a made one cuts one into two
            assert again == 2 - (damaged.count(b"\n") >= 6) - (at == len(job.header) - 1), at
            assert 1 <= results.damaged_lines <= 2, at


def test_truncation(job: Job) -> None:
    for length in random.Random(0).sample(range(len(job.content)), 50):
        again, results = job.resume(job.content[:length])
        assert again == 5 - max(job.content[:length].count(b"\n") - 1, 0)
        assert results.damaged_lines == 0  # a torn last line is what every crash leaves


class Killed(BaseException):
    """Ends a job as kill -9 does: nothing is cleaned up."""


@contextlib.contextmanager
def killed_at(operation: int, rng: random.Random) -> Iterator[None]:
    """Dies at the disk operation of that number: before it, after it or, of a write, in the middle."""
    done = 0

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            if done == operation:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: rng.randrange(len(arguments[1]) + 1)])
                elif rng.random() < 0.5:
                    real(*arguments, **named)
            if done >= operation:
                raise Killed
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "fsync", "replace", "unlink"):
            patch.setattr(os, name, dying(name, getattr(os, name)))
        yield


@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_disk_operation(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    output = tmp_path / "o.jsonl"
    kills = 0
    while True:
        results = None
        try:
            with killed_at(rng.randrange(1, 13), rng):
                results = ResultFile(output, JOB, overwrite=False)
                for row in rng.sample(ROWS, len(ROWS)):
                    if not results.is_done(row):
                        results.append(finished(row.index, row.digest(), result_of(row)))
                results.finish()
                results.discard_partial()
            break
        except Killed:
            kills += 1
            assert not output.exists() or output.read_bytes() == WHOLE
            if results is not None:
                results._file.close()  # as the end of a process does
    assert kills > 0
    assert output.read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl"]


def foreign_line(job: Job, rng: random.Random) -> bytes:
    """Anything but an undamaged line of this job."""
    line = rng.choice(job.lines)
    start = rng.randrange(1, len(line) - 1)
    index = rng.choice([0, 3, 10**9, 10**12, 10**30, -1])
    return rng.choice(
        [
            b'{"index": %d}\n' % index,
            b'{"id": "batch_req_%d", "response": null, "error": {"code": "x"}}\n' % index,
            b"[" * 100_000 + b"\n",
            b'{"index": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            b"\0" * 40 + b"\n",
            b"\n",
            rng.randbytes(100) + b"\n",
            line[start:],
            line[:start] + b"\n",
            line[:start] + line[start + 1 :],
            PartialLines(b"another job").row(ROWS[3].digest(), encode_line(result_of(ROWS[3]))),
        ]
    )


def test_foreign_doubled_and_swapped_lines(job: Job) -> None:
    rng = random.Random(0)
    for _ in range(100):
        foreign = [foreign_line(job, rng) for _ in range(rng.randrange(3))]
        lines = [*job.lines, *rng.choices(job.lines, k=2), *foreign]
        rng.shuffle(lines)
        again, results = job.resume(job.header + b"".join(lines))
        assert again == 0
        assert results.damaged_lines >= len(foreign)
        assert results.resumed_rows == 5


@pytest.mark.parametrize("index", [3, 9, 10**9, 10**12, 10**30])
def test_a_forged_line_is_left_out_and_costs_next_to_nothing(job: Job, index: int) -> None:
    """Its checksum fits, but no input row does."""
    ours = PartialLines(job.header)
    forged = [ours.row(1, encode_line({"index": index, "error": {"type": "x"}}))]
    forged += [ours.row(1, encode_line({"id": f"batch_req_{index}", "error": {"code": "x"}}))]
    forged += [ours.row(1, b'{"index": 1, "error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")]
    forged += [ours.row(1, b"{}\n"), ours.row(1, b"[]\n"), ours.row(1, b'{"index": true, "error": {"type": "x"}}\n')]
    before = psutil.Process().memory_info().rss
    again, results = job.resume(b"".join([job.header, *forged, *job.lines]))
    assert psutil.Process().memory_info().rss - before < 50 << 20
    assert (again, results.damaged_lines, results.stale_rows) == (0, 4, 1)


def test_a_result_of_another_row_in_its_place_is_computed_again(job: Job) -> None:
    """As of a long standard input, of which only the beginning identifies the job."""
    ours = PartialLines(job.header)
    other = ours.row(RawRow(4, b"other").digest(), encode_line({"index": 4, "error": {"type": "x"}}))
    again, results = job.resume(job.content + other)
    assert (again, results.damaged_lines, results.stale_rows) == (1, 0, 1)


def test_a_row_that_is_taken_back_leaves_nothing_in_the_sums() -> None:
    """Not even the length of its histogram, which was the longest."""
    totals, row = RowTotals(), result_of(ROWS[2])
    totals.add(row)
    before = asdict(totals)
    counts = {**row["speculation"], "accept_histogram": [0, 0, 0, 1]}
    for times in (1, -1):
        totals.add({**row, "finish_reason": "length", "speculation": counts}, times)
    assert asdict(totals) == before


def test_files_of_other_versions_and_of_others_are_refused(job: Job) -> None:
    record = json.loads(job.header)
    for first, said in (
        (encode_line({"specbatch_job": record["specbatch_job"]}), r"another version of specbatch \(format 1"),
        (b"precious\n", "is not a partial result"),
        (b"[" * 100_000 + b"\n", "is not a partial result"),
        (b'{"specbatch_job": 3}\n', "is not a partial result"),
    ):
        with pytest.raises(InputError, match=said):
            job.resume(first)
        assert job.partial.read_bytes() == first


def test_a_damaged_header_is_no_way_into_another_job(job: Job) -> None:
    damaged = job.content.replace(b'"limit": null', b'"limit": 1234')
    assert job.resume(damaged)[0] == 0
    for content in (damaged, damaged[: len(job.header)]):
        with pytest.raises(InputError, match=r"the first line of .* is damaged"):
            job.resume(content, {**JOB, "limit": 1234})
        assert job.partial.read_bytes() == content


def test_damage_while_the_job_runs_is_found_before_the_output_is_written(job: Job) -> None:
    job.output.unlink(missing_ok=True)
    results = ResultFile(job.output, JOB, overwrite=True)
    for row in ROWS:
        results.append(finished(row.index, row.digest(), result_of(row)))
    whole = job.partial.read_bytes()
    job.partial.write_bytes(whole.replace(b'"text": "t"', b'"text": "u"', 1))
    with pytest.raises(InputError, match="damaged while the job was running"):
        results.finish()
    results.close()
    assert not job.output.exists()


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what a process reads")
def test_the_merge_reads_each_byte_once(tmp_path: Path) -> None:
    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    order = list(range(5_000))
    random.Random(0).shuffle(order)
    results = ResultFile(tmp_path / "o.jsonl", {}, overwrite=False)
    for index in order:
        results.append(
            finished(index, index, {"index": index, "error": {"type": "x"}, "metadata": "y" * (index % 700)})
        )
    size = partial_path(results.output).stat().st_size
    before = read_so_far()
    results.finish()
    assert read_so_far() - before < 1.1 * size
    rows = [json.loads(line) for line in results.output.read_bytes().splitlines()]
    assert [row["index"] for row in rows] == list(range(5_000))
    results.close()


def test_the_command_says_how_many_lines_are_damaged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write([{"prompt": f"p{i}"} for i in range(30)])
    run()
    whole = run.output.read_bytes()
    run.output.unlink()
    with pytest.raises(RuntimeError):
        run(engine=StubEngine(fail_at=6))
    partial = partial_path(run.output)
    lines = partial.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"index": ', b'"index": 1')  # an answer under another row
    partial.write_bytes(b"".join(lines))
    assert run() == 0
    assert f"resuming: {len(lines) - 3} rows are done" in run.log
    assert f"left out 1 damaged line of {partial}:" in run.log
    assert run.output.read_bytes() == whole
