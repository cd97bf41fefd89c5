"""Errors of the library, each with a stable `code` and the HTTP status to answer with.

Each carries a stable `code` and the HTTP status that a front end should answer with.

| error | code | status | raised when |
|---|---|---|---|
| StoreError | store_error | 500 | base of all below |
| ShapeMismatch | shape_mismatch | 500 | a tensor does not fit its layout or patch |
| CorruptRecord | corrupt_record | 500 | a stored record fails any check; the library turns it into a miss |
| InvalidKey | invalid_key | 400 | a tier key could leave its tier (`..`, absolute, odd characters) |
| TierUnavailable | tier_unavailable | 503 | a tier could not answer; the library turns it into a miss |
| BlobReplaced | tier_unavailable | 503 | a blob was written anew while it was read; the library reads it again |
| UnknownFile | file_not_found | 404 | no such file *for this tenant* |
| UnknownVectorStore | vector_store_not_found | 404 | no such vector store, or no such file or batch in it |
| FileTooLarge | file_too_large | 413 | one upload exceeds the limit |
| QuotaExceeded | quota_exceeded | 413 | a tenant's files would exceed the tenant's limit |
| InvalidUpload | invalid_upload | 400 | an upload's own fields are unusable (empty, bad expiry, bad name) |
"""

from __future__ import annotations

from typing import ClassVar


class StoreError(Exception):
    """Base of every error that `kvstore` raises on purpose."""

    code: ClassVar[str] = "store_error"
    status: ClassVar[int] = 500


class ShapeMismatch(StoreError, ValueError):
    """A tensor's shape or dtype does not fit the layout or the patch it is used with."""

    code = "shape_mismatch"


class CorruptRecord(StoreError):
    """A record that cannot be trusted: truncated, altered, of another version or key."""

    code = "corrupt_record"


class InvalidKey(StoreError, ValueError):
    """A tier key is not a relative path of plain names."""

    code = "invalid_key"
    status = 400


class TierUnavailable(StoreError):
    """A storage tier failed to answer.

    `found`: of many keys that were looked up, those known to exist.

    `found`: of many keys that were looked up, those that it said it has.
    """

    found: frozenset[str] = frozenset()

    code = "tier_unavailable"
    status = 503


class BlobReplaced(TierUnavailable):
    """A blob was overwritten while it was read: the bytes so far are of no stored blob."""


class UnknownFile(StoreError, KeyError):
    """No such file for this tenant. Another tenant's file raises exactly this."""

    code = "file_not_found"
    status = 404

    def __init__(self, file_id: str) -> None:
        super().__init__(f"No such file: {file_id}")
        self.file_id = file_id

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class UnknownVectorStore(StoreError, KeyError):
    """No such vector store (any more), or nothing of that id in it."""

    code = "vector_store_not_found"
    status = 404

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class FileTooLarge(StoreError):
    """One upload is larger than the configured limit."""

    code = "file_too_large"
    status = 413


class QuotaExceeded(StoreError):
    """The tenant's files together would exceed the tenant's limit."""

    code = "quota_exceeded"
    status = 413


class InvalidUpload(StoreError, ValueError):
    """An upload whose own fields are unusable."""

    code = "invalid_upload"
    status = 400
