"""Everything else is in pyproject.toml, which has no way to add one package from elsewhere to those that are found, nor
to change README.md: package indexes show it without the files that its links lead to."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/specbatch/specbatch"
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\((?!https?://|#)([^)\s]+)\)")


def absolute(link: re.Match[str]) -> str:
    """Return a link to a file of this repository with its address."""
    name = link[3]
    if link[1]:  # a picture
        address = f"{REPOSITORY}/raw/main/{name}"
    else:
        kind = "tree" if (ROOT / name.partition("#")[0]).is_dir() else "blob"
        address = f"{REPOSITORY}/{kind}/main/{name}"
    return f"{link[1]}[{link[2]}]({address})"


setup(
    packages=[*find_namespace_packages(include=["specbatch*"]), "specbatch.configs"],
    package_dir={"specbatch.configs": "configs"},
    long_description=LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
