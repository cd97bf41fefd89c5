"""Journal of files' parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.records.keys import part_id
from kvstore.settings import FileSettings
from kvstore.uploads import parts
from kvstore.uploads.files import FileStore

CONTENT = "a" * 64


def test_parts_that_another_process_has_settled_are_noted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "_AGAIN_SECONDS", 0.0)
    ingress, keeper = (FileStore(str(tmp_path), FileSettings()) for _ in range(2))
    ids = ingress.parts.note(CONTENT, "one", "pages-96-1", 3)
    keeper.parts.settle(CONTENT, "one")
    ingress.parts.note(CONTENT, "one", "pages-96-1", 3)
    assert keeper.parts.of(CONTENT, "one") == ids


def test_single_parts_are_found_beside_counted_ones_and_by_their_owner_alone(tmp_path: Path):
    journal = FileStore(str(tmp_path), FileSettings()).parts
    ids = journal.note(CONTENT, "one", "rendition.pdf", 2)
    journal.note_one(CONTENT, "one", "clip-qwen2_vl-2.5-1-8000", 4000)
    journal.note_one(CONTENT, "two", "clip-qwen2_vl-2.5-1-8000", 0)
    assert {*journal.of(CONTENT, "one")} == {*ids, part_id(CONTENT, "clip-qwen2_vl-2.5-1-8000", 4000)}
