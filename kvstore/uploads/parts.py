"""Journal of files' parts: the content ids that derive from a file's.

    parts/<owner>/<content>/<form>.<count>      noted before anything is derived from a part

The ids follow from the file's content id, the form and the number (`part_id`): none is listed.
"""

from __future__ import annotations

import re

import pyarrow as pa

from kvstore.records.keys import owner_of, part_id
from kvstore.tiers.base import Tier
from kvstore.tiers.paths import tenant_digest

_ROOT = "parts/"
_NOTED = re.compile(r"parts/[0-9a-f]{32}/[a-z0-9-]+/(?P<form>[a-z0-9-]+)\.(?P<count>\d+)")


class PartsJournal:
    """Journal of files' parts in a tier. Thread-safe; all methods raise TierUnavailable."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._noted: set[str] = set()

    def note(self, content: str, tenant: str, form: str, count: int) -> list[str]:
        """Note that a file was taken apart; returns its parts' content ids."""
        key = f"{folder_of(content, tenant)}{form}.{count}"
        if key not in self._noted:
            self._tier.put(key, [pa.py_buffer(b"")])
            if len(self._noted) > 1 << 16:
                self._noted.clear()
            self._noted.add(key)
        return [part_id(content, form, number) for number in range(count)]

    def of(self, content: str, tenant: str) -> list[str]:
        """Content ids of all parts of a file."""
        noted = (_NOTED.fullmatch(key) for key in self._tier.keys(folder_of(content, tenant)))
        return [
            part_id(content, match["form"], number) for match in noted if match for number in range(int(match["count"]))
        ]

    def settle(self, content: str, tenant: str) -> None:
        """Forget a file's parts: nothing that derives from them is left."""
        keys = list(self._tier.keys(folder_of(content, tenant)))
        self._noted.difference_update(keys)
        self._tier.delete_all(keys)


def folder_of(content: str, tenant: str) -> str:
    """Prefix of the keys that go when nothing derives from a file any more."""
    return f"{_ROOT}{tenant_digest(owner_of(tenant, content))}/{content}/"
