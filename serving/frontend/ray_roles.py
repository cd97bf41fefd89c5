"""Roles over Ray Serve handles; see `ray_calls`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from autoscale.planner import NAMESPACE, actor_name
from infra.hand_back import HELD_SECONDS
from prefill_workers.protocol import TINY_PROMPT, replica_of
from serving.config import OrbitServeConfig
from serving.errors import RoleUnavailable
from serving.frontend.ray_calls import alive, answered, answered_by_all, answered_in_time, answers_in_time, streamed
from serving.frontend.reachability import Reachability

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from torch import Tensor
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from prefill_workers.background.patch_precompiler import CompileStats
    from prefill_workers.engine.image_batches import Pixels
    from prefill_workers.fidelity.monitor import PointStatus
    from prefill_workers.modes import OperatingPoint
    from prefill_workers.protocol import (
        LeaseState,
        LinkRequest,
        LinkResult,
        LoadBearing,
        PrefetchRequest,
        SessionInfo,
        SessionStats,
    )
    from serving.placement.patch_feed import PatchFeed
    from serving.retrieval.protocol import Search, SearchAnswer

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 2.0  # for a role to say how it is, beside what its canary may take
_RETRY_SECONDS = 10.0  # for another replica to search in the place of one that was lost
_RENEWAL_SECONDS = 5.0  # for replicas to say that they have heard of a lease; one that hangs keeps nobody from the next


class RayRoles:
    """`serving.frontend.roles.Roles` over Ray Serve handles."""

    def __init__(
        self, handles: dict[str, DeploymentHandle], ingress: DeploymentHandle, canary_timeout_s: float = 5.0
    ) -> None:
        """`canary_timeout_s`: the longest of all roles."""
        self.ingress = ingress  # all its replicas, of which the caller is one
        self.vision = handles.get("vision")  # without the role, prefill workers encode
        self.prefill = handles["prefill"]
        self.decode = handles["decode"].options(stream=True)
        self._decode_once = handles["decode"]
        self.library = handles["library"]
        self._patience = canary_timeout_s + HEALTH_SECONDS
        self._pulling: dict[str, Callable[[], None]] = {}  # by lease: ends the need of the replica that holds it
        self._reach = {
            name: Reachability(name, partial(alive, role))
            for name, role in {**handles, "decode": self._decode_once}.items()
            if role is not None
        }
        retriever = handles.get("retriever")
        self.retriever = None if retriever is None else RetrieverHandle(retriever, self._reach["retriever"])

    async def prefetch(self, request: PrefetchRequest) -> Collection[str]:
        """Best effort.

        Another replica that links the prompt finds what was loaded in the tiers that they share.
        """
        try:
            return await answered(self.prefill.prefetch.remote(request))
        except Exception as error:
            logger.debug("nothing is loaded ahead: %s", error)
            return ()

    async def encode(self, items: Sequence[Pixels]) -> Sequence[Tensor | Pixels]:
        """See `VisionEncoder.encode`; the items themselves where there is no such role."""
        if self.vision is None:
            return items
        async with self._reach["vision"].required():
            return await answered(self.vision.encode.remote(items))

    async def link(
        self, request: LinkRequest, indices: Sequence[int], embeddings: Sequence[Tensor | Pixels]
    ) -> LinkResult:
        """See `PrefillWorker.link`."""
        async with self._reach["prefill"].required():
            return await answered(self.prefill.link.remote(request, tuple(indices), tuple(embeddings)))

    async def generate(
        self, token_ids: list[int], transfer: dict[str, Any], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `DecodeWorker.generate`. Closing the generator aborts the request on its replica.

        Until the KV was pulled, by every choice for itself, the replica that holds it must be there.
        """
        stream, ended = self.decode.generate.remote(token_ids, transfer, params, request_id, options), False
        outputs, lease, pulled = streamed(stream), transfer["remote_request_id"], set[int]()
        try:
            while len(pulled) < (params.n or 1):
                async with (
                    self._reach["decode"].required(),
                    self._reach["prefill"].required(replica_of(lease)) as release,
                ):
                    self._pulling[lease] = release
                    output = await anext(outputs, None)
                if output is None:
                    break
                pulled |= {choice.index for choice in output.outputs}
                yield output
            async for output in outputs:
                yield output
            ended = True
        finally:
            self._pulling.pop(lease, None)
            if not ended:
                stream.cancel()

    async def renew(self, lease: str) -> LeaseState:
        """State of a lease, if its replica tells in time.

        All replicas are told, since none else knows whose it is.
        """
        from prefill_workers.protocol import LeaseState

        try:
            states = await answers_in_time(self.prefill, _RENEWAL_SECONDS, "renew", lease)
        except Exception as error:
            logger.warning("nobody tells of lease %s: %s", lease, error)
            return LeaseState.UNKNOWN
        told = [state for state in states if isinstance(state, LeaseState) and state is not LeaseState.UNKNOWN]
        if LeaseState.READ in told and lease in self._pulling:
            self._pulling[lease]()
        return told[0] if told else LeaseState.UNKNOWN

    async def keep_answer(self, lease: str, token_ids: Sequence[int], offer: Mapping[str, Any] | None = None) -> None:
        """Best effort. All replicas are told: none else knows whose lease it is, nor the `offer`."""
        seconds = _RENEWAL_SECONDS if offer is None else HELD_SECONDS  # to read it, between two forwards
        try:
            told = await answers_in_time(self.prefill, seconds, "keep_answer", lease, tuple(token_ids), offer)
        except Exception as error:
            logger.debug("the answer behind lease %s is not kept: %s", lease, error)
            return
        if offer is None or True not in told:  # vLLM holds it for its time, and the decode worker counts it
            return
        try:
            name = offer["remote_request_id"]
            await answers_in_time(self._decode_once, _RENEWAL_SECONDS, "end_hand_back", name)
        except Exception as error:
            logger.debug("the decode worker holds the answer behind lease %s for longer: %s", lease, error)

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """Best effort; leases end by time-out.

        Not sent as a part of the request: of one that is cancelled, as most are that abandon a lease, Serve cancels all
        calls that no replica has been chosen for yet.
        """
        Context().run(self._decode_once.abandon.remote, transfer, readers)

    async def longest(self) -> int:
        """Most tokens of a prompt with its answer that every prefill and decode worker has room for."""
        roles = (self.prefill, self._decode_once)
        await asyncio.gather(*(answered(role.longest.remote()) for role in roles))  # once each role has a replica
        return min(itertools.chain(*await asyncio.gather(*(answered_by_all(role, "longest") for role in roles))))

    async def fidelity(self) -> dict[str, list[PointStatus]]:
        """See `PrefillWorker.fidelity`; of all replicas."""
        return dict(await answered_by_all(self.prefill, "fidelity"))

    async def allow(self, point: OperatingPoint) -> int:
        """See `LibraryKeeper.allow`."""
        async with self._reach["library"].required():
            return int(await answered(self.library.allow.remote(point)))

    async def formed(self, cursors: Mapping[str, int]) -> list[PatchFeed]:
        """See `PatchFeedRoles.formed`."""
        roles = (answered_by_all(role, "formed", dict(cursors)) for role in (self.prefill, self.library))
        return [one for answers in await asyncio.gather(*roles) for one in answers]

    async def compiled(self) -> dict[str, CompileStats]:
        """Patches compiled ahead of requests, by prefill replica."""
        return {stats["name"]: stats["loop"].compiled for stats in await answered_by_all(self.prefill, "stats")}

    async def sessions(self, tenant: str) -> list[SessionInfo]:
        """See `SessionRoles.sessions`."""
        return [info for answer in await answered_by_all(self.prefill, "sessions", tenant) for info in answer]

    async def session(self, tenant: str, session: str) -> list[SessionInfo]:
        """See `SessionRoles.session`."""
        answers = await answered_by_all(self.prefill, "session", tenant, session)
        return [info for info in answers if info is not None]

    async def delete_session(self, tenant: str, session: str) -> bool:
        """See `SessionRoles.delete_session`."""
        return any(await answered_by_all(self.prefill, "delete_session", tenant, session))

    async def session_stats(self) -> dict[str, SessionStats]:
        """See `SessionRoles.session_stats`."""
        return {stats["name"]: stats["sessions"] for stats in await answered_by_all(self.prefill, "stats")}

    async def load_bearing(self, tenant: str, request_id: str) -> list[LoadBearing]:
        """See `LoadBearingRoles.load_bearing`."""
        answers = await answered_by_all(self.prefill, "load_bearing", tenant, request_id)
        return [found for found in answers if found is not None]

    async def counted(self) -> dict[str, list[Metric]]:
        """See `Ingress.counted`; of all replicas."""
        return dict(await answered_by_all(self.ingress, "counted"))

    async def warm_up(self, config: OrbitServeConfig) -> None:
        """Send a tiny prompt for every pair of prefill and decode replica.

        A pair's first transfer shakes hands.
        """
        from vllm.sampling_params import SamplingParams

        from prefill_workers.modes import Mode
        from prefill_workers.protocol import LinkRequest, Overloaded

        async def one(number: int) -> None:
            tokens = TINY_PROMPT
            name = f"warm-up-{number}"
            linked = await self.link(LinkRequest(name, tokens, mode=Mode.OFF), (), ())
            params = SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True)
            async for _ in self.generate(tokens, linked.transfer, params, name):
                pass

        pairs = config.prefill.least_replicas * config.decode.least_replicas
        for outcome in await asyncio.gather(*(one(number) for number in range(pairs)), return_exceptions=True):
            if isinstance(outcome, (RoleUnavailable, Overloaded)):  # others are asking: they shake the hands
                logger.warning("a pair of workers is not warmed up: %s", outcome)
            elif outcome is not None:
                raise outcome

    async def check_health(self) -> None:
        """Ask every role for its health. Raises RoleUnavailable, naming the role.

        Serve restarts unhealthy replicas; an unanswered call means that a role has none, or none with a free place.
        """
        roles = {"vision": self.vision, "prefill": self.prefill, "decode": self._decode_once, "library": self.library}
        if self.retriever is not None:
            roles["retriever"] = self.retriever.handle
        calls = (
            answered_in_time(name, role.check_health.remote(), self._patience) for name, role in roles.items() if role
        )
        await asyncio.gather(*calls)


class RetrieverHandle:
    """`serving.retrieval.protocol.RetrieverRole` over a Ray Serve handle."""

    def __init__(self, handle: DeploymentHandle, reach: Reachability) -> None:
        self.handle, self._reach = handle, reach

    async def search(self, search: Search) -> SearchAnswer:
        """See `Retriever.search`; a replica that was lost is asked no more, another one is.

        Raises:
            RoleUnavailable: none answers.
        """
        async with self._reach.required():
            try:
                return await answered(self.handle.search.remote(search))
            except RoleUnavailable:
                return await self._search_again(search)

    async def _search_again(self, search: Search) -> SearchAnswer:
        try:
            async with asyncio.timeout(_RETRY_SECONDS) as limit:
                return await answered(self.handle.search.remote(search))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RoleUnavailable("the retriever does not answer") from error

    async def index(self, store: str, files: Sequence[str]) -> None:
        """See `Retriever.index`. Best effort: the retriever looks for such files itself."""
        try:
            await answered(self.handle.index.remote(store, tuple(files)))
        except Exception as error:
            logger.warning("files of %s are not announced to the retriever: %s", store, error)

    async def follow(self, store: str, files: Sequence[str]) -> None:
        """See `Retriever.follow`, of all replicas. Best effort: they look for changes themselves."""
        try:
            await answered_by_all(self.handle, "follow", store, tuple(files))
        except Exception as error:
            logger.warning("not every retriever replica has heard of a change of %s: %s", store, error)

    async def counted(self) -> dict[str, list[Metric]]:
        """See `Retriever.counted`; of all replicas."""
        return dict(await answered_by_all(self.handle, "counted"))


async def planner_status(app_name: str) -> dict[str, Any]:
    """Status of the planner, see `Planner.status`.

    Raises:
        RoleUnavailable: there is no planner, as while its keeper starts.
    """
    try:
        planner = await asyncio.to_thread(ray.get_actor, actor_name(app_name), namespace=NAMESPACE)
        status: dict[str, Any] = await planner.status.remote()
    except (ValueError, RayActorError) as error:
        raise RoleUnavailable("the planner is not there") from error
    return status
