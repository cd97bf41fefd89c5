"""Ingress replicas: the HTTP front end."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from autoscale.settings import Mode
from serving.config import OrbitServeConfig
from serving.engine_spec import front_end_config
from serving.errors import RoleUnavailable
from serving.frontend.ray_calls import answered
from serving.frontend.ray_roles import RayRoles, planner_status
from serving.placement.patch_feed import follow
from serving.replicas.process import enter_vllm, replica_name

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from serving.access_log import AccessLog

logger = logging.getLogger(__name__)

_THREADS = 32  # of an ingress: images, documents, files and vector stores


_CLOSE_SECONDS = 5.0  # for the access log's last lines


@serve.ingress()
class Ingress:
    """Ingress role: the HTTP front end; see `serving.api.app`."""

    async def __init__(self, config: OrbitServeConfig, **handles: DeploymentHandle) -> None:  # type: ignore[misc]
        enter_vllm(config.ingress, kv_cache_gib=None)
        from serving.access_log import AccessLog as Log
        from serving.api.app import build_api
        from serving.frontend.engine_client import LinkedEngineClient

        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ingress")
        asyncio.get_running_loop().set_default_executor(threads)  # Serve's own is as small as `num_cpus`
        context = serve.get_replica_context()
        self._name = replica_name()
        self._roles = RayRoles(
            handles,
            serve.get_deployment_handle(type(self).__name__, context.app_name),
            max(config.prefill.canary_timeout_s, config.decode.canary_timeout_s),
        )
        self._longest = await self._roles.longest()
        front_end = front_end_config(config.model, config.ingress.processor_cache_gib, self._longest)
        client = LinkedEngineClient(front_end, self._roles, config.sums_up_to, config.prefill)
        client.compaction = config.elastic.compaction
        self._log: AccessLog | None = None
        if config.access_log.directory is not None:
            self._log = client.access_log = Log(config.access_log, self._name, config.model.served_name)
        await self._roles.warm_up(config)
        self._forgets = client.forgets
        self._following = asyncio.create_task(follow(self._roles, client.orderer, config.ingress.index_period_s))
        planned = None if config.autoscale.mode is Mode.OFF else partial(planner_status, context.app_name)
        retriever = self._roles.retriever
        self._app = await build_api(client, config, self._forget, self._name, self._counted, planned, retriever)

    async def longest(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self._longest

    async def counted(self) -> tuple[str, list[Metric]]:
        """This replica's name and metrics."""
        return self._name, self._app.state.metrics.collect()

    async def _counted(self) -> dict[str, list[Metric]]:
        """Metrics of all ingress and retriever replicas, by name; of the latter none while one does not answer."""
        counted = await self._roles.counted()
        if self._roles.retriever is not None:
            try:
                counted |= await self._roles.retriever.counted()
            except RoleUnavailable as error:
                logger.warning("metrics without the retriever's: %s", error)
        return counted

    async def forget(self, content: str, tenant: str) -> None:
        """Drop a deleted content's patch names, tokens and processed pixels from this replica."""
        await self._forgets.forget(content, tenant)

    async def _forget(self, content: str, tenant: str) -> None:
        keeper = answered(self._roles.library.delete_content.remote(content, tenant))
        for error in await asyncio.gather(self.forget(content, tenant), keeper, return_exceptions=True):
            if isinstance(error, Exception):  # the file is gone, and this is owed: the keeper tries with every sweep
                logger.warning("what derives from %s is not deleted yet: %s", content[:16], error)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    def __del__(self) -> None:
        log: AccessLog | None = getattr(self, "_log", None)
        if log is not None:
            log.close(_CLOSE_SECONDS)
