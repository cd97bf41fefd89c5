"""The patches that a directory holds, as placement's index learns of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvstore_support import FINGERPRINT, GQA, random_kv

from kvstore.catalog.catalogue import PatchCatalogue
from kvstore.catalog.index import Entry, PatchIndex, Scope, prefix_key
from kvstore.library import Library
from kvstore.operator.patch import PatchKind
from kvstore.records.keys import antecedent_key, canonical_key
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import PatchRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.paths import path_of
from prefill_workers.settings import PatchFormSettings
from serving.placement.patch_feed import PatchFeed, PatchFeedSource, log_stored

FORM = PatchForm(2)
PREFIX = [1, 2]
SCOPE = Scope("acme", prefix_key(PREFIX))


def key_of(content: str) -> str:
    return canonical_key(FINGERPRINT, content, [], "float32")


def patch(content: str, before: str = "", kind: PatchKind = PatchKind.own, form: PatchForm = FORM) -> PatchRecord:
    """The patch of a chunk behind others, all named by a letter."""
    antecedent = antecedent_key(PREFIX, [key_of(other) for other in before], ordered=kind is PatchKind.own)
    return PatchRecord(
        key=form.key(key_of(content), antecedent, kind),
        fingerprint=FINGERPRINT,
        tenant="acme",
        content=content,
        antecedents=tuple(before),
        layout=GQA,
        patch=form.form(random_kv(GQA, 5), GQA, kind),
        canonical=key_of(content),
        antecedent=antecedent,
        prefix=SCOPE.prefix,
    )


def entry(content: str, before: str = "", *, ordered: bool = True) -> Entry:
    return Entry(SCOPE, content, tuple(before), ordered)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    """A library on disk, as another process has it open."""
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as opened:
        yield opened


@pytest.fixture
def catalogue(tmp_path: Path) -> PatchCatalogue:
    return PatchCatalogue(DiskTier(tmp_path), FINGERPRINT, FORM)


def store(library: Library, *records: PatchRecord) -> None:
    for record in records:
        library.put(record)
    library.flush()


def test_what_lay_there_before_is_found_and_then_only_what_came_since(library: Library, catalogue: PatchCatalogue):
    assert catalogue.look() == []
    store(library, patch("a"), patch("b", "a"), patch("c", "ba", PatchKind.orbit), patch("b", "a", PatchKind.pair))
    found = catalogue.look()
    assert len(found) == 4
    assert set(found) == {entry("a"), entry("b", "a"), entry("c", "ab", ordered=False), entry("b", "a", ordered=False)}
    assert catalogue.look() == []
    store(library, patch("c", "ab"))
    assert catalogue.look() == [entry("c", "ab")]


def test_an_index_filled_from_disk_answers_as_one_that_heard_of_every_patch(
    library: Library, catalogue: PatchCatalogue
):
    store(library, patch("a"), patch("b", "a"), patch("c", "ab"), patch("c", "ab", PatchKind.orbit))
    index = PatchIndex()
    for found in catalogue.look():
        index.add(found)
    assert index.sequences(SCOPE, "abc") == {(): 0b001, (0,): 0b010, (0, 1): 0b100}
    assert index.sets(SCOPE, "cba") == {0b110: 0b001}


def test_a_look_reads_no_more_headers_than_it_may(library: Library, tmp_path: Path):
    store(library, *(patch(content) for content in "abcde"))
    catalogue = PatchCatalogue(DiskTier(tmp_path), FINGERPRINT, FORM, limit=2)
    looks = [(len(catalogue.look()), catalogue.is_behind) for _ in range(4)]
    assert looks == [(2, True), (2, True), (1, False), (0, False)]


def test_a_patch_that_went_and_came_again_is_found_again(library: Library, catalogue: PatchCatalogue):
    store(library, patch("a"))
    assert catalogue.look() == [entry("a")]
    library.delete("patch", patch("a").key, "acme")
    assert catalogue.look() == []
    store(library, patch("a"))
    assert catalogue.look() == [entry("a")]


def test_folders_in_which_nothing_came_or_went_are_not_listed(
    library: Library, catalogue: PatchCatalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store(library, *(patch(content) for content in "abcdef"))
    long_ago = time.time_ns() - 10**10
    for folder, _, _ in os.walk(tmp_path / "records"):
        os.utime(folder, ns=(long_ago, long_ago))
    assert len(catalogue.look()) == 6
    monkeypatch.setattr("kvstore.catalog.catalogue.os.scandir", pytest.fail)
    assert catalogue.look() == []


def test_patches_that_linkers_would_not_find_are_left_out(library: Library, catalogue: PatchCatalogue):
    update = patch("a", "b", PatchKind.update)
    store(library, patch("a", form=PatchForm(3)), update)
    assert catalogue.look() == []


def test_a_damaged_record_is_passed_over(library: Library, catalogue: PatchCatalogue, tmp_path: Path):
    store(library, patch("a"), patch("b"))
    damaged = tmp_path / path_of(patch("a"))
    data = bytearray(damaged.read_bytes())
    data[200] ^= 0xFF
    damaged.write_bytes(data)
    assert catalogue.look() == [entry("b")]


async def test_a_keeper_logs_what_another_process_stores_while_it_runs(library: Library, tmp_path: Path):
    store(library, patch("a"))
    feed, log = PatchFeedSource("keeper"), list[Entry]()
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as own:
        logging = asyncio.create_task(log_stored(own, PatchFormSettings(rank=FORM.rank), feed, period_s=0.01))
        while len(log) < 2:
            await asyncio.sleep(0.01)
            log = feed.since({}).entries
            if len(log) == 1:
                await asyncio.to_thread(store, library, patch("b", "a"))
        logging.cancel()
    assert log == [entry("a"), entry("b", "a")]


async def test_a_keeper_without_a_directory_has_nothing_to_log():
    feed = PatchFeedSource("keeper")
    with Library(LibrarySettings(directory=None), FINGERPRINT) as own:
        await log_stored(own, PatchFormSettings(), feed, period_s=0.01)
    assert feed.since({}) == PatchFeed("keeper", 0, [])
