"""Load-bearing chunks over HTTP: `GET /v1/orbit/load_bearing/{id}`, by the id of an answer.

What an answer asked for by `orbit.load_bearing` is measured in its worker's idle time (see
`prefill_workers.background.load_bearing`). Of another tenant's answer nothing is told, not even that there is one.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from vllm.exceptions import GracefulHTTPError

from prefill_workers.protocol import ChunkLoss, LoadBearing, LoadBearingState, Loss
from serving.api.errors import NotFound
from serving.errors import RoleUnavailable
from serving.frontend.report import LOAD_BEARING
from serving.frontend.roles import LoadBearingRoles

AnswerId = Annotated[str, Path(max_length=256)]


def load_bearing_router(roles: LoadBearingRoles) -> APIRouter:
    """The module's route."""
    router = APIRouter(prefix=LOAD_BEARING, tags=["sessions"])

    @router.get("/{answer_id:path}", summary="Which chunks of an answer's prompt it needed")
    async def load_bearing(answer_id: AnswerId, request: Request) -> dict[str, Any]:
        try:
            found = await roles.load_bearing(request.state.tenant, answer_id)
        except RoleUnavailable as error:
            message = f"what was measured cannot be reached: {error}"
            raise GracefulHTTPError(message, HTTPStatus.SERVICE_UNAVAILABLE) from error
        if not found:
            raise NotFound(f"nothing is known of answer {answer_id!r}: it did not ask for load_bearing, or long ago")
        return _object(max(found, key=lambda one: one.state is LoadBearingState.MEASURED))

    return router


def _object(found: LoadBearing) -> dict[str, Any]:
    return {
        "id": found.request_id,
        "object": "orbit.load_bearing",
        "state": found.state,
        "reason": found.reason or None,
        "chunks": [_chunk(i, chunk) for i, chunk in enumerate(found.chunks)],
    }


def _chunk(index: int, chunk: ChunkLoss) -> dict[str, Any]:
    return {
        "index": index,
        "tokens": chunk.tokens,
        "operating_point": chunk.operating_point,
        "left_out": _loss(chunk.left_out),
        "patch_off": None if chunk.patch_off is None else _loss(chunk.patch_off),
    }


def _loss(loss: Loss) -> dict[str, Any]:
    return {"kl_nats": loss.kl, "first_token_changes": loss.changes_token}
