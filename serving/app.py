"""The Ray Serve application: one deployment per role, and the graph between them.

| deployment     | holds                                   | called by            |
|----------------|-----------------------------------------|----------------------|
| Ingress        | vLLM's OpenAI server on our engine client | HTTP               |
| VisionEncoder  | the vision tower (may be left out)      | Ingress              |
| PrefillWorker  | an engine over runs, the linker         | Ingress              |
| PatchCompiler  | nothing but a library                   | PrefillWorker        |
| DecodeWorker   | a stock, text-only vLLM engine          | Ingress              |
| LibraryKeeper  | deletion, expiry, statistics            | Ingress              |

A request goes HTTP → Ingress → (VisionEncoder →) PrefillWorker → NIXL → DecodeWorker → Ingress → HTTP. Workers read and
write the library themselves; its data never passes through an actor.

`build_app` is what `serve run serving.app:build_app config=PATH` and `serve deploy` take.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from serving.config import OrbitServeConfig
from serving.errors import RoleUnavailable
from serving.frontend.ray_roles import RayRoles, answered
from serving.placement.patch_feed import FormedReplica, follow
from serving.replicas.fidelity_mixin import FidelityReplica
from serving.replicas.library_keeper import LibraryKeeper
from serving.replicas.patch_compiler import PatchCompiler
from serving.replicas.patch_queue import Deficits
from serving.replicas.process import enter_vllm
from serving.routing.reports import DecodeReporter, PrefillReporter, ReportingReplica, router_config
from serving.settings import RoleSettings

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from torch import Tensor
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from prefill_workers.block_pool import LeaseState
    from prefill_workers.engine.engine import EngineSpec
    from prefill_workers.engine.image_batches import Pixels
    from prefill_workers.link.plan import LinkRequest, PrefetchRequest
    from prefill_workers.patches.patch_compiler import PatchJob
    from prefill_workers.scheduler.link_job import LinkResult
    from serving.access_log import AccessLog

logger = logging.getLogger(__name__)

_FAILURES = 3  # of the engine, one after another: then it is hardly the requests
_UNUSED_GIB = 1  # of KV, which a vision encoder has no use for
_THREADS = 32  # of an ingress: images, documents, files and vector stores
_CLOSE_SECONDS = 5.0  # for the access log's last lines

# -- roles ------------------------------------------------------------------------------------------------------------


class VisionEncoder:
    """Pixels to embeddings, for chunks that nobody has seen yet."""

    def __init__(self, config: OrbitServeConfig) -> None:
        settings = config.vision
        enter_vllm(settings, kv_cache_gib=None, nixl=False)
        from prefill_workers.engine.vision_encoder import VisionEncoder as Encoder

        spec = engine_spec(config, tensor_parallel_size=1, hand_off=False)
        share = settings.gpu_memory_utilization
        self._encoder = Encoder(replace(spec, gpu_memory_utilization=share, kv_cache_gib=_UNUSED_GIB))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vision")
        self._failing = 0

    async def encode(self, items: Sequence[tuple[str, Any]]) -> list[Tensor]:
        """Embeddings [tokens, hidden] of (modality, processed item) pairs."""
        import torch

        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.encode, list(items))
        except torch.AcceleratorError:  # what else fails, as for want of memory, is its request's
            self._failing += 1
            raise
        self._failing = 0
        return found

    async def stats(self) -> dict[str, Any]:
        """How many images were encoded."""
        return {"images": self._encoder.images}

    async def check_health(self) -> None:
        """Raises when the engine encodes nothing any more (a GPU's lost context)."""
        if self._failing >= _FAILURES:
            raise RuntimeError(f"the encoder failed {self._failing} times in a row")


class PrefillWorker(FidelityReplica, FormedReplica, ReportingReplica):
    """Links requests; see `prefill_workers.link.linker`."""

    async def __init__(self, config: OrbitServeConfig, compiler: DeploymentHandle) -> None:  # type: ignore[misc]
        settings = config.prefill
        enter_vllm(settings, kv_cache_gib=settings.kv_cache_gib, nixl=True)
        from kvstore.library import Library
        from prefill_workers.engine.engine import PrefillEngine, check_hand_off
        from prefill_workers.fidelity.switch_file import SwitchedOff
        from prefill_workers.link.linker import Linker
        from prefill_workers.link.prefix_cache import PrefixCache
        from prefill_workers.patches.patch_compiler import load_form
        from prefill_workers.scheduler.cost_model import measure
        from prefill_workers.scheduler.load_budget import LoadedKV
        from prefill_workers.scheduler.prefill_loop import PrefillLoop

        self._engine = PrefillEngine(engine_spec(config, settings.tensor_parallel_size, hand_off=True))
        check_hand_off(self._engine.layout, settings.tensor_parallel_size, config.decode.tensor_parallel_size)
        if settings.self_check:
            for outcome in self._engine.require_self_check():
                logger.info("self-check passed: %s (%s)", outcome.name, outcome.detail)
        self._library = Library(config.library, self._engine.fingerprint)
        self._compiler = compiler
        self._deficits = Deficits(self._compile, settings.max_patch_queue, settings.max_patch_queue_bytes)
        form = load_form(config.patch, self._library)
        linker = Linker(
            self._engine,
            self._library,
            form,
            self._deficits.submit,
            self.watch_fidelity(settings.fidelity, SwitchedOff(config.library.directory, self._engine.fingerprint)),
            compose_up_to=config.compose_up_to,
            prefixes=PrefixCache.of(self._engine, settings.prefix_cache_bytes),
            weigh_by=config.weigh_by,
            free_text=settings.free_text,
        )
        self._linker, self._log = linker, self.log_formed(patches=linker.patches, sums=linker.sums)
        bytes_per_token = self._engine.layout.bytes_per_token(self._engine.dtype)
        self._loaded = LoadedKV(settings.loaded_bytes, bytes_per_token)
        self._loop = PrefillLoop(
            self._engine,
            linker,
            budget=settings.max_batch_tokens,
            max_queue=settings.max_queue,
            lease_seconds=settings.lease_seconds,
            owner=f"prefill-{os.getpid()}-{serve.get_replica_context().replica_id.unique_id}",
            learns=settings.form_patches,
            compiles=settings.compile_limits(linker.compose_up_to),
            pace=measure(self._engine),
            loaded=self._loaded,
            crowded=lambda: self._deficits.crowded,
        )
        self._reporter = PrefillReporter(self._loop, self._library, bytes_per_token, config.routing.hot_chunks)
        self._planners = ThreadPoolExecutor(32, thread_name_prefix="plan")  # a plan waits for look-ups
        await self.hear_fidelity()
        self._loop.start()

    async def _compile(self, job: PatchJob) -> None:
        await answered(self._compiler.compile.remote(job))
        self._log.add(job.entry)

    async def prefetch(self, request: PrefetchRequest) -> list[str]:
        """Start loading what a prompt on its way will need; the images of which nothing is stored."""
        self._loop.expect()
        loop, prefetch = asyncio.get_running_loop(), partial(self._linker.prefetch, load=not self._loaded.waiting)
        lacking = await loop.run_in_executor(self._planners, prefetch, request)
        return [content for content, lacks in lacking.items() if await asyncio.wrap_future(lacks)]

    async def link(
        self, request: LinkRequest, indices: Sequence[int] = (), images: Sequence[Tensor | Pixels] = ()
    ) -> LinkResult:
        """Link one request. Cancelling the call frees what it holds.

        Args:
            images: of the chunks at `indices`: embeddings, or without vision encoders pixels, to be encoded here.

        Raises:
            PixelsNeeded: images are missing; the caller calls again with them.
            Overloaded: the queue is full.
            RoleUnavailable: the loop's thread died.
        """
        if not self._loop.alive():
            raise RoleUnavailable("the prefill loop has ended")
        self._loop.refuse_if_full()
        began = time.perf_counter()
        pixels = {i: image for i, image in zip(indices, images, strict=True) if isinstance(image, tuple)}
        given = {i: image for i, image in zip(indices, images, strict=True) if not isinstance(image, tuple)}
        if pixels:
            embeddings = await asyncio.wrap_future(self._loop.encode(list(pixels.values())))
            given |= zip(pixels, embeddings, strict=True)
        vision_ms = (time.perf_counter() - began) * 1e3
        loop = asyncio.get_running_loop()
        async with self._loaded.room_for(request) as waited:
            plan = await loop.run_in_executor(self._planners, self._linker.plan, request, given)
            plan.took("queue", waited)
            if pixels:
                plan.stages_ms["vision"] = vision_ms
            try:
                future = self._loop.submit(plan)
            except BaseException:
                plan.unpin()
                raise
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._loop.abandon(future.result().lease)
                raise

    async def longest(self) -> int:
        """Tokens of the longest prompt that finds room here."""
        return self._loop.longest

    async def renew(self, lease: str) -> LeaseState:
        """Whoever waits for a link's KV still wants it. Returns what this replica knows of it."""
        return self._loop.renew(lease)

    async def stats(self) -> dict[str, Any]:
        """This replica's name, loop and library counters."""
        loop = self._loop.stats()
        return {
            "name": self._name,
            "loop": replace(loop, compiled=replace(loop.compiled, dropped=self._deficits.dropped)),
            "library": self._library.stats(),
            "patches_queued": len(self._deficits),
            "patches_dropped": self._deficits.dropped,
        }

    async def flush(self) -> None:
        """Wait until everything learnt so far is formed and stored (demo, tests)."""
        from prefill_workers.scheduler.prefill_loop import drain

        await asyncio.to_thread(drain, self._loop)
        while self._deficits:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._library.flush)

    async def forget(self, content: str, tenant: str) -> None:
        """Drop what this worker's memory still holds of deleted content."""
        self._loop.forget(content, tenant)
        await asyncio.to_thread(self._library.delete_content, content, tenant)

    async def check_health(self) -> None:
        """Raises when the loop's thread died, or the engine answers no forward any more (a GPU's lost context)."""
        if not self._loop.alive():
            raise RuntimeError("the prefill loop has ended")
        if self._engine.silent:
            raise RuntimeError("a rank of the engine does not answer any more")
        if self._loop.failing >= _FAILURES:
            raise RuntimeError(f"the engine failed {self._loop.failing} times in a row")

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.stop()
            self._library.close()


class DecodeWorker(ReportingReplica):
    """Stock vLLM; see `decode_workers.engine`."""

    def __init__(self, config: OrbitServeConfig) -> None:
        settings = config.decode
        enter_vllm(settings, kv_cache_gib=settings.kv_cache_gib, nixl=True)
        from decode_workers.engine import DecodeEngine, DecodeSpec

        model = config.model
        self._engine = DecodeEngine(
            DecodeSpec(
                model=str(model.path),
                dtype=model.dtype,
                load_format=model.load_format,
                max_model_len=model.max_model_len,
                block_size=config.prefill.block_size,
                tensor_parallel_size=settings.tensor_parallel_size,
                max_num_seqs=settings.max_num_seqs,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                kv_cache_gib=settings.kv_cache_gib,
                trust_remote_code=model.trust_remote_code,
                kv_cache_dtype=model.kv_cache_dtype,
                reasoning_parser=model.reasoning_parser or "",
                seed=model.seed,
            )
        )
        self._reporter = DecodeReporter(self._engine, settings.max_num_seqs)

    async def generate(
        self,
        token_ids: list[int],
        transfer: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream outputs; the prompt's token ids stay here, the caller has them.

        With the engine core this process ends: Serve then asks it no more, and callers hear of a lost worker.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async for output in self._engine.generate(token_ids, transfer, params, request_id, **options):
                output.prompt_token_ids = None
                yield output
        except EngineDeadError:
            logger.exception("the decode engine died, and this worker ends")
            os._exit(1)

    async def longest(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self._engine.max_model_len

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """Tell the prefill worker that nobody will read this lease."""
        await self._engine.abandon(transfer, readers)

    async def stats(self) -> Any:
        """Queue lengths and reserved blocks."""
        return self._engine.stats()

    async def all_blocks_free(self) -> bool:
        """Whether vLLM's own pool holds no KV block."""
        return await self._engine.all_blocks_free()

    async def check_health(self) -> None:
        """Raises when the engine core died."""
        await self._engine.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()


@serve.ingress()
class Ingress:
    """The HTTP front end; see `serving.api.app`."""

    async def __init__(self, config: OrbitServeConfig, **handles: DeploymentHandle) -> None:  # type: ignore[misc]
        enter_vllm(config.ingress, kv_cache_gib=None, nixl=False)
        from serving.access_log import AccessLog as Log
        from serving.api.app import build_api
        from serving.frontend.engine_client import LinkedEngineClient, front_end_config

        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ingress")
        asyncio.get_running_loop().set_default_executor(threads)  # Serve's own is as small as `num_cpus`
        context = serve.get_replica_context()
        self._name = str(context.replica_id.unique_id)
        self._roles = RayRoles(handles, serve.get_deployment_handle(type(self).__name__, context.app_name))
        self._longest = await self._roles.longest()
        front_end = front_end_config(config.model, config.ingress.processor_cache_gib, self._longest)
        client = LinkedEngineClient(front_end, self._roles, config.sums_up_to, config.prefill)
        self._log: AccessLog | None = None
        if config.access_log.directory is not None:
            self._log = client.access_log = Log(config.access_log, self._name, config.model.served_name)
        await self._roles.warm_up(config)
        self._arranger = client.arranger
        self._following = asyncio.create_task(follow(self._roles, client.arranger, config.ingress.index_period_s))
        self._app = await build_api(client, config, self._forget, self._name, self._roles.counted)

    async def longest(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self._longest

    async def counted(self) -> tuple[str, list[Metric]]:
        """This replica's name, and what it counted."""
        return self._name, self._app.state.metrics.collect()

    async def forget(self, content: str, tenant: str) -> None:
        """Drop what this replica remembers of a deleted content: its patches' names, its tokens or processed pixels."""
        self._arranger.forget(content)
        await self._app.state.forget(content)

    async def _forget(self, content: str, tenant: str) -> None:
        await self.forget(content, tenant)
        try:
            await answered(self._roles.library.delete_content.remote(content, tenant))
        except Exception as error:  # the file is gone, and this is owed: the keeper tries again with every sweep
            logger.warning("what derives from %s is not deleted yet: %s", content[:16], error)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    def __del__(self) -> None:
        log: AccessLog | None = getattr(self, "_log", None)
        if log is not None:
            log.close(_CLOSE_SECONDS)


# -- the graph --------------------------------------------------------------------------------------------------------


def build(config: OrbitServeConfig) -> serve.Application:
    """The application graph of a configuration."""
    compiler = _deployment(PatchCompiler, config.patch).bind(config)
    routers = {role: router_config(role, config.routing) for role in ("prefill", "decode")}
    prefill = _deployment(PrefillWorker, config.prefill, routers["prefill"]).bind(config, compiler)
    vision = {"vision": _deployment(VisionEncoder, config.vision).bind(config)} if config.vision.replicas else {}
    return _deployment(Ingress, config.ingress).bind(
        config,
        **vision,
        prefill=prefill,
        decode=_deployment(DecodeWorker, config.decode, routers["decode"]).bind(config),
        library=_deployment(LibraryKeeper, config.keeper).bind(config, prefill, compiler),
    )


def build_app(arguments: dict[str, str]) -> serve.Application:
    """Application builder for `serve run serving.app:build_app config=PATH`.

    Serve calls it again for other arguments alone: further ones, such as `revision`, mean nothing here.

    Raises:
        ValueError: no `config` argument.
    """
    if "config" not in arguments:
        raise ValueError("serve run serving.app:build_app needs config=PATH, the YAML of an OrbitServeConfig")
    return build(OrbitServeConfig.from_yaml(Path(arguments["config"])))


def _deployment(role: type, settings: RoleSettings, router: RequestRouterConfig | None = None) -> Any:
    return serve.deployment(
        role,
        name=role.__name__,
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        health_check_period_s=settings.health_check_period_s,
        graceful_shutdown_timeout_s=settings.graceful_shutdown_timeout_s,
        request_router_config=router or RequestRouterConfig(),
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.gpus,
        },
    )


def engine_spec(config: OrbitServeConfig, tensor_parallel_size: int, hand_off: bool) -> EngineSpec:
    """What a prefill or vision engine is built from."""
    from prefill_workers.engine.engine import EngineSpec

    model, prefill = config.model, config.prefill
    return EngineSpec(
        model=str(model.path),
        dtype=model.dtype,
        load_format=model.load_format,
        max_model_len=model.max_model_len,
        block_size=prefill.block_size,
        tensor_parallel_size=tensor_parallel_size,
        max_batch_tokens=prefill.max_batch_tokens,
        kv_cache_gib=prefill.kv_cache_gib,
        gpu_memory_utilization=prefill.gpu_memory_utilization,
        trust_remote_code=model.trust_remote_code,
        hand_off=hand_off,
        kv_cache_dtype=model.kv_cache_dtype,
        seed=model.seed,
    )
