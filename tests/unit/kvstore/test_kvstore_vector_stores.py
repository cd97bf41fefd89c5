from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from kvstore_support import canonical, embedding_of, patch_of

from kvstore.errors import TierUnavailable, UnknownFile, UnknownVectorStore
from kvstore.library import Library
from kvstore.records.keys import (
    DYNAMIC_TENANT,
    canonical_key,
    content_id,
    is_shared,
    owned_content_id,
    owner_of,
    tenant_salt,
)
from kvstore.settings import LibrarySettings
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.faults import FaultyTier, WrappedTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.paths import Marker, marker_paths, path_of
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores

Open = Callable[[], VectorStores]


@pytest.fixture(params=["directory", "url"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the stores as another process would."""
    location = tmp_path if request.param == "directory" else f"memory://{uuid.uuid4().hex}"
    return lambda: VectorStores(FileStore(location))


def upload(stores: VectorStores, data: bytes = b"page", tenant: str = "ops") -> str:
    return stores._files.create(tenant, "a.png", "assistants", data).id


def test_everything_survives_a_restart(reopen: Open) -> None:
    stores = reopen()
    page, cover = upload(stores), upload(stores, b"cover")
    store = stores.create("pages", "scans", {"of": "a book"}, expires_days=3)
    batch = stores.add_batch(store.id, "ops", {page: {"n": 1}, cover: {}})
    again = reopen()
    assert again.get(store.id) == store
    assert again.all() == [store]
    assert {r.file: r.attributes for r in again.references(store.id)} == {page: {"n": 1}, cover: {}}
    assert again.batch(store.id, batch.id) == batch
    summary = again.summary(store)
    assert (summary.files, summary.bytes) == (2, len(b"page") + len(b"cover"))
    assert summary.expires_at == summary.last_active_at + 3 * 24 * 3600
    assert again.content(page) == b"page"


def test_what_is_not_there_is_unknown(reopen: Open) -> None:
    stores = reopen()
    page, store = upload(stores), stores.create()
    for call in (
        lambda: stores.get("vs_" + "0" * 32),
        lambda: stores.get("../../etc"),
        lambda: stores.delete("vs_" + "0" * 32),
        lambda: stores.add("vs_" + "0" * 32, "ops", {page: {}}),
        lambda: stores.reference(store.id, page),
        lambda: stores.remove(store.id, page),
        lambda: stores.set_attributes(store.id, "../x", {}),
        lambda: stores.batch(store.id, "vsfb_" + "0" * 32),
    ):
        with pytest.raises(UnknownVectorStore):
            call()
    for file_id in (page, "../../etc/passwd", "file-" + "0" * 32):
        with pytest.raises(UnknownFile):
            stores.content(file_id)


def test_of_found_files_those_are_told_that_are_there_still(reopen: Open) -> None:
    stores = reopen()
    page, cover, store, gone = upload(stores), upload(stores, b"cover"), stores.create(), stores.create()
    for one in (store, gone):
        stores.add(one.id, "ops", {page: {"n": 1}, cover: {}})
    stores.remove(store.id, cover)
    stores.delete(gone.id)
    places = {(one.id, file) for one in (store, gone) for file in (page, cover)}
    assert stores.references_there(places) == {(store.id, page): stores.reference(store.id, page)}


def test_adding_needs_every_file_and_adds_none_without(reopen: Open) -> None:
    stores = reopen()
    mine, theirs, store = upload(stores), upload(stores, tenant="rival"), stores.create()
    with pytest.raises(UnknownFile):
        stores.add(store.id, "ops", {mine: {}, theirs: {}})
    assert stores.references(store.id) == []
    with pytest.raises(UnknownFile):
        stores.content(mine)


def test_adding_again_changes_attributes_only(reopen: Open) -> None:
    stores = reopen()
    page, store = upload(stores), stores.create()
    (first,) = stores.add(store.id, "ops", {page: {"n": 1}})
    (second,) = stores.add(store.id, "ops", {page: {"n": 2}})
    assert (second.created_at, second.attributes) == (first.created_at, {"n": 2})
    assert stores.references(store.id) == [second]


def test_equal_bytes_are_one_content_held_by_any_store(reopen: Open) -> None:
    stores = reopen()
    one, two = upload(stores), upload(stores)
    a, b = stores.create("a"), stores.create("b")
    (reference,) = stores.add(a.id, "ops", {one: {}})
    assert stores.add(b.id, "ops", {two: {}})[0].content == reference.content
    assert stores.remove(a.id, one) == set()
    assert stores.has_content(reference.content)
    assert stores.remove_file(two) == {reference.content}
    assert not stores.has_content(reference.content)
    assert stores.references(b.id) == []


def test_a_deleted_file_of_its_owner_is_no_reference_any_more(reopen: Open) -> None:
    stores = reopen()
    page, store = upload(stores), stores.create()
    stores.add(store.id, "ops", {page: {}})
    (reference,) = stores.references(store.id)
    stores._files.delete("ops", page)
    with pytest.raises(UnknownFile):
        stores.content(page)
    assert stores.overdue() == {reference.content}
    assert stores.sweep() == {reference.content}
    assert stores.references(store.id) == []
    assert stores.overdue() == stores.sweep() == set()


def test_expiry_counts_from_the_last_use(reopen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    stores, now = reopen(), time.time()
    page = upload(stores)
    store = stores.create(expires_days=2)
    (reference,) = stores.add(store.id, "ops", {page: {}})
    for hours in (40, 80, 120):  # each use is a day or more after the last, none two days
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        assert stores.content(page) == b"page"
    monkeypatch.setattr(time, "time", lambda: now + 169 * 3600)
    with pytest.raises(UnknownFile):
        stores.content(page)
    with pytest.raises(UnknownVectorStore):
        stores.get(store.id)
    assert stores.sweep() == {reference.content}
    assert all(key.startswith(("files/", "owed/")) for key in list(stores._tier.keys()))


def test_use_in_requests_is_written_once_an_hour_and_read_never(monkeypatch: pytest.MonkeyPatch) -> None:
    stores, now = VectorStores(FileStore(tier := FaultyTier(MemoryTier()))), time.time()
    store = stores.create(expires_days=1)
    tier.calls.clear()
    for minutes in (0, 30, 59, 61, 90):
        monkeypatch.setattr(time, "time", lambda minutes=minutes: now + minutes * 60)
        stores.note_use(store.id)
    assert [action for action, _ in tier.calls] == ["put", "put"]
    assert stores.summary(store).last_active_at == int(now + 61 * 60)
    tier.failing.add("put")
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    stores.note_use(store.id)


def test_a_reference_is_read_in_few_round_trips() -> None:
    class Together(WrappedTier):
        """Answers for no store before it is asked for the reference, and for when the store was used."""

        def before(self, action: str, key: str) -> None:
            super().before(action, key)
            if action == "get" and key.startswith("store"):
                together.wait(10)

    together = Barrier(1)
    stores = VectorStores(FileStore(tier := Together(MemoryTier())))
    page, store = upload(stores), stores.create(expires_days=3)
    stores.add(store.id, "ops", {page: {}})
    tier.calls.clear()
    together = Barrier(3)
    assert stores.content(page) == b"page"
    assert len(tier.calls) == 6, "where it is; the three; the file, and its bytes"


def test_simultaneous_changes_lose_nothing(reopen: Open) -> None:
    first, second = reopen(), reopen()
    files = [upload(first, bytes([n])) for n in range(12)]
    store = first.create()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: (first, second)[i % 2].add(store.id, "ops", {files[i]: {}}), range(12)))
    assert {r.file for r in first.references(store.id)} == set(files)
    with ThreadPoolExecutor(6) as pool:
        dropped = list(pool.map(lambda i: (second, first)[i % 2].remove(store.id, files[i]), range(12)))
    assert len(set().union(*dropped)) == 12
    assert second.references(store.id) == []


def test_what_a_crash_leaves_is_invisible_and_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FaultyTier(MemoryTier())
    stores = VectorStores(FileStore(tier))
    page, store = upload(stores), stores.create()

    def fail(action: str, key: str) -> None:
        if action == "put" and key.startswith("store-files/"):
            raise TierUnavailable("down")

    monkeypatch.setattr(tier, "before", fail)
    with pytest.raises(TierUnavailable):
        stores.add(store.id, "ops", {page: {}})
    monkeypatch.undo()
    assert stores.references(store.id) == []
    with pytest.raises(UnknownFile):
        stores.content(page)
    stores.sweep()
    assert list(tier.keys("references/")), "the addition may still be under way"
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    stores.sweep()
    assert not list(tier.keys("references/"))


# What derives from references


def test_only_references_alone_make_a_record_everybodys() -> None:
    shared, own = owned_content_id(b"page", DYNAMIC_TENANT), owned_content_id(b"page", "acme")
    assert is_shared(shared)
    assert own == content_id(b"page", tenant_salt("acme"))
    assert owner_of("acme", shared) == owner_of("acme", shared, shared) == DYNAMIC_TENANT
    assert owner_of("acme", shared, own) == owner_of("acme", own) == owner_of("acme") == "acme"


def test_deleting_a_reference_takes_the_records_of_every_tenant(tmp_path: Path) -> None:
    shared, private = owned_content_id(b"page", DYNAMIC_TENANT), owned_content_id(b"page", "acme")
    everybodys = canonical(tenant=DYNAMIC_TENANT, content=shared, key=canonical_key("m", shared, [], "float32"))
    tenants = canonical(tenant="acme", content=private)
    behind_reference = patch_of(tenants, [shared])
    behind_itself = patch_of(canonical(tenant="rival", content=shared, key=everybodys.key))
    mine = [everybodys, behind_reference, behind_itself, embedding_of(everybodys)]
    with Library(LibrarySettings(), everybodys.fingerprint, [DiskTier(tmp_path)]) as library:
        for record in (everybodys, tenants):
            library.put(record)
        for patch in (behind_reference, behind_itself):
            library.put(patch)
        library.put(embedding_of(everybodys))
        library.flush()
        for record in mine:
            markers = [Marker.parse(path) for path in marker_paths(record)]
            assert all(marker is not None and marker.record == path_of(record) for marker in markers)
    with Library(LibrarySettings(), everybodys.fingerprint, [DiskTier(tmp_path)]) as library:
        assert library.get_patch(behind_itself.key, "rival") is not None  # also in memory now
        assert library.delete_content(shared, DYNAMIC_TENANT) == len(mine)
        assert library.get_patch(behind_itself.key, "rival") is None
        assert library.has("canonical", tenants.key, "acme")
    assert list(DiskTier(tmp_path).keys("records/")) == [path_of(tenants)]


def test_what_derived_from_files_that_are_gone_is_owed_until_it_is_settled(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, now = reopen(), time.time()
    files, store = stores._files, stores.create()
    page, again = (files.get("ops", upload(stores, tenant="ops")) for _ in range(2))
    (reference,) = stores.add(store.id, "ops", {page.id: {}})
    files.delete("ops", page.id)
    stores.sweep()
    assert reopen().unheld() == [(reference.content, DYNAMIC_TENANT)], "the tenant's other file has the same content"
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    stores.unheld()  # settles what is held
    files.delete("ops", again.id)
    assert set(reopen().unheld()) == {(reference.content, DYNAMIC_TENANT), (page.content, "ops")}
    files.pending_deletions.settle(reference.content, DYNAMIC_TENANT)
    files.pending_deletions.settle(page.content, "ops")
    assert reopen().unheld() == files.pending_deletions.all() == []


def test_what_is_noted_again_while_it_is_found_to_be_held_stays_owed(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, now = reopen(), time.time()
    files = stores._files
    page, again = (files.get("ops", upload(stores, tenant="ops")) for _ in range(2))
    files.delete("ops", page.id)
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    contents = files.contents

    def then_the_last_goes(owner: str) -> set[str]:
        found = contents(owner)
        files.delete("ops", again.id)
        return found

    monkeypatch.setattr(files, "contents", then_the_last_goes)
    assert stores.unheld() == []
    monkeypatch.setattr(files, "contents", contents)
    assert reopen().unheld() == [(page.content, "ops")]


def test_a_sweep_that_fails_half_way_loses_no_deletion(tmp_path: Path) -> None:
    tier = FaultyTier(DiskTier(tmp_path))
    files = FileStore(tier)
    stores = VectorStores(files)
    contents = {files.create("acme", name, "vision", name.encode(), expires_after=1).content for name in "abc"}
    tier.failing.add("delete")
    with pytest.raises(TierUnavailable):
        files.sweep(time.time() + 60)
    tier.failing.clear()
    files.sweep(time.time() + 60)
    assert set(stores.unheld()) == {(content, "acme") for content in contents}


def test_a_store_that_was_not_used_for_long_may_be_given_an_expiry(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, now = reopen(), time.time()
    page, store = upload(stores), stores.create()
    stores.add(store.id, "ops", {page: {}})
    monkeypatch.setattr(time, "time", lambda: now + 30 * 86400)
    other, notes = reopen(), []
    stores._note_use, noted = lambda store_id: notes.append(other.get(store_id)) or noted(store_id), stores._note_use
    stores.update(store.id, lambda store: replace(store, expires_days=2))
    assert notes, "as others see it meanwhile it has not expired"
    assert other.content(page) == b"page"


def test_a_store_that_cannot_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, now = FaultyTier(DiskTier(tmp_path)), time.time()
    stores = VectorStores(FileStore(tier))
    page, store = upload(stores), stores.create(expires_days=2)
    stores.add(store.id, "ops", {page: {}})
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    tier.failing.add("put")
    assert stores.content(page) == b"page"
