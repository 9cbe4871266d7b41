"""The pages: links and examples hold, options are those of the schema, the log is short, figures have evidence."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import specbatch
from specbatch.config_load import default_config_text, option_paths

ROOT = Path(specbatch.__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("docs", "configs", "specbatch", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
LOG_WIDTH = 120

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="no checkout")


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_options", ROOT / "scripts" / "write_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_options_and_default_are_written_from_the_schema(generator: ModuleType) -> None:
    assert (DOCS / "options.md").read_text(encoding="utf-8") == generator.options_text(), "scripts/write_options.py"
    assert default_config_text() == generator.default_text(), "run scripts/write_options.py"


def test_every_option_is_described(generator: ModuleType) -> None:
    rows = re.findall(r"^\| `(.*?)` \| (.*) \| .* \| (.*) \|$", generator.options_text(), flags=re.MULTILINE)
    assert [name for name, _, _ in rows if "[]" not in name] == option_paths()
    for name, kind, description in rows:
        assert kind, name
        assert description.strip().rstrip(".") not in ("", "None"), name


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\((.*?)\)", prose(page))]
    inside = [(page, link) for page, link in links if not link.startswith("https://")]
    assert len(inside) > 50
    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in inside if not leads_somewhere(page, link)]
    assert not broken


def leads_somewhere(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_scripts_and_evidence_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.parent.name != "log":  # the log has the names of its day
            missing += [n for n in re.findall(r"python (scripts/[\w/]+\.py)", text) if not (ROOT / n).is_file()]
        evidence = set(re.findall(r"bench/([\w.-]+\.json)", text)) - {"NAME.json"}
        missing += [name for name in evidence if not (DOCS / "bench" / name).is_file()]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "docs/input.md", "docs/output.md", "docs/structured.md"])
def test_json_examples_are_json(page: str) -> None:
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for line in "".join(blocks).splitlines():
        json.loads(line)


def test_all_evidence_belongs_to_a_claim() -> None:
    claims = (DOCS / "bench" / "README.md").read_text(encoding="utf-8")
    for file in (DOCS / "bench").glob("*.json"):
        assert f"({file.name})" in claims, file.name


def test_the_log_is_one_claim_a_line() -> None:
    assert not (DOCS / "log.md").exists(), "the log is a folder, one file a day"
    days = sorted((DOCS / "log").glob("*.md"))
    assert len(days) > 3
    index = (DOCS / "log" / "README.md").read_text(encoding="utf-8")
    for day in days:
        for number, line in enumerate(day.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= LOG_WIDTH, f"{day.name}:{number}"
        if day.name != "README.md":
            assert re.fullmatch(r"\d{4}-\d\d-\d\d\.md", day.name)
            assert f"({day.name})" in index
