"""What README.md says about options and commands is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import specbatch
from specbatch.config import Config
from specbatch.config_load import config_to_dict, option_paths

ROOT = Path(specbatch.__file__).resolve().parent.parent
HERE = "https://github.com/specbatch/specbatch/"


@pytest.fixture
def readme() -> str:
    path = ROOT / "README.md"
    if not path.is_file():
        pytest.skip("no checkout")
    return path.read_text(encoding="utf-8")


def test_every_option_is_listed_with_its_default(readme: str) -> None:
    listed = dict(re.findall(r"^\| `([a-z_]+\.[a-z_.]+)` \| `(.*?)` \|", readme, flags=re.MULTILINE))
    assert list(listed) == option_paths()
    tree = config_to_dict(Config())
    for path, shown in listed.items():
        value = tree
        for key in path.split("."):
            value = value[key]
        assert shown == json.dumps(value).strip('"'), path


def test_commands_and_files_exist(readme: str) -> None:
    assert "pip install . && specbatch generate examples/questions.jsonl" in readme
    assert "pip install -e '.[dev]' && pytest -q" in readme
    linked = [link for link in re.findall(r"\]\((.*?)\)", readme) if not link.startswith("#")]
    files = [link.removeprefix(HERE).split("#")[0].split("/", 2)[2] for link in linked if link.startswith(HERE)]
    assert len(files) > 5
    for name in files + re.findall(r"python (scripts/\w+\.py)", readme):
        assert (ROOT / name).exists(), name
    for folder in re.findall(r"^  (\w+/) ", readme, flags=re.MULTILINE):
        assert (ROOT / "specbatch" / folder).is_dir(), folder


def test_links_work_outside_of_the_repository(readme: str) -> None:
    """The same text is shown by package indexes, which have no files beside it."""
    for link in re.findall(r"\]\((.*?)\)", readme):
        assert link.startswith(("https://", "#")), link


def test_json_examples_are_json(readme: str) -> None:
    blocks = re.findall(r"```json\n(.*?)```", readme, flags=re.DOTALL)
    assert len(blocks) == 2
    for line in "".join(blocks).splitlines():
        json.loads(line)
