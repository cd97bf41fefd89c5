"""Files of mode 0600 and folders of mode 0700, whatever the umask leaves.

What they hold is tenants' content. A folder that exists keeps its mode: whoever made it may share it on purpose.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


def make_private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing. Raises OSError."""
    try:
        _make(path)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_private_folder(path.parent)
        _make(path)


def private_opener(path: str, flags: int) -> int:
    """Opener for `open`, which makes files private."""
    return os.open(path, flags, _FILE_MODE)


def _make(path: Path) -> None:
    try:
        path.mkdir(_FOLDER_MODE)
    except OSError:
        with suppress(OSError):
            if path.is_dir():
                return
        raise
