"""Journal of files' parts: the content ids that derive from a file's.

    parts/<owner>/<content>/<form>.<count>      noted before anything is derived from a part
    parts/<owner>/<content>/<form>.at-<number>  of one part alone, whose number is a place: a video's clip

The ids follow from the file's content id, the form and the number (`part_id`): none is listed.
"""

from __future__ import annotations

import re
import time

import pyarrow as pa

from kvstore.records.keys import owner_of, part_id
from kvstore.tiers.base import Tier
from kvstore.tiers.paths import tenant_digest

_ROOT = "parts/"
_NOTED = re.compile(r"parts/[0-9a-f]{32}/[a-z0-9-]+/(?P<form>[A-Za-z0-9._-]+)\.(?P<one>at-)?(?P<number>\d+)")
_AGAIN_SECONDS = 20.0  # a key is put again after so long: another process may have settled what this one has noted


class PartsJournal:
    """Journal of files' parts in a tier. Thread-safe; all methods raise TierUnavailable."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._noted: dict[str, float] = {}  # by key: when it was put last

    def note(self, content: str, tenant: str, form: str, count: int) -> list[str]:
        """Note that a file was taken apart; returns its parts' content ids."""
        self._put(f"{folder_of(content, tenant)}{form}.{count}")
        return [part_id(content, form, number) for number in range(count)]

    def note_one(self, content: str, tenant: str, form: str, number: int) -> None:
        """Note one part of a file."""
        self._put(f"{folder_of(content, tenant)}{form}.at-{number}")

    def _put(self, key: str) -> None:
        now = time.monotonic()
        if (before := self._noted.get(key)) is not None and now - before < _AGAIN_SECONDS:
            return
        self._tier.put(key, [pa.py_buffer(b"")])
        if len(self._noted) > 1 << 16:
            self._noted.clear()
        self._noted[key] = now

    def of(self, content: str, tenant: str) -> list[str]:
        """Content ids of all parts of a file."""
        noted = (_NOTED.fullmatch(key) for key in self._tier.keys(folder_of(content, tenant)))
        return [
            part_id(content, match["form"], number)
            for match in noted
            if match
            for number in ([int(match["number"])] if match["one"] else range(int(match["number"])))
        ]

    def settle(self, content: str, tenant: str) -> None:
        """Forget a file's parts: nothing that derives from them is left."""
        keys = list(self._tier.keys(folder_of(content, tenant)))
        for key in keys:
            self._noted.pop(key, None)
        self._tier.delete_all(keys)


def folder_of(content: str, tenant: str) -> str:
    """Prefix of the keys that go when nothing derives from a file any more."""
    return f"{_ROOT}{tenant_digest(owner_of(tenant, content))}/{content}/"
