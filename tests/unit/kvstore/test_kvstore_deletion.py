"""Deleting records and content: everywhere, also from what is under way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import pyarrow as pa
import pytest
from kvstore_support import FINGERPRINT, HoldsWhatItRead, MakeLibrary, canonical, embedding_of, patch_of, stored
from waiting import wait_for as wait_until

from kvstore.errors import TierUnavailable
from kvstore.library import Library
from kvstore.records.record import Record
from kvstore.settings import LibrarySettings
from kvstore.tiers import stack
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.faults import FaultyTier, HeldTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.paths import MARKERS, path_of, sorted_out


def test_a_deleted_record_is_gone_everywhere(make_library: MakeLibrary) -> None:
    tiers, record = [MemoryTier("one"), MemoryTier("two")], canonical()
    library = make_library(*tiers)
    library.put(record)
    library.flush()
    assert library.delete("canonical", record.key, "acme")
    assert not library.delete("canonical", record.key, "acme")
    assert library.get_canonical(record.key, "acme") is None
    assert [stored(tier) for tier in tiers] == [set(), set()]


def test_a_deleted_record_leaves_no_markers(make_library: MakeLibrary) -> None:
    tier, record = MemoryTier(), canonical()
    library = make_library(tier)
    library.put(record)
    library.flush()
    assert list(tier.keys(MARKERS))
    library.delete("canonical", record.key, "acme")
    assert not list(tier.keys(MARKERS))


def test_old_markers_of_what_this_process_never_had_are_swept(
    make_library: MakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, record = MemoryTier("remote"), canonical()
    library = make_library(tier)
    library.put(record)
    library.flush()
    tier.delete(path_of(record))
    assert library.sweep_markers() == 0, "its record may be on its way"
    monkeypatch.setattr(stack, "ORPHAN_SECONDS", -10.0)
    assert library.sweep_markers() > 0
    assert not list(tier.keys(MARKERS))


def test_deleting_overtakes_a_write_under_way(make_library: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make_library(slow)
    being_written, waiting = canonical("a"), canonical("b")
    library.put(being_written)
    assert slow.entered.wait(5)
    library.put(waiting)
    assert library.delete("canonical", waiting.key, "acme")
    assert library.get_canonical(waiting.key, "acme") is None
    with ThreadPoolExecutor(1) as other:
        deleted = other.submit(library.delete, "canonical", being_written.key, "acme")
        wait_until(lambda: library.get_canonical(being_written.key, "acme") is None)
        assert not deleted.done(), "it is not gone while it is written"
        slow.release.set()
        assert deleted.result(5)
    assert stored(slow.inner) == set()


def test_a_deletion_that_cannot_undo_a_write_under_way_says_so(make_library: MakeLibrary) -> None:
    stubborn = FaultyTier(MemoryTier(), "delete")
    slow, record = HeldTier(stubborn, "put"), canonical()
    library = make_library(slow)
    library.put(record)
    assert slow.entered.wait(5)
    with ThreadPoolExecutor(1) as other:
        deleted = other.submit(library.delete_content, record.content, "acme")
        wait_until(lambda: library.get_canonical(record.key, "acme") is None)
        slow.release.set()
        with pytest.raises(TierUnavailable):
            deleted.result(5)
    stubborn.failing.clear()
    assert library.delete_content(record.content, "acme") == 1
    assert list(stubborn.inner.keys()) == []


def test_deleting_overtakes_a_load_under_way(make_library: MakeLibrary) -> None:
    record, tier = canonical(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put(record)
    slow = HoldsWhatItRead(tier)
    library = make_library(slow, load_timeout_s=5)
    loading = library.load("canonical", record.key, "acme")
    assert slow.entered.wait(5)
    assert library.delete("canonical", record.key, "acme")
    slow.release.set()
    wait_for([loading], 5)
    assert library.get_canonical(record.key, "acme") is None
    library.flush()
    assert stored(tier) == set()


def test_deleting_content_takes_all_that_derives_from_it(make_library: MakeLibrary, tmp_path: Path) -> None:
    page, other = canonical("page"), canonical("other")
    of_page = [page, patch_of(page), embedding_of(page), patch_of(other, [page.content])]
    kept: list[Record] = [other, patch_of(other), canonical("page", tenant="rival")]
    library = make_library(DiskTier(tmp_path / "one"), MemoryTier("two"))
    for record in (*of_page, *kept):
        library.put(record)
    library.flush()
    assert library.delete_content(page.content, "acme") == len(of_page)
    for tier in (DiskTier(tmp_path / "one"), library._stack.tiers[1]):
        assert stored(tier) == {record.key for record in kept}
        assert not [entry.key for entry in tier.entries() if page.content in entry.key]
    assert library.get_canonical(page.key, "acme") is None
    assert library.get_canonical(other.key, "acme") is other
    assert library.delete_content(page.content, "acme") == 0


def test_deleting_content_reaches_what_another_process_stored_and_what_is_still_queued(
    make_library: MakeLibrary,
) -> None:
    tier = HeldTier(MemoryTier())
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put(canonical("page"))
        writer.put(patch_of(canonical("other"), ["some page", canonical("page").content]))
    with Library(LibrarySettings(), "another-model", [tier]) as writer:
        writer.put(canonical("page", fingerprint="another-model"))
    library = make_library(tier)
    tier.held = {"put"}
    library.put(patch_of(canonical("page")))
    assert library.delete_content(canonical("page").content, "acme") == 4
    tier.release.set()
    library.flush()
    assert list(tier.keys("records/")) == []


def test_what_a_request_under_way_derives_from_deleted_content_is_not_kept(make_library: MakeLibrary) -> None:
    page, other, tier = canonical("page"), canonical("other"), MemoryTier()
    library = make_library(tier)
    library.delete_content(page.content, "acme")
    for late in (page, patch_of(other, [page.content]), embedding_of(page)):
        library.put(late)
    for kept in (other, canonical("page", tenant="rival")):
        library.put(kept)
    library.flush()
    assert stored(tier) == {other.key, canonical("page", tenant="rival").key}
    assert library.get_canonical(page.key, "acme") is None
    again = make_library(tier, deletion_grace_s=0)
    again.delete_content(page.content, "acme")
    again.put(page)
    assert again.get_canonical(page.key, "acme") is page


def test_a_load_that_begins_while_a_tier_still_deletes_is_a_miss(make_library: MakeLibrary) -> None:
    page, near, far = canonical("page"), HeldTier(MemoryTier("near"), "delete"), MemoryTier("far")
    with Library(LibrarySettings(), FINGERPRINT, [far]) as writer:
        writer.put(page)
    library = make_library(near, far, load_timeout_s=5)
    deleting = threading.Thread(target=library.delete_content, args=(page.content, "acme"))
    deleting.start()
    assert near.entered.wait(5)
    assert stored(far) == {page.key}
    assert library.get_canonical(page.key, "acme") is None
    near.release.set()
    deleting.join(5)
    library.flush()
    assert library.get_canonical(page.key, "acme") is None
    assert (stored(near), stored(far)) == (set(), set())


def test_what_waits_to_be_written_when_its_content_is_deleted_is_not_written(make_library: MakeLibrary) -> None:
    page, other, tier = canonical("page"), canonical("other"), HeldTier(MemoryTier(), "put")
    library = make_library(tier)
    library.put(other)
    assert tier.entered.wait(5)
    library.put(page)
    library._deletions.note(page.content, "acme")  # a deletion's first step
    tier.release.set()
    library.flush()
    assert stored(tier) == {other.key}


def test_what_is_put_while_a_deletion_begins_does_not_stay(
    make_library: MakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, tier = canonical("page"), MemoryTier()
    library = make_library(tier)
    deleting = threading.Thread(target=library.delete_content, args=(page.content, "acme"))
    covers = library._deletions.covers

    def covers_then_deletes(record: Record) -> bool:
        answer = covers(record)
        if not deleting.ident:
            deleting.start()
            deleting.join(0.2)  # it ends, or waits for the record to be in
        return answer

    monkeypatch.setattr(library._deletions, "covers", covers_then_deletes)
    library.put(page)
    deleting.join(5)
    library.flush()
    assert library.get_canonical(page.key, "acme") is None
    assert stored(tier) == set()


def test_deleting_tells_when_a_tier_could_not_be_reached(make_library: MakeLibrary) -> None:
    record, tier = canonical(), FaultyTier(MemoryTier("far"))
    near = MemoryTier("near")
    library = make_library(near, tier)
    library.put(record)
    library.flush()
    tier.failing = {"delete"}
    with pytest.raises(TierUnavailable):
        library.delete("canonical", record.key, "acme")
    assert stored(near) == set()
    tier.failing = {"entries"}
    with pytest.raises(TierUnavailable):
        library.delete_content(record.content, "acme")


@pytest.mark.parametrize("failing", ["entries", "delete"])
def test_a_tier_that_cannot_be_reached_keeps_no_content_in_the_others(make_library: MakeLibrary, failing: str) -> None:
    page = canonical("page")
    records = [page, patch_of(page), embedding_of(page)]
    near, lost, far = MemoryTier("near"), FaultyTier(MemoryTier("lost")), MemoryTier("far")
    library = make_library(near, lost, far)
    for record in records:
        library.put(record)
    library.flush()
    lost.failing = {failing}
    with pytest.raises(TierUnavailable):
        library.delete_content(page.content, "acme")
    assert [list(tier.entries()) for tier in (near, far)] == [[], []]
    assert len(stored(lost.inner)) == (3 if failing == "delete" else 0), "what others told of goes there too"
    lost.failing = set()
    assert library.delete_content(page.content, "acme") == 3, "its markers are kept for another try"
    assert list(lost.inner.entries()) == []


def test_markers_of_a_record_that_was_moved_aside_are_kept_for_its_deletion(make_library: MakeLibrary) -> None:
    tier, record = MemoryTier(), canonical()
    library = make_library(tier)
    library.put(record)
    library.flush()
    markers = set(tier.keys(MARKERS))
    tier.quarantine(path_of(record))
    assert sorted_out(tier.entries())[1] == [], "no orphans"
    library.delete_content(record.content, "acme")
    assert markers
    assert list(tier.keys()) == []
    tier.put(min(markers), [pa.py_buffer(b"")])
    assert [entry.key for entry in sorted_out(tier.entries())[1]] == [min(markers)]
