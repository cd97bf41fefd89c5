"""Sessions over HTTP: what a request may say of one, and what its tenant may see and delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvstore.errors import TierUnavailable
from prefill_workers.protocol import SessionInfo, SessionRef, SessionStats, Survivors
from serving.api.auth import Authenticate
from serving.api.errors import answer_errors
from serving.api.metrics import Metrics, exposition
from serving.api.sessions import counted_sessions, sessions_router
from serving.api_keys import KeyRing
from serving.errors import RoleUnavailable
from serving.frontend.errors import InvalidRequest
from serving.frontend.report import OrbitReport, SessionReport, parse_options
from serving.settings import ApiKey

KEYS = {"one": ApiKey(tenant="one"), "two": ApiKey(tenant="two")}
INFO = SessionInfo("agent", 10.5, 20.5, 3620.5, segments=7, chunks=3, tokens=420, nbytes=1 << 20)


class Roles:
    """Two prefill replicas that both have served tenant one's session, the second last."""

    def __init__(self) -> None:
        self.held = {"one": [INFO, replace(INFO, used=30.0, expires=3630.0, tokens=500), replace(INFO, id="other")]}
        self.failure: Exception | None = None

    async def sessions(self, tenant: str) -> list[SessionInfo]:
        if self.failure:
            raise self.failure
        return self.held.get(tenant, [])

    async def session(self, tenant: str, session: str) -> list[SessionInfo]:
        return [info for info in await self.sessions(tenant) if info.id == session]

    async def delete_session(self, tenant: str, session: str) -> bool:
        found = await self.session(tenant, session)
        self.held[tenant] = [info for info in self.held.get(tenant, []) if info not in found]
        return bool(found)

    async def session_stats(self) -> dict[str, SessionStats]:
        if self.failure:
            raise self.failure
        return {"a": SessionStats(2, 700)}


@pytest.fixture
def roles() -> Roles:
    return Roles()


async def call(roles: Roles, method: str, path: str, key: str = "one") -> httpx.Response:
    app = FastAPI()
    app.include_router(sessions_router(roles))
    answer_errors(app)
    app.add_middleware(Authenticate, KeyRing(KEYS))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, f"/v1/orbit/sessions{path}", headers={"Authorization": f"Bearer {key}"})


async def test_a_tenant_sees_its_sessions_once_as_they_were_served_last(roles: Roles):
    listed = (await call(roles, "GET", "")).json()
    assert [one["id"] for one in listed["data"]] == ["agent", "other"]
    assert (
        (await call(roles, "GET", "/agent")).json()
        == listed["data"][0]
        == {
            "id": "agent",
            "object": "orbit.session",
            "created_at": 10,
            "last_used_at": 30,
            "expires_at": 3630,
            "from": None,
            "chunks": 3,
            "segments": 7,
            "prompt_tokens": 500,
            "bytes": 1 << 20,
        }
    )
    assert (await call(roles, "GET", "", "two")).json()["data"] == []


async def test_a_session_is_deleted_by_its_tenant_alone(roles: Roles):
    foreign = await call(roles, "DELETE", "/agent", "two")
    assert foreign.status_code == 404
    assert "no session 'agent'" in foreign.json()["error"]["message"]
    gone = await call(roles, "DELETE", "/agent")
    assert gone.json() == {"id": "agent", "object": "orbit.session", "deleted": True}
    assert (await call(roles, "GET", "/agent")).status_code == 404
    assert (await call(roles, "GET", "/a*b")).status_code == 400


@pytest.mark.parametrize("failure", [RoleUnavailable("gone"), TierUnavailable("disk: gone")])
async def test_what_cannot_be_reached_is_answered_503(roles: Roles, failure: Exception):
    roles.failure = failure
    assert (await call(roles, "GET", "")).status_code == 503


async def test_metrics_count_sessions_and_segments_by_operating_point(roles: Roles):
    lines = exposition(await counted_sessions(roles)).decode().splitlines()
    assert 'orbitserve_sessions{replica="a"} 2.0' in lines
    assert 'orbitserve_session_bytes{replica="a"} 700.0' in lines
    roles.failure = RoleUnavailable("gone")
    assert await counted_sessions(roles) == []
    metrics = Metrics()
    session = SessionReport(id="s", prefix=1, survived=3, refreshed=1, recalled=0, computed=2, new=4, tokens_reused=90)
    metrics.observe(OrbitReport(mode="auto", session=session))
    lines = exposition(metrics.registry.collect()).decode().splitlines()
    assert 'orbitserve_session_segments_total{operating_point="survived"} 3.0' in lines


def test_a_request_names_its_session():
    options = parse_options(
        {"session": {"id": "agent-7", "from": "agent-6", "clean": True, "survivors": "keep", "cascade_tokens": 512}}
    )
    assert options.session is not None
    assert options.session.ref == SessionRef("agent-7", "agent-6", True, Survivors.KEEP, 512)
    assert parse_options({"session": {"id": "a"}}).session.ref == SessionRef("a")


@pytest.mark.parametrize(
    ("options", "parameter", "message"),
    [
        ({"session": {"id": "a b"}}, "orbit.session.id", "pattern"),
        ({"session": {"id": "x" * 129}}, "orbit.session.id", "pattern"),
        ({"session": {}}, "orbit.session.id", "required"),
        ({"session": {"id": "a", "from": ""}}, "orbit.session.from", "pattern"),
        ({"session": {"id": "a", "clean": True}}, "orbit.session", "say `from`"),
        (
            {"session": {"id": "a", "survivors": "most"}},
            "orbit.session.survivors",
            "'removal' or 'exact'",
        ),
        ({"session": {"id": "a", "cascade_tokens": 0}}, "orbit.session.cascade_tokens", "greater than or equal to 1"),
        ({"session": {"id": "a", "name": 1}}, "orbit.session.name", "not permitted"),
        ({"session": {"id": "a"}, "mode": "mpic-32"}, "orbit.session", "mode auto or exact, not mpic-32"),
        ({"session": {"id": "a"}, "order": "free"}, "orbit.session", "order fixed"),
    ],
)
def test_what_a_session_may_not_be_is_named(options: dict[str, Any], parameter: str, message: str):
    with pytest.raises(InvalidRequest, match=message) as refused:
        parse_options(options)
    assert refused.value.parameter == parameter
