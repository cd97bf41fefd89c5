"""Prefill worker replicas: an engine over runs, and the linker."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from infra.nixl_handshake import dropped
from infra.vllm_env import is_cpu_build
from prefill_workers.modes import Mode
from prefill_workers.protocol import (
    TINY_PROMPT,
    CompactionRefused,
    LinkRequest,
    NonFiniteLogits,
    Overloaded,
    PixelsNeeded,
    PromptTooLarge,
    Refusal,
    SessionStats,
    lease_owner,
    replica_of,
)
from serving.config import OrbitServeConfig
from serving.engine_spec import prefill_spec
from serving.errors import RoleUnavailable
from serving.frontend.ray_calls import answered
from serving.placement.patch_feed import PatchFeed, PatchFeedSource
from serving.replicas.canary import Canary
from serving.replicas.fidelity import PrefillFidelity
from serving.replicas.first_transfer import pulled_by_decode
from serving.replicas.hand_over import HandOver
from serving.replicas.patch_queue import PatchQueue
from serving.replicas.process import MOST_FAILURES, address_for_peers, enter_vllm, node_id, replica_name
from serving.routing.reports import PrefillReporter
from serving.scaling.meters import PrefillMeter
from serving.scaling.roles import scales

if TYPE_CHECKING:
    from torch import Tensor

    from kvstore.hand_over import Parcel
    from kvstore.records.patch_form import PatchForm
    from prefill_workers.engine.image_batches import Pixels
    from prefill_workers.fidelity.disabled_points import PointDecision
    from prefill_workers.fidelity.monitor import PointStatus
    from prefill_workers.link.linker import Linker
    from prefill_workers.link.plan import LinkPlan
    from prefill_workers.modes import OperatingPoint
    from prefill_workers.patches.device_forming import DeviceForming
    from prefill_workers.patches.patch_compiler import PatchJob
    from prefill_workers.protocol import LeaseState, LinkResult, LoadBearing, PrefetchRequest, SessionInfo

logger = logging.getLogger(__name__)

_LEASE_LOOK_SECONDS = 0.05
_FORMING_SECONDS = 280.0  # less than a call's time limit


class PrefillWorker:
    """Prefill role: links requests; see `prefill_workers.link.linker`."""

    async def __init__(self, config: OrbitServeConfig, compiler: DeploymentHandle) -> None:  # type: ignore[misc]
        settings = config.prefill
        self._meter = PrefillMeter(config.library.load_threads)
        enter_vllm(settings, kv_cache_gib=settings.kv_cache_gib, handshakes_at=address_for_peers())
        from kvstore.library import Library
        from prefill_workers.engine.engine import PrefillEngine, check_hand_off, may_read_answers
        from prefill_workers.engine.self_check import require_self_check
        from prefill_workers.patches.device_forming import DeviceForming
        from prefill_workers.patches.harvester import Harvester
        from prefill_workers.patches.patch_compiler import PatchCompiler, load_form
        from prefill_workers.scheduler.cost_model import measure_forward_cost
        from prefill_workers.scheduler.load_budget import KVLoadBudget
        from prefill_workers.scheduler.prefill_loop import PrefillLoop

        self._engine = PrefillEngine(prefill_spec(config))
        ranks = settings.tensor_parallel_size, config.decode.tensor_parallel_size
        check_hand_off(self._engine.layout, *ranks)
        if settings.self_check:
            for outcome in require_self_check(self._engine):
                logger.info("self-check passed: %s (%s)", outcome.name, outcome.detail)
        self._library = Library(config.library, self._engine.fingerprint)
        self._hand_over = HandOver(self._library)
        self._compiler = compiler
        self._device_forming: DeviceForming | None = None
        self._patch_queue = PatchQueue(self._compile, settings.max_patch_queue, settings.max_patch_queue_bytes)
        keeper = DeploymentHandle("LibraryKeeper", serve.get_replica_context().app_name)  # bound, it would be a circle
        self._fidelity = PrefillFidelity(settings.fidelity, lambda known: answered(keeper.exchange.remote(known)))
        form = load_form(config.patch, self._library)
        linker = self._new_linker(config, form)
        self._linker, self._sessions = linker, linker.sessions.store
        if config.is_forming_in_prefill:
            forming = DeviceForming(PatchCompiler(self._library, form, device="cuda"))
            self._device_forming = linker.forgets.group().register(forming)
        self._feed = PatchFeedSource(self._name, patches=linker.patches, sums=linker.sums)
        bytes_per_token = self._engine.layout.bytes_per_token(self._engine.dtype)
        self._load_budget = KVLoadBudget(settings.loaded_bytes, bytes_per_token)
        self._loop = PrefillLoop(
            linker,
            Harvester(self._engine, self._library, form, self._patch_queue.submit),
            settings.loop_limits(linker.compose_up_to, reads_answers=may_read_answers(self._engine.layout, *ranks)),
            owner=lease_owner(os.getpid(), self._name),
            cost_model=measure_forward_cost(self._engine),
            load_budget=self._load_budget,
            crowded=lambda: self._patch_queue.is_crowded,
        )
        self._canary = Canary(
            lambda: self._loop.progressed,
            self._compute_one_token,
            settings.canary_timeout_s,
            self._loop.cpu_seconds if is_cpu_build() else None,
        )
        self._handshake_timeout = settings.canary_timeout_s
        self._reporter = PrefillReporter(
            self._loop,
            self._library,
            bytes_per_token,
            config.routing.hot_chunks,
            self._sessions,
            self._engine.on_device,
        )
        self._tiny = count()
        self._planners = ThreadPoolExecutor(32, thread_name_prefix="plan")  # a plan waits for look-ups
        await self._fidelity.start()
        self._loop.start()
        await pulled_by_decode(self.link_tiny)
        self._meter.ready()
        if scales(config, settings):
            vars(self)["__del__"] = self._retire  # Serve awaits an instance's, once no call runs

    def _new_linker(self, config: OrbitServeConfig, form: PatchForm) -> Linker:
        from prefill_workers.link.linker import Linker

        settings = config.prefill
        return Linker(
            self._engine,
            self._library,
            form,
            self._fidelity.monitor,
            compose_up_to=config.compose_up_to,
            keeps_prefixes=settings.prefix_cache,
            weigh_by=config.weigh_by,
            free_text=settings.free,
            sessions=settings.sessions,
        )

    async def _compile(self, job: PatchJob) -> None:
        forming = self._device_forming
        await (forming.compile(job) if forming else answered(self._compiler.compile.remote(job)))
        self._feed.add(job.entry)

    async def prefetch(self, request: PrefetchRequest) -> list[str]:
        """Start loading for a prompt on its way; returns the images of which nothing is stored."""
        self._loop.expect()
        loop, prefetch = asyncio.get_running_loop(), partial(self._linker.prefetch, load=not self._load_budget.waiting)
        lacking = await loop.run_in_executor(self._planners, prefetch, request)
        return [content for content, lacks in lacking.items() if await asyncio.wrap_future(lacks)]

    async def link(
        self, request: LinkRequest, indices: Sequence[int] = (), images: Sequence[Tensor | Pixels] = ()
    ) -> LinkResult | Refusal:
        """Link one request. Cancelling the call frees what it holds.

        Args:
            images: of the chunks at `indices`: embeddings, or without vision encoders pixels, to be encoded here.

        Returns:
            A Refusal carries:
                PixelsNeeded: images are missing; the caller calls again with them.
                Overloaded: the queue is full.
                PromptTooLarge: no pool has room for the prompt.

        Raises:
            NonFiniteLogits: the model gave NaN, also without what was stored.
            RoleUnavailable: the loop's thread died.
        """
        try:
            return await self._link(request, indices, images)
        except (PixelsNeeded, Overloaded, PromptTooLarge, CompactionRefused) as refusal:
            return Refusal(refusal)

    async def _link(
        self, request: LinkRequest, indices: Sequence[int], images: Sequence[Tensor | Pixels]
    ) -> LinkResult:
        if not self._loop.alive():
            raise RoleUnavailable("the prefill loop has ended")
        self._loop.refuse_if_full()
        began = time.perf_counter()
        pixels = {i: image for i, image in zip(indices, images, strict=True) if isinstance(image, tuple)}
        given = {i: image for i, image in zip(indices, images, strict=True) if not isinstance(image, tuple)}
        if pixels:
            embeddings = await asyncio.wrap_future(self._loop.encode(list(pixels.values())))
            given |= zip(pixels, embeddings, strict=True)
        vision_ms = (time.perf_counter() - began) * 1e3 if pixels else 0.0
        try:
            return await self._link_embedded(request, given, vision_ms)
        except NonFiniteLogits as error:
            if not (error.stored or error.is_prefix_hit):
                raise
            logger.error("link %.100r: %s; what it was linked from is quarantined", request.request_id, error)
            await asyncio.to_thread(self._linker.quarantine, error.stored)
            return await self._link_embedded(request, given, vision_ms)

    async def _link_embedded(self, request: LinkRequest, given: Mapping[int, Tensor], vision_ms: float) -> LinkResult:
        loop = asyncio.get_running_loop()
        async with self._load_budget.room_for(request) as waited:
            plan = await loop.run_in_executor(self._planners, self._plan, request, given)
            plan.took("queue", waited)
            if vision_ms:
                plan.stages_ms["vision"] = vision_ms
            try:
                future = self._loop.submit(plan)
            except BaseException:
                plan.unpin()
                raise
            try:
                linked: LinkResult = await asyncio.wrap_future(future)
                self._meter.linked(linked)
                return linked
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._loop.abandon(future.result().lease)
                raise

    def _plan(self, request: LinkRequest, given: Mapping[int, Tensor]) -> LinkPlan:
        """Plan a link, once host memory has given back what its prompt begins with."""
        try:
            if (coming := self._loop.bring_back(request)) is not None:
                coming.result()
        except Exception as error:  # it is computed; a loop that has ended refuses the link
            logger.warning("nothing comes back from host memory: %s", error)
        return self._linker.plan(request, given)

    async def link_tiny(self, readers: int = 1) -> dict[str, Any]:
        """Transfer of a tiny prompt, `TINY_PROMPT`, for so many decode engines to pull."""
        request = LinkRequest(f"tiny-{next(self._tiny)}", TINY_PROMPT, mode=Mode.OFF, readers=readers)
        return (await self._link_embedded(request, {}, 0.0)).transfer

    async def longest(self) -> int:
        """Tokens of the longest prompt that finds room here."""
        return self._loop.longest

    async def renew(self, lease: str) -> LeaseState:
        """Keep a link's KV for longer: it is still wanted. Returns what this replica knows of it."""
        return self._loop.renew(lease)

    async def keep_answer(self, lease: str, token_ids: Sequence[int], offer: Mapping[str, Any] | None = None) -> bool:
        """Read an answer's KV, or compute it in idle time, if the link was made here.

        Returns True once vLLM was told that it need not hold any more what it offers; False if it was not.
        """
        if replica_of(lease) != self._name:
            return False
        return await asyncio.wrap_future(self._loop.keep_answer(lease, token_ids, offer))

    async def fidelity(self) -> tuple[str, list[PointStatus]]:
        """This replica's name, and its measurements of every approximate operating point."""
        return self._name, self._fidelity.monitor.status()

    async def allow(self, point: OperatingPoint) -> bool:
        """Serve at an operating point again. Returns whether it was disabled here."""
        return self._fidelity.monitor.allow(point)

    async def apply_decisions(self, decisions: Sequence[PointDecision]) -> None:
        """Adopt the keeper's decisions about operating points."""
        self._fidelity.monitor.apply(decisions)

    async def sessions(self, tenant: str) -> list[SessionInfo]:
        """Sessions of a tenant that this replica has served."""
        return self._sessions.of_tenant(tenant)

    async def session(self, tenant: str, session: str) -> SessionInfo | None:
        """One session of a tenant, also one that another replica has served."""
        found = await asyncio.to_thread(self._sessions.get, tenant, session)
        return None if found is None else self._sessions.info(found)

    async def delete_session(self, tenant: str, session: str) -> bool:
        """Delete a session and what no other needs. Returns whether there was one."""
        return await asyncio.to_thread(self._sessions.delete, tenant, session)

    async def load_bearing(self, tenant: str, request_id: str) -> LoadBearing | None:
        """Load-bearing chunks of a tenant's request that this replica has linked."""
        return self._loop.load_bearing(tenant, request_id)

    @property
    def _name(self) -> str:
        return replica_name()

    async def alive(self) -> str:
        """This replica's name."""
        return self._name

    async def formed(self, cursors: Mapping[str, int]) -> PatchFeed:
        """Patches formed since these cursors; see `serving.placement.patch_feed`."""
        return self._feed.since(cursors)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve, every `routing.report_period_s`."""
        return self._reporter.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where the role is scaled; see `autoscale.signals`."""
        return self._meter.signals(self._loop.stats(), self._library.stats(), self._hand_over.cost_s())

    async def signals(self) -> tuple[str, dict[str, float]]:
        """This replica's name, and its signals for the planner, who asks all replicas."""
        self._hand_over.called()
        return self._name, await self.record_autoscaling_stats()

    async def stats(self) -> dict[str, Any]:
        """This replica's name, its counters and those of its loop and library."""
        loop = self._loop.stats()
        return {
            "name": self._name,
            "loop": replace(loop, compiled=replace(loop.compiled, dropped=self._patch_queue.dropped)),
            "library": self._library.stats(),
            "sessions": SessionStats(len(self._sessions), self._sessions.nbytes),
            "patches_queued": len(self._patch_queue),
            "patches_dropped": self._patch_queue.dropped,
            "handshakes_dropped": dropped(),
        }

    async def flush(self) -> None:
        """Wait until everything learnt so far is formed and stored (demo, tests, the replica's end).

        Raises TimeoutError when forming takes too long.
        """
        from prefill_workers.scheduler.loop_stats import drain

        async with asyncio.timeout(_FORMING_SECONDS):
            await asyncio.to_thread(drain, self._loop, _FORMING_SECONDS)
            while self._patch_queue:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(self._library.flush)

    async def forget(self, content: str, tenant: str) -> None:
        """Drop deleted content from this worker's caches and library.

        Raises the first failure, once all have tried.
        """
        try:
            await self._linker.forgets.forget(content, tenant)
        finally:
            await asyncio.to_thread(self._library.delete_content, content, tenant)

    async def node(self) -> str:
        """Ray's id of this replica's node."""
        return node_id()

    async def lacking(self, paths: Sequence[str]) -> list[str]:
        """Of these paths, those whose records are not within reach; asked by a replica that goes."""
        from kvstore.hand_over import lacking

        return await asyncio.to_thread(lacking, self._library, paths)

    async def adopt(self, parcels: Sequence[Parcel]) -> int:
        """Take over records of a replica that goes; returns how many."""
        from kvstore.hand_over import adopt

        return await asyncio.to_thread(adopt, self._library, parcels)

    async def check_health(self) -> None:
        """Raise when the engine does not serve.

        The loop's thread died, all forwards fail (a GPU's lost context), nothing is computed any more, or decode
        engines could not shake hands.
        """
        if not self._loop.alive():
            raise RuntimeError("the prefill loop has ended")
        if self._engine.is_silent:
            raise RuntimeError("a rank of the engine does not answer any more")
        if self._loop.failing >= MOST_FAILURES:
            raise RuntimeError(f"the engine failed {self._loop.failing} times in a row")
        await asyncio.gather(self._canary.check(), self._engine.check_handshake(self._handshake_timeout))

    async def _compute_one_token(self) -> None:
        await asyncio.wrap_future(self._loop.compute_one_token())

    async def _retire(self) -> None:
        """Hand over what only this replica has, form what it still learns, and wait until no lease is held.

        Handed over before and behind: forming may take longer than a hand-over may wait.
        """
        await self._hand_over.give()
        try:
            await self.flush()
            await self._hand_over.give()
        except TimeoutError:
            logger.warning("not all that was learnt last is formed in time; it is lost")
        await self._hand_over.leave_node()
        while self._loop.stats().leases:
            await asyncio.sleep(_LEASE_LOOK_SECONDS)
        self._close()

    def _close(self) -> None:
        self._loop.stop()
        if self._device_forming is not None:
            self._device_forming.close()
        self._library.close()

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._close()
