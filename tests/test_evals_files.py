"""An evaluation replaces no file of somebody else; found before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specbatch.errors import InputError
from tests.test_evals_command import EXACT, Eval, write_task

NAMES = ["results.json", "samples.jsonl", "mine/prompts.jsonl", "mine/answers.jsonl", "mine/answers.jsonl.partial"]
NAMES += ["mine/answers.jsonl.sorted", "mine/answers.stats.json", "mine/none/differing.prompts.jsonl"]
ROW = '{"id": 1, "prompt": "precious"}\n'


@pytest.fixture
def run(tmp_path: Path) -> Eval:
    (tmp_path / "out" / "mine" / "none").mkdir(parents=True)
    return Eval(tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_files_of_others(run: Eval, name: str, overwrite: bool) -> None:
    task = write_task(run.folder, EXACT)
    (run.output / name).write_text(ROW)
    with pytest.raises(InputError, match="was not written by specbatch"):
        run(task_files=(task,), overwrite=overwrite)
    assert (run.output / name).read_text() == ROW
    assert not run.engines
    (run.output / name).unlink()
    (run.output / name).symlink_to(task)
    before = task.read_text()
    with pytest.raises(InputError, match=r"is a link|is the task"):
        run(task_files=(task,), overwrite=overwrite)
    assert task.read_text() == before


def test_our_own_files_are_known(run: Eval) -> None:
    """Of a run that was killed once its prompts were written, of a finished one, and of one that compared."""
    task = write_task(run.folder, EXACT)
    run.plain_texts = dict.fromkeys(run.texts, "#### 1")
    assert run(task_files=(task,), compare="none") == 0
    assert run(task_files=(task,), compare="none") == 0
    assert run(task_files=(task,), compare="none", overwrite=True) == 0
    assert (run.output / "mine" / "none" / "differing.prompts.jsonl").exists()
    for path in run.output.rglob("*"):
        if path.is_file() and path != run.output / "mine" / "prompts.jsonl":
            path.unlink()
    assert run(task_files=(task,)) == 0


@pytest.mark.parametrize("name", ["results.json", "mine/prompts.jsonl"])
def test_rows_and_tasks_that_are_read(run: Eval, name: str) -> None:
    """--data within the folder, named like a file that is written."""
    task = write_task(run.folder, EXACT)
    data = run.output / name
    content = (run.folder / "rows.jsonl").read_bytes()
    data.write_bytes(content)
    with pytest.raises(InputError, match=r"is the data, and|was not written by specbatch"):
        run(task_files=(task,), data=data)
    assert data.read_bytes() == content


def test_folders_that_cannot_be_written(run: Eval) -> None:
    task = write_task(run.folder, EXACT)
    for name, message in (
        ("no/out", "does not exist"),
        ("file", "is no folder"),
        ("x" * 300, "File name too long"),
        ("s3://b/x", "s3: is not"),
    ):
        (run.folder / "file").touch()
        with pytest.raises(InputError, match=message):
            run(task_files=(task,), output=run.folder / name)
    with pytest.raises(InputError, match="s3: is not supported"):
        run(task_files=(task,), output=Path("s3://bucket/out"))
    os.rmdir(run.output / "mine" / "none")
    (run.output / "mine" / "none").touch()
    with pytest.raises(InputError, match="Not a directory"):
        run(task_files=(task,))
    assert not run.engines
