"""No damaged, misplaced or half-written record is ever served, whatever happened to its file or its writer."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvstore_support import FINGERPRINT, canonical, embedding_of, patch_of

from kvstore.library import Library
from kvstore.records import format as record_format
from kvstore.records.format import encode
from kvstore.records.record import Record, kind_of
from kvstore.records.seal import read_all
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import QUARANTINE, Blob
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.loading import Loading
from kvstore.tiers.paths import path_of
from kvstore.tiers.stack import Found, TierStack

TESTS = Path(__file__).parents[2]
CORRUPTIONS = 10_000


def read(stack: TierStack, path: str, key: str) -> Found | None:
    """What the first tier gives."""
    loading = Loading(path)
    loading.queue(0)
    return stack.read(loading, key, FINGERPRINT, "acme", verify=True)


def whole(blob: Blob | None) -> Blob | None:
    """A blob without its reader, all of it read."""
    if blob is None or blob.read is None:
        return blob
    read_all(blob.read, 0, blob.buffer.size)
    return Blob(blob.buffer)


Damage = Callable[[random.Random, bytes, bytes], bytes]


def place(rng: random.Random, data: bytes, width: int = 1) -> int:
    return rng.randrange(len(data) - width + 1)


def overwritten(data: bytes, at: int, span: bytes) -> bytes:
    return data[:at] + span + data[at + len(span) :]


def flipped_bits(rng: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[place(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def random_run(rng: random.Random, data: bytes, other: bytes) -> bytes:
    width = rng.randint(1, 600)
    return overwritten(data, place(rng, data, width), rng.randbytes(width))


def zeroed_block(rng: random.Random, data: bytes, other: bytes) -> bytes:
    width = rng.choice([8, 64, 512])
    return overwritten(data, place(rng, data, width), bytes(width))


def truncated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def zeroed_tail(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """What a power cut may leave of a file that was not synced."""
    at = rng.randrange(len(data))
    return data[:at] + bytes(len(data) - at)


def extended(rng: random.Random, data: bytes, other: bytes) -> bytes:
    count = rng.randint(1, 300)
    return data + rng.choice([bytes(count), rng.randbytes(count), data[-count:], data[:count]])


def swapped_blocks(rng: random.Random, data: bytes, other: bytes) -> bytes:
    width = rng.choice([1, 4, 16, 128, 512])
    first, second = sorted(rng.sample(range(len(data) // width), 2))
    a, b = (data[n * width : (n + 1) * width] for n in (first, second))
    return overwritten(overwritten(data, first * width, b), second * width, a)


def damaged_head(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return overwritten(data, rng.randrange(64), rng.randbytes(rng.randint(1, 16)))


def damaged_foot(rng: random.Random, data: bytes, other: bytes) -> bytes:
    width = rng.randint(1, 16)
    return overwritten(data, len(data) - width - rng.randrange(64), rng.randbytes(width))


def spliced(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The start of one record and the end of another of the same shape, or the other way round."""
    at = place(rng, data)
    first, second = rng.sample([data, other], 2)
    return first[:at] + second[at:]


def shifted(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at, count = place(rng, data), rng.randint(1, 64)
    return rng.choice([data[:at] + data[at + count :], data[:at] + rng.randbytes(count) + data[at:]])


DAMAGES: list[Damage] = [
    flipped_bits, random_run, zeroed_block, truncated, zeroed_tail, extended, swapped_blocks, damaged_head,
    damaged_foot, spliced, shifted,
]  # fmt: skip


def test_of_ten_thousand_corrupted_files_none_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")  # every one is logged as a warning
    rng = random.Random(20260801)

    class Tier(DiskTier):
        """Half of the files come as a whole, as other tiers give them: those are verified after they were read."""

        def open(self, key: str) -> Blob | None:
            return super().open(key) if rng.random() < 0.5 else whole(super().open(key))

    tier = Tier(tmp_path, durable=False)
    stack = TierStack([tier], LibrarySettings(), pinned=lambda key: False, last_used=dict)
    mine, others = canonical("mine"), canonical("other")
    pairs: list[tuple[Record, Record]] = [
        (mine, others),
        (patch_of(mine, ["x"]), patch_of(others, ["x"])),
        (embedding_of(mine), embedding_of(others)),
    ]
    encoded = [(record, bytes(encode(record)), bytes(encode(other))) for record, other in pairs]
    served: list[str] = []
    applied = 0
    for number in itertools.count():
        if applied == CORRUPTIONS:
            break
        damage = DAMAGES[number % len(DAMAGES)]
        record, sound, other = rng.choice(encoded)
        damaged = damage(rng, sound, other)
        if damaged == sound:
            continue
        applied += 1
        path = path_of(record)
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(damaged)
        if read(stack, path, record.key) is not None:
            served.append(damage.__name__)
        assert not tier.contains(path)
        (tmp_path / QUARANTINE / path).unlink()
    assert served == []
    counts = stack.count()
    assert (counts["corrupt"], counts["quarantined"], counts["tier_errors"]) == (CORRUPTIONS, CORRUPTIONS, 0)
    for record, sound, _ in encoded:
        (tmp_path / path_of(record)).write_bytes(sound)
        assert read(stack, path_of(record), record.key) is not None


@pytest.mark.parametrize("what", ["older version", "newer version", "fingerprint", "tenant", "key", "kind"])
def test_a_sound_record_that_is_not_the_one_asked_for_is_moved_aside_and_stored_again(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = canonical()
    foreign: Record
    if what.endswith("version"):
        foreign = record
        monkeypatch.setattr(record_format, "FORMAT_VERSION", 1 if what.startswith("older") else 3)
    elif what == "kind":
        foreign = replace(embedding_of(record), key=record.key)
    else:
        foreign = replace(record, **{what: "0" * 64})
    stored = bytes(encode(foreign))
    monkeypatch.undo()
    file = tmp_path / path_of(record)
    file.parent.mkdir(parents=True)
    file.write_bytes(stored)
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as library:
        assert library.get_canonical(record.key, "acme") is None
        stats = library.stats()
        assert (stats.corrupt, stats.quarantined, stats.misses) == (1, 1, 1)
        assert not file.exists()
        library.put(record)
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as library:
        found = library.get_canonical(record.key, "acme")
        assert found is not None
        assert torch.equal(found.kv, record.kv)


# Writers are forked one after the other from one process, because importing takes long. Each puts records, flushes and
# says which are stored; it deletes some and says so before and after; until it is killed. It says a line in one write,
# which a pipe takes whole: where Python's output is unbuffered, print writes word by word, and dies between two.
WRITER = """
import itertools, os, sys
from pathlib import Path
from kvstore_support import FINGERPRINT, canonical
from kvstore.library import Library
from kvstore.settings import LibrarySettings

def say(*words):
    os.write(sys.stdout.fileno(), (" ".join(words) + "\\n").encode())

def write(directory, life):
    library = Library(LibrarySettings(directory=directory, memory_bytes=0), FINGERPRINT)
    for number in itertools.count():
        names = [f"{life}-{number}-{part}" for part in "abc"]
        records = [canonical(name, tokens=400) for name in names]
        for record in records:
            library.put(record)
        library.flush()
        say("stored", *names)
        if number % 2:
            say("deleting", names[0])
            library.delete("canonical", records[0].key, "acme")
            say("deleted", names[0])

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        say("pid", str(os.getpid()))
        write(Path(sys.argv[1]), line.strip())
    os.waitpid(pid, 0)
    say("dead")
"""


@contextmanager
def writer(directory: Path) -> Iterator[subprocess.Popen[str]]:
    script = f"import sys; sys.path[:0] = {[str(TESTS), str(TESTS.parent)]!r}\n{WRITER}"
    command = [sys.executable, "-c", script, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_was_acknowledged_outlives_kill_and_nothing_half_written_is_read(tmp_path: Path) -> None:
    rng = random.Random(7)
    said: dict[str, set[str]] = {"stored": set(), "deleting": set(), "deleted": set()}
    with writer(tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for life in range(10):
            print(life, file=process.stdin, flush=True)
            words = process.stdout.readline().split()
            assert words[0] == "pid"
            pid, left = int(words[1]), rng.randint(1, 6)
            for line in process.stdout:
                words = line.split()
                if words == ["dead"]:
                    break
                said[words[0]].update(words[1:])
                left -= 1
                if left == 0:
                    time.sleep(rng.uniform(0, 0.02))  # somewhere in the middle of the next writes
                    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(pid)], check=True)
            # a slow load is a miss, which on a busy machine would look like a loss
            patient = LibrarySettings(directory=tmp_path, memory_bytes=0, load_timeout_s=60)
            with Library(patient, FINGERPRINT) as library:
                for name in said["stored"] - said["deleting"]:
                    expected = canonical(name, tokens=400)
                    found = library.get_canonical(expected.key, "acme")
                    assert found is not None, name
                    assert torch.equal(found.kv, expected.kv)
                for name in said["deleted"]:
                    assert library.get_canonical(canonical(name).key, "acme") is None
                assert library.stats().corrupt == 0
            assert list((tmp_path / ".partial").iterdir()) == []
    tier = DiskTier(tmp_path)
    stack = TierStack([tier], LibrarySettings(), pinned=lambda key: False, last_used=dict)
    for path in tier.keys("records/"):  # those that were being acknowledged too
        key = Path(path).stem
        found = read(stack, path, key)
        assert found is not None
        assert kind_of(found.record) == "canonical"
    assert len(said["stored"]) > 50
    assert said["deleted"]
