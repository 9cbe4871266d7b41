"""Imports run downward only and in no circle, configuration is read in few places, and modules hold no state."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import specbatch

ROOT = Path(specbatch.__file__).parent
# Lowest last. Modules of one line may import each other.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["ray_data"],
    ["api"],
    ["startup"],
    ["evals", "tune", "train", "report", "serve"],
    ["scaleout"],
    ["job"],
    ["results"],
    ["rows"],
    ["text"],
    ["files"],
    ["setup"],
    ["engine"],
    ["config_load"],
    ["config"],
    ["draft"],
    ["models", "graphs", "grammar"],
    ["attention"],
    ["cache"],
    ["kernels", "parallel"],
    ["batch"],
    ["types"],
    ["strict", "counts", "logprobs", "matcher"],
    ["schemas"],
    ["errors", "signals", "torch_threads", ""],  # "": the package itself, for its version
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
CONFIG_READERS = (
    "cli",
    "api",
    "startup",
    "job",
    "results",
    "rows",
    "text",
    "files",
    "scaleout",
    "evals",
    "serve",
    "tune.command",
    "tune.output",
    "tune.start",
    "train",
    "setup",
    "config_load",
)
MAX_FILES = 20  # in a folder
FILES = sorted(ROOT.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    """Free the trees after these tests. They are 700,000 objects, and each test that runs a job collects garbage."""
    yield
    syntax.cache_clear()


@cache
def syntax(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path, within_functions: bool = True) -> list[str]:
    """List the modules of the package that a file imports, without the package's own name. `within_functions` False:
    only what is imported when the file is, without what type checkers alone read."""
    found: list[str] = []
    for node in statements(syntax(file), within_functions):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [node.module or ""]
            if (folder := ROOT.parent / names[0].replace(".", "/")).is_dir():  # names in it are modules, or its own
                parts = [
                    (folder / a.name).with_suffix(".py").exists() or (folder / a.name).is_dir() for a in node.names
                ]
                names = [f"{names[0]}.{a.name}" if p else names[0] for a, p in zip(node.names, parts, strict=True)]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        found += (n.removeprefix("specbatch").removeprefix(".") for n in names if n.split(".")[0] == "specbatch")
    return found


def statements(node: ast.AST, within_functions: bool) -> Iterator[ast.AST]:
    """Yield the statements of a module. `within_functions` False: those that run when it is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if not within_functions:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
        yield child
        yield from statements(child, within_functions)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of a circle, the first once more at the end, or nothing."""
    finished: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for successor in sorted(graph.get(path[-1], ())):
            if successor in path:
                return [*path[path.index(successor) :], successor]
            if successor not in finished and (found := search([*path, successor])):
                return found
        finished.add(path[-1])
        return []

    return next((found for name in sorted(graph) if name not in finished and (found := search([name]))), [])


def test_no_circle_between_modules() -> None:
    graph = {module_name(f): set(imports(f, within_functions=False)) - {module_name(f)} for f in FILES}
    assert sum(map(len, graph.values())) > 200, "the parser found nothing"
    assert circle(graph) == []
    assert circle(graph | {"errors": {"results.results"}}), "a circle was missed"


def test_triton_is_not_needed_on_a_cpu() -> None:
    """A machine without CUDA need not have the package. So Triton's kernels are imported when they are needed."""
    pairs = [(module_name(f), name) for f in FILES for name in imports(f, within_functions=False)]
    wrong = [pair for pair in pairs if pair[1].startswith("kernels.triton") and not pair[0].startswith("kernels.")]
    assert not wrong


def test_imports_run_downward() -> None:
    # The package itself offers what is above it, and imports that when it is used first.
    pairs = [(name, imported) for file in FILES if (name := module_name(file)) for imported in imports(file)]
    parts = {name.split(".")[0] for pair in pairs for name in pair} | {
        module_name(file).split(".")[0] for file in FILES
    }
    assert parts <= set(RANK), "these have no place in the layering: add them to LAYERS"
    wrong = [f"{name} imports {imported}, {why}" for name, imported in pairs if (why := forbidden(name, imported))]
    assert not wrong


def forbidden(name: str, imported: str) -> str | None:
    """Why a module may not import another one."""
    top, lower = name.split(".")[0], imported.split(".")[0]
    folders = {part.split(".")[1] for part in (name, imported) if part.startswith("kernels.")}
    if RANK[top] > RANK[lower]:
        return "which is above it"
    if top != lower and {top, lower} <= {"evals", "tune", "train", "report"}:
        return "and neither uses the other"
    if folders == {"torch", "triton"}:
        return "and each is written without the other"
    if lower in ("config", "config_load") and not name.startswith(CONFIG_READERS):
        return "and so reads the configuration"
    return None


def test_folders_are_small_enough_to_read() -> None:
    """A folder is a room: a reader sees all of its files at once."""
    counts = Counter(file.parent for file in FILES if file.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MAX_FILES} == {}
    assert len(counts) > 20


def test_the_rule_is_checked_on_something() -> None:
    """The parser sees imports within functions, and enough of them in all."""
    found = {(module_name(f), i) for f in FILES for i in imports(f)}
    assert ("engine.engine", "engine.executor") in found
    assert ("cli.commands", "setup.build") in found, "an import within a function was missed"
    assert len(found) > 60
    for pair in (("types", "rows.parser"), ("tune.live", "evals.tasks"), ("kernels.torch.tree", "kernels.triton.tree")):
        assert forbidden(*pair), pair
    assert forbidden("tune.live", "config")
    assert not forbidden("tune.command", "config")


@pytest.mark.parametrize("layer", ["types", "logprobs", "errors", "engine/scheduler", "cache/prefix", "config"])
def test_these_need_no_torch(layer: str) -> None:
    tree = syntax(ROOT / f"{layer}.py")
    named = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    named |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not any(n.split(".")[0] in ("torch", "transformers") for n in named)


def test_no_global_state() -> None:
    """No `global`, and what a module holds in a mutable container is a constant by its name."""
    found = [f"{module_name(file)}: {name}" for file in FILES for name in mutable_state(syntax(file))]
    assert not found
    seen = mutable_state(ast.parse("seen = []\nLIMITS = {}\n__all__ = []\nby_name: dict = {}\ndef f():\n    global n"))
    assert list(seen) == ["global n", "seen", "by_name"]


def mutable_state(tree: ast.Module) -> Iterator[str]:
    yield from (f"global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global))
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
            names = [ast.unparse(target) for target in targets]
            yield from (name for name in names if not (name.isupper() or name == "__all__"))
