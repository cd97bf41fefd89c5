"""Discovery of patches in a directory: those of earlier runs and of other processes.

A look reads the headers of files that came since the one before, never their factors. Folders whose modification time
has not changed are not listed again.

A look reads the headers of files that came since the one before, never their factors: a folder in which no name came or
went since then, by its time of change, is not even listed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from kvstore.catalog.index import Entry, Scope
from kvstore.errors import StoreError
from kvstore.operator.patch import PatchKind
from kvstore.records.format import read_metadata
from kvstore.records.patch_form import PatchForm
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.paths import patches_prefix

logger = logging.getLogger(__name__)

_SETTLED_NS = 2_000_000_000  # a folder that changed later may change again within the clock tick that it was read in
_SERVING = (PatchKind.own, PatchKind.orbit, PatchKind.pair)


class _Folder(NamedTuple):
    changed: int  # ns; 0: not settled yet
    folders: tuple[str, ...]
    files: frozenset[str]


class PatchCatalogue:
    """Finds new patches of one model and form in one directory.

    Not thread-safe; reads files, so keep it off event loops.

    Args:
        form: others are not found by linkers.
        limit: headers read in one look.
    """

    def __init__(self, tier: DiskTier, fingerprint: str, form: PatchForm, limit: int = 1024) -> None:
        self._tier, self._form, self._limit = tier, form, limit
        self._top = patches_prefix(fingerprint).rstrip("/")
        self._folders: dict[str, _Folder] = {}
        self._unread: deque[str] = deque()

    @property
    def is_behind(self) -> bool:
        """True if the last look left headers for the next one."""
        return bool(self._unread)

    def look(self) -> list[Entry]:
        """The patches that came since the last look, or some of them (see `is_behind`)."""
        if not self._unread:
            self._unread.extend(self._news())
        paths = [self._unread.popleft() for _ in range(min(self._limit, len(self._unread)))]
        found = (self._entry(path) for path in paths)
        return [entry for entry in found if entry is not None]

    def _news(self) -> list[str]:
        """Keys of files that were not there at the last look."""
        waiting, found, news = [self._top], dict[str, _Folder](), list[str]()
        while waiting:
            name = waiting.pop()
            before = self._folders.get(name)
            now = self._listed(name, before)
            if now is None:
                continue
            found[name] = now
            waiting += now.folders
            if before is not now:
                news += [f"{name}/{file}" for file in now.files - (before.files if before else frozenset())]
        self._folders = found
        return news

    def _listed(self, name: str, before: _Folder | None) -> _Folder | None:
        """A folder's content: `before` if it has not changed; None if it is gone."""
        path = self._tier.root / name
        try:
            changed = path.stat().st_mtime_ns
            if before is not None and before.changed == changed:
                return before
            settled = time.time_ns() - changed > _SETTLED_NS
            with os.scandir(path) as found:
                items = list(found)
        except OSError:
            return None
        folders = tuple(f"{name}/{item.name}" for item in items if item.is_dir(follow_symlinks=False))
        files = frozenset(item.name for item in items if item.is_file(follow_symlinks=False))
        return _Folder(changed if settled else 0, folders, files)

    def _entry(self, path: str) -> Entry | None:
        """Index entry of the patch in a file; None if it is gone, damaged or of no use to linkers."""
        with suppress(StoreError, KeyError, TypeError, ValueError):
            buffer = self._tier.get(path)
            return None if buffer is None else entry_of(read_metadata(buffer), self._form)
        logger.debug("%s: no patch to be read", path)
        return None


def entry_of(document: Mapping[str, Any], form: PatchForm) -> Entry | None:
    """Index entry of a patch, from its record's metadata (see `kvstore.records.format`).

    None for a patch of another form, or of a kind that linkers do not look for. Raises KeyError or ValueError where the
    document is not a patch's.
    """
    kind = PatchKind(document["patch"]["kind"])
    if kind not in _SERVING:
        return None
    if form.key(document["canonical"], document["antecedent"], kind) != document["key"]:
        return None
    scope = Scope(document["tenant"], document["prefix"])
    return Entry(scope, document["content"], tuple(document["antecedents"]), ordered=kind is PatchKind.own)
