"""What the library's tests share: small layouts and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import torch

from kvstore.library import Library
from kvstore.operator.basis import pool_basis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import PatchKind, form_patch
from kvstore.operator.rotary import RotaryScheme
from kvstore.records.keys import canonical_key, content_id, embedding_key, patch_key, session_key
from kvstore.records.record import (
    BasisRecord,
    CanonicalRecord,
    EmbeddingRecord,
    PatchRecord,
    SegmentPatchRecord,
    SegmentRecord,
    SessionRecord,
)
from kvstore.tiers.base import Tier
from kvstore.tiers.faults import HeldTier

FINGERPRINT = "tiny-model@1"
GQA = Layout.gqa(layers=3, kv_heads=2, head_size=8, rotary=RotaryScheme.from_base(8))
MLA = Layout.mla(layers=2, latent=24, k_pe=8, rotary=RotaryScheme.from_base(8, style="interleaved"))


class HoldsWhatItRead(HeldTier):
    """Holds what it has read already until `release` is set: what happens to the blob meanwhile comes too late."""

    def get(self, key: str) -> pa.Buffer | None:
        buffer = self.inner.get(key)
        self.entered.set()
        self.release.wait(10)
        return buffer


def random_kv(layout: Layout, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """[layers, tokens, features] of standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.layers, tokens, layout.features, generator=generator).to(dtype)


def canonical(name: str = "a", tenant: str = "acme", tokens: int = 5, **fields: Any) -> CanonicalRecord:
    """A canonical record whose key, content and numbers follow from `name`."""
    content = content_id(name.encode(), tenant.encode())
    fields.setdefault("kv", random_kv(GQA, tokens, seed=sum(name.encode())))
    key = canonical_key(FINGERPRINT, content, [1, 2], "float32")
    return CanonicalRecord(
        **{"key": key, "fingerprint": FINGERPRINT, "tenant": tenant, "content": content, "layout": GQA} | fields
    )


def patch_of(record: CanonicalRecord, antecedents: Sequence[str] = (), rank: int = 2) -> PatchRecord:
    """A patch record of a canonical, behind the antecedents' content ids."""
    patch = form_patch(random_kv(record.layout, record.kv.shape[1], seed=9), record.layout, rank)
    return PatchRecord(
        key=patch_key(record.key, "behind " + " ".join(antecedents), PatchKind.own, rank),
        fingerprint=record.fingerprint,
        tenant=record.tenant,
        content=record.content,
        antecedents=tuple(antecedents),
        layout=record.layout,
        patch=patch,
        canonical=record.key,
        antecedent="behind " + " ".join(antecedents),
    )


def basis_record(rank: int = 4) -> BasisRecord:
    """A shared basis pooled from three patches of random deficits."""
    basis = pool_basis([form_patch(random_kv(GQA, 7, seed=seed), GQA) for seed in range(3)], rank)
    return BasisRecord(key=basis.version, fingerprint=FINGERPRINT, tenant="", layout=GQA, basis=basis)


def embedding_of(record: CanonicalRecord) -> EmbeddingRecord:
    """An embedding record of a canonical's content."""
    return EmbeddingRecord(
        key=embedding_key(record.fingerprint, record.content, "float32"),
        fingerprint=record.fingerprint,
        tenant=record.tenant,
        content=record.content,
        embeddings=torch.randn(4, 6),
    )


def segment_of(record: CanonicalRecord, at: int = 7) -> SegmentRecord:
    """A session's KV of a canonical's content."""
    return SegmentRecord(
        key=canonical_key(FINGERPRINT, record.content, [at], "float32"),
        fingerprint=record.fingerprint,
        tenant=record.tenant,
        content=record.content,
        antecedents=("before",),
        layout=record.layout,
        kv=random_kv(record.layout, record.kv.shape[1], seed=at),
        at=at,
    )


def segment_patch_of(record: CanonicalRecord, key: str = "5" * 64) -> SegmentPatchRecord:
    """A removal patch of a segment."""
    delta = random_kv(record.layout, record.kv.shape[1], seed=3)
    return SegmentPatchRecord(
        key=key,
        fingerprint=record.fingerprint,
        tenant=record.tenant,
        content=record.content,
        antecedents=("before",),
        layout=record.layout,
        patch=form_patch(delta, record.layout, 2, kind=PatchKind.removal, dtype=torch.int8, spread=True),
    )


def session_of(record: CanonicalRecord) -> SessionRecord:
    """A session that holds a canonical's content."""
    key = session_key(record.fingerprint, "a session", "float32")
    return SessionRecord(
        key=key,
        fingerprint=record.fingerprint,
        tenant=record.tenant,
        antecedents=(record.content,),
        manifest=b'{"segments":[]}',
    )


SIZE = canonical().nbytes  # bytes of one test record in memory
MakeLibrary = Callable[..., Library]


def stored(tier: Tier) -> set[str]:
    """Keys of the sound records in a tier."""
    return {key.rpartition("/")[2].removesuffix(".arrow") for key in tier.keys("records/")}
