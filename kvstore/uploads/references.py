"""Vector stores and references of files, as data (see `kvstore.uploads.vector_stores`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.uploads.ids import NANOSECONDS, Place, place_of

Attributes = Mapping[str, str | float | bool]


@dataclass(frozen=True)
class VectorStore:
    """A reference set. `created_at` in Unix seconds; `expires_days` counts from its last use."""

    id: str
    name: str
    created_at: int
    description: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    expires_days: int | None = None
    owner: str = DYNAMIC_TENANT

    def is_visible(self, tenant: str) -> bool:
        """True if a tenant may know of it."""
        return self.owner in (DYNAMIC_TENANT, tenant)

    @property
    def place(self) -> Place:
        """Place among all stores, by the order of creation."""
        return place_of(self.id, self.created_at)


@dataclass(frozen=True)
class Reference:
    """One file of a store.

    `tenant` uploaded it; `content` is its content id with the store's owner. `added`: when it came into the store, in
    Unix nanoseconds; 0 in references of earlier versions. `chunking`: tokens of a text's passages, and by how many two
    of them overlap; None: the defaults.
    """

    file: str
    store: str
    tenant: str
    content: str
    bytes: int
    created_at: int
    attributes: Attributes = field(default_factory=dict)
    added: int = 0
    chunking: Sequence[int] | None = None

    @property
    def place(self) -> Place:
        """Place in its store, by the order in which files were added."""
        return self.added or self.created_at * NANOSECONDS, self.file


@dataclass(frozen=True)
class Batch:
    """Files that were added to a store in one call."""

    id: str
    store: str
    created_at: int
    files: Sequence[str]


@dataclass(frozen=True)
class Activity:
    """Last use of a store, Unix seconds."""

    at: float


@dataclass(frozen=True)
class Summary:
    """Totals of a store's listing; needs none of its files read."""

    files: int
    bytes: int
    last_active_at: int
    expires_at: int | None
