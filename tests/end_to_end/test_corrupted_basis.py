"""What an operator sees when patches go bad: metrics show it, the service falls back to exact, a command ends that."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from client import CHECKPOINT, Service, picture, user
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from typer.testing import CliRunner

from infra.checkpoints import checkpoint_path
from kvstore.catalog.inventory import contents
from kvstore.library import Library
from kvstore.records.record import PatchRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.disk import DiskTier
from prefill_workers.engine.fingerprint import fingerprint
from serving.cli.main import app as cli

pytestmark = pytest.mark.service

PAGE = user("Look at ", picture(301), " and ", picture(302), " and say what follows.")
NO_MEMORY = {"memory_bytes": 0, "object_store_bytes": 0}


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


def logged(role: str, words: str) -> list[str]:
    """Lines in the logs of a role's replicas that hold these words."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    lines = (line for log in logs.glob(f"replica_*_{role}_*.log") for line in log.read_text().splitlines())
    return [line for line in lines if words in line]


def rewrite_patches(service: Service, change: Callable[[PatchRecord], PatchRecord]) -> None:
    """Change every stored patch, with sound checksums."""
    folder = service.root / "library"
    library = Library(LibrarySettings(directory=folder, **NO_MEMORY), fingerprint(checkpoint_path(CHECKPOINT)))
    keys = [item.key for item in contents(DiskTier(folder)).items if item.kind == "patch"]
    for record in [library.get_patch(key, "local") for key in keys]:
        assert record is not None
        library.put(change(record))
    library.close()


def turn_basis(record: PatchRecord) -> PatchRecord:
    return with_right(record, lambda right: -4.0 * right.flip(1))


def turn_back(record: PatchRecord) -> PatchRecord:
    return with_right(record, lambda right: -0.25 * right.flip(1))


def with_right(record: PatchRecord, change: Callable[[Tensor], Tensor]) -> PatchRecord:
    segments = tuple(replace(part, right=change(part.right)) for part in record.patch.segments)
    return replace(record, patch=replace(record.patch, segments=segments))


def test_a_corrupted_patch_basis_is_seen_on_metrics_and_switched_off_everywhere(couples: Service):
    couples.wait_until(lambda: points(couples) == ["patched", "patched"], 60)
    couples.wait_until(lambda: sum(metrics(couples)["checks_total"]) >= 1, 30)
    honest = metrics(couples)
    assert sum(honest["agreements_total"]) == sum(honest["checks_total"])
    assert max(honest["rolling_kl_nats"]) < 1e-6
    assert honest["switched_off"] == [0, 0]
    assert honest["bound_nats"] == [0.1, 0.1]

    couples.settle()  # what is served need not be on disk yet
    rewrite_patches(couples, turn_basis)
    couples.wait_until(lambda: bool(points(couples)) and metrics(couples)["switched_off"] == [1, 1], 60)
    assert max(metrics(couples)["rolling_kl_nats"]) > 0.1
    assert len(logged("PrefillWorker", "operating point patched is switched off")) == 2
    kept_in = couples.root / "library" / ".operating-points"
    couples.wait_until(lambda: bool(list(kept_in.glob("*.json"))), 10)
    (kept,) = kept_in.glob("*.json")
    assert "rolling KL is" in json.loads(kept.read_text())["patched"]["reason"], "for a worker that starts"
    for _ in range(4):  # whichever worker it comes to
        answer = couples.chat(PAGE, max_tokens=2)
        assert [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]] == ["recomputed", "recomputed"]
        assert "patched is switched off" in answer["orbit"]["chunks"][0]["reason"]
    exact = couples.chat(PAGE, mode="exact")["choices"][0]["message"]["content"]
    assert couples.chat(PAGE)["choices"][0]["message"]["content"] == exact

    rewrite_patches(couples, turn_back)
    told = CliRunner().invoke(cli, ["fidelity", "allow", "patched", "--url", couples.url])
    assert told.exit_code == 0, told.output
    assert "2 prefill workers" in told.output
    assert metrics(couples)["switched_off"] == [0, 0]
    couples.wait_until(lambda: json.loads(kept.read_text()) == {}, 10)
    assert len(logged("PrefillWorker", "patched is allowed again by an operator")) == 2
    for _ in range(4):
        chunks = couples.chat(PAGE, max_tokens=2)["orbit"]["chunks"]
        assert [chunk["operating_point"] for chunk in chunks] == ["patched", "patched"], chunks
    shown = CliRunner().invoke(cli, ["fidelity", "show", "--url", couples.url])
    assert "switched off" not in shown.output
