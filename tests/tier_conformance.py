"""One conformance suite for whatever calls itself a tier.

A test class inherits `TierConformance` and says how an empty tier is made:

    class TestMyTier(TierConformance):
        @pytest.fixture
        def tier(self) -> Tier:
            return MyTier()
"""

from __future__ import annotations

import os
import threading

import pyarrow as pa
import pytest

from kvstore.errors import InvalidKey
from kvstore.tiers.base import Tier


def buffers(*parts: bytes) -> list[pa.Buffer]:
    """Bytes in the form `Tier.put` takes."""
    return [pa.py_buffer(part) for part in parts]


class TierConformance:
    """What `Tier` promises."""

    @pytest.fixture
    def tier(self) -> Tier:
        """An empty tier."""
        raise NotImplementedError

    def test_absent_blob_is_none(self, tier: Tier) -> None:
        assert tier.get("a/b") is None
        assert not tier.contains("a/b")
        assert not tier.delete("a/b")
        assert not tier.quarantine("a/b")
        assert list(tier.keys()) == []
        assert tier.size_bytes() == 0

    def test_stored_blob_comes_back(self, tier: Tier) -> None:
        tier.put("a/b.arrow", buffers(b"hello"))
        found = tier.get("a/b.arrow")
        assert found is not None
        assert bytes(found) == b"hello"
        assert tier.contains("a/b.arrow")

    def test_buffers_are_joined_in_order(self, tier: Tier) -> None:
        tier.put("k", buffers(b"one ", b"", b"two ", b"three"))
        assert bytes(tier.get("k") or b"") == b"one two three"

    def test_large_and_empty_blobs(self, tier: Tier) -> None:
        large = os.urandom(3 << 20)
        tier.put("large", buffers(large))
        tier.put("empty", buffers(b""))
        assert bytes(tier.get("large") or b"") == large
        assert tier.get("empty") is not None
        assert tier.size_bytes() == len(large)

    def test_put_replaces(self, tier: Tier) -> None:
        tier.put("k", buffers(b"a long first version"))
        tier.put("k", buffers(b"second"))
        assert bytes(tier.get("k") or b"") == b"second"
        assert tier.size_bytes() == 6

    def test_a_buffer_outlives_replacement_and_deletion(self, tier: Tier) -> None:
        tier.put("k", buffers(b"first" * 2000))
        held = tier.get("k")
        tier.put("k", buffers(b"other" * 2000))
        tier.delete("k")
        assert held is not None
        assert bytes(held) == b"first" * 2000

    def test_deleted_blob_is_gone(self, tier: Tier) -> None:
        tier.put("d/e/f", buffers(b"x"))
        tier.put("d/e/g", buffers(b"y"))
        assert tier.delete("d/e/f")
        assert not tier.delete("d/e/f")
        assert tier.get("d/e/f") is None
        assert list(tier.keys()) == ["d/e/g"]

    def test_many_are_deleted_at_once(self, tier: Tier) -> None:
        keys = [f"many/{number}" for number in range(7)]
        for key in (*keys, "other"):
            tier.put(key, buffers(b"x"))
        assert tier.delete_all([*keys[:2], "many/absent"]) in (2, 3)
        assert tier.delete_all(keys[2:6]) == 4
        assert sorted(tier.keys()) == ["many/6", "other"]
        assert tier.delete_all([]) == 0
        with pytest.raises(InvalidKey):
            tier.delete_all(["other", "../outside"])

    def test_keys_are_listed_by_prefix(self, tier: Tier) -> None:
        for key in ("a/x1", "a/x2", "a/y", "ab/x", "b"):
            tier.put(key, buffers(b"12"))
        assert sorted(tier.keys()) == ["a/x1", "a/x2", "a/y", "ab/x", "b"]
        assert sorted(tier.keys("a/")) == ["a/x1", "a/x2", "a/y"]
        assert sorted(tier.keys("a/x")) == ["a/x1", "a/x2"]
        assert sorted(tier.keys("a")) == ["a/x1", "a/x2", "a/y", "ab/x"]
        assert list(tier.keys("c/d/e")) == []
        assert list(tier.keys("b/d")) == []
        assert tier.size_bytes("a/") == 6

    def test_entries_tell_size_and_recency(self, tier: Tier) -> None:
        tier.put("k", buffers(b"12345"))
        (entry,) = tier.entries()
        assert (entry.key, entry.size) == ("k", 5)
        assert entry.used > 1.6e9

    def test_touching_changes_nothing_but_recency(self, tier: Tier) -> None:
        tier.put("k", buffers(b"12345"))
        tier.touch("k")
        tier.touch("absent")
        assert list(tier.keys()) == ["k"]
        assert bytes(tier.get("k") or b"") == b"12345"

    def test_quarantined_blob_is_moved_aside(self, tier: Tier) -> None:
        tier.put("a/b", buffers(b"bad"))
        assert tier.quarantine("a/b")
        assert tier.get("a/b") is None
        assert bytes(tier.get("quarantine/a/b") or b"") == b"bad"

    def test_a_folder_is_not_a_blob(self, tier: Tier) -> None:
        tier.put("a/b/c", buffers(b"x"))
        assert tier.get("a/b") is None
        assert not tier.contains("a/b")
        assert not tier.delete("a/b")
        assert tier.contains("a/b/c")
        assert tier.stored(["a/b", "a/b/c", "a"]) == {"a/b/c"}
        assert tier.stored([]) == set()

    @pytest.mark.parametrize(
        "key", ["", "/", "/etc/passwd", "..", "a/../b", "a//b", "a/", ".hidden", "a/.b", "a b", "a\x00", "é", "a\n"]
    )
    def test_keys_that_could_leave_the_tier_are_refused(self, tier: Tier, key: str) -> None:
        with pytest.raises(InvalidKey):
            tier.put(key, buffers(b"x"))
        with pytest.raises(InvalidKey):
            tier.get(key)
        with pytest.raises(InvalidKey):
            tier.delete(key)
        with pytest.raises(InvalidKey):
            tier.contains(key)
        with pytest.raises(InvalidKey):
            tier.stored([key])

    def test_readers_see_whole_versions_only(self, tier: Tier) -> None:
        versions = [bytes([n]) * 200_000 for n in range(4)]
        tier.put("k", buffers(versions[0]))
        seen: list[bytes] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                seen.append(bytes(tier.get("k") or b"missing"))

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(5):
            for version in versions:
                tier.put("k", buffers(version[:100_000], version[100_000:]))
        stop.set()
        reader.join()
        assert seen
        assert all(value in versions for value in seen)
