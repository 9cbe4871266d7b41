"""The how-tos of CONTRIBUTING.md name files and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specbatch

ROOT = Path(specbatch.__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"


def how_tos() -> dict[str, str]:
    """The text of each how-to by its title."""
    if not PAGE.is_file():
        pytest.skip("no checkout")
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return {title: text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title.startswith("How to")}


def names(text: str) -> list[str]:
    """The words in code style."""
    return re.findall(r"`([^`\n]+)`", text)


def test_the_files_exist() -> None:
    found = {
        title: [name for name in names(text) if "/" in name and " " not in name] for title, text in how_tos().items()
    }
    for title, files in found.items():
        assert len(files) >= 5, title
        # NAME stands for what the reader adds.
        missing = [name for name in files if "NAME" not in name and "." in name and not (ROOT / name).exists()]
        assert not missing, title


def test_the_names_are_in_the_files() -> None:
    """Each item of a list begins with a file; the functions, classes and constants that it names are in that file, or
    in another file of the same item."""
    code = re.compile(r"_?[A-Za-z][A-Za-z_]*\Z")
    checked = 0
    for title, text in how_tos().items():
        for item in re.split(r"^(?=\d+\. )", text, flags=re.M):
            files = [ROOT / name for name in names(item) if name.endswith(".py") and (ROOT / name).is_file()]
            texts = "".join(file.read_text(encoding="utf-8") for file in files)
            wanted = [name for name in names(item) if code.match(name) and ("_" in name or name[0].isupper())]
            missing = [name for name in wanted if files and name not in texts]
            assert not missing, f"{title}: {item[:60]}"
            checked += len(wanted) if files else 0
    assert checked > 20
