"""Rules of names and docstrings that reviews would otherwise repeat."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["serving", "prefill_workers", "decode_workers", "kvstore", "autoscale", "infra", "tests/benchmarks"]
SHIPPED = "kimi_vl_processing.py"  # part of a checkpoint, whose digest covers it
LONGEST_FIRST_LINE = 90
VAGUE_OPENING = re.compile(
    r"(Anybody|Everybody|How|It|Its|Nobody|Somebody|Something|That|There|They|Those|What|When|Where|Whether|Who|"
    r"Whoever|Whose)\b"
)
BOOLEAN = re.compile(r"(is|has|needs|can|may|accepts)_")
VERB = re.compile(  # a property is a noun: a verb in the third person reads like a call, or like a plural
    r"composes|computes|covers|differs|fits|fuses|gains|goes|holds|keeps|knows|learns|leaves|measures|needs|reads|"
    r"reuses|selects|serves|teaches|tells|uses|waits|writes"
)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Classes, functions and methods without a leading underscore, outside of functions."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child)


def docstring_breaches(node: ast.Module | Definition) -> Iterator[str]:
    first_line = (ast.get_docstring(node) or "").partition("\n")[0]
    if len(first_line) > LONGEST_FIRST_LINE:
        yield f"the docstring's first line has {len(first_line)} characters, not {LONGEST_FIRST_LINE} at most"
    if opening := VAGUE_OPENING.match(first_line):
        yield f"the docstring begins with {opening[1]!r}, not with a noun of the field or an imperative"


def property_breaches(node: Definition) -> Iterator[str]:
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    if isinstance(node, ast.ClassDef) or not decorators & {"property", "cached_property"}:
        return
    if node.returns is not None and ast.unparse(node.returns) == "bool" and not BOOLEAN.match(node.name):
        yield f"the boolean property {node.name!r} does not begin with one of {BOOLEAN.pattern}"
    if VERB.fullmatch(node.name):
        yield f"the property {node.name!r} is named by a verb"


def breaches(file: Path) -> list[str]:
    module = ast.parse(file.read_text())
    found = [(1, breach) for breach in docstring_breaches(module)]
    for node in public_definitions(module):
        found += [(node.lineno, breach) for breach in (*docstring_breaches(node), *property_breaches(node))]
    return [f"{file.relative_to(ROOT)}:{line}: {breach}" for line, breach in found]


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_and_docstrings_follow_the_rules(folder: str) -> None:
    files = [file for file in sorted((ROOT / folder).rglob("*.py")) if file.name != SHIPPED]
    assert files, f"no Python files in {folder}"
    found = [breach for file in files for breach in breaches(file)]
    assert not found, "\n".join([f"{len(found)} breaches", *found])


def test_every_breach_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_docstrings.ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(
        '"""What it is."""\n'
        "class Tier:\n"
        f'    """A tier. {"x" * 90}"""\n'
        "    @property\n"
        "    def late(self) -> bool:\n"
        '        """Whose it is."""\n'
        "    @functools.cached_property\n"
        "    def waits(self) -> int: ...\n"
        "    @property\n"
        "    def is_open(self) -> bool: ...\n"
        "    def open(self) -> bool: ...\n"
    )
    assert [breach.split(":")[1] for breach in breaches(file)] == ["1", "2", "5", "5", "8"]
