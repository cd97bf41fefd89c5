"""Files and folders for one user alone, whatever the umask leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kvstore.catalog.archive import tar_writer
from kvstore.private_files import make_private_folder
from kvstore.tiers.disk import DiskTier
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from prefill_workers.fidelity.disabled_points import DisabledPoints, PointDecision
from prefill_workers.modes import OperatingPoint
from serving.access_log import _File
from serving.settings import AccessLogSettings


@pytest.fixture(autouse=True)
def open_to_everybody() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> set[tuple[str, str]]:
    """The kinds of what lies below, and of `root` itself, with their permissions."""
    found = [root, *root.rglob("*")]
    assert any(path.is_file() for path in found), "there is something to look at"
    return {("folder" if path.is_dir() else "file", f"{path.stat().st_mode & 0o777:o}") for path in found}


PRIVATE = {("folder", "700"), ("file", "600")}


def test_records_quarantine_and_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier = DiskTier(tmp_path / "data" / "library")
    for name in "ab":
        tier.put(f"records/some/{name}", [pa.py_buffer(b"x")])
    assert tier.quarantine("records/some/a")
    while_written: set[tuple[str, str]] = set()
    monkeypatch.setattr(os, "rename", lambda *_: while_written.update(modes(tmp_path / "data")))
    tier.put("records/c", [pa.py_buffer(b"x")])
    assert while_written == PRIVATE
    assert modes(tmp_path / "data") == PRIVATE


def test_uploads_and_vector_stores(tmp_path: Path):
    files = FileStore(tmp_path / "files")
    stores = VectorStores(files)
    one, other = (files.create("ops", name, "assistants", b"page").id for name in "ab")
    store = stores.create("pages").id
    stores.add_batch(store, "ops", {one: {}, other: {}})
    stores.remove(store, one)
    assert modes(tmp_path / "files") == PRIVATE


def test_access_logs_also_rotated_ones(tmp_path: Path):
    make_private_folder(tmp_path / "logs")
    log = _File(tmp_path / "logs" / "access-a.jsonl", AccessLogSettings(directory=tmp_path / "logs", max_file_bytes=10))
    for _ in range(3):
        log.write("{}" * 10)
    log.close()
    assert len(list((tmp_path / "logs").iterdir())) > 1
    assert modes(tmp_path / "logs") == PRIVATE


def test_disabled_points_and_exports(tmp_path: Path):
    kept = DisabledPoints(tmp_path / "library", "model")
    kept.write(PointDecision(OperatingPoint.PATCHED, False, 1.0, "a test"))
    kept.flush()
    with tar_writer(tmp_path / "library" / "all.tar") as put:
        put("records/a", pa.py_buffer(b"x"))
    assert modes(tmp_path / "library") == PRIVATE


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir(0o755)
    make_private_folder(shared / "a" / "b")
    make_private_folder(shared / "a" / "b")
    permissions = [f"{path.stat().st_mode & 0o777:o}" for path in (shared, shared / "a", shared / "a" / "b")]
    assert permissions == ["755", "700", "700"]


def test_a_file_in_the_way_is_told(tmp_path: Path):
    (tmp_path / "file").touch()
    for inside in ("file", "file/folder"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            make_private_folder(tmp_path / inside)
