"""Records of the library: what is stored of a chunk, a set of chunks, or a session."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator.basis import SharedBasis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch

RecordKind = Literal["canonical", "patch", "embedding", "basis", "segment", "session"]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Record:
    """Fields common to all records.

    `key`: 64 hex digits; `fingerprint`: of model and processor; `tenant`: who may read it; `content`: content id of
    the chunk it was derived from; `antecedents`: content ids it was conditioned on; `recompute_seconds`: what a miss
    would cost (eviction weighs it); `created`: Unix seconds; `meta`: anything JSON the owner wants back.
    """

    key: str
    fingerprint: str
    tenant: str
    content: str = ""
    antecedents: tuple[str, ...] = ()
    recompute_seconds: float = 0.0
    created: float = field(default_factory=time.time)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class CanonicalRecord(_Record):
    """KV(B|∅): `kv` [layers, tokens, features], keys at base position 0; `token_ids` if known."""

    layout: Layout
    kv: Tensor
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.layout.check(self.kv)
        if self.token_ids is not None and len(self.token_ids) != self.kv.shape[1]:
            raise ShapeMismatch(f"{len(self.token_ids)} token ids for {self.kv.shape[1]} tokens")

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class PatchRecord(_Record):
    """A patch of canonical `canonical`, formed behind the antecedents with key `antecedent`.

    `prefix` names the fixed prefix among these (`kvstore.catalog.index.prefix_key`). A patch on a shared basis is
    stored without the basis' directions, and read back unbound (`Patch.bind`).
    """

    layout: Layout
    patch: Patch
    canonical: str = ""
    antecedent: str = ""
    prefix: str = ""

    @property
    def nbytes(self) -> int:
        return self.patch.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingRecord(_Record):
    """A chunk's vision embeddings [tokens, hidden].

    Qwen3-VL: hidden · (1 + deepstack levels) columns.
    """

    embeddings: Tensor

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the numbers, and of what stands beside them.

        A file's index has its parts' texts there.
        """
        return self.embeddings.nbytes + len(json.dumps(dict(self.meta)))


@dataclass(frozen=True, eq=False, kw_only=True)
class BasisRecord(_Record):
    """A shared basis of the model, under its version as key.

    It belongs to no tenant: `tenant` is empty.
    """

    layout: Layout
    basis: SharedBasis

    def __post_init__(self) -> None:
        self.basis.check(self.layout)

    @property
    def nbytes(self) -> int:
        return self.basis.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentRecord(_Record):
    """Conditioned KV of a session's segment: `kv` [layers, tokens, features].

    As it was computed behind what stood in front of it, its first token at position `at`.
    """

    layout: Layout
    kv: Tensor
    at: int

    def __post_init__(self) -> None:
        self.layout.check(self.kv)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentPatchRecord(_Record):
    """Removal patch of a session's segment (kamera.md §5), in the frame of its KV's record."""

    layout: Layout
    patch: Patch

    @property
    def nbytes(self) -> int:
        return self.patch.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class SessionRecord(_Record):
    """Manifest of a session: a JSON document of `prefill_workers.sessions.manifest`."""

    manifest: bytes

    @property
    def nbytes(self) -> int:
        return len(self.manifest)


Record: TypeAlias = (
    CanonicalRecord | PatchRecord | EmbeddingRecord | BasisRecord | SegmentRecord | SegmentPatchRecord | SessionRecord
)


def kind_of(record: Record) -> RecordKind:
    """The record's kind as the library and its paths name it."""
    if isinstance(record, CanonicalRecord):
        return "canonical"
    if isinstance(record, BasisRecord):
        return "basis"
    if isinstance(record, SegmentRecord | SegmentPatchRecord):
        return "segment"
    if isinstance(record, SessionRecord):
        return "session"
    return "patch" if isinstance(record, PatchRecord) else "embedding"
