"""Rows that fail: limits that end a job early, and running only the failed rows again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import InputError, TooManyFailed
from specbatch.files.paths import partial_path
from specbatch.files.result_files import result_rows
from specbatch.job.failures import FIRST_ROWS, MaxFailed
from specbatch.rows.shard import Shard
from specbatch.types import Completion, FinishReason, Request
from tests.job.shards import native
from tests.job.test_generate import Run
from tests.stub_engine import StubEngine


class Broken(StubEngine):
    """The logits of prompts that begin with x are not finite."""

    def _complete(self, request: Request) -> Completion:
        done = super()._complete(request)
        if request.prompt_token_ids[1] == ord("x"):
            done.finish_reason = FinishReason.ERROR
        return done


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def rows(count: int, every: int) -> list[Any]:
    return [{"prompt": f"{'x' if i % every == 0 else 'p'}{i}", "id": i} for i in range(count)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_only_failed_rows_run_again(run: Run, suffix: str) -> None:
    run.write(rows(60, 10) + native(20))
    output = run.folder / f"d.results{suffix}"
    assert run(output=output, engine=Broken()) == 1
    failed = run.stats()["rows"]["failed"]
    first = list(result_rows(output))
    assert run(output=output, retry_errors=True) == 1  # bad lines fail again
    assert run.stats()["session"]["rows"] == failed
    assert run.stats()["rows"]["failed"] == failed - 6
    second = list(result_rows(output))
    assert [a for a, b in zip(first, second, strict=True) if a != b] == [
        r for r in first if r.get("error", {}) and r["error"]["type"] == "non_finite"
    ]
    whole = Run(run.folder / "whole")
    whole.folder.mkdir()
    whole.write(rows(60, 10) + native(20))
    whole(output=whole.folder / f"d.results{suffix}")
    assert output.read_bytes() == (whole.folder / f"d.results{suffix}").read_bytes()
    assert run(output=output) == 1
    assert "finished already" in run.log


class SecondBroken(StubEngine):
    """The logits of the second completion of each row are not finite."""

    def _complete(self, request: Request) -> Completion:
        done = super()._complete(request)
        if request.rng.sample == 1:
            done.finish_reason = FinishReason.ERROR
        return done


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_which_a_part_failed_run_again(run: Run, suffix: str) -> None:
    """They count as failed, and have what finished. A resume counts the same."""
    given = [{"prompt": f"p{i}", "temperature": 1.0, "n": 1 + 2 * (i % 2)} for i in range(30)]
    run.write(given)
    output = run.folder / f"d.results{suffix}"
    assert run(output=output) == 0
    healthy, tokens = output.read_bytes(), run.stats()["tokens"]
    whole = list(result_rows(output))
    with pytest.raises(RuntimeError):
        run(output=output, overwrite=True, engine=SecondBroken(fail_at=10))
    assert run(output=output, engine=SecondBroken()) == 1
    assert run.stats()["rows"]["errors"] == {"non_finite": 15}
    for line, expected in zip(result_rows(output), whole, strict=True):
        if "choices" not in expected:
            assert line == expected
            continue
        kept = [choice for choice in line["choices"] if "error" not in choice]
        assert kept == [expected["choices"][0], expected["choices"][2]]
        assert "of completion 2 of 3" in line["error"]["message"]
    assert 0 < run.stats()["tokens"]["completion"] < tokens["completion"]
    assert run.stats()["tokens"]["prompt"] == tokens["prompt"]
    assert run(output=output, retry_errors=True) == 0
    assert run.stats()["session"]["rows"] == 15
    assert output.read_bytes() == healthy


def test_a_killed_retry_resumes(run: Run) -> None:
    run.write(rows(60, 2))
    run(engine=Broken())
    old = run.output.read_bytes()
    with pytest.raises(RuntimeError):
        run(retry_errors=True, engine=StubEngine(fail_at=3))
    assert run.output.read_bytes() == old, "the old output stays until the new one is there"
    assert run() == 0  # with the option or without it
    assert run.stats()["session"]["resumed_rows"] > 30
    assert run(retry_errors=True) == 0
    assert "nothing to do" in run.log


def test_the_margins_of_rows_that_do_not_run_again_are_kept(run: Run) -> None:
    run.write([{**row, "temperature": 0} for row in rows(30, 3)])
    run(engine=Broken())
    assert run.stats()["margins"]["rows"] == 20
    run(retry_errors=True)
    retried = run.stats()["margins"]
    run(overwrite=True)
    assert run.stats()["margins"] == retried
    assert retried["rows"] == 30


def test_a_retry_is_of_the_same_job(run: Run) -> None:
    run.write(rows(20, 2))
    run(engine=Broken())
    with pytest.raises(InputError, match="different job"):
        run(retry_errors=True, limit=5)
    run.write(rows(20, 3))
    with pytest.raises(InputError, match="different job: input"):
        run(retry_errors=True)
    assert not partial_path(run.output).exists()


def test_a_retry_of_nothing_is_an_error(run: Run) -> None:
    """A typing error in the name of the output would run the whole file."""
    run.write(rows(20, 2))
    with pytest.raises(InputError, match="does not exist, so it has no rows that failed"):
        run(retry_errors=True)
    assert not partial_path(run.output).exists()


def test_a_retry_of_a_shard(run: Run) -> None:
    run.write(rows(40, 2))
    run(shard=Shard(0, 2), engine=Broken())
    output = run.folder / "d.results.0-of-2.jsonl"
    assert all(row["finish_reason"] == "error" for row in result_rows(output))
    assert run(shard=Shard(0, 2), retry_errors=True) == 0
    assert [row["index"] for row in result_rows(output)] == list(range(0, 40, 2))


@pytest.mark.parametrize("text", ["9", "2%"])
def test_too_many_failed_rows_end_the_job(run: Run, text: str) -> None:
    run.write(rows(400, 10))
    with pytest.raises(TooManyFailed, match=rf"rows failed, more than --max-failed {text} allows; ") as caught:
        run(engine=Broken(), max_failed=MaxFailed.parse(text))
    assert " of these rows): non_finite: the model's logits are not finite" in caught.value.message
    assert "--max-failed" in (caught.value.hint or "")
    assert not run.output.exists()
    kept = len(partial_path(run.output).read_bytes().splitlines())
    assert 20 < kept < 300
    assert run(engine=Broken(), max_failed=MaxFailed.parse("40")) == 1
    assert run.stats()["session"]["resumed_rows"] > 20
    assert run.stats()["rows"]["failed"] == 40
    undisturbed = run.output.read_bytes()
    assert run(engine=Broken(), overwrite=True) == 1
    assert run.output.read_bytes() == undisturbed


def test_a_limit_that_the_last_row_exceeds(run: Run) -> None:
    run.write([{"prompt": "p"}] * 9 + [{"prompt": "x"}])
    with pytest.raises(TooManyFailed, match=r"1 of \d+ finished rows failed, more than --max-failed 0 allows"):
        run(engine=Broken(), max_failed=MaxFailed.parse("0"))
    assert run(engine=Broken(), max_failed=MaxFailed.parse("10%")) == 1


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "a", "1 %", "%", "1e3"])
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="neither a number of rows nor a share"):
        MaxFailed.parse(text)


def test_a_share_of_an_unknown_number_of_rows() -> None:
    from specbatch.results.stats import RowTotals

    limit = MaxFailed.parse("1%")
    assert not limit.is_exceeded(RowTotals(ok=90, failed=9), None, ended=False)
    assert limit.is_exceeded(RowTotals(ok=90, failed=9), None, ended=True)
    assert limit.is_exceeded(RowTotals(ok=1000, failed=20), None, ended=False)
    assert not limit.is_exceeded(RowTotals(ok=1000, failed=20), 100_000, ended=False)


def test_a_job_ends_if_all_of_its_first_rows_fail(run: Run) -> None:
    run.write([{"prompt": f"x{i}"} for i in range(500)] + [{"prompt": "p"}])
    with pytest.raises(TooManyFailed, match=r"each of the first 1\d\d rows that ran failed; .* non_finite: ") as caught:
        run(engine=Broken())
    assert "--keep-going" in (caught.value.hint or "")
    lines = run.input.read_bytes()
    run.input.write_bytes(lines.replace(b'"x49', b'"p49'))  # repaired: the rows that were not are kept
    assert run(engine=Broken(), keep_going=True) == 1
    assert run.stats()["session"]["resumed_rows"] >= FIRST_ROWS - 10
    assert run.stats()["rows"]["ok"] == 12


def test_a_healthy_one_of_the_first_rows_is_awaited(run: Run) -> None:
    class Slow(StubEngine):
        """A row takes ten steps. Rows without a prompt take none."""

        def step(self) -> list[Completion]:
            self._calls = getattr(self, "_calls", 0) + 1
            return super().step() if self._calls % 10 == 0 else []

    run.write([{"prompt": "p" * (i == FIRST_ROWS - 1)} for i in range(FIRST_ROWS + 50)])
    assert run(engine=Slow()) == 1
    assert run.stats()["rows"]["ok"] == 1


def test_rows_of_standard_input_are_kept_by_a_retry(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows(30, 10))

    def run_lines(**options: Any) -> bytes:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
        run(input="-", output=run.output, **options)
        return run.output.read_bytes()

    failed = run_lines(engine=Broken())
    assert failed.count(b"non_finite") == 3
    healthy = run_lines(retry_errors=True)
    assert b"non_finite" not in healthy
    assert healthy == run_lines(overwrite=True)


def test_a_short_file_of_bad_rows_is_finished(run: Run) -> None:
    run.write([{"prompt": "x"}] * FIRST_ROWS)
    assert run(engine=Broken()) == 1
    assert json.loads(run.output.read_bytes().splitlines()[0])["error"]["type"] == "non_finite"
