"""Export and import of records: to a tar file or another tier, and back.

    records/...            the records, at the paths they have in every tier
    manifest.json          format, when it was written, and for each record its path, size and BLAKE3; written last

What has no manifest was not finished. Reading an archive writes nothing anywhere but into the tier it is meant for.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from blake3 import blake3

from kvstore.catalog.inventory import Advance, Item, checked, is_index
from kvstore.errors import CorruptRecord, StoreError
from kvstore.private_files import private_opener
from kvstore.tiers.base import Tier
from kvstore.tiers.paths import RecordPath, marker_paths

MANIFEST = "manifest.json"
_FORMAT = 1


class BadArchive(StoreError):
    """Not an archive of records, or not a finished one."""

    code = "bad_archive"
    status = 400


@dataclass(frozen=True)
class Listed:
    """A record as a manifest lists it."""

    path: str
    size: int
    blake3: str


@dataclass(frozen=True)
class Imported:
    """Result of an import. `refused`: paths, and why."""

    added: int
    present: int
    refused: tuple[tuple[str, str], ...]


class Archive(Protocol):
    """Source of named blobs for an import."""

    def get(self, key: str) -> pa.Buffer | None:
        """A blob; None if there is none of that name."""


def export(
    tier: Tier, items: Sequence[Item], put: Callable[[str, pa.Buffer], None], advance: Advance = lambda size: None
) -> list[Listed]:
    """Copy sound records through `put`, then the manifest.

    Records that vanished meanwhile are left out.

    Raises CorruptRecord, naming the record, and TierUnavailable.
    """
    listed = []
    for item in items:
        buffer = tier.get(item.path)
        if buffer is not None:
            try:
                checked(buffer, item.path)
            except CorruptRecord as error:
                raise CorruptRecord(f"{item.path}: {error}") from error
            put(item.path, buffer)
            listed.append(Listed(item.path, buffer.size, _digest(buffer)))
        advance(item.size)
    manifest = {"format": _FORMAT, "created": time.time(), "records": [vars(entry) for entry in listed]}
    put(MANIFEST, pa.py_buffer(json.dumps(manifest).encode()))
    return listed


@contextmanager
def tar_writer(path: Path) -> Iterator[Callable[[str, pa.Buffer], None]]:
    """A `put` into a tar file, which is renamed into place when the block ends without an error.

    Raises BadArchive if it cannot be written.
    """
    temporary = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        with open(temporary, "xb", opener=private_opener) as file, tarfile.open(fileobj=file, mode="w:") as tar:

            def put(name: str, buffer: pa.Buffer) -> None:
                info = tarfile.TarInfo(name)
                info.size, info.mtime = buffer.size, int(time.time())
                tar.addfile(info, pa.BufferReader(buffer))

            yield put
        os.replace(temporary, path)
    except OSError as error:
        raise BadArchive(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it has told what is wrong
            temporary.unlink(missing_ok=True)


@contextmanager
def tar_reader(path: Path) -> Iterator[Archive]:
    """A tar file as an archive. Raises BadArchive if it is none, or damaged."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield _Tar(tar)
    except (OSError, tarfile.TarError) as error:
        raise BadArchive(f"cannot read {path} as a tar file: {error}") from error


class _Tar:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members = {member.name: member for member in tar}  # a look-up by name would search them all

    def get(self, key: str) -> pa.Buffer | None:
        member = self._members.get(key)
        if member is None:
            return None
        with self._tar.extractfile(member) or io.BytesIO() as handle:
            return pa.py_buffer(handle.read())


def manifest_of(archive: Archive) -> list[Listed]:
    """The records that an archive lists. Raises BadArchive, TierUnavailable."""
    buffer = archive.get(MANIFEST)
    if buffer is None:
        raise BadArchive(f"there is no {MANIFEST}: not an export, or not a finished one")
    try:
        document: dict[str, Any] = json.loads(memoryview(buffer).tobytes())
        if document["format"] != _FORMAT:
            raise BadArchive(f"{MANIFEST} is of format {document['format']!r}; this version reads {_FORMAT}")
        return [Listed(str(r["path"]), int(r["size"]), str(r["blake3"])) for r in document["records"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadArchive(f"{MANIFEST} cannot be read: {error!r}") from error


def take_in(
    tier: Tier,
    archive: Archive,
    listed: Sequence[Listed],
    fingerprint: str | None,
    advance: Advance = lambda size: None,
) -> Imported:
    """Import the listed records that a tier lacks; damaged ones are refused, the others go on.

    What is there already is left as it is, so that an import that was interrupted is simply run again.

    Args:
        fingerprint: digest of the model that records must be of; None takes any. Files' indices are an embedder's, and
            taken as well.

    Raises:
        BadArchive, TierUnavailable.
    """
    added = present = 0
    refused: list[tuple[str, str]] = []
    for entry in listed:
        place = RecordPath.parse(entry.path)
        if place is None or place.quarantined:
            refused.append((entry.path, "not a record's path"))
        elif fingerprint not in (None, place.fingerprint) and not _is_index(archive, place, entry):
            refused.append((entry.path, "of another model"))
        elif tier.contains(entry.path):
            present += 1
        else:
            try:
                _store(tier, archive, entry)
                added += 1
            except CorruptRecord as error:
                refused.append((entry.path, str(error)))
        advance(entry.size)
    return Imported(added, present, tuple(refused))


def _is_index(archive: Archive, place: RecordPath, entry: Listed) -> bool:
    """True for a file's index record (`kvstore.search.record`)."""
    buffer = archive.get(entry.path) if place.kind == "embedding" else None
    try:
        return buffer is not None and is_index(buffer)
    except CorruptRecord:
        return False


def _store(tier: Tier, archive: Archive, entry: Listed) -> None:
    buffer = archive.get(entry.path)
    if buffer is None:
        raise CorruptRecord("listed, but not in the archive")
    if buffer.size != entry.size or _digest(buffer) != entry.blake3:
        raise CorruptRecord("does not match the manifest's checksum")
    for marker in marker_paths(checked(buffer, entry.path)):
        tier.put(marker, [pa.py_buffer(entry.path.encode())])
    tier.put(entry.path, [buffer])


def _digest(buffer: pa.Buffer) -> str:
    return blake3(memoryview(buffer), max_threads=blake3.AUTO).hexdigest()
