"""The library's tiers against the raw medium: same bytes, same durability, one by one.

| arm | ours | raw |
|---|---|---|
| disk-write | put and flush, `durable`: encode, checksum, temporary name, sync, rename, sync | plain files, synced |
| disk-write-cached | the same as by default: the page cache may keep it for a while | plain files |
| disk-read | get: read and verify every checksum; nothing in the page cache | plain reads into one buffer |
| disk-read-warm | the same, all of it in the page cache | the same |
| s3-write, s3-read | put and flush, get | s3fs `pipe_file`, `cat_file` |

S3 is a real server on this machine (`infra.s3_server`): it takes processor time from both arms alike.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from infra.s3_server import s3_server
from kvstore.library import Library
from kvstore.operator.layout import Layout
from kvstore.operator.rotary import RotaryScheme
from kvstore.records.format import encode
from kvstore.records.record import CanonicalRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.paths import path_of
from serving.bench.harness import Arm, Benchmark, Outcome, clock_ms, in_turns

# Qwen2.5-VL-7B: 28 layers, 4 KV heads of 128, bf16, so 56 KiB a token.
LAYOUT = Layout.gqa(layers=28, kv_heads=4, head_size=128, rotary=RotaryScheme.from_base(128))
FINGERPRINT, TENANT, BUCKET = "bench-store", "local", "bench"
RECORDS = 8  # a turn
DIRECTORY = Path(".orbitserve")
Work = Callable[[], float]  # does one turn, returns its milliseconds


def run(quick: bool, console: Console) -> Outcome:
    """Measure every tier in turns with its raw medium."""
    cases, turns = ([256], 3) if quick else ([256, 1024], 9)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    nbytes = {}
    DIRECTORY.mkdir(exist_ok=True)
    with ExitStack() as stack:
        console.print("starting an S3 server")
        server = stack.enter_context(s3_server())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-store-", dir=DIRECTORY)))
        for tokens in cases:
            console.print(f"records of {tokens} tokens")
            records = _Records(tokens)
            nbytes[str(tokens)] = records.nbytes
            folder = directory / str(tokens)
            arms = {
                **_disk_writes(records, folder / "durable", durable=True),
                **_disk_writes(records, folder / "cached", durable=False),
                **_disk_reads(records, folder / "reads"),
                **_s3(records, f"{BUCKET}-{tokens}", server.storage_options()),
            }
            in_turns(arms, 1)  # opens connections, starts threads
            for name, times in in_turns(arms, turns).items():
                samples[name][str(tokens)] = times
    arms_ = [Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()]
    workload = {"tokens": cases, "bytes_per_record": nbytes, "records_per_turn": RECORDS, "turns": turns}
    return Outcome(workload, arms_, _figures(arms_, nbytes, str(cases[-1])), axis="tokens of a record")


def _figures(arms: list[Arm], nbytes: dict[str, int], largest: str) -> dict[str, float]:
    """Ours as a share of raw, and MiB/s of both, for the largest records; other sizes by name."""
    by_name, figures = {arm.name: arm for arm in arms}, {}
    for name in (name for name in by_name if not name.endswith("-raw")):
        figure, raw = name.replace("-", "_"), by_name[f"{name}-raw"]
        for case, size in nbytes.items():
            suffix = "" if case == largest else f"_{case}_tokens"
            figures[f"{figure}_fraction{suffix}"] = raw.median_ms(case) / by_name[name].median_ms(case)
            for kind, arm in (("", by_name[name]), ("_raw", raw)):
                figures[f"{figure}{kind}_mib_per_s{suffix}"] = RECORDS * size / 2**20 / (arm.median_ms(case) * 1e-3)
    return figures


_DESCRIPTIONS = {
    "disk-write-raw": "plain files of the same bytes, synced with their folder",
    "disk-write": "put and flush with every record synced",
    "disk-write-cached-raw": "plain files of the same bytes, left to the page cache",
    "disk-write-cached": "put and flush, left to the page cache",
    "disk-read-raw": "plain reads, nothing in the page cache",
    "disk-read": "get with every checksum verified, nothing in the page cache",
    "disk-read-warm-raw": "plain reads from the page cache",
    "disk-read-warm": "get with every checksum verified, from the page cache",
    "s3-write-raw": "s3fs pipe_file",
    "s3-write": "put and flush to S3",
    "s3-read-raw": "s3fs cat_file",
    "s3-read": "get from S3 with every checksum verified",
}


class _Records:
    """Canonicals of one size under ever new keys, and the bytes that one takes in a tier."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        self._kv = torch.randn((LAYOUT.layers, tokens, LAYOUT.features), generator=generator).to(torch.bfloat16)
        self._numbers = itertools.count()
        self.encoded = bytes(encode(self._new()))
        self.nbytes = len(self.encoded)

    def batch(self) -> list[CanonicalRecord]:
        return [self._new() for _ in range(RECORDS)]

    def _new(self) -> CanonicalRecord:
        key = f"{next(self._numbers):064x}"
        return CanonicalRecord(key=key, fingerprint=FINGERPRINT, tenant=TENANT, layout=LAYOUT, kv=self._kv)


def _disk_writes(records: _Records, folder: Path, durable: bool) -> dict[str, Work]:
    raw_folder = folder / "raw"
    raw_folder.mkdir(parents=True)
    library = _library(directory=folder / "library", durable=durable)

    def raw() -> float:
        paths = [raw_folder / str(number) for number in range(RECORDS)]
        elapsed = clock_ms(lambda: _write_plainly(paths, records.encoded, durable))
        for path in paths:
            path.unlink()
        return elapsed

    name = "disk-write" if durable else "disk-write-cached"
    return {f"{name}-raw": raw, name: lambda: _put(library, records)}


def _write_plainly(paths: list[Path], data: bytes, durable: bool) -> None:
    for path in paths:
        with path.open("wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if durable:
                os.fsync(file.fileno())
        if durable:
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


def _disk_reads(records: _Records, folder: Path) -> dict[str, Work]:
    batch = records.batch()
    library = _library(directory=folder)
    for record in batch:
        library.put(record)
    library.flush()
    paths = [folder / path_of(record) for record in batch]
    target = bytearray(records.nbytes)

    def raw() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                view = memoryview(target)
                while count := file.readinto(view):
                    view = view[count:]

    def cold(work: Callable[[], None]) -> float:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return clock_ms(work)

    def ours() -> None:
        _get(library, batch)

    return {
        "disk-read-raw": lambda: cold(raw),
        "disk-read": lambda: cold(ours),
        "disk-read-warm-raw": lambda: clock_ms(raw),
        "disk-read-warm": lambda: clock_ms(ours),
    }


def _s3(records: _Records, bucket: str, options: dict[str, Any]) -> dict[str, Work]:
    import s3fs

    files = s3fs.S3FileSystem(**options)
    files.mkdir(bucket)
    library = _library(directory=None, url=f"s3://{bucket}/library", storage_options=options)
    stored = records.batch()
    for record in stored:
        library.put(record)
    library.flush()
    paths = [f"{bucket}/raw/{number}" for number in range(RECORDS)]

    def write_raw() -> float:
        return clock_ms(lambda: [files.pipe_file(path, records.encoded) for path in paths])

    def read_raw() -> float:
        return clock_ms(lambda: [files.cat_file(f"{bucket}/library/{path_of(record)}") for record in stored])

    return {
        "s3-write-raw": write_raw,
        "s3-write": lambda: _put(library, records),
        "s3-read-raw": read_raw,
        "s3-read": lambda: clock_ms(lambda: _get(library, stored)),
    }


def _library(**fields: Any) -> Library:
    """A library that keeps nothing in memory, so that every read reaches the tier."""
    settings = LibrarySettings(memory_bytes=0, load_timeout_s=60, write_queue_bytes=1 << 40, **fields)
    return Library(settings, FINGERPRINT)


def _put(library: Library, records: _Records) -> float:
    batch = records.batch()

    def work() -> None:
        for record in batch:
            library.put(record)
        library.flush()

    elapsed = clock_ms(work)
    assert library.stats().dropped_writes == 0
    for record in batch:
        library.delete("canonical", record.key, TENANT)
    return elapsed


def _get(library: Library, batch: list[CanonicalRecord]) -> None:
    for record in batch:
        assert library.get_canonical(record.key, TENANT) is not None


BENCHMARK = Benchmark(
    "store",
    "Reading and writing records in every tier, against the raw disk and a raw s3fs transfer of the same bytes.",
    run,
    {
        name: (">=", 0.8)
        for name in ("disk_read_fraction", "disk_write_fraction", "s3_read_fraction", "s3_write_fraction")
    },
)
