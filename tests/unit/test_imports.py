"""Direction of imports: data flows one way, and no files or folders need each other in a circle.

Read from the source by `ast`. What a module imports when it is loaded makes circles; directions hold for all imports,
those within functions and for type checkers included.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "infra": set(),
    "autoscale": set(),  # pure values: whoever scales loads neither an engine nor a library
    "kvstore": {"infra"},
    "decode_workers": {"autoscale", "infra", "kvstore"},
    "prefill_workers": {"autoscale", "infra", "kvstore"},
    "serving": {"autoscale", "decode_workers", "infra", "kvstore", "prefill_workers"},
}


@dataclass(frozen=True)
class Imports:
    """Names that a file imports: `at_load` when the module is loaded, `anywhere` in functions and for types, too."""

    at_load: frozenset[str]
    anywhere: frozenset[str]


def read(root: Path, packages: Collection[str]) -> dict[str, Imports]:
    """The imports of all modules of some packages, by dotted name; modules of ours by their full names."""
    files = {_name(root, file): file for package in packages for file in (root / package).rglob("*.py")}
    found = {}
    for name, file in files.items():
        nodes = list(_statements(ast.parse(file.read_text())))
        found[name] = Imports(
            at_load=frozenset(each for node, loaded in nodes if loaded for each in _imported(node, files)),
            anywhere=frozenset(each for node, _ in nodes for each in _imported(node, files)),
        )
    return found


def _name(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _statements(node: ast.AST, loaded: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below one, each with whether it runs when the module is loaded."""
    for child in ast.iter_child_nodes(node):
        runs = loaded and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            runs = False
        yield child, runs
        yield from _statements(child, runs)


def _imported(node: ast.AST, modules: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules else str(node.module)


def circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """A circle of a graph, from a node to the same; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def of_files(imports: Mapping[str, Imports]) -> dict[str, Collection[str]]:
    return {name: (each.at_load & imports.keys()) - {name} for name, each in imports.items()}


def of_folders(imports: Mapping[str, Imports]) -> dict[str, Collection[str]]:
    """The same graph by folders. A folder and those inside it are one thing to each other: their files are compared."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, needed in of_files(imports).items():
        for other in needed:
            here, there = name.rpartition(".")[0], other.rpartition(".")[0]
            if not (f"{here}.".startswith(f"{there}.") or f"{there}.".startswith(f"{here}.")):
                graph[here].add(there)
    return dict(graph)


@pytest.fixture(scope="module")
def ours() -> dict[str, Imports]:
    return read(ROOT, MAY_IMPORT)


def test_no_circle_of_files(ours: dict[str, Imports]):
    assert circle(of_files(ours)) == []


def test_no_circle_of_folders(ours: dict[str, Imports]):
    assert circle(of_folders(ours)) == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_those_before_them(package: str, ours: dict[str, Imports]):
    forbidden = {"tests", *MAY_IMPORT} - MAY_IMPORT[package] - {package}
    wrong = [
        f"{name} imports {other}"
        for name, each in ours.items()
        for other in sorted(each.anywhere)
        if name.split(".")[0] == package and other.split(".")[0] in forbidden
    ]
    assert wrong == []


def test_autoscaling_loads_no_engine(ours: dict[str, Imports]):
    heavy, of_ray = {"ray", "torch", "vllm"}, {"autoscale.planner", "autoscale.serve"}  # an actor, and Serve's plug-in
    assert {
        name
        for name, each in ours.items()
        if name.startswith("autoscale") and heavy & {other.split(".")[0] for other in each.anywhere}
    } == of_ray


def test_the_load_test_imports_no_benchmark(ours: dict[str, Imports]):
    wrong = [
        f"{name} imports {other}"
        for name, each in ours.items()
        for other in sorted(each.anywhere)
        if name.startswith("serving.loadtest") and other.startswith(("serving.bench", "tests"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("one", "files", "folders"),
    [
        ("from app.b.two import y", {"app.a.one", "app.b.two"}, {"app.a", "app.b"}),
        ("import app.b.two", {"app.a.one", "app.b.two"}, {"app.a", "app.b"}),
        ("from app.b import three", set(), {"app.a", "app.b"}),
        ("from app import top", {"app.a.one", "app.top"}, set()),  # of a folder and the one around it
        ("def f():\n    from app.b import two", set(), set()),
        ("if TYPE_CHECKING:\n    from app.b import two", set(), set()),
    ],
)
def test_circles_are_found(one: str, files: set[str], folders: set[str], tmp_path: Path):
    sources = {"a/one.py": one, "b/two.py": "from app.a.one import x", "b/three.py": "", "top.py": "import app.a.one"}
    for path, source in sources.items():
        file = tmp_path / "app" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    found = read(tmp_path, ["app"])
    assert set(circle(of_files(found))) == files
    assert set(circle(of_folders(found))) == folders


def test_imports_in_functions_and_for_types_are_read(tmp_path: Path):
    (tmp_path / "app").mkdir()
    lazy = "import os\nif TYPE_CHECKING:\n    import json\ndef f():\n    from app import two\n"
    (tmp_path / "app" / "one.py").write_text(lazy)
    (tmp_path / "app" / "two.py").write_text("")
    assert read(tmp_path, ["app"])["app.one"] == Imports(frozenset({"os"}), frozenset({"os", "json", "app.two"}))
