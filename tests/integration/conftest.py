"""Real engines, one per dtype for the whole session; every test gets a fresh library and loop on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig import Rig, tiny_engine

from prefill_workers.engine import PrefillEngine


@pytest.fixture(scope="session")
def engines() -> Iterator[dict[str, PrefillEngine]]:
    """The bundled model in both precisions."""
    built = {dtype: tiny_engine(dtype) for dtype in ("float32", "bfloat16")}
    yield built
    for engine in built.values():
        engine.shutdown()


@pytest.fixture(scope="session")
def fp32(engines: dict[str, PrefillEngine]) -> PrefillEngine:
    return engines["float32"]


@pytest.fixture(scope="session")
def bf16(engines: dict[str, PrefillEngine]) -> PrefillEngine:
    return engines["bfloat16"]


@pytest.fixture
def make_rig(fp32: PrefillEngine, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Builds workers on the fp32 engine (or the one given); one at a time may have links running."""
    made: list[Rig] = []

    def make(engine: PrefillEngine | None = None, **options) -> Rig:
        made.append(Rig(engine or fp32, tmp_path / f"library-{len(made)}", **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A worker on the fp32 engine whose patches keep full rank."""
    return make_rig()
