"""Load-bearing chunks over HTTP: what a request may ask, and what its tenant is told of an answer."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import ChunkLoss, LoadBearing, LoadBearingState, Loss
from serving.api.auth import Authenticate
from serving.api.errors import answer_errors
from serving.api.load_bearing import load_bearing_router
from serving.api_keys import KeyRing
from serving.errors import RoleUnavailable
from serving.frontend.report import parse_options
from serving.settings import ApiKey

KEYS = {"one": ApiKey(tenant="one"), "two": ApiKey(tenant="two")}
MEASURED = LoadBearing(
    "chatcmpl-1",
    LoadBearingState.MEASURED,
    chunks=(
        ChunkLoss(84, OperatingPoint.PATCHED, Loss(0.25, False), Loss(1.5, True)),
        ChunkLoss(60, OperatingPoint.SURVIVED, None, Loss(0.001, False)),
    ),
)


class Roles:
    """Two prefill replicas; the first lost the request to the second, which has measured it."""

    def __init__(self) -> None:
        self.known = {("one", "chatcmpl-1"): [MEASURED, LoadBearing("chatcmpl-1")]}
        self.failure: Exception | None = None

    async def load_bearing(self, tenant: str, request_id: str) -> list[LoadBearing]:
        if self.failure:
            raise self.failure
        return self.known.get((tenant, request_id), [])


async def get(roles: Roles, id: str, key: str = "one") -> httpx.Response:
    app = FastAPI()
    app.include_router(load_bearing_router(roles))
    answer_errors(app)
    app.add_middleware(Authenticate, KeyRing(KEYS))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(f"/v1/orbit/load_bearing/{id}", headers={"Authorization": f"Bearer {key}"})


async def test_what_was_measured_is_told_chunk_by_chunk():
    assert (await get(Roles(), "chatcmpl-1")).json() == {
        "id": "chatcmpl-1",
        "object": "orbit.load_bearing",
        "state": "measured",
        "reason": None,
        "chunks": [
            {
                "index": 0,
                "tokens": 84,
                "operating_point": "patched",
                "left_out": {"kl_nats": 1.5, "first_token_changes": True},
                "patch_off": {"kl_nats": 0.25, "first_token_changes": False},
            },
            {
                "index": 1,
                "tokens": 60,
                "operating_point": "survived",
                "left_out": {"kl_nats": 0.001, "first_token_changes": False},
                "patch_off": None,
            },
        ],
    }


async def test_what_waits_or_was_skipped_says_so():
    roles = Roles()
    roles.known["one", "a/b"] = [LoadBearing("a/b", LoadBearingState.SKIPPED, "a request needed its KV blocks")]
    skipped = (await get(roles, "a%2Fb")).json()
    assert (skipped["state"], skipped["reason"], skipped["chunks"]) == ("skipped", "a request needed its KV blocks", [])
    roles.known["one", "c"] = [LoadBearing("c")]
    assert (await get(roles, "c")).json()["state"] == "queued"


async def test_others_are_not_told_that_there_is_an_answer():
    foreign, unknown = await get(Roles(), "chatcmpl-1", "two"), await get(Roles(), "chatcmpl-2")
    assert foreign.status_code == unknown.status_code == 404
    messages = [one.json()["error"]["message"] for one in (foreign, unknown)]
    assert messages[0] == messages[1].replace("chatcmpl-2", "chatcmpl-1")
    assert "did not ask for load_bearing" in messages[0]


async def test_workers_that_do_not_answer_are_a_503():
    roles = Roles()
    roles.failure = RoleUnavailable("gone")
    assert (await get(roles, "chatcmpl-1")).status_code == 503


@pytest.mark.parametrize("asked", [True, False])
def test_a_request_asks_for_it(asked: bool):
    assert parse_options({"load_bearing": asked}).load_bearing is asked
