from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import SecretStr

from kvstore.errors import FileTooLarge, InvalidUpload, QuotaExceeded, TierUnavailable, UnknownFile
from kvstore.records.keys import content_id, tenant_salt
from kvstore.settings import FileSettings
from kvstore.tiers.faults import FaultyTier, HeldTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.paths import tenant_digest
from kvstore.uploads.files import FileStore


@pytest.fixture(params=["directory", "url"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    return FileStore(tmp_path if request.param == "directory" else f"memory://{uuid.uuid4().hex}")


def test_an_upload_comes_back(store: FileStore) -> None:
    before = int(time.time())
    file = store.create("acme", "page 1.png", "vision", b"\x89PNG data")
    assert store.get("acme", file.id) == file
    assert store.content("acme", file.id) == b"\x89PNG data"
    assert before <= file.created_at <= time.time()
    assert file.content == content_id(b"\x89PNG data", tenant_salt("acme"))


def test_it_looks_like_openais_file_object(store: FileStore) -> None:
    file = store.create("acme", "a.png", "vision", b"12345", expires_after=3600)
    shown = file.to_openai()
    assert shown == {
        "id": file.id,
        "object": "file",
        "bytes": 5,
        "created_at": file.created_at,
        "expires_at": file.created_at + 3600,
        "filename": "a.png",
        "purpose": "vision",
        "status": "processed",
    }
    assert file.id.startswith("file-")
    assert file.content not in str(shown)


def test_another_tenants_file_is_indistinguishable_from_a_missing_one(store: FileStore) -> None:
    file = store.create("acme", "a.png", "vision", b"secret")
    missing = "file-" + "0" * 32
    for call in (store.get, store.content, store.delete):
        with pytest.raises(UnknownFile) as other:
            call("rival", file.id)
        with pytest.raises(UnknownFile) as absent:
            call("rival", missing)
        assert str(other.value).replace(file.id, missing) == str(absent.value)
        assert (other.value.code, other.value.status) == ("file_not_found", 404)
    assert store.list("rival") == ([], False)
    assert store.content("acme", file.id) == b"secret"


def test_equal_bytes_of_two_tenants_share_no_content_id(store: FileStore) -> None:
    ids = {store.create(tenant, "a", "vision", b"same").content for tenant in ("acme", "rival")}
    assert len(ids) == 2
    again = store.create("acme", "b", "vision", b"same").content
    assert again in ids


@pytest.mark.parametrize(
    "file_id", ["", "file-", "../../x", "file-../x", "file-" + "0" * 31, "FILE-" + "0" * 32, "x\x00"]
)
def test_malformed_ids_are_unknown(store: FileStore, file_id: str) -> None:
    with pytest.raises(UnknownFile):
        store.get("acme", file_id)


@pytest.mark.parametrize("tenant", ["", "../rival", "a/b", "ünï", "x" * 500, "file"])
def test_tenant_names_may_be_anything(store: FileStore, tenant: str) -> None:
    file = store.create(tenant, "a", "vision", b"x")
    assert store.list(tenant) == ([file], False)
    assert store.list(tenant + "x") == ([], False)


def test_a_deleted_file_is_gone(store: FileStore) -> None:
    file = store.create("acme", "a", "vision", b"x")
    assert store.delete("acme", file.id) == file
    with pytest.raises(UnknownFile):
        store.content("acme", file.id)
    with pytest.raises(UnknownFile):
        store.delete("acme", file.id)


def test_listing_pages_through_everything_once(store: FileStore) -> None:
    files = {store.create("acme", f"{n}", "vision", b"x").id for n in range(7)}
    store.create("acme", "other", "assistants", b"x")
    for order in ("asc", "desc"):
        seen: list[str] = []
        more = True
        while more:
            page, more = store.list("acme", "vision", limit=3, after=seen[-1] if seen else None, order=order)
            seen += [file.id for file in page]
        assert len(seen) == 7
        assert set(seen) == files
    with pytest.raises(UnknownFile):
        store.list("acme", after="file-" + "0" * 32)
    with pytest.raises(InvalidUpload):
        store.list("acme", order="sideways")


def test_listing_is_by_the_order_of_upload_in_whatever_process_it_was(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path), FileStore(tmp_path)]
    names = [str(n) for n in range(12)]
    for n, name in enumerate(names):
        stores[n % 2].create("acme", name, "vision", b"x")
    assert [file.filename for file in stores[0].list("acme", order="asc")[0]] == names
    assert [file.filename for file in stores[1].list("acme")[0]] == names[::-1]


def test_a_clock_that_is_set_back_changes_no_order(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    for name, offset in (("first", 5), ("second", 1), ("third", 3)):
        monkeypatch.setattr(time, "time_ns", lambda offset=offset: now + offset * 10**9)
        store.create("acme", name, "vision", b"x")
    assert [file.filename for file in store.list("acme", order="asc")[0]] == ["first", "second", "third"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_cursor_whose_file_is_gone_goes_on_behind_its_place(store: FileStore, order: str) -> None:
    names = [str(n) for n in range(7)]
    for name in names:
        store.create("acme", name, "vision", b"x")
    seen, after, more = list[str](), None, True
    while more:
        page, more = store.list("acme", limit=2, after=after, order=order)
        seen += [store.delete("acme", file.id).filename for file in page]
        after = page[-1].id
    assert seen == (names if order == "asc" else names[::-1])
    assert store.list("acme", after=after) == ([], False)


def test_files_of_earlier_versions_are_listed_before_and_paged_through(store: FileStore) -> None:
    new = store.create("acme", "new", "vision", b"x")
    old = [
        replace(new, id=f"file-{digit * 32}", filename=f"old {digit}", created_at=new.created_at - age)
        for digit, age in (("f", 9), ("1", 8), ("0", 7))
    ]
    for file in old:
        store._objects.write(f"files/{tenant_digest('acme')}/{file.id}.json", file)
    assert store.list("acme", order="asc")[0] == [*old, new]
    assert store.list("acme", order="asc", limit=1, after=old[0].id) == ([old[1]], True)
    assert store.get("acme", old[0].id) == old[0]


def test_an_expired_file_is_unknown_at_once_and_swept_later(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    short = store.create("acme", "short", "vision", b"x", expires_after=10)
    long = store.create("acme", "long", "vision", b"y", expires_after=1000)
    forever = store.create("rival", "forever", "vision", b"z")
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(UnknownFile):
        store.get("acme", short.id)
    assert store.list("acme") == ([long], False)
    assert store.sweep(later) == (short,)
    assert store.sweep(later) == ()
    assert store.content("acme", long.id) == b"y"
    assert store.content("rival", forever.id) == b"z"
    assert not store.has_content("acme", short.content)
    assert store.has_content("acme", long.content)


def test_default_expiry_applies_where_none_is_given(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FileSettings(default_expiry_s=60))
    file = store.create("acme", "a", "vision", b"x")
    assert file.expires_at == file.created_at + 60


def test_unusable_uploads_are_refused_and_store_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FileSettings(max_file_bytes=10, max_expiry_s=100))
    for arguments, error in (
        (("a", "vision", b""), InvalidUpload),
        (("", "vision", b"x"), InvalidUpload),
        (("n" * 256, "vision", b"x"), InvalidUpload),
        (("a\x00", "vision", b"x"), InvalidUpload),
        (("a", "vision", b"x" * 11), FileTooLarge),
        (("a", "vision", b"x", 0), InvalidUpload),
        (("a", "vision", b"x", 101), InvalidUpload),
    ):
        with pytest.raises(error):
            store.create("acme", *arguments)
    assert store.list("acme") == ([], False)
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]


def test_a_tenants_quota_is_its_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FileSettings(max_tenant_bytes=10, max_tenant_files=3))
    store.create("acme", "a", "vision", b"123456")
    with pytest.raises(QuotaExceeded):
        store.create("acme", "b", "vision", b"12345")
    store.create("rival", "b", "vision", b"12345")
    store.create("acme", "c", "vision", b"1")
    store.create("acme", "d", "vision", b"1")
    with pytest.raises(QuotaExceeded):
        store.create("acme", "e", "vision", b"1")
    store.delete("acme", store.list("acme")[0][0].id)
    store.create("acme", "f", "vision", b"1")


def test_a_tenant_named_has_a_quota_of_its_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FileSettings(max_tenant_bytes=10, named_tenant_bytes={"large": 20, "small": 5}))
    for tenant, most in {"large": 20, "small": 5, "acme": 10}.items():
        store.create(tenant, "a", "vision", b"1" * most)
        with pytest.raises(QuotaExceeded, match=f" {most} bytes"):
            store.create(tenant, "b", "vision", b"1")


def test_simultaneous_uploads_cannot_exceed_the_quota(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FileSettings(max_tenant_files=5))

    def upload(_: int) -> bool:
        try:
            store.create("acme", "a", "vision", b"x")
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(upload, range(20))) == 5


def test_a_tenant_does_not_wait_for_anothers_quota_to_be_checked() -> None:
    class Slow(HeldTier):
        """Once the first upload's bytes are there, its tenant's folder takes long to list."""

        def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
            super().put(key, buffers)
            if not self.entered.is_set():
                self.held = {"entries"}

    tier = Slow(MemoryTier())
    store = FileStore(tier)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.create, "one", "a.png", "vision", b"a")
        assert tier.entered.wait(10)
        tier.held.clear()
        store.create("two", "b.png", "vision", b"b")
        assert not waiting.done()
        tier.release.set()
        waiting.result(10)
    assert [len(store.list(tenant)[0]) for tenant in ("one", "two")] == [1, 1]


def test_an_upload_that_never_finished_is_invisible_and_swept() -> None:
    tier = FaultyTier(MemoryTier())
    store = FileStore(tier)

    def fail_on_json(action: str, key: str) -> None:
        if action == "put" and key.endswith(".json"):
            raise TierUnavailable("down")

    tier.before = fail_on_json  # type: ignore[method-assign]
    with pytest.raises(TierUnavailable):
        store.create("acme", "a", "vision", b"x")
    assert store.list("acme") == ([], False)
    assert len(list(tier.inner.keys())) == 1
    store.sweep()
    assert len(list(tier.inner.keys())) == 1  # it may still be under way
    store.sweep(time.time() + 7200)
    assert list(tier.inner.keys()) == []


def test_a_damaged_object_is_unknown(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    file = store.create("acme", "a", "vision", b"x")
    (path,) = tmp_path.rglob("*.json")
    path.write_text('{"id": ')
    with pytest.raises(UnknownFile):
        store.get("acme", file.id)
    assert store.list("acme") == ([], False)


def test_the_salt_secret_changes_content_ids(tmp_path: Path) -> None:
    plain = FileStore(tmp_path).create("acme", "a", "vision", b"x")
    salted = FileStore(tmp_path, FileSettings(salt_secret=SecretStr("s"))).create("acme", "a", "vision", b"x")
    assert plain.content != salted.content
