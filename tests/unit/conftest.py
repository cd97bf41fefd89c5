"""Libraries for unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvstore_support import FINGERPRINT, MakeLibrary

from kvstore.library import Library
from kvstore.operator import host_kernel
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Tier


@pytest.fixture
def make_library(tmp_path: Path, request: pytest.FixtureRequest) -> MakeLibrary:
    """Opens a library on `tiers` (default: a disk), their only writer by default, and closes it after the test."""

    def open_library(*tiers: Tier, fingerprint: str = FINGERPRINT, **fields: Any) -> Library:
        chosen = LibrarySettings(**{"directory": tmp_path / "library", "writers": 1, **fields})
        library = Library(chosen, fingerprint, tiers or None)
        request.addfinalizer(lambda: library.close(5))
        return library

    return open_library


@pytest.fixture(params=["fused", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The operator as the fused host kernel, and in plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(host_kernel, "_loops", lambda: None)
    elif host_kernel._loops() is None:
        pytest.skip("numba is not installed")
    return request.param
