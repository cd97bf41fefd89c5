"""Fidelity over HTTP and on the command line, without an engine behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from infra.ports import free_port
from prefill_workers.fidelity.monitor import Comparison, Fidelity
from prefill_workers.modes import OperatingPoint
from prefill_workers.settings import FidelitySettings
from serving.api import fidelity as api
from serving.api import metrics
from serving.api.auth import Authenticate
from serving.api.errors import answer_errors
from serving.api.metrics import exposition
from serving.api_keys import KeyRing
from serving.cli.main import app as command_line
from serving.errors import RoleUnavailable
from serving.settings import ApiKey

KEYS = {"boss": ApiKey(tenant="ops", admin=True), "one": ApiKey(tenant="one")}
PATCHED = OperatingPoint.PATCHED
POINTS = "/v1/orbit/operating_points"


class Roles:
    """Two prefill replicas, the first of which has switched `patched` off."""

    def __init__(self) -> None:
        settings = FidelitySettings(minimum=2)
        self.replicas = {"a": Fidelity(settings), "b": Fidelity(settings)}
        self.failure: Exception | None = None
        self.seconds = 0.0
        for kl in (0.002, 4.0):
            self.replicas["a"].record([PATCHED], Comparison(kl, kl < 1))
        self.replicas["b"].skip([PATCHED], "embeddings")

    async def fidelity(self) -> Any:
        await asyncio.sleep(self.seconds)
        if self.failure:
            raise self.failure
        return {name: replica.status() for name, replica in self.replicas.items()}

    async def allow(self, point: OperatingPoint) -> int:
        if self.failure:
            raise self.failure
        return sum(replica.allow(point) for replica in self.replicas.values())


@pytest.fixture
def roles() -> Roles:
    return Roles()


def application(roles: Roles) -> FastAPI:
    app = FastAPI()
    app.include_router(api.fidelity_router(roles))
    answer_errors(app)
    app.add_middleware(Authenticate, KeyRing(KEYS))
    return app


async def call(roles: Roles, method: str, path: str, key: str = "boss") -> httpx.Response:
    transport = httpx.ASGITransport(application(roles), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, headers={"Authorization": f"Bearer {key}"})


async def samples(roles: Roles) -> dict[tuple[str, ...], float]:
    """Every sample of a scrape that concerns `patched`: (name, replica, reason or edge) to value."""
    text = exposition(api.families(await api.scraped(roles))).decode()
    return {
        (
            sample.name,
            sample.labels["replica"],
            *(sample.labels[x] for x in ("reason", "le") if x in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("operating_point") == "patched"
    }


async def test_a_scrape_shows_every_replicas_points(roles: Roles):
    found = await samples(roles)
    assert found["orbitserve_fidelity_checks_total", "a"] == 2
    assert found["orbitserve_fidelity_agreements_total", "a"] == 1
    assert found["orbitserve_fidelity_rolling_kl_nats", "a"] == pytest.approx(2.001)
    assert found["orbitserve_fidelity_rolling_agreement", "a"] == 0.5
    assert found["orbitserve_fidelity_bound_nats", "a"] == 0.5
    assert found["orbitserve_fidelity_switched_off", "a"] == 1
    assert found["orbitserve_fidelity_kl_nats_count", "a"] == 2
    assert found["orbitserve_fidelity_kl_nats_sum", "a"] == pytest.approx(4.002)
    assert found["orbitserve_fidelity_kl_nats_bucket", "a", "0.003"] == 1
    assert found["orbitserve_fidelity_kl_nats_bucket", "a", "10.0"] == 2
    assert found["orbitserve_fidelity_checks_total", "b"] == 0
    assert found["orbitserve_fidelity_skipped_total", "b", "embeddings"] == 1
    assert found["orbitserve_fidelity_switched_off", "b"] == 0
    assert ("orbitserve_fidelity_rolling_kl_nats", "b") not in found, "nothing was checked there"


async def test_a_scrape_goes_without_replicas_that_do_not_answer(roles: Roles, monkeypatch: pytest.MonkeyPatch):
    roles.failure = RoleUnavailable("gone")
    assert await samples(roles) == {}
    monkeypatch.setattr(metrics, "SCRAPE_SECONDS", 0.05)
    roles.failure, roles.seconds = None, 5.0
    assert await samples(roles) == {}


async def test_anybody_may_look_and_only_an_administrator_may_allow(roles: Roles):
    listed = (await call(roles, "GET", POINTS, "one")).json()["data"]
    states = {(point["replica"], point["operating_point"]): point["allowed"] for point in listed}
    assert states["a", "patched"] is False
    assert states["b", "patched"] is True
    refused = await call(roles, "POST", f"{POINTS}/patched/allow", "one")
    assert refused.status_code == 403
    assert not roles.replicas["a"].allows(PATCHED)
    allowed = await call(roles, "POST", f"{POINTS}/patched/allow")
    assert (allowed.status_code, allowed.json()["replicas_allowed_again"]) == (200, 1)
    assert roles.replicas["a"].allows(PATCHED)
    assert (await call(roles, "POST", f"{POINTS}/patched/allow")).json()["replicas_allowed_again"] == 0


@pytest.mark.parametrize("point", ["recomputed", "nonsense"])
async def test_a_point_that_is_never_switched_off_is_a_404(roles: Roles, point: str):
    answer = await call(roles, "POST", f"{POINTS}/{point}/allow")
    assert answer.status_code == 404
    assert "patched" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", POINTS), ("POST", f"{POINTS}/patched/allow")])
async def test_a_lost_worker_is_a_503(roles: Roles, method: str, path: str):
    roles.failure = RoleUnavailable("gone")
    answer = await call(roles, method, path)
    assert answer.status_code == 503
    assert "gone" in answer.json()["error"]["message"]


@pytest.fixture
def url(roles: Roles) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(application(roles), port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_an_operator_looks_and_allows_from_the_command_line(roles: Roles, url: str):
    def run(*arguments: str, key: str = "boss") -> Any:
        return CliRunner().invoke(command_line, ["fidelity", *arguments, "--url", url, "--api-key", key])

    shown = run("show")
    assert shown.exit_code == 0
    assert "switched off" in shown.output
    refused = run("allow", "patched", key="one")
    assert (refused.exit_code, "403" in refused.output) == (1, True)
    assert "1 prefill workers" in run("allow", "patched").output
    assert roles.replicas["a"].allows(PATCHED)
    assert "was allowed" in run("allow", "patched").output
    roles.replicas["b"].disable(OperatingPoint.COMPOSED, "a test")
    assert "composed is allowed again on 1 prefill workers" in run("allow", "composed").output
    assert run("allow", "nonsense").exit_code == 1


def test_the_command_line_says_that_no_service_answers():
    result = CliRunner().invoke(command_line, ["fidelity", "show", "--url", f"http://127.0.0.1:{free_port()}"])
    assert result.exit_code == 1
    assert "no service answers" in result.output
