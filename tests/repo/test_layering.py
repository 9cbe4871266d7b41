"""Imports run downward only, configuration is read in few places, and modules hold no state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import specbatch

ROOT = Path(specbatch.__file__).parent
# Lowest last. Modules of one line may import each other.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["job", "evals", "tune"],
    ["engine"],
    ["config_load"],
    ["config"],
    ["draft"],
    ["models", "graphs"],
    ["attention"],
    ["cache"],
    ["kernels", "parallel"],
    ["batch"],
    ["strict"],
    ["strict_yaml", "retired"],
    ["types"],
    ["option"],
    ["errors", "signals", ""],  # "": the package itself, for its version
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
CONFIG_READERS = (
    "cli",
    "job",
    "evals",
    "tune.command",
    "tune.output",
    "tune.start",
    "engine.resolve",
    "config_load",
)
FILES = sorted(ROOT.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it, without the package's own name in front."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [node.module or ""]
            if names == ["specbatch"]:  # from specbatch import x: a submodule or the version
                names = [f"specbatch.{a.name}" if (ROOT / a.name).exists() else "specbatch" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        yield from (n.removeprefix("specbatch").removeprefix(".") for n in names if n.split(".")[0] == "specbatch")


@pytest.mark.parametrize("file", FILES, ids=[module_name(f) or "specbatch" for f in FILES])
def test_imports_run_downward(file: Path) -> None:
    name = module_name(file)
    top = name.split(".")[0]
    assert top in RANK, f"{name} has no place in the layering: add it to LAYERS"
    for imported in imports(file):
        lower = imported.split(".")[0]
        assert RANK[top] <= RANK[lower], f"{name} imports {imported}, which is above it"
        assert (top, lower) != ("job", "evals"), "evals use job, not the other way round"
        if lower in ("config", "config_load"):
            assert name.startswith(CONFIG_READERS), f"{name} reads the configuration"


def test_the_rule_is_checked_on_something() -> None:
    """The parser sees imports within functions, and enough of them in all."""
    found = {(module_name(f), i) for f in FILES for i in imports(f)}
    assert ("engine.engine", "engine.executor") in found
    assert ("cli.commands", "engine.build") in found, "an import within a function was missed"
    assert len(found) > 60


@pytest.mark.parametrize("layer", ["types", "errors", "engine/scheduler", "cache/prefix", "config"])
def test_these_need_no_torch(layer: str) -> None:
    tree = ast.parse((ROOT / f"{layer}.py").read_text(encoding="utf-8"))
    named = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    named |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not any(n.split(".")[0] in ("torch", "transformers") for n in named)


@pytest.mark.parametrize("file", FILES, ids=[module_name(f) or "specbatch" for f in FILES])
def test_no_global_state(file: Path) -> None:
    """No `global`, and what a module holds in a mutable container is a constant by its name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert not any(isinstance(n, ast.Global) for n in ast.walk(tree)), "a module with changing globals"
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
            for target in targets:
                assert isinstance(target, ast.Name)
                assert target.id.isupper() or target.id == "__all__", f"{target.id} looks like mutable state"
