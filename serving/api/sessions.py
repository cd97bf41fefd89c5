"""Sessions over HTTP: routes to list, show and delete them, and their metrics.

| route                            | who        | what                                                   |
|----------------------------------|------------|--------------------------------------------------------|
| GET /v1/orbit/sessions           | any key    | the tenant's sessions that running workers have served |
| GET /v1/orbit/sessions/{id}      | any key    | one of the tenant's sessions                           |
| DELETE /v1/orbit/sessions/{id}   | any key    | delete it, with the KV that no fork of it shares       |

Sessions are their tenant's: of another's nothing is told, not even that it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from vllm.exceptions import GracefulHTTPError

from kvstore.errors import StoreError
from prefill_workers.protocol import SessionInfo, SessionStats
from serving.api.errors import NotFound
from serving.api.metrics import in_time
from serving.errors import RoleUnavailable
from serving.frontend.report import SESSION_ID
from serving.frontend.roles import SessionRoles

SessionId = Annotated[str, Path(pattern=SESSION_ID)]


async def counted_sessions(roles: SessionRoles) -> list[Metric]:
    """Metrics of all prefill replicas' sessions; none when they do not answer in time."""
    stats = await in_time(roles.session_stats(), None, "prefill workers")
    return [] if stats is None else list(families(stats))


def families(stats: Mapping[str, SessionStats]) -> Iterator[Metric]:
    """Metrics of all replicas' sessions."""
    count = GaugeMetricFamily("orbitserve_sessions", "Sessions that a worker has served and keeps.", labels=["replica"])
    nbytes = GaugeMetricFamily(
        "orbitserve_session_bytes", "KV of these sessions, in whatever tier of the library.", labels=["replica"]
    )
    for replica, of_replica in stats.items():
        count.add_metric([replica], of_replica.sessions)
        nbytes.add_metric([replica], of_replica.nbytes)
    yield from (count, nbytes)


def sessions_router(roles: SessionRoles) -> APIRouter:
    """The routes of the module's table."""
    router = APIRouter(prefix="/v1/orbit/sessions", tags=["sessions"])

    @router.get("", summary="Sessions of the tenant")
    async def sessions(request: Request) -> dict[str, Any]:
        found = _latest(await _answered(roles.sessions(request.state.tenant)))
        return {"object": "list", "data": [_object(info) for info in found]}

    @router.get("/{session_id}", summary="One session")
    async def session(session_id: SessionId, request: Request) -> dict[str, Any]:
        found = _latest(await _answered(roles.session(request.state.tenant, session_id)))
        if not found:
            raise NotFound(f"no session {session_id!r}")
        return _object(found[0])

    @router.delete("/{session_id}", summary="Delete a session and its KV")
    async def delete(session_id: SessionId, request: Request) -> dict[str, Any]:
        if not await _answered(roles.delete_session(request.state.tenant, session_id)):
            raise NotFound(f"no session {session_id!r}")
        return {"id": session_id, "object": "orbit.session", "deleted": True}

    return router


def _latest(found: Iterable[SessionInfo]) -> list[SessionInfo]:
    """Each session once, as the worker that served it last describes it; the latest used first."""
    by_id: dict[str, SessionInfo] = {}
    for info in sorted(found, key=lambda info: info.used):
        by_id[info.id] = info
    return sorted(by_id.values(), key=lambda info: info.used, reverse=True)


async def _answered(call: Any) -> Any:
    try:
        return await call
    except (RoleUnavailable, StoreError) as error:
        raise GracefulHTTPError(f"sessions cannot be reached: {error}", HTTPStatus.SERVICE_UNAVAILABLE) from error


def _object(info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "orbit.session",
        "created_at": int(info.created),
        "last_used_at": int(info.used),
        "expires_at": int(info.expires),
        "from": info.parent,
        "chunks": info.chunks,
        "segments": info.segments,
        "prompt_tokens": info.tokens,
        "bytes": info.nbytes,
    }
