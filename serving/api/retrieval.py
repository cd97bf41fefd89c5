"""Searches of vector stores for clients, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from kvstore.errors import UnknownVectorStore
from kvstore.search.filters import InvalidFilter, check_filter
from kvstore.uploads.index_states import IndexState
from kvstore.uploads.references import Reference, VectorStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.errors import NotAvailable
from serving.frontend.errors import InvalidRequest
from serving.retrieval.protocol import Hit, RetrieverRole, Search, SearchAnswer, SearchRefused

_MOST_RESULTS = 50  # OpenAI's
_SPARE = 8  # results beyond those asked for: some may be of files that went just now
_LONGEST_QUERY = 16_384  # characters
_AT_ONCE = 4  # queries of one request

_Query = Annotated[str, StringConstraints(min_length=1, max_length=_LONGEST_QUERY)]
_Parts = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=16)]  # see `serving.api.query_parts`


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class HybridWeights(_Body):
    """Weights of the two ranked lists."""

    embedding_weight: float = Field(1.0, ge=0)
    text_weight: float = Field(1.0, ge=0)


class RankingOptions(_Body):
    """Ranking, as OpenAI names it; see `kvstore.search.index`."""

    ranker: Literal["none", "auto", "default-2024-11-15", "default_2024_08_21"] = "auto"
    score_threshold: float = Field(0.0, ge=0, le=1)
    hybrid_search: HybridWeights = HybridWeights()


class SearchOptions(_Body):
    """Fields of a search besides its query."""

    filters: dict[str, Any] | None = None
    max_num_results: int = Field(10, ge=1, le=_MOST_RESULTS)
    ranking_options: RankingOptions = RankingOptions()

    @field_validator("filters")
    @classmethod
    def _readable(cls, filters: dict[str, Any] | None) -> dict[str, Any] | None:
        if filters is not None:
            try:
                check_filter(filters)
            except InvalidFilter as error:
                raise ValueError(str(error)) from None
        return filters

    @field_validator("ranking_options")
    @classmethod
    def _weighed(cls, ranking: RankingOptions) -> RankingOptions:
        weights = ranking.hybrid_search
        if weights.embedding_weight + weights.text_weight <= 0:
            raise ValueError("hybrid_search: one of the weights must be more than 0")
        return ranking


class SearchBody(SearchOptions):
    """`POST /v1/vector_stores/{id}/search`."""

    query: _Query | Annotated[list[_Query], Field(min_length=1, max_length=16)] | _Parts
    rewrite_query: bool = False


class RetrieveOptions(SearchOptions):
    """`orbit.retrieve` in a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vector_store_ids: tuple[str, ...] = Field(min_length=1, max_length=16, description="Stores that are searched.")
    query: _Query | _Parts | None = Field(
        None,
        description="Words to search by, or content parts with images (`query_parts`). None: the last user message's "
        "text; of a message without any its images.",
    )
    max_num_results: int = Field(4, ge=1, le=_MOST_RESULTS, description="Most pages and passages that are linked.")


@dataclass(frozen=True)
class Result:
    """A hit whose file is there still, and the reference that says so."""

    hit: Hit
    reference: Reference


class Retrieval:
    """Vector stores that can be searched. `role`: None where the deployment has no retriever."""

    def __init__(self, stores: VectorStores, role: RetrieverRole | None = None) -> None:
        self.stores, self._role = stores, role

    @property
    def is_on(self) -> bool:
        """True if the deployment has a retriever."""
        return self._role is not None

    def visible(self, store_id: str, tenant: str) -> VectorStore:
        """A store that a tenant may know of. Raises UnknownVectorStore, for another tenant's, too."""
        store = self.stores.get(store_id)
        if not store.is_visible(tenant):
            raise UnknownVectorStore(f"No such vector store: {store_id}")
        return store

    async def check(self, store_ids: Sequence[str], tenant: str) -> None:
        """Raise UnknownVectorStore, NotAvailable for what `search` would refuse."""
        for store_id in store_ids:
            await asyncio.to_thread(self.visible, store_id, tenant)
        if self._role is None:
            raise NotAvailable("searching a vector store is not available: this deployment has no retriever")

    async def added(self, store_id: str, files: Sequence[str]) -> None:
        """Have files of a store indexed."""
        if self._role is not None:
            await self._role.index(store_id, files)

    async def changed(self, store_id: str, files: Sequence[str] = ()) -> None:
        """Have all replicas take over what changed in a store."""
        if self._role is not None:
            await self._role.follow(store_id, files)

    async def search(
        self,
        tenant: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        options: SearchOptions,
        images: Sequence[bytes] = (),
    ) -> tuple[list[Result], list[SearchAnswer]]:
        """Find parts for a tenant; of several queries each part counts by its best score.

        Raises:
            UnknownVectorStore: of one that is not there, or not the tenant's to see. NotAvailable: no retriever.
            InvalidRequest: a search that this deployment cannot do. RoleUnavailable.
        """
        await self.check(store_ids, tenant)
        role = self._role
        assert role is not None
        ranking, at_once = options.ranking_options, asyncio.Semaphore(_AT_ONCE)

        async def one(query: str) -> SearchAnswer:
            async with at_once:
                return await role.search(
                    Search(
                        tuple(store_ids),
                        query,
                        options.max_num_results + _SPARE,
                        tuple(images),
                        options.filters,
                        "none" if ranking.ranker == "none" else "auto",
                        ranking.hybrid_search.embedding_weight,
                        ranking.hybrid_search.text_weight,
                        ranking.score_threshold,
                    )
                )

        try:
            answers = await asyncio.gather(*map(one, queries))
        except SearchRefused as error:
            raise InvalidRequest(str(error), parameter="query") from error
        best: dict[tuple[str, int], Hit] = {}  # a file in two stores is found once
        for hit in sorted((hit for answer in answers for hit in answer.hits), key=lambda hit: -hit.score):
            best.setdefault((hit.file, hit.number), hit)
        return await asyncio.to_thread(self._there, store_ids, list(best.values()), options.max_num_results), answers

    def _there(self, store_ids: Sequence[str], hits: Sequence[Hit], most: int) -> list[Result]:
        """The first hits whose files are in their stores still; the stores were used."""
        for store_id in store_ids:
            self.stores.note_use(store_id)
        found: list[Result] = []
        for some in (hits[:most], hits[most:]):  # the others only where some of the first have gone
            if len(found) < most:
                there = self.stores.references_there({(hit.store, hit.file) for hit in some})
                found += [Result(hit, there[hit.store, hit.file]) for hit in some if (hit.store, hit.file) in there]
        return found[:most]

    def state(self, known: Mapping[tuple[str, int], IndexState], reference: Reference) -> str:
        """State of a file by those known of its store."""
        return known.get((reference.file, reference.added), IndexState()).state if self.is_on else "completed"


def search_page(results: Sequence[Result], queries: Sequence[str]) -> dict[str, Any]:
    """Results as OpenAI lists them, with page, box and image besides."""
    return {
        "object": "vector_store.search_results.page",
        "search_query": list(queries),
        "data": [result_object(result) for result in results],
        "has_more": False,
        "next_page": None,
    }


def result_object(result: Result) -> dict[str, Any]:
    """A result as OpenAI has it. `page`, `box` and content of type image_file are ours."""
    hit = result.hit
    content: list[dict[str, Any]] = [{"type": "text", "text": hit.text}] if hit.text else []
    if hit.page is not None or not hit.text:
        image = {"file_id": hit.file} | ({} if hit.page is None else {"page": hit.page})
        content.append({"type": "image_file", "image_file": image})
    return {
        "file_id": hit.file,
        "filename": hit.filename,
        "score": round(hit.score, 6),
        "attributes": dict(result.reference.attributes),
        "content": content,
        "page": hit.page,
        "box": None if hit.box is None else [round(side, 4) for side in hit.box],
    }
