"""The static library: tenants' uploaded files, with expiry (OpenAI's Files API).

    files/<tenant>/<id>.json      the FileObject; a file exists from the moment this is written
    files/<tenant>/<id>.blob      its bytes, written before and deleted after

Another tenant's file, an expired one and one that never was raise the same UnknownFile: a tenant learns nothing about
others. Ids are a time stamp and random bits (see `ids`), so they say nothing about content either.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvstore.errors import FileTooLarge, InvalidUpload, QuotaExceeded, UnknownFile
from kvstore.records.keys import owned_content_id
from kvstore.settings import FileSettings
from kvstore.tiers.base import Tier
from kvstore.tiers.paths import ORPHAN_SECONDS, tenant_digest
from kvstore.tiers.stack import tier_for_url
from kvstore.uploads.ids import DIGITS, Place, new_id, place_of, stamp_of
from kvstore.uploads.json_objects import JsonObjects
from kvstore.uploads.parts import PartsJournal
from kvstore.uploads.pending_deletions import PendingDeletions
from kvstore.uploads.renditions import Renditions

_ID = re.compile(rf"file-{DIGITS}")
_PREFIX = "file-"
_ROOT = "files/"


@dataclass(frozen=True)
class FileObject:
    """An uploaded file.

    Times are Unix seconds; `content` is the content id that chunks of this file carry.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None
    content: str

    @property
    def place(self) -> Place:
        """Place among the tenant's files, by the order of upload."""
        return place_of(self.id, self.created_at)

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def to_openai(self) -> dict[str, Any]:
        """The object as OpenAI's API shows it; `content` and `tenant` stay inside."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Uploaded files of all tenants. Thread-safe; processes may share one location.

    Limits hold per process as of the last listing.
    """

    def __init__(self, location: Tier | Path | str, settings: FileSettings | None = None) -> None:
        """`location`: a directory, an fsspec URL, or a tier."""
        self.settings = settings or FileSettings()
        if isinstance(location, Tier):
            self.tier = location
        else:
            self.tier = tier_for_url(str(location), self.settings.storage_options)
        self.pending_deletions = PendingDeletions(self.tier)
        self.parts = PartsJournal(self.tier)
        self.renditions = Renditions(self.tier, self.pending_deletions)
        self._objects = JsonObjects(self.tier, FileObject, immutable=True)
        self._creating: dict[str, threading.Lock] = {}  # by tenant: a quota is checked and used up in one step

    def create(
        self, tenant: str, filename: str, purpose: str, data: bytes, expires_after: int | None = None
    ) -> FileObject:
        """Store an upload; `expires_after` in seconds from now.

        Raises InvalidUpload (empty, bad name or expiry), FileTooLarge, QuotaExceeded, TierUnavailable.
        """
        limits = self.settings
        if not data:
            raise InvalidUpload("the file is empty")
        if len(data) > limits.max_file_bytes:
            raise FileTooLarge(f"the file has {len(data)} bytes, the limit is {limits.max_file_bytes}")
        if not filename or len(filename) > 255 or "\x00" in filename:
            raise InvalidUpload("a file name has 1 to 255 characters")
        if expires_after is not None and not 1 <= expires_after <= limits.max_expiry_s:
            raise InvalidUpload(f"expires_after must lie between 1 and {limits.max_expiry_s} seconds")
        lifetime = limits.default_expiry_s if expires_after is None else expires_after
        present = self._check_quota(tenant, len(data))
        now = int(time.time())
        file = FileObject(
            id=new_id(_PREFIX, present),
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            bytes=len(data),
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            content=owned_content_id(data, tenant, limits.salt_secret.get_secret_value().encode()),
        )
        self.tier.put(_blob_key(file), [pa.py_buffer(data)])  # others need not wait for so many bytes
        with self._creating.setdefault(tenant, threading.Lock()):
            try:
                self._check_quota(tenant)
            except QuotaExceeded:
                self.tier.delete(_blob_key(file))
                raise
            self._objects.write(_object_key(file), file)
        return file

    def get(self, tenant: str, file_id: str) -> FileObject:
        """The tenant's file. Raises UnknownFile if there is none (any more)."""
        if not _ID.fullmatch(file_id):
            raise UnknownFile(file_id)
        file = self._objects.read(_folder(tenant) + file_id + ".json")
        if file is None or file.tenant != tenant or file.expired(time.time()):
            raise UnknownFile(file_id)
        return file

    def content(self, tenant: str, file_id: str) -> bytes:
        """The uploaded bytes. Raises UnknownFile."""
        blob = self.tier.get(_blob_key(self.get(tenant, file_id)))
        if blob is None:
            raise UnknownFile(file_id)
        return bytes(memoryview(blob))

    def list(
        self,
        tenant: str,
        purpose: str | None = None,
        limit: int = 10_000,
        after: str | None = None,
        order: str = "desc",
    ) -> tuple[list[FileObject], bool]:
        """The tenant's files by the order of upload, and whether more follow.

        `after`: the id that ended the last page; of a file that is gone, what stood behind it follows.

        Raises UnknownFile if `after` is of a file that is gone and its id tells no place (see `ids`), or is no id;
        InvalidUpload for an unknown order.
        """
        if order not in ("asc", "desc"):
            raise InvalidUpload("order must be asc or desc")
        stored, now = self._objects.find(_folder(tenant)), time.time()
        files = [f for f in stored if not f.expired(now) and (purpose is None or f.purpose == purpose)]
        files.sort(key=lambda file: file.place, reverse=order == "desc")
        if after is not None:
            start = next((file.place for file in stored if file.id == after), None)
            if start is None and _ID.fullmatch(after) and (stamp := stamp_of(after)) is not None:
                start = stamp, after
            if start is None:
                raise UnknownFile(after)
            files = [file for file in files if (file.place > start if order == "asc" else file.place < start)]
        return files[:limit], len(files) > limit

    def delete(self, tenant: str, file_id: str) -> FileObject:
        """Remove a file and return it; its content is noted in `pending_deletions` first."""
        file = self.get(tenant, file_id)
        self._remove(file)
        return file

    def has_content(self, tenant: str, content: str) -> bool:
        """True if some file of the tenant still holds this content."""
        return content in self.contents(tenant)

    def contents(self, tenant: str) -> set[str]:
        """Content ids of a tenant's files."""
        now = time.time()
        return {file.content for file in self._objects.find(_folder(tenant)) if not file.expired(now)}

    def ids(self) -> set[str]:
        """Ids of the files of all tenants that have not expired."""
        now = time.time()
        return {file.id for file in self._objects.find(_ROOT) if not file.expired(now)}

    def expired(self, now: float | None = None) -> tuple[FileObject, ...]:
        """The files of all tenants that have expired and are still to be swept."""
        now = time.time() if now is None else now
        return tuple(file for file in self._objects.find(_ROOT) if file.expired(now))

    def sweep(self, now: float | None = None) -> tuple[FileObject, ...]:
        """Remove and return expired files of all tenants; remove leftovers of unfinished uploads."""
        now = time.time() if now is None else now
        entries = list(self.tier.entries(_ROOT))
        kept = {entry.key.removesuffix(".json") for entry in entries if entry.key.endswith(".json")}
        for entry in entries:
            orphan = entry.key.endswith(".blob") and entry.key.removesuffix(".blob") not in kept
            if orphan and entry.used < now - ORPHAN_SECONDS:
                self.tier.delete(entry.key)
        expired = self.expired(now)
        for file in expired:
            self._remove(file)
        return expired

    def _check_quota(self, tenant: str, *more: int) -> tuple[str, ...]:
        """Ids of the tenant's files. Raises QuotaExceeded if their blobs and `more` such sizes pass the limit."""
        folder = _folder(tenant)
        blobs = [entry for entry in self.tier.entries(folder) if entry.key.endswith(".blob")]
        sizes = [*(entry.size for entry in blobs), *more]
        if len(sizes) > self.settings.max_tenant_files:
            raise QuotaExceeded(f"the limit is {self.settings.max_tenant_files} files")
        most = self.settings.named_tenant_bytes.get(tenant, self.settings.max_tenant_bytes)
        if sum(sizes) > most:
            raise QuotaExceeded(f"the files would exceed {most} bytes in all")
        return tuple(entry.key.removeprefix(folder).removesuffix(".blob") for entry in blobs)

    def _remove(self, file: FileObject) -> None:
        self.pending_deletions.note(file.content, file.tenant)
        self.tier.delete(_object_key(file))
        self.tier.delete(_blob_key(file))


def _folder(tenant: str) -> str:
    return f"{_ROOT}{tenant_digest(tenant)}/"


def _object_key(file: FileObject) -> str:
    return f"{_folder(file.tenant)}{file.id}.json"


def _blob_key(file: FileObject) -> str:
    return f"{_folder(file.tenant)}{file.id}.blob"
