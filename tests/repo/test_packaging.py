"""What a package says of itself: licences, types, addresses, and what a source distribution holds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import specbatch
from specbatch.models.catalog import catalog

ROOT = Path(specbatch.__file__).resolve().parent.parent


@pytest.fixture
def project() -> dict[str, Any]:
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        pytest.skip("no checkout")
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return found


def test_every_licence_text_is_part_of_the_metadata(project: dict[str, Any]) -> None:
    named = {path for pattern in project["license-files"] for path in ROOT.glob(pattern)}
    assert named == {ROOT / "LICENSE", ROOT / "THIRD_PARTY.md", *(ROOT / "specbatch").rglob("*.LICENSE")}
    assert project["license"] == "Apache-2.0 AND MIT"


def test_third_party_names_all_data_and_what_the_heads_were_trained_on(project: dict[str, Any]) -> None:
    text = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    for data in (ROOT / "specbatch" / "evals" / "data").glob("*.gz"):
        assert data.name.split(".")[0].split("_t")[0] in text, data
    for name, entry in catalog().items():
        if entry.draft_for is not None:
            assert f"specbatch/models/heads/{name}/" in text
    for source in ("GSM8K, training split", "Self-Instruct", "Arena-Hard", "SmolLM2-135M-Instruct"):
        assert source in text


def test_a_type_checker_may_read_the_annotations(project: dict[str, Any]) -> None:
    assert (ROOT / "specbatch" / "py.typed").is_file()
    assert "Typing :: Typed" in project["classifiers"]
    assert {"Homepage", "Documentation", "Issues"} <= set(project["urls"])
    assert project["keywords"]


def test_a_source_distribution_holds_more_than_the_package(project: dict[str, Any]) -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    folders = {line.split()[1] for line in lines if line.startswith("graft ")}
    assert folders == {"configs", "docs", "examples", "scripts", "tests"}
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_the_package_holds_its_data_files(project: dict[str, Any]) -> None:
    """A template that is not in the wheel fails only for users."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = whole["tool"]["setuptools"]["package-data"]["specbatch"]
    held = {path for pattern in patterns for path in (ROOT / "specbatch").glob(pattern)}
    found = {
        path for path in (ROOT / "specbatch").rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert found - held == set()


def test_structured_output_needs_no_extra(project: dict[str, Any]) -> None:
    assert any(need.startswith("llguidance") for need in project["dependencies"])
    assert "grammar" not in project["optional-dependencies"]


def test_each_dependency_has_a_lower_bound(project: dict[str, Any]) -> None:
    """`.ci/lowest` installs it. Without one it would take the first version of all."""
    assert [need for need in project["dependencies"] if ">=" not in need] == []
    assert (ROOT / ".ci" / "lowest").is_file()
    assert ".ci/lowest" in (ROOT / "MANIFEST.in").read_text(encoding="utf-8")


def test_the_range_of_torch_is_the_same_everywhere(project: dict[str, Any]) -> None:
    torch = next(need for need in project["dependencies"] if need.startswith("torch"))
    for path in ("README.md", "specbatch/setup/device.py"):
        assert f"'{torch}'" in (ROOT / path).read_text(encoding="utf-8"), path


def test_ci_runs_the_oldest_torch(project: dict[str, Any]) -> None:
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.is_file():
        pytest.skip("no checkout")
    torch = next(need for need in project["dependencies"] if need.startswith("torch"))
    oldest = torch.split(">=")[1].split(",")[0]
    assert f'torch: "{oldest}"' in workflow.read_text(encoding="utf-8")
