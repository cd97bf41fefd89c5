"""One fp32 service for all end-to-end tests, and one multimodal vLLM engine to compare it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client import Reference, Service, running


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    engine = Reference("float32")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def service(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running("float32", tmp_path_factory.mktemp("service")) as started:
        yield started
