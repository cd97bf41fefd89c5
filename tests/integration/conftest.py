"""Real engines, one per dtype for the whole session; every test gets a fresh library and loop on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig import Rig, tiny_engine

from prefill_workers.engine import PrefillEngine


@pytest.fixture(scope="session")
def fp32() -> Iterator[PrefillEngine]:
    engine = tiny_engine("float32")
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def bf16() -> Iterator[PrefillEngine]:
    engine = tiny_engine("bfloat16")
    yield engine
    engine.shutdown()


@pytest.fixture
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Builds workers on the engine given, by default the fp32 one; one at a time may have links running."""
    made: list[Rig] = []

    def make(engine: PrefillEngine | None = None, **options) -> Rig:
        engine = engine or request.getfixturevalue("fp32")
        made.append(Rig(engine, tmp_path / f"library-{len(made)}", **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A worker on the fp32 engine whose patches keep full rank."""
    return make_rig()
