"""Files that a command writes at its end: whether it can is said before it begins."""

from __future__ import annotations

import os
from pathlib import Path


def unwritable(*files: Path | None) -> str | None:
    """Error of the first file that cannot be written; None if all can. Makes their folders."""
    for file in files:
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            return f"cannot write {file}: {error.filename} is no folder"
        except OSError as error:
            return f"cannot write {file}: {error.strerror}: {error.filename}"
        if file.is_dir():
            return f"cannot write {file}: it is a folder"
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            return f"cannot write {file}: permission denied"
    return None
