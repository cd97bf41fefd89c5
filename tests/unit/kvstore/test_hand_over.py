"""Hand-over: a process that ends leaves its hot records with the processes that stay, without a disk they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch
from kvstore_support import SIZE, MakeLibrary, canonical, embedding_of, patch_of, session_of

from kvstore import hand_over as handing
from kvstore.hand_over import HandedOver, Parcel, at_stake, hand_over
from kvstore.library import Library
from kvstore.tiers.base import Lifetime, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.faults import FaultyTier
from kvstore.tiers.memory import MemoryTier


class Local:
    """Siblings in this process; each batch goes to the next of them. `delay_s`: of every call."""

    def __init__(self, *libraries: Library, delay_s: float = 0.0) -> None:
        self._libraries, self._delay_s = libraries, delay_s
        self.batches: list[list[str]] = []

    async def lacking(self, paths: Sequence[str]) -> list[Collection[str]]:
        await asyncio.sleep(self._delay_s)
        return [handing.lacking(library, paths) for library in self._libraries]

    async def adopt(self, parcels: Sequence[Parcel]) -> int:
        await asyncio.sleep(self._delay_s)
        self.batches.append([parcel.path for parcel in parcels])
        return handing.adopt(self._libraries[len(self.batches) % len(self._libraries)], parcels)


class Store(MemoryTier):
    """A tier that outlives nodes."""

    lifetime = Lifetime.STORE


def handed_over(library: Library, siblings: Local, lifetime: Lifetime = Lifetime.STORE) -> HandedOver:
    library.flush()
    return asyncio.run(hand_over(library, lifetime, siblings, time.monotonic() + 20))


def test_a_survivor_on_another_node_has_what_only_the_leaver_had(make_library: MakeLibrary, tmp_path: Path):
    """Each library has a disk of its own, as on two nodes."""
    leaver, survivor = (make_library(DiskTier(tmp_path / name)) for name in ("a", "b"))
    page, known = canonical("page", recompute_seconds=1.0), canonical("known", recompute_seconds=9.0)
    records = [page, patch_of(page, ["before"]), embedding_of(page), session_of(page)]
    leaver.put(page)
    leaver.put(records[1])
    leaver.put(records[2])
    leaver.put(records[3])
    for library in (leaver, survivor):
        library.put(known)
    survivor.flush()
    done = handed_over(leaver, siblings := Local(survivor))
    leaver.close()
    assert (done.records, done.left) == (4, 0)
    assert not any(known.key in path for batch in siblings.batches for path in batch)

    found = survivor.get_canonical(page.key, "acme")
    assert found is not None
    assert torch.equal(found.kv, page.kv)
    assert found.recompute_seconds == 1.0
    assert survivor.stats().tier_hits == 0, "from memory"
    survivor.close()
    again = make_library(DiskTier(tmp_path / "b"))  # it is the survivor's own from then on
    patch = again.get_patch(records[1].key, "acme")
    assert patch is not None
    assert again.has("embedding", records[2].key, "acme")
    assert again.has("session", records[3].key, "acme")


@pytest.mark.parametrize(
    ("tier", "lifetime", "records"),
    [(MemoryTier, Lifetime.NODE, 1), (Store, Lifetime.STORE, 0), (Store, Lifetime.NODE, 0)],
)
def test_what_a_tier_that_outlives_it_has_stays_there(
    make_library: MakeLibrary, tier: type[Tier], lifetime: Lifetime, records: int
):
    leaver, survivor = make_library(tier()), make_library(MemoryTier())
    leaver.put(canonical())
    assert handed_over(leaver, Local(survivor), lifetime).records == records


def test_what_a_tier_did_not_take_is_at_stake_until_it_does(make_library: MakeLibrary):
    broken = FaultyTier(Store(), "put")
    library = make_library(broken)
    library.put(canonical(recompute_seconds=0.5))
    library.flush()
    assert at_stake(library, Lifetime.STORE, SIZE) == 0.5, "sooner computed than moved"
    assert at_stake(library, Lifetime.STORE, 10 * SIZE) == pytest.approx(0.1)
    sound = make_library(Store())
    sound.put(canonical(recompute_seconds=0.5))
    sound.flush()
    assert at_stake(sound, Lifetime.STORE, SIZE) == 0.0


def test_a_record_that_was_loaded_from_a_tier_is_no_stake(make_library: MakeLibrary):
    tier = Store()
    first = make_library(tier)
    first.put(canonical())
    first.close()
    again = make_library(tier)
    assert again.get_canonical(canonical().key, "acme") is not None
    assert again.outlived(Lifetime.STORE) == []


def test_the_worthiest_go_first_with_all_that_belongs_to_their_content(
    make_library: MakeLibrary, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(handing, "PARCEL_BYTES", 1)  # each record by itself
    leaver, survivor = make_library(MemoryTier()), make_library(MemoryTier())
    cheap, dear = canonical("cheap", recompute_seconds=1.0), canonical("dear", recompute_seconds=50.0)
    for record in (cheap, dear):
        leaver.put(record)
    leaver.put(patch_of(dear))  # worth little by itself
    siblings = Local(survivor)
    assert handed_over(leaver, siblings).records == 3
    assert [dear.key in siblings.batches[0][0], "/patch/" in siblings.batches[1][0]] == [True, True]
    assert cheap.key in siblings.batches[2][0]


def test_a_deadline_ends_it_and_what_was_given_stays_given(make_library: MakeLibrary, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handing, "PARCEL_BYTES", 1)
    leaver, survivor = make_library(MemoryTier()), make_library(MemoryTier())
    for name in ("a", "b", "c", "d"):
        leaver.put(canonical(name, recompute_seconds=1.0))
    leaver.flush()
    slow = Local(survivor, delay_s=0.2)
    done = asyncio.run(hand_over(leaver, Lifetime.STORE, slow, time.monotonic() + 0.5))
    assert done.records + done.left == 4
    assert 1 <= done.records <= 2


def test_without_siblings_nothing_is_handed_over_and_nothing_fails(make_library: MakeLibrary):
    class Gone(Local):
        async def lacking(self, paths: Sequence[str]) -> list[Collection[str]]:
            raise ConnectionError("they are going, too")

    leaver = make_library(MemoryTier())
    leaver.put(canonical())
    for siblings in (Local(), Gone()):
        assert handed_over(leaver, siblings) == HandedOver(left=1)


def test_deleted_content_and_damaged_or_foreign_records_are_not_adopted(make_library: MakeLibrary):
    leaver, survivor = make_library(MemoryTier()), make_library(MemoryTier())
    other = make_library(fingerprint="other@1")
    kept, deleted = canonical("kept"), canonical("deleted")
    for record in (kept, deleted):
        leaver.put(record)
    survivor.delete_content(deleted.content, "acme")  # the leaver is told of no deletion any more
    siblings = Local(survivor)
    handed_over(leaver, siblings)
    assert survivor.get_canonical(deleted.key, "acme") is None
    assert survivor.get_canonical(kept.key, "acme") is not None
    (path,) = (path for path in siblings.batches[0] if kept.key in path)
    damaged = Parcel(path, 0.0, b"damaged")
    whole = handing._packed([(path, kept, 0.0)])
    assert handing.adopt(other, [damaged, *whole]) == 0
    assert other.get_canonical(kept.key, "acme") is None


def test_adopted_records_do_not_push_out_what_is_worth_more(make_library: MakeLibrary):
    survivor = make_library(MemoryTier(), memory_bytes=2 * SIZE)
    own = [canonical(name, recompute_seconds=5.0) for name in ("own-1", "own-2")]
    for record in own:
        survivor.put(record)
    less, more = canonical("less", recompute_seconds=1.0), canonical("more", recompute_seconds=500.0)
    survivor.put(less, 10.0)
    survivor.flush()
    assert not survivor.is_resident("canonical", less.key, "acme")
    assert all(survivor.is_resident("canonical", record.key, "acme") for record in own)
    assert survivor.get_canonical(less.key, "acme") is not None, "its tiers have it all the same"
    survivor.put(more, 1.0)
    survivor.flush()
    assert survivor.is_resident("canonical", more.key, "acme")
