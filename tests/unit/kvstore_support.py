"""What the library's tests share: small layouts and records, and tiers that fail or dawdle on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch

from kvstore.basis import pool_basis
from kvstore.chunk import canonical_key, content_id, embedding_key, patch_key
from kvstore.errors import TierUnavailable
from kvstore.format import BasisRecord, CanonicalRecord, EmbeddingRecord, PatchRecord
from kvstore.layout import Layout
from kvstore.patch import PatchKind, form_patch
from kvstore.rotary import RotaryScheme
from kvstore.tiers import Entry, Tier

FINGERPRINT = "tiny-model@1"
GQA = Layout.gqa(layers=3, kv_heads=2, head_size=8, rotary=RotaryScheme.from_base(8))
MLA = Layout.mla(layers=2, latent=24, k_pe=8, rotary=RotaryScheme.from_base(8, style="interleaved"))


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
        key=embedding_key(record.fingerprint, record.content),
        fingerprint=record.fingerprint,
        tenant=record.tenant,
        content=record.content,
        embeddings=torch.randn(4, 6),
    )


class _Wrapper(Tier):
    """Passes every call on to another tier, through `before`."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.calls: list[tuple[str, str]] = []

    def before(self, action: str, key: str) -> None:
        self.calls.append((action, key))

    def get(self, key: str) -> pa.Buffer | None:
        self.before("get", key)
        return self.inner.get(key)

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        self.before("put", key)
        self.inner.put(key, buffers)

    def delete(self, key: str) -> bool:
        self.before("delete", key)
        return self.inner.delete(key)

    def contains(self, key: str) -> bool:
        self.before("contains", key)
        return self.inner.contains(key)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        self.before("entries", prefix)
        return self.inner.entries(prefix)

    def quarantine(self, key: str) -> bool:
        self.before("quarantine", key)
        return self.inner.quarantine(key)


class FaultyTier(_Wrapper):
    """Raises TierUnavailable for the actions named in `failing`."""

    def __init__(self, inner: Tier, *failing: str) -> None:
        super().__init__(inner)
        self.failing = set(failing)

    def before(self, action: str, key: str) -> None:
        super().before(action, key)
        if action in self.failing:
            raise TierUnavailable(f"{self.name}: {action} fails on purpose")


class SlowTier(_Wrapper):
    """Holds the actions named in `held` until `release` is set, at most ten seconds."""

    def __init__(self, inner: Tier, *held: str) -> None:
        super().__init__(inner)
        self.held = set(held)
        self.entered = threading.Event()
        self.release = threading.Event()

    def before(self, action: str, key: str) -> None:
        super().before(action, key)
        if action in self.held:
            self.entered.set()
            self.release.wait(10)
