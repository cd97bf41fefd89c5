"""Store of sessions: what is kept, for how long, and who shares it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
from kvstore_support import FINGERPRINT, GQA, canonical, random_kv, segment_patch_of

from kvstore.library import Library
from kvstore.records.record import SegmentRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.memory import MemoryTier
from prefill_workers.protocol import SessionRef
from prefill_workers.sessions.manifest import KeptKV, KeptSegment, Session
from prefill_workers.sessions.store import SessionStore
from prefill_workers.sessions.sweep import Swept, sweep
from prefill_workers.settings import SessionSettings

HOUR = 3600.0


class Clock:
    now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Stored = Callable[..., Session]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def library(tier: MemoryTier):
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as library:
        yield library


def store_of(library: Library, clock: Clock, max_bytes: int = 1 << 30) -> SessionStore:
    return SessionStore(library, "float32", SessionSettings(idle_s=HOUR, max_bytes=max_bytes), clock)


def put(store: SessionStore, library: Library, id: str, names: str, tenant: str = "acme", size: int = 100) -> Session:
    """A session whose segments, a letter each, have a record and count `size` bytes."""
    found = []
    for i, name in enumerate(names):
        key = (tenant + id + name).encode().hex().ljust(64, "0")
        kv = random_kv(GQA, 2)
        library.put(
            SegmentRecord(
                key=key, fingerprint=FINGERPRINT, tenant=tenant, content=f"page {name}", layout=GQA, kv=kv, at=i,
                antecedents=tuple(f"page {other}" for other in names[:i]),
            )
        )  # fmt: skip
        content = "" if name == "h" else f"page {name}"  # the head is text
        found.append(KeptSegment(name, 2, content, (), KeptKV(key, tuple(names[:i]), True, size)))
    session = store.open(tenant, SessionRef(id)).session.moved_on(tuple(found), store._clock())
    store.put(session)
    return session


def is_stored(library: Library, session: Session, i: int) -> bool:
    kv = session.segments[i].conditioned
    assert kv is not None
    return library.has("segment", kv.key, session.tenant)


def settle(store: SessionStore) -> None:
    """Wait until what is being deleted is gone."""
    store._deleting.submit(lambda: None).result(10)


def test_another_worker_goes_on_with_a_session(library: Library, clock: Clock):
    session = put(store_of(library, clock), library, "s", "hAB")
    assert store_of(library, clock).get("acme", "s") == session
    assert store_of(library, clock).get("other", "s") is None


def test_a_session_ends_when_nobody_asks_for_it(library: Library, clock: Clock):
    store = store_of(library, clock)
    session = put(store, library, "s", "hAB")
    clock.now += HOUR - 1
    assert store.get("acme", "s") == session
    clock.now += 2
    assert store.get("acme", "s") is None
    assert store.of_tenant("acme") == []
    put(store, library, "t", "h")
    settle(store)
    assert not is_stored(library, session, 1)
    assert len(store) == 1


@pytest.mark.parametrize("by", ["age", "bytes"])
def test_a_worker_that_drops_its_copy_leaves_what_another_has_gone_on_with(
    library: Library, tier: MemoryTier, clock: Clock, by: str
):
    store = store_of(library, clock, max_bytes=700)
    session = put(store, library, "s", "hAB")
    library.flush()
    clock.now += HOUR / 2
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as elsewhere:
        other = store_of(elsewhere, clock)
        slid = other.get("acme", "s").moved_on((session.segments[0], session.segments[2]), clock.now)
        other.put(slid)
        elsewhere.flush()
        if by == "age":
            clock.now += HOUR / 2 + 1
            assert store.get("acme", "s") == slid, "not its own, which is expired"
        put(store, library, "t", "hAB")
        put(store, library, "u", "hAB")
        settle(store)
        assert store.nbytes == 600, "its own copy is dropped"
        assert store.get("acme", "s") == slid
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as third:
        assert is_stored(third, session, 0)
        assert is_stored(third, session, 2)


def test_without_tiers_a_dropped_session_leaves_nothing_in_memory(clock: Clock):
    with Library(LibrarySettings(), FINGERPRINT, []) as library:
        store = store_of(library, clock)
        session = put(store, library, "s", "hAB")
        clock.now += HOUR + 1
        put(store, library, "t", "h")
        settle(store)
        assert not any(is_stored(library, session, i) for i in range(3))
        assert store.nbytes == 100


def test_what_leaves_a_window_is_deleted_unless_a_fork_holds_it(library: Library, clock: Clock):
    store = store_of(library, clock)
    session = put(store, library, "s", "hAB")
    fork = store.open("acme", SessionRef("f", "s")).session
    assert (fork.segments, fork.parent) == (session.segments, "s")
    store.put(fork)
    assert store.nbytes == 300, "a fork shares"
    store.put(session.moved_on((session.segments[0], session.segments[2]), clock.now))
    settle(store)
    assert is_stored(library, session, 1), "the fork needs it"
    assert store.delete("acme", "f")
    settle(store)
    assert not is_stored(library, session, 1)
    assert is_stored(library, session, 2)
    assert store.get("acme", "s").left == ("A",)
    assert store.open("acme", SessionRef("c", "s", clean=True)).session.segments == ()


def test_what_a_link_has_opened_stays_until_its_session_is_put(library: Library, clock: Clock):
    store = store_of(library, clock)
    session = put(store, library, "s", "hAB")
    fork = store.open("acme", SessionRef("f", "s"))
    slid = session.moved_on((session.segments[0], session.segments[2]), clock.now)
    store.put(slid)
    settle(store)
    assert is_stored(library, session, 1), "the fork may take it"
    store.put(fork.session.moved_on(session.segments[:2], clock.now), opened=fork)
    settle(store)
    assert is_stored(library, session, 1), "and has"
    store.put(store.get("acme", "f").moved_on(session.segments[:1], clock.now))
    settle(store)
    assert not is_stored(library, session, 1)


@pytest.mark.parametrize("ends", ["let go", "dropped", "put without it"])
def test_what_a_link_had_opened_goes_when_that_has_ended(library: Library, clock: Clock, ends: str):
    store = store_of(library, clock)
    session = put(store, library, "s", "hAB")
    fork = store.open("acme", SessionRef("f", "s"))
    store.put(session.moved_on((session.segments[0], session.segments[2]), clock.now))
    settle(store)
    if ends == "let go":
        store.let_go(fork)
    elif ends == "put without it":
        store.put(fork.session.moved_on(session.segments[:1], clock.now), opened=fork)
    else:
        del fork
        gc.collect()
    put(store, library, "t", "h")
    settle(store)
    assert not is_stored(library, session, 1)
    assert is_stored(library, session, 2)


def test_a_patch_goes_when_another_takes_its_place_and_its_kv_stays(library: Library, clock: Clock):
    store = store_of(library, clock)
    session = put(store, library, "s", "hAB")
    kv = session.segments[2].conditioned
    assert kv is not None

    def add(key: str) -> str:
        library.put(segment_patch_of(canonical(), key))
        library.put(segment_patch_of(canonical(), "9" * 64))
        patched = replace(kv, behind=("h",), is_exact=False, patch=key, patch_nbytes=7)
        made = {"B": patched, "gone": replace(patched, patch="9" * 64)}
        store.add_refreshed("acme", "s", made, "mended")
        store.discard("acme", made.values())
        settle(store)
        return key

    first = add("1" * 64)
    assert not library.has("segment", "9" * 64, "acme"), "the session has no such segment"
    assert store.nbytes == 307, "KV counts once, with its patch"
    second = add("2" * 64)
    assert not library.has("segment", first, "acme")
    assert library.has("segment", second, "acme")
    assert is_stored(library, session, 2)
    store.delete("acme", "s")
    settle(store)
    assert not library.has("segment", second, "acme")


def test_a_session_that_no_worker_has_served_goes_with_the_next_sweep_but_for_what_forks_share(
    library: Library, clock: Clock
):
    store = store_of(library, clock)
    session = put(store, library, "s", "hAB")
    fork = store.open("acme", SessionRef("f", "s"))
    store.put(fork.session.moved_on(session.segments[:2], clock.now), opened=fork)
    other = store_of(library, clock)
    assert not other.delete("another tenant", "s")
    assert other.delete("acme", "s")
    settle(other)
    assert all(is_stored(library, session, i) for i in range(3)), "it does not know who else needs them"
    assert other.get("acme", "s") is None
    assert not other.delete("acme", "s")
    library.flush()
    swept = sweep(library, HOUR, 1 << 30, clock.now)
    assert (swept.sessions, swept.segments) == (1, 1)
    assert [is_stored(library, session, i) for i in range(3)] == [True, True, False]
    assert store.get("acme", "f") is not None


def test_deleting_a_session_deletes_its_records_where_it_was_served(library: Library, clock: Clock):
    store = store_of(library, clock)
    session = put(store, library, "s", "hAB")
    assert store.delete("acme", "s")
    settle(store)
    assert not any(is_stored(library, session, i) for i in range(3))
    assert not store.delete("acme", "s")
    library.flush()
    assert sweep(library, HOUR, 1 << 30, clock.now) == Swept(), "nothing is left to do"


def test_bytes_are_bounded_and_the_tenant_that_holds_most_gives_way(library: Library, clock: Clock):
    store = store_of(library, clock, max_bytes=1000)
    small = put(store, library, "small", "hA", tenant="modest")
    for n in range(4):
        put(store, library, f"large {n}", "hABC")
    assert store.nbytes <= 1000
    assert store.get("modest", "small") == small
    assert [info.id for info in store.of_tenant("acme")] == ["large 3", "large 2"]
    put(store, library, "huge", "hABCDEFGHIJKLMN")
    huge = store.get("acme", "huge")
    assert [one.id for one in huge.segments if one.conditioned] == list("hKLMN"), "the head and the last, up to half"
    assert store.get("modest", "small") == small


@pytest.mark.parametrize(
    ("room", "fits"),
    [
        (300, ["h", "B", "C"]),
        (400, ["h", "A", "B", "C"]),
        (600, ["h", "A", "A refreshed", "B", "B refreshed", "C"]),
        (800, ["h", "A", "A refreshed", "A ahead", "B", "B refreshed", "C", "C refreshed"]),
    ],
)
def test_what_idle_time_made_finds_room_behind_all_that_segments_were_linked_with(
    library: Library, clock: Clock, room: int, fits: list[str]
):
    def kv(name: str) -> KeptKV:
        return KeptKV(name.encode().hex().ljust(64, "0"), (), True, 100)

    window = [KeptSegment("h", 2, conditioned=kv("h"))]
    for one in "ABC":
        made = {field: kv(f"{one} {field}") for field in ("refreshed", "ahead")}
        window.append(KeptSegment(one, 2, f"page {one}", conditioned=kv(one), **made))
    store = store_of(library, clock, max_bytes=2 * room)
    store.put(Session("s", "acme", clock.now, clock.now, tuple(window)))
    left = store.get("acme", "s")
    assert left is not None
    assert [one.key for one in left.records()] == [kv(name).key for name in fits]


def test_a_deleted_content_goes_from_sessions(library: Library, clock: Clock):
    store = store_of(library, clock)
    session, other = put(store, library, "s", "hAB"), put(store, library, "o", "hC")
    store.forget("page A", "acme")
    library.delete_content("page A", "acme")
    left = store.get("acme", "s")
    assert [(one.id, one.conditioned is not None) for one in left.segments] == [("h", True), ("B", False)]
    assert store.get("acme", "o") == other
    assert not is_stored(library, session, 2), "it was computed behind it"
    assert store_of(library, clock).get("acme", "s") is None, "nor does a manifest name it"
    assert store_of(library, clock).get("acme", "o") == other


def test_what_finds_no_room_is_deleted(library: Library, clock: Clock):
    store = store_of(library, clock, max_bytes=1000)
    huge = put(store, library, "huge", "hABCDEFGHIJKLMN")
    settle(store)
    assert [one.id for i, one in enumerate(huge.segments) if is_stored(library, huge, i)] == list("hKLMN")


def test_what_was_deleted_since_it_was_opened_is_not_kept(library: Library, clock: Clock):
    store = store_of(library, clock)
    session = put(store, library, "s", "hA")
    opened = store.open("acme", SessionRef("s"))
    assert store.delete("acme", "s")
    assert not store.put(session, opened=opened)
    assert store.get("acme", "s") is None
    assert store.nbytes == 0
    assert store.put(session, opened=store.open("acme", SessionRef("s"))), "one that began behind the deletion is kept"
