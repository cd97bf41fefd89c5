"""Renditions: PDFs of office files, kept with the journal of the files' parts.

    parts/<owner>/<content>/rendition.pdf      goes with the parts, once nothing holds the content any more

So a file is converted once, whichever process reads it.
"""

from __future__ import annotations

import pyarrow as pa

from kvstore.tiers.base import Tier
from kvstore.uploads.parts import folder_of
from kvstore.uploads.pending_deletions import PendingDeletions


class Renditions:
    """PDFs by content id and owner. Thread-safe; all methods raise TierUnavailable."""

    def __init__(self, tier: Tier, pending: PendingDeletions) -> None:
        self._tier, self._pending = tier, pending

    def get(self, content: str, tenant: str) -> bytes | None:
        """The PDF of a file, or None."""
        buffer = self._tier.get(_key(content, tenant))
        return None if buffer is None else buffer.to_pybytes()

    def put(self, content: str, tenant: str, pdf: bytes) -> None:
        """Keep the PDF of a file.

        Converting takes seconds, and the file may be deleted, or refused, meanwhile: the note behind it has the next
        sweep look whether the content is held.
        """
        self._tier.put(_key(content, tenant), [pa.py_buffer(pdf)])
        self._pending.note(content, tenant)


def _key(content: str, tenant: str) -> str:
    return f"{folder_of(content, tenant)}rendition.pdf"
