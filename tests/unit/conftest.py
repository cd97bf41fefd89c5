"""Libraries for unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvstore_support import FINGERPRINT, MakeLibrary

from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.tiers import Tier


@pytest.fixture
def make_library(tmp_path: Path, request: pytest.FixtureRequest) -> MakeLibrary:
    """Opens a library on `tiers` (default: a disk) and closes it after the test."""

    def open_library(*tiers: Tier, fingerprint: str = FINGERPRINT, **fields: Any) -> Library:
        chosen = LibrarySettings(directory=tmp_path / "library", **fields)
        library = Library(chosen, fingerprint, tiers or None)
        request.addfinalizer(lambda: library.close(5))
        return library

    return open_library
