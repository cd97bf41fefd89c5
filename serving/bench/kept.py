"""Finished parts of a measurement that takes hours, kept so that one that was cut off goes on from them."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

Part = TypeVar("Part")


def digest_of(code: Sequence[Path]) -> bytes:
    """What these folders and files of code hold now: to be asked before any of it is imported that may change."""
    known = hashlib.sha256()
    for path in sorted(path for part in code for path in (part.rglob("*.py") if part.is_dir() else [part])):
        known.update(path.read_bytes())
    return known.digest()


class Kept:
    """Parts in a folder, each under its name and what it was measured with; None: nothing is kept.

    Args:
        of: what a part depends on besides the code.
        code: `digest_of` the code that measures and is measured. What other code measured is measured again.
    """

    def __init__(self, folder: Path | None, of: object = (), code: bytes = b"") -> None:
        self._folder = folder
        self._known = hashlib.sha256(repr(of).encode() + code).digest()

    def once(self, name: str, measure: Callable[[], Part]) -> Part:
        """What `measure` returned when this part was measured, be it now."""
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
