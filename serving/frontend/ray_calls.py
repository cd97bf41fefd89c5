"""Calls over Ray Serve handles, with Ray's errors as RoleUnavailable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from prefill_workers.protocol import Refusal
from serving.errors import RoleUnavailable

logger = logging.getLogger(__name__)

_PING_SECONDS = 3.0  # for a replica to say that it is there


async def answered(response: Any) -> Any:
    """Result of a call to a role.

    Raises the role's error or refusal, or RoleUnavailable if it was lost.
    """
    try:
        return accepted(await response)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except (RayActorError, DeploymentUnavailableError) as error:
        raise lost(error) from error
    except asyncio.CancelledError:
        response.cancel()
        raise


async def answered_in_time(role: str, response: Any, seconds: float) -> None:
    """Wait for a call's answer.

    Raises RoleUnavailable, naming the role, for any error and if there is none in time.
    """
    try:
        async with asyncio.timeout(seconds):
            await answered(response)
    except Exception as error:
        reason = str(error) or f"no answer within {seconds:g} s"  # a time-out says nothing
        raise RoleUnavailable(f"{role}: {reason}") from error


async def streamed(responses: Any) -> AsyncGenerator[Any, None]:
    """Items of a stream. Raises what `answered` does."""
    try:
        async for item in responses:
            yield accepted(item)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except (RayActorError, DeploymentUnavailableError) as error:
        raise lost(error) from error


def accepted(answer: Any) -> Any:
    """An answer that is no refusal. Raises the error of one that is."""
    if isinstance(answer, Refusal):
        raise answer.error
    return answer


async def answered_by_all(role: DeploymentHandle, method: str, *arguments: Any) -> list[Any]:
    """Results of a call to every replica of a role.

    Raises RoleUnavailable if the role has none, or any was lost; the others were called.
    """
    try:
        answers = await role.broadcast(method, *arguments).results_async(return_exceptions=True)
    except (RayActorError, DeploymentUnavailableError) as error:
        raise lost(error) from error
    for answer in answers:
        if isinstance(answer, RayActorError | DeploymentUnavailableError):
            raise lost(answer) from answer
        if isinstance(answer, BaseException):
            raise answer
    return list(answers)


async def answers_of_all(
    role: DeploymentHandle, method: str, *arguments: Any, timeout_s: float | None = None
) -> list[Any]:
    """Answer or exception of every replica of a role; [] where none serves.

    Raises TimeoutError if one of them takes longer: the answers of the others are lost (see `answers_in_time`).
    """
    limit: dict[str, float] = {} if timeout_s is None else {"timeout_s": timeout_s}
    try:
        return list(await role.broadcast(method, *arguments).results_async(return_exceptions=True, **limit))
    except DeploymentUnavailableError:
        return []


async def answers_in_time(role: DeploymentHandle, seconds: float, method: str, *arguments: Any) -> list[Any]:
    """Answers or exceptions of a role's replicas to a call; TimeoutError for one that is late.

    A broadcast of Serve's, given a time, loses all answers with the one that does not come.

    Raises DeploymentUnavailableError if the role has no replica.
    """
    async with asyncio.timeout(seconds):
        calls = await role.broadcast(method, *arguments)._fetch_replica_results_async()
    answers = (asyncio.wait_for(call.get_async(), seconds) for call in calls)
    return list(await asyncio.gather(*answers, return_exceptions=True))


async def alive(role: DeploymentHandle) -> list[str]:
    """Names of a role's replicas that answer."""
    return [answer for answer in await answers_in_time(role, _PING_SECONDS, "alive") if isinstance(answer, str)]


def lost(error: Exception) -> RoleUnavailable:
    """RoleUnavailable for Ray's error; ids, processes and addresses go to the log alone."""
    logger.warning("a role is not available: %s", error)
    if isinstance(error, ActorUnavailableError):  # which names the replica's id before anything else
        return RoleUnavailable("a replica does not answer")
    return RoleUnavailable(str(error).partition("\n")[0])


def has_died(error: Exception) -> bool:
    """True if a replica is gone, its memory with it. One that is unreachable remembers."""
    return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
