"""Retriever replicas: search in vector stores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ray import serve
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import DeploymentUnavailableError

from serving.config import OrbitServeConfig
from serving.errors import RoleUnavailable
from serving.frontend.ray_calls import answers_of_all, has_died
from serving.replicas.process import enter, enter_vllm, replica_name

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from serving.retrieval.protocol import Search, SearchAnswer

_MEMORY_BYTES = 64 << 20  # of index records: their indices are in memory anyway


class Retriever:
    """Retriever role: indices of all vector stores in memory, the same in every replica."""

    async def __init__(self, config: OrbitServeConfig) -> None:  # type: ignore[misc]
        if config.retriever.has_model:
            enter_vllm(config.retriever, kv_cache_gib=None)
        else:
            enter(config.retriever)
        from kvstore.forget import ForgetRegistry
        from kvstore.library import Library
        from kvstore.search.vectors import warm_up
        from kvstore.uploads.files import FileStore
        from kvstore.uploads.vector_stores import VectorStores
        from serving.documents.passages import tokens_of
        from serving.retrieval.embedders.choice import open_embedder
        from serving.retrieval.indices import StoreIndices
        from serving.retrieval.metrics import RetrieverMetrics
        from serving.retrieval.parts import FileSplitter

        self._name = replica_name()
        self._peers = serve.get_deployment_handle(type(self).__name__, serve.get_replica_context().app_name)
        files = FileStore(config.files_url, config.files)
        embedder = await open_embedder(config, files.tier)
        library = config.library.model_copy(update={"memory_bytes": _MEMORY_BYTES})
        self._library = Library(library, embedder.fingerprint)
        offsets = tokens_of(config.model.path)
        splitter = FileSplitter(files, config.documents, offsets, "image" in embedder.modalities)
        self._forgets = ForgetRegistry()
        forgetting = ThreadPoolExecutor(1, thread_name_prefix="forget")
        self._indices = self._forgets.group(forgetting.submit).register(
            StoreIndices(
                config.retriever, files, VectorStores(files), self._library, embedder, splitter, self._tell_all
            )
        )
        self._metrics = RetrieverMetrics(self._indices)
        await asyncio.to_thread(warm_up)
        await self._indices.start()  # before it is asked anything
        self._following = asyncio.create_task(self._indices.keep_up())

    async def search(self, search: Search) -> SearchAnswer:
        """Find parts; see `serving.retrieval.protocol`."""
        with self._metrics.timed():
            return await self._indices.search(search)

    async def index(self, store: str, files: Sequence[str]) -> None:
        """Index files of a store that are in progress; returns at once."""
        await self._indices.index(store, files)

    async def follow(self, store: str, files: Sequence[str]) -> None:
        """Make memory agree with what some files of a store are now, or all of them."""
        await self._indices.follow(store, files)

    async def forget(self, content: str, tenant: str) -> None:
        """Drop what derives from a deleted content."""
        await self._forgets.forget(content, tenant)
        await asyncio.to_thread(self._library.delete_content, content, tenant)

    async def counted(self) -> tuple[str, list[Metric]]:
        """This replica's name and metrics."""
        return self._name, self._metrics.collect()

    async def alive(self) -> str:
        """This replica's name."""
        return self._name

    async def check_health(self) -> None:
        """Raise when it no longer follows the vector stores."""
        if self._following.done():
            raise RuntimeError("the retriever no longer follows the vector stores")

    async def _tell_all(self, store: str, files: Sequence[str]) -> None:
        """Have every replica follow.

        One that died needs not: its successor reads all anew.

        Raises:
            RoleUnavailable: one that lives has not heard.
        """
        await self._indices.follow(store, files)  # this one: while it starts, it gets no calls
        answers = await answers_of_all(self._peers, "follow", store, files)  # none while the first one starts
        for answer in answers:
            if isinstance(answer, ActorUnavailableError | DeploymentUnavailableError):
                raise RoleUnavailable("a retriever replica does not answer") from answer
            if isinstance(answer, Exception) and not has_died(answer):
                raise answer
