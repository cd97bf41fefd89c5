"""What an operator sees when patches go bad: metrics show it, the service falls back to exact, a command ends that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from client import CHECKPOINT, Service, picture, user
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from typer.testing import CliRunner

from infra.checkpoints import checkpoint_path
from kvstore.format import PatchRecord
from kvstore.inventory import contents
from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.tiers import DiskTier
from prefill_workers.fingerprint import fingerprint
from serving.cli import app as cli

pytestmark = pytest.mark.service

PAGE = user("Look at ", picture(301), " and ", picture(302), " and say what follows.")
NO_MEMORY = {"memory_bytes": 0, "object_store_bytes": 0}


@pytest.fixture
def watched(only_service: Callable[..., Service]) -> Service:
    """Two prefill workers that check every request, and read every patch from disk."""
    fidelity = {"share": 1.0, "window": 4, "minimum": 2, "bounds": {"patched": 0.1}}
    return only_service(
        "watched",
        "float32",
        library=NO_MEMORY,
        prefill={"replicas": 2, "fidelity": fidelity},
        patch={"rank": None, "factors": "model"},
    )


def points(service: Service) -> list[str]:
    chunks: list[dict[str, Any]] = service.chat(PAGE, max_tokens=2)["orbit"]["chunks"]
    return [chunk["operating_point"] for chunk in chunks]


def metrics(service: Service) -> dict[str, list[float]]:
    """Fidelity of `patched`: each metric's value on every prefill worker that has one."""
    found: dict[str, list[float]] = defaultdict(list)
    for family in text_string_to_metric_families(httpx.get(service.url + "/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("orbitserve_fidelity_") and sample.labels["operating_point"] == "patched":
                found[sample.name.removeprefix("orbitserve_fidelity_")].append(sample.value)
    return found


def rewrite_patches(service: Service, change: Callable[[PatchRecord], PatchRecord]) -> None:
    """Change every stored patch, with sound checksums."""
    folder = service.root / "library"
    library = Library(LibrarySettings(directory=folder, **NO_MEMORY), fingerprint(checkpoint_path(CHECKPOINT)))
    keys = [item.key for item in contents(DiskTier(folder)).items if item.kind == "patch"]
    for record in [library.get_patch(key, "local") for key in keys]:
        assert record is not None
        library.put_patch(change(record))
    library.close()


def turn_basis(record: PatchRecord) -> PatchRecord:
    return with_right(record, lambda right: -4.0 * right.flip(1))


def turn_back(record: PatchRecord) -> PatchRecord:
    return with_right(record, lambda right: -0.25 * right.flip(1))


def with_right(record: PatchRecord, change: Callable[[Tensor], Tensor]) -> PatchRecord:
    segments = tuple(replace(part, right=change(part.right)) for part in record.patch.segments)
    return replace(record, patch=replace(record.patch, segments=segments))


def test_a_corrupted_patch_basis_is_seen_on_metrics_and_switched_off_everywhere(watched: Service):
    watched.wait_until(lambda: points(watched) == ["patched", "patched"], 60)
    watched.wait_until(lambda: sum(metrics(watched)["checks_total"]) >= 1, 30)
    honest = metrics(watched)
    assert sum(honest["agreements_total"]) == sum(honest["checks_total"])
    assert max(honest["rolling_kl_nats"]) < 1e-6
    assert honest["switched_off"] == [0, 0]
    assert honest["bound_nats"] == [0.1, 0.1]

    rewrite_patches(watched, turn_basis)
    watched.wait_until(lambda: bool(points(watched)) and metrics(watched)["switched_off"] == [1, 1], 60)
    assert max(metrics(watched)["rolling_kl_nats"]) > 0.1
    for _ in range(4):  # whichever worker it comes to
        answer = watched.chat(PAGE, max_tokens=2)
        assert [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]] == ["recomputed", "recomputed"]
        assert "patched is switched off" in answer["orbit"]["chunks"][0]["reason"]
    exact = watched.chat(PAGE, mode="exact")["choices"][0]["message"]["content"]
    assert watched.chat(PAGE)["choices"][0]["message"]["content"] == exact

    rewrite_patches(watched, turn_back)
    told = CliRunner().invoke(cli, ["fidelity", "allow", "patched", "--url", watched.url])
    assert told.exit_code == 0, told.output
    assert "2 prefill workers" in told.output
    assert metrics(watched)["switched_off"] == [0, 0]
    assert [points(watched) for _ in range(4)] == [["patched", "patched"]] * 4
    shown = CliRunner().invoke(cli, ["fidelity", "show", "--url", watched.url])
    assert "switched off" not in shown.output
