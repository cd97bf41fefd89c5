"""Calls between ingress and retriever; imports neither an embedder nor an index.

| call     | of           | does                                            | raises                         |
|----------|--------------|-------------------------------------------------|--------------------------------|
| `search` | one replica  | finds parts in stores that the caller may read  | RoleUnavailable, SearchRefused |
| `index`  | one replica  | indexes files that came, notes their states     | nothing: best effort           |
| `follow` | all replicas | takes over what changed: files, attributes      | nothing: best effort           |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Ranker = Literal["auto", "none"]


class SearchRefused(ValueError):
    """A search that this deployment cannot do, such as by an image without an embedder for it."""


@dataclass(frozen=True)
class Search:
    """A question to stores.

    `stores`: ids; the caller has checked that they may be read. `images`: bytes of image files that are asked by,
    too. `score_threshold`, weights: see `kvstore.search.index.Query`.
    """

    stores: Sequence[str]
    text: str
    count: int
    images: Sequence[bytes] = ()
    filters: Mapping[str, Any] | None = None
    ranker: Ranker = "auto"
    embedding_weight: float = 1.0
    text_weight: float = 1.0
    score_threshold: float = 0.0


@dataclass(frozen=True)
class Hit:
    """A part that was found.

    `number`: of the part in its file, from 0. `page`: from 1, of a file with pages. `box`: x0, y0, x1, y1 in shares of
    the page from its upper left: where the query's words stand. `content`: the part's content id.
    """

    store: str
    file: str
    filename: str
    score: float
    number: int
    content: str
    text: str
    page: int | None = None
    box: tuple[float, float, float, float] | None = None
    attributes: Mapping[str, str | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchAnswer:
    """Parts that were found, best first.

    `stages_ms`: milliseconds of embedding and of searching. `degraded`: "lexical" where the embedder did not answer in
    time, so that words alone were compared.
    """

    hits: Sequence[Hit]
    stages_ms: Mapping[str, float]
    degraded: str | None = None


class RetrieverRole(Protocol):
    """The retriever as the ingress calls it; see the module's table."""

    async def search(self, search: Search) -> SearchAnswer:
        """Find parts."""

    async def index(self, store: str, files: Sequence[str]) -> None:
        """Index files of a store that are in progress; returns at once."""

    async def follow(self, store: str, files: Sequence[str]) -> None:
        """Bring every replica's index in line with what a store's files are now."""
