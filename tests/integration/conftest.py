"""Real engines; every test gets a fresh library and loop on one of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import QWEN2_5_VL, Rig, tiny_engine

from infra.families import Family
from prefill_workers.engine.engine import PrefillEngine


class OnlyEngines:
    """The engines of one model at a time: shutting an engine down takes away what others in the process stand on."""

    def __init__(self) -> None:
        self._model: object = None
        self._built: dict[str, PrefillEngine] = {}

    def get(self, dtype: str, family: Family = QWEN2_5_VL, **options: Any) -> PrefillEngine:
        """A running engine, built unless it is there; engines of other models end first."""
        model = (family, tuple(sorted(options.items())))
        if model != self._model:
            self.close()
            self._model = model
        if dtype not in self._built:
            gc.freeze()  # vLLM collects garbage five times on the way: not among all of torch, 1.6 s of CPU, every time
            self._built[dtype] = tiny_engine(dtype, family, **options)
        return self._built[dtype]

    def close(self) -> None:
        for engine in self._built.values():
            engine.shutdown()
        self._built.clear()
        self._model = None


@pytest.fixture(scope="session")
def only_engines() -> Iterator[OnlyEngines]:
    engines = OnlyEngines()
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def fp32(only_engines: OnlyEngines) -> PrefillEngine:
    return only_engines.get("float32")


@pytest.fixture(scope="module")
def bf16(only_engines: OnlyEngines) -> PrefillEngine:
    return only_engines.get("bfloat16")


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
