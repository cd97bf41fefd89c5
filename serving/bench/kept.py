"""Finished parts of a long measurement, kept so that an interrupted one resumes."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

Part = TypeVar("Part")


def digest_of(code: Sequence[Path]) -> bytes:
    """Digest of folders and files of code; ask before importing any that may change."""
    known = hashlib.sha256()
    for path in sorted(path for part in code for path in (part.rglob("*.py") if part.is_dir() else [part])):
        known.update(path.read_bytes())
    return known.digest()


class Kept:
    """Parts in a folder, by name and conditions of measurement; None: nothing is kept.

    Args:
        of: what a part depends on besides the code.
        code: `digest_of` the code that measures and is measured. What other code measured is measured again.
    """

    def __init__(self, folder: Path | None, of: object = (), code: bytes = b"") -> None:
        self._folder = folder
        self._known = hashlib.sha256(repr(of).encode() + code).digest()

    def once(self, name: str, measure: Callable[[], Part]) -> Part:
        """Result of `measure` for this part, measured now or before."""
        if self._folder is None:
            return measure()
        path = self._folder / f"{hashlib.sha256(self._known + name.encode()).hexdigest()[:32]}.part"
        if path.exists():
            return cast(Part, pickle.loads(path.read_bytes()))
        part = measure()
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(pickle.dumps(part))
        fresh.rename(path)
        return part
