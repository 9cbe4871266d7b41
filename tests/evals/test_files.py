"""An evaluation replaces no file of somebody else; found before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specbatch.errors import InputError
from tests.evals.test_command import EXACT, Eval, write_task

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
    with pytest.raises(InputError, match=r"is the data, so|was not written by specbatch"):
        run(task_files=(task,), data=data)
    assert data.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/out", "does not exist"),
        ("file", "is not a folder"),
        ("x" * 300, "File name too long"),
        ("s3://bucket/out", "s3: is not supported"),
        ("out", "Not a directory"),
    ],
)
def test_folders_that_cannot_be_written(run: Eval, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.folder)
    Path("file").touch()
    os.rmdir("out/mine/none")
    Path("out/mine/none").touch()
    with pytest.raises(InputError, match=message):
        run(task_files=(write_task(run.folder, EXACT),), output=Path(name))
    assert not run.engines
