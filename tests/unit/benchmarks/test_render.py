"""The documents' blocks are as the command renders them, and every record is read by some."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.benchmarks.catalogue import BENCHMARKS
from tests.benchmarks.documents.records import MACHINES, RESULTS
from tests.benchmarks.documents.speed import FIGURES
from tests.benchmarks.render import BLOCK, BLOCKS, DOCUMENTS, ROOT, rendered

NAMED = {name for path in DOCUMENTS for _, name, _ in BLOCK.findall(path.read_text())}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rendering_changes_nothing(path: Path):
    text = path.read_text()
    assert rendered(text) == text, "run `make figures`"


def test_every_block_is_shown_somewhere():
    assert BLOCKS.keys() == NAMED


def test_a_block_is_replaced_and_what_surrounds_it_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BLOCKS, "one", lambda: "| new |")
    text = "before\n<!-- figures: one -->\n| old |\n<!-- end -->\nafter\n"
    assert rendered(text) == text.replace("old", "new")
    with pytest.raises(KeyError):
        rendered("<!-- figures: unknown -->\n<!-- end -->\n")


def test_no_comment_of_a_block_is_misspelt():
    for path in DOCUMENTS:
        text = path.read_text()
        assert len(re.findall(r"^<!-- ", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text)), path


def test_every_target_that_is_not_of_fidelity_is_told():
    told = {(benchmark, figure) for benchmark, figure, _ in FIGURES}
    aimed = {(name, figure) for name, one in BENCHMARKS.items() for figure in one.targets if name != "fidelity"}
    assert aimed <= told


def test_there_is_one_record_a_benchmark_and_machine():
    names = {path.stem for path in RESULTS.glob("*.json") if not path.stem.startswith("fidelity-")}
    assert names <= {f"{name}-{suffix}" for name in BENCHMARKS for suffix in MACHINES.values()}
    assert {path.stem for path in RESULTS.glob("*.png")} <= {path.stem for path in RESULTS.glob("*.json")}


def test_every_series_that_is_declared_is_in_the_table():
    declared = {
        name
        for path in (ROOT / "serving").rglob("*.py")
        for name in re.findall(r'"(orbitserve_\w+)",', path.read_text())
    }
    table = BLOCKS["metrics"]()
    assert declared
    assert not [name for name in declared if f"`{name}`" not in table and f"`{name}_total`" not in table]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path):
    text = path.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        found = path.parent / target if target else path
        assert found.exists(), target
        if anchor:
            document = found / "README.md" if found.is_dir() else found
            assert anchor in anchors(document.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_files_that_a_document_names_are_there(path: Path):
    named = re.findall(r"`([\w./-]+\.py)`", path.read_text())
    assert not [name for name in named if not (path.parent / name).exists() and not (ROOT / name).exists()]


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
